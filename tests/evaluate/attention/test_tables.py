"""Tables of recorded runs, from made-up records."""

import pytest

from specdeft.errors import SpecdeftError
from specdeft.evaluate import report
from specdeft.evaluate.attention import beside, published, table
from specdeft.evaluate.attention.report import TABLES, printed


def record(method: str, length: int, nodes: int, us: float | None, **more):
    base = {"cell": f"llama3-8b N={nodes} L={length}", "kind": "token-tree", "shape": "llama3-8b", "length": length}
    base |= {"nodes": nodes, "method": method, "floor_us": 10.0, "of": "specdeft" if "deft" in method else "peer"}
    base |= {"id": f"{base['cell']}: {method}", "plan_us": 5.0, "step_us": None, "extra_mib": 1.5}
    if us is not None:
        moved = {"kv": 4_000_000, "masks": 1000, "partials": 0}
        base |= {"us": us, "ratio": us / 10, "timing": {"by": "graph", "why": ""}, "relative_error": 1e-3}
        base |= {"real_bytes": moved | {"kv_loads": 12_000_000}, "paper_bytes": moved | {"kv": 8_000_000}}
    return base | more


RECORDS = [
    record("deft-flatten", 1024, 64, 8.0),
    record("deft-node", 1024, 64, 30.0),
    record("sdpa", 1024, 64, 24.0),
    record("flex", 1024, 64, None, not_run="needs | a GPU"),
    record("deft-flatten", 16384, 64, 16.0),
    record("sdpa", 16384, 64, None, error="out of memory"),
    record("dense-mask", 16384, 64, None, wrong=True, relative_error="inf"),
    record("deft-flatten@512", 16384, 64, 20.0),
]
RESULT = {
    "kind": "attention",
    "settings": {"preset": "llama3-8b"},
    "ceilings": {"bytes_per_second": 4e12, "flops_per_second": 7e14},
    "records": RECORDS,
    "provenance": {"date": "2026-01-02", "device": "a GPU", "dtype": "bfloat16"},
}


def test_times_name_the_best_other_method_and_how_much_slower_it_is():
    rows = table.times(RECORDS).splitlines()
    assert rows[2].startswith("| 1024 | 64 | 10.0 | 8.00 | 0.80 | sdpa 24.0 | 3.00 | 30.0 | 24.0 | not run |")
    assert rows[3].startswith("| 16384 | 64 | 10.0 | 16.0 | 1.60 |  |  |")
    assert "failed" in rows[3]
    assert "wrong" in rows[3]


def test_goals_are_met_or_not():
    rows = table.goals(RECORDS).splitlines()
    assert "| 1024 | 64 | 9 us | 8.00 | yes |" in rows
    assert "| 16384 | 64 | 1.5 x floor | 1.60 | no |" in rows
    assert "| 131072 | 64 | 1.25 x floor |  |  |" in rows
    assert rows[-1].endswith(
        "| 1 of 1, by 3.00 or more; timed were only sdpa in 1, fa2-merge in 0, flex in 0, "
        "flashinfer in 0, flashinfer-mask in 0 | open |"
    )


def test_to_be_the_fastest_everywhere_is_met_only_against_every_peer_in_every_cell():
    def at(length: int, nodes: int, other: float) -> list[dict]:
        peers = [record(peer, length, nodes, other) for peer in table.PEERS]
        return [record("deft-flatten", length, nodes, 10.0), record("deft-node", length, nodes, 30.0), *peers]

    whole = [each for length, nodes in table.SIXTEEN for each in at(length, nodes, 20.0)]
    assert table.goals(whole).splitlines()[-1].endswith("| 16 of 16, by 2.00 or more | yes |")
    but_one = table.goals(whole[7:]).splitlines()[-1]
    assert "| 15 of 15, by 2.00 or more; timed were only sdpa in 15" in but_one
    assert but_one.endswith("| open |")
    slower = [*whole, *at(*table.SIXTEEN[3], 9.0)]
    assert table.goals(slower).splitlines()[-1].endswith("| 15 of 16, by 0.90 or more | no |")


def test_memory_is_a_goal():
    ours = record("deft-flatten", 131072, 256, 900.0, extra_mib=65.0)
    assert "| 131072 | 256 | 64 MiB extra | 65.0 | no |" in table.goals([ours])


def test_chunk_sizes_stand_beside_auto():
    assert table.chunk_sizes(RECORDS).splitlines()[2] == "| 16384 | 64 | 16.0 | 20.0 |"


def test_what_has_no_time_says_why():
    text = table.failures(RECORDS)
    assert "| flex | needs \\| a GPU | 1, first llama3-8b N=64 L=1024 |" in text
    assert "failed: out of memory" in text
    assert "wrong: relative error inf" in text
    assert table.failures(RECORDS[:3]) == "Every record has a time.\n"


def test_a_peer_without_any_record_is_named():
    assert "no record of fa2-merge, flashinfer, flashinfer-mask." in table.absent(RECORDS)
    assert "no record of fa2-merge" in TABLES["attention_failures"]({"new.json": RESULT}, "x")
    assert table.absent([record(peer, 1, 1, 1.0) for peer in table.PEERS]) == ""


def test_bytes_and_host_work():
    assert "| deft-flatten | 1024 | 4.00 | 12.0 | 0.00 | 0.00 | 8.00 | 0.00 | 0.00 | 1.50 |" in table.moved(RECORDS)
    older = [RECORDS[0] | {"real_bytes": {"kv": 4_000_000, "masks": 1000, "partials": 0}}]
    assert "| 4.00 |  | 0.00 |" in table.moved(older)  # before loads were counted
    assert "| deft-flatten | 1024 | 5.00 | nothing | graph |" in table.host(RECORDS)


def test_a_run_is_scaled_to_the_papers():
    """The mean of the sampled steps, times steps, times layers; nothing if a step has no number."""
    whole = {"column": "t64", "run_steps": 1000}
    steps = [record("deft-flatten", 1024 + i, 64, us, **whole) for i, us in enumerate((10.0, 30.0))]
    assert beside.whole_run(steps, "llama3-8b", "t64", "deft-flatten", "us") == pytest.approx(20e-6 * 1000 * 32)
    assert beside.whole_run(steps, "llama3-8b", "t64", "deft-flatten", "kv") == pytest.approx(8e-6 * 1000 * 32)
    steps.append(record("deft-flatten", 9, 64, None, **whole))
    assert beside.whole_run(steps, "llama3-8b", "t64", "deft-flatten", "us") is None


def test_stars_and_thoughts_are_compared_cell_by_cell():
    times = {"deft-flatten": (10.0, 10.0), "q-guided": (20.0, 8.0), "deft-node": (30.0, None)}
    records = [
        record(method, 4000, 0, us, kind="reasoning", cell=f"step {i}")
        for method, found in times.items()
        for i, us in enumerate(found)
    ]
    rows = beside.goals(records).splitlines()
    assert "| reasoning | q-guided | 1 of 2 | 0.80 | 1.40 |" in rows
    assert "| reasoning | deft-node | 1 of 1 | 3.00 | 3.00 |" in rows


def test_measured_chunk_sizes_are_shown_with_the_rules_time():
    point = {"shape": "llama3-8b", "length": 1024, "nodes": 64, "rule_us": 10.0, "by_size": {"128": 12.0, "256": 9.0}}
    result = {"kind": "chunk-sizes", "settings": {}, "provenance": RESULT["provenance"]}
    points = [point | {"best": {"chunk_size": 256}}, point | {"batch": 8, "by_size": {}, "best": None}]
    text = TABLES["attention_tuned"]({"c.json": result | {"points": points}}, "x")
    assert "| llama3-8b | 1024 | 64 | 1 | 10.0 | 256 | 9.00 | yes |" in text
    assert "| llama3-8b | 1024 | 64 | 8 | 10.0 |  |  | no |" in text


def test_published_rows_are_as_wide_as_their_columns():
    for rows in (published.DECODE_SECONDS, published.ATTENTION_SECONDS, published.KV_TERABYTES):
        assert {len(row) for row in rows.values()} == {len(published.COLUMNS)}
    for name in published.ATTENTION_SECONDS:
        assert name in published.OURS_FOR


def test_documents_show_the_newest_result_and_where_it_is_from():
    older = RESULT | {"provenance": RESULT["provenance"] | {"date": "2025-01-01"}, "records": []}
    text = TABLES["attention_goals"]({"new.json": RESULT, "old.json": older}, "eval/results")
    assert "| 1024 | 64 | 9 us | 8.00 | yes |" in text
    assert text.endswith(
        "a GPU, bfloat16; copy 4.00 TB/s, matrix product 700 TFLOP/s; from [new](eval/results/new.json).\n"
    )
    for make in TABLES.values():
        assert make({"new.json": RESULT}, "x")
        assert make({}, "x") == "No results of this kind are recorded yet.\n"


def test_markers_in_a_document_take_these_tables():
    text = "<!-- results: attention_goals -->\nold\n<!-- end of results -->\n"
    assert "| yes |" in report.fill(text, {"new.json": RESULT})
    broken = RESULT | {"records": [{"kind": "token-tree"}]}
    with pytest.raises(SpecdeftError, match="lacks what attention_goals shows"):
        report.fill(text, {"new.json": broken})


def test_a_run_prints_its_tables():
    text = printed(RESULT)
    assert "| 1024 | 64 |" in text
    assert "| L | N | auto | 512 |" in text
    assert "| method | L | KV | KV loads |" in text
    paper = printed(RESULT | {"records": [record("deft-flatten", 1024, 64, 8.0, column="t64", run_steps=10)]})
    assert "DeFT-Flatten is faster by" in paper


def test_pictures_come_out_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    from specdeft.evaluate.attention.plots import draw, main

    more = [record("deft-flatten", 16384, 32, 12.0), record("sdpa", 16384, 32, 14.0)]
    more.append(record("deft-flatten@256", 16384, 64, 25.0))
    result = RESULT | {"records": RECORDS + more}
    first, second = ([path.read_bytes() for path in draw(result, tmp_path / name)] for name in "ab")
    assert len(first) == 3
    assert first == second
    assert main([str(tmp_path / "none.json")]) == 2


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    import sys

    from specdeft.evaluate.attention.plots import draw

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SpecdeftError, match=r"pip install 'specdeft\[plots\]'"):
        draw(RESULT, tmp_path)
