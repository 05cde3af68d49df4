"""Runs: records on disk as they come, methods that fail or are wrong, times, profiles, tuning."""

import json
import math

import pytest
import torch

from specdeft.attention.chunk_table import Entry
from specdeft.errors import SpecdeftError
from specdeft.evaluate.accuracy import METHODS, attention_errors, perplexity
from specdeft.evaluate.attention import measure, methods, profile, timing
from specdeft.evaluate.attention import tune as tuning
from specdeft.evaluate.attention.method import Ready
from specdeft.evaluate.attention.presets import grid
from specdeft.evaluate.attention.run import Run, run
from specdeft.evaluate.attention.tune import merged, tune
from specdeft.trees import Tree
from tests.evaluate.attention.conftest import CPU, SHAPE
from tests.tiny import OracleHeads, prompts, tiny

SETTINGS = {"preset": "tiny"}


def a_run(*names: str) -> Run:
    return Run(grid("4x2x16", (40,), (32,), (16,)), names, torch.float32, CPU, 0.002, asked=True)


def test_every_record_is_on_disk_and_a_second_run_measures_nothing_again(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    found = run(a_run("deft-flatten", "dense-mask"), SETTINGS, path, lambda line: None)
    assert [record["method"] for record in found["records"]] == ["deft-flatten", "dense-mask", "deft-flatten@16"]
    for record in found["records"]:
        assert record["us"] > 0
        assert record["ratio"] == pytest.approx(record["us"] / record["floor_us"])
        assert record["relative_error"] < 1e-5
    monkeypatch.setattr(measure, "make_case", lambda *a, **k: pytest.fail("measured again"))
    again = run(a_run("deft-flatten", "dense-mask"), SETTINGS, path, lambda line: None)
    assert again == json.loads(json.dumps(found))
    with pytest.raises(SpecdeftError, match="was written with preset 'tiny'"):
        run(a_run("deft-flatten"), {"preset": "other"}, path, lambda line: None)


def test_what_is_left_out_is_recorded_with_the_reason_until_it_is_asked_for(tmp_path):
    path, cells = tmp_path / "records.jsonl", grid("4x2x16", (40,), (32,), ())
    usual = Run(cells, ("deft-flatten", "flex"), torch.float32, CPU, 0.002, asked=False)
    ours, left = run(usual, SETTINGS, path, lambda line: None)["records"]
    assert ours["us"] > 0
    assert left["method"] == "flex"
    assert "compiles for long" in left["not_run"]
    asked = Run(cells, ("flex",), torch.float32, CPU, 0.002, asked=True)
    [tried] = run(asked, SETTINGS, path, lambda line: None)["records"]
    assert tried["not_run"] == "compiles for minutes on a CPU"


def test_an_error_names_files_and_not_where_they_lay():
    text = measure.explain(OSError("no /opt/some/kernels/a.cu, ~/b/c.h; 1/2 of https://x.org/y/z"))
    assert text == "OSError: no a.cu, c.h; 1/2 of https://x.org/y/z"


def test_a_method_that_there_is_not_is_found_out_before_anything_is_measured(tmp_path):
    with pytest.raises(SpecdeftError, match="no method 'dense'"):
        run(a_run("deft-flatten", "dense"), SETTINGS, tmp_path / "r.jsonl", lambda line: None)
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("fault", ["wrong", "error"])
def test_what_is_wrong_or_fails_has_no_time_and_the_run_goes_on(fault, monkeypatch):
    def prepare(case):
        if fault == "error":
            raise RuntimeError("broken\nkernel")
        return Ready(lambda index: torch.zeros_like(case.q))

    monkeypatch.setitem(methods.METHODS, "odd", methods.Method("odd", "peer", "", prepare))
    lines: list[str] = []
    found = run(a_run("odd", "deft-flatten"), SETTINGS, None, lines.append)
    odd, ours, _ = found["records"]
    assert odd.get(fault)
    assert "us" not in odd
    assert ours["us"] > 0
    assert any("WRONG, error" in line or "broken kernel" in line for line in lines)


def test_short_launches_stand_together_in_a_graph_and_rotate_over_the_sets():
    assert timing.launches_in_a_graph(10, 5) == 25
    assert timing.launches_in_a_graph(5000, 3) == 6
    assert timing.repeats_within(1.0, 1e9) == timing.LEAST_REPLAYS
    assert timing.repeats_within(0.01, 100) == 100


def test_a_profile_is_read_back_per_launch():
    header = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    rows = [f'"{i}","k{i}","{profile.TIME}","us","1,{i}00.0"' for i in range(6)]
    rows += [f'"{i}","k{i}","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","{10 * i}"' for i in range(6)]
    kernels = profile.read_csv("\n".join(["==PROF== noise", header, *rows]))
    found = profile.summarise(kernels, launches=3)
    assert found["kernels"] == 2
    assert found["us"] == pytest.approx(sum(1000 + 100 * i for i in range(6)) / 3)
    weights = [1000 + 100 * i for i in range(6)]
    mean = sum(10 * i * w for i, w in enumerate(weights)) / sum(weights)
    assert found["dram_percent"] == pytest.approx(mean)
    for wrong in ("nothing", f'{header}\n"0","k","{profile.TIME}","parsec","1"'):
        with pytest.raises(SpecdeftError):
            profile.read_csv(wrong)
    with pytest.raises(SpecdeftError, match="expected METHOD=CSV"):
        profile.result(["deft-node"], {})
    assert profile.launch(grid("4x2x16", (40,), (32,))[0], "deft-node", torch.float32, CPU) == profile.LAUNCHES


def test_tuning_measures_sizes_that_cut():
    one, three = tune([SHAPE], [100], [32], [1, 3], [64, 4096], torch.float32, CPU, 0.002)
    assert (list(one.by_size), list(three.by_size)) == ([64], [64])
    assert (one.batch, three.batch) == (1, 3)
    assert "B=3: rule" in three.line()


def test_tuning_keeps_what_gains_and_stops_where_it_is_hopeless(monkeypatch):
    times = {"auto": 10.0, 64: 9.0, 32: 30.0, 16: 1.0}
    monkeypatch.setattr(tuning, "_time", lambda case, size, seconds: times[size])
    [point] = tune([SHAPE], [100], [32], [3], [16, 32, 64], torch.float32, CPU, 0.002)
    assert point.by_size == {64: 9.0, 32: 30.0}
    assert point.best == Entry(rows=32 * 2, slots=192, head_dim=16, heads=3 * 2, chunk_size=64)
    times[64] = 9.9
    [point] = tune([SHAPE], [100], [32], [3], [64], torch.float32, CPU, 0.002)
    assert point.best is None


def test_new_entries_replace_those_of_the_same_shapes():
    old = [Entry(64, 1024, 128, 8, 256), Entry(32, 1024, 128, 8, 512)]
    assert merged(old, [Entry(64, 1024, 128, 8, 128)]) == (Entry(64, 1024, 128, 8, 128), old[1])


def test_errors_are_measured_against_float64():
    found = list(attention_errors("4x2x16", (50,), 32, (torch.float32, torch.float16), CPU))
    assert {record["method"] for record in found} == set(METHODS)
    assert not any("error" in record for record in found)
    ours = {record["dtype"]: record["relative_error"] for record in found if record["method"] == "deft-flatten"}
    assert 1e-8 < ours["float32"] < 1e-6
    assert 1e-5 < ours["float16"] < 1e-3


def test_perplexity_is_that_of_a_plain_pass():
    model, ids = tiny(), prompts(1)[0]
    found = perplexity(model, OracleHeads.of(model, ids, 60), Tree.load("medusa-63"), ids, 60)
    assert found["tokens"] == 60
    assert 10 < found["passes"] < 59  # several tokens a pass
    assert found["largest"] < 1e-4
    assert math.isclose(found["specdeft"], found["transformers"], rel_tol=1e-5)
    assert 1 < found["transformers"] < 17
