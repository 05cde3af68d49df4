"""Ways to decode beside each other: what they say, when tokens arrive, and what is made of it."""

import json
from pathlib import Path

import pytest
import torch

from specdeft.attention import dense, paths
from specdeft.evaluate.throughput import plots, table, ways
from specdeft.evaluate.throughput.run import Point, of_length, run, summary
from specdeft.evaluate.throughput.ways import Decoded
from specdeft.trees import Tree
from tests.tiny import OracleHeads, plain, prompts, tiny

TREE = Tree.load("medusa-63")


def decoded(tokens: int, gaps: list[float], **more) -> Decoded:
    return Decoded([list(range(tokens))], 0.5, gaps, len(gaps), more)


@pytest.mark.parametrize("name", ["plain", "prompt-lookup", "medusa-style", "specdeft"])
def test_every_way_says_what_the_model_says(name):
    model, ids = tiny(), prompts(1)[0]
    way = ways.ways(OracleHeads.of(model, ids, 20), TREE, compiled=False)[name]
    found = way(model, [ids], 20)
    assert found.token_ids == [plain(model, ids, 20)]
    assert found.decoded == 19
    assert found.passes == len(found.gaps) > 0
    assert found.first > 0
    assert found.decoding > 0


def test_auto_is_left_to_specdeft_and_recorded(tmp_path):
    model, ids = tiny(), prompts(1)[0]
    found = ways.ways(OracleHeads.of(model, ids, 20), TREE, compiled=False, auto=True)
    records = run(model, found, [Point(1, None, [ids])], 20, {}, tmp_path / "records.jsonl", lambda _: None)
    trees = {record["way"]: record["trees"] for record in records}
    assert trees["plain"] == []
    assert trees["medusa-style"] == ["medusa-63"]
    assert trees["specdeft"] == ["medusa-63 (auto: these heads have no calibrated tree)"]
    assert "| specdeft, medusa-63 (auto: these heads have no calibrated tree) |" in table.throughput(records)


def test_a_batch_is_padded_and_its_rows_end_where_they_end():
    model, (one, two) = tiny(), prompts(2)
    eos = plain(model, one, 20)[5]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = eos
    try:
        found = ways.by_transformers(model, [one, two[:4]], 20)
        ours = ways.by_specdeft(model, [one, two[:4]], 20, heads=OracleHeads.of(model, one, 20), tree=TREE)
    finally:
        model.generation_config.eos_token_id = before
    assert found.token_ids == ours.token_ids
    assert found.token_ids[0][-1] == eos


def test_medusas_way_verifies_by_the_dense_path_and_leaves_the_choice_as_it_was():
    with paths.forced(dense):
        assert paths.path_for("cuda", torch.bfloat16, 64) is dense
    assert not paths._forced


def test_rates_count_what_comes_after_the_first_token():
    found = summary([decoded(5, [0.1, 0.3], verify=30.0), decoded(3, [0.1], verify=9.0)])
    assert found["tokens"] == 8
    assert found["tokens_per_second"] == pytest.approx((4 + 2) / 0.5)
    assert found["tau"] == pytest.approx(6 / 3)
    assert found["pass_ms"] == pytest.approx(500 / 3)
    assert found["gap_ms"]["p99"] == pytest.approx(300)
    assert found["phases_ms"] == pytest.approx({"verify": 13.0, "host": 500 / 3 - 13})


def test_overhead_is_against_the_fastest_way_of_one_token_a_pass():
    base = {"batch": 1, "length": None}
    records = [
        base | {"way": "plain", "tokens_per_second": 50.0, "tau": 1.0},
        base | {"way": "static-compiled", "tokens_per_second": 100.0, "tau": 1.0},
        base | {"way": "specdeft", "tokens_per_second": 160.0, "tau": 2.0},
        {"batch": 8, "length": None, "way": "plain", "tokens_per_second": 900.0, "tau": 1.0},
    ]
    assert table.overhead(records[2], records) == pytest.approx({"speed_up": 1.6, "overhead": 0.25})
    assert table.overhead(records[2], records[2:]) is None


def test_prompts_get_a_length_and_keep_their_end():
    assert of_length([1, 2, 3], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert of_length([1, 2, 3], 2) == [2, 3]
    assert Point(2, None, [[1], [2], [3]]).groups() == [[[1], [2]], [[3], [1]]]


def test_a_run_goes_on_where_it_stopped_and_past_a_way_that_fails(tmp_path):
    model, ids = tiny(), prompts(1)[0]
    path, lines = tmp_path / "records.jsonl", []
    found = ways.ways(OracleHeads.of(model, ids, 20), TREE, compiled=False)
    found["broken"] = lambda *arguments: 1 / 0
    points = [Point(1, None, [ids]), Point(2, 9, [of_length(ids, 9)])]
    records = run(model, found, points, 12, {"a": 1}, path, lines.append)
    names = [record["id"] for record in records]
    assert "B=2 L=9: specdeft" in names
    assert "B=2 L=9: prompt-lookup" not in names  # transformers takes one prompt there
    assert [record["error"] for record in records if "error" in record] == ["ZeroDivisionError: division by zero"] * 2
    ours = records[names.index("B=1: specdeft")]
    assert (ours["equal"], ours["texts"]) == (1, 1)
    assert ours["tau"] > 1
    del found["broken"]
    before = len(lines)
    again = run(model, found, points, 12, {"a": 1}, path, lines.append)
    assert len(lines) == before
    assert {record["id"] for record in again} == {name for name in names if "broken" not in name}
    text = table.throughput(records)
    assert "| failed: ZeroDivisionError: division by zero |" in text
    result = {"kind": "throughput", "records": records, "settings": {"model": "m", "nodes": 64, "max_new_tokens": 12}}
    result["provenance"] = {"date": "2026", "device": "a GPU", "dtype": "float32"}
    assert text in table.newest_table({"x.json": json.loads(json.dumps(result))}, "eval/results")


def test_pictures_show_rates_over_batches_and_over_lengths(tmp_path):
    pytest.importorskip("matplotlib")
    base = {"way": "specdeft", "tau": 2.0}
    records = [
        base | {"batch": b, "length": n, "tokens_per_second": 10.0 * b} for b, n in ((1, 512), (8, 512), (1, 4096))
    ]
    records.append({"way": "broken", "batch": 1, "length": 512, "error": "no"})
    settings = {"model": "tiny", "nodes": 64, "replay": "2.5"}
    result = {"kind": "replay", "records": records, "settings": settings}
    result["provenance"] = {"device": "a GPU", "dtype": "float32"}
    (tmp_path / "r.json").write_text(json.dumps(result))
    assert plots.over(records, "batch", "length", 512) == {"specdeft": [(1.0, 10.0), (8.0, 80.0)]}
    assert plots.main([str(tmp_path / "r.json"), "--out", str(tmp_path)]) == 0
    names = {"replay-tiny-batch-length-512.svg", "replay-tiny-length-batch-1.svg"}
    assert {path.name for path in Path(tmp_path).glob("*.svg")} == names
    assert "replay of 2.5" in (tmp_path / "replay-tiny-batch-length-512.svg").read_text()
