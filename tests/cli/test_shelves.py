"""`specdeft trees`, `heads` and `env`: what they print, and that programs can read it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specdeft.evaluate.calibration import Calibration
from specdeft.trees import Tree, known_trees
from tests.cli.conftest import Saved, run


def test_trees_ls_names_every_shipped_tree_once() -> None:
    out = run("trees", "ls")
    names = [line.split()[0] for line in out.stdout.splitlines()[1:]]
    assert names == [known.name for known in known_trees()]
    assert "medusa-63" in names
    assert [each["name"] for each in json.loads(run("trees", "ls", "--json").stdout)] == names


def test_trees_ls_leaves_out_what_the_heads_cannot_fill() -> None:
    shallow = json.loads(run("trees", "ls", "--max-depth", "2", "--json").stdout)
    assert shallow
    assert max(each["depth"] for each in shallow) == 2


def test_trees_show_draws_the_tree_and_marks_a_path() -> None:
    out = run("trees", "show", "medusa-63")
    assert out.exit_code == 0
    assert "size 64" in out.stdout
    assert "[root]" not in out.stdout
    assert "[root]" in run("trees", "show", "medusa-63", "--path", "0,1").stdout


def test_trees_show_writes_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "tree.svg"
    out = run("trees", "show", "chain-3", "--svg", picture, "--path", "0,0")
    assert (out.exit_code, out.stdout) == (0, "")
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_trees_show_json_loads_back_as_the_same_tree() -> None:
    shape = json.loads(run("trees", "show", "medusa-63", "--json").stdout)
    assert Tree(shape["parents"], shape["ranks"]) == Tree.load("medusa-63")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "medusa-62"], "the nearest are medusa-63"),
        (["show", "nowhere.json"], "does not exist"),
        (["show", "medusa-63", "--path", "0,x"], "expected ranks such as 0,2,0"),
        (["show", "medusa-63", "--path", "0,99"], "no node at the ranks 0,99"),
        (["search", "no-such-heads", "--name", "x"], "has no calibration.json"),
    ],
    ids=str,
)
def test_wrong_names_and_paths_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    out = run("trees", *arguments)
    assert out.exit_code == 2
    assert message in out.stderr


def test_trees_search_builds_nested_trees_from_calibration(tmp_path: Path) -> None:
    counts = {(0,): 60, (1,): 20, (2,): 5, (0, 0): 40, (0, 1): 10, (1, 0): 8}
    Calibration(100, counts, "a test").save(tmp_path)
    out = run("trees", "search", tmp_path, "--sizes", "3,5", "--name", "mine", "--out", tmp_path)
    assert out.exit_code == 0, out.stderr
    assert Tree.load(tmp_path / "mine-3.json").paths == ((), (0,), (0, 0))
    assert set(Tree.load(tmp_path / "mine-5.json").paths) == {(), (0,), (1,), (0, 0), (0, 1)}
    assert "expected tau 2.300" in out.stdout
    assert Calibration.load(tmp_path) == Calibration(100, counts, "a test")
    file, new = tmp_path / "calibration.json", tmp_path / "new"
    rows = json.loads(run("trees", "search", file, "--sizes", "3,5", "--out", new, "--json").stdout)
    assert [(row["size"], row["depth"], row["width"], row["expected_tau"]) for row in rows] == [
        *((3, 2, 1, 2.0), (5, 2, 2, 2.3)),
    ]
    assert [Tree.load(row["path"]).name for row in rows] == [f"{tmp_path.name}-3", f"{tmp_path.name}-5"]


def test_heads_show_describes_heads_in_a_folder(saved: Saved) -> None:
    facts = json.loads(run("heads", "show", saved.heads, "--json").stdout)
    assert (facts["num_heads"], facts["hidden_size"], facts["vocab_size"]) == (2, 144, 48)
    assert facts["parameters"] == 2 * (144 * 144 + 144)
    assert "num_heads             2" in run("heads", "show", saved.heads).stdout


def test_heads_ls_lists_what_is_shipped() -> None:
    out = run("heads", "ls", "--json")
    assert out.exit_code == 0, out.stderr
    names = [each["name"] for each in json.loads(out.stdout)]
    assert names == [line.split()[0] for line in run("heads", "ls").stdout.splitlines()[1:]]


def test_unknown_heads_are_one_line_and_exit_code_2() -> None:
    out = run("heads", "show", "no-such-heads")
    assert out.exit_code == 2
    assert "no heads named 'no-such-heads'" in out.stderr


def test_env_tells_versions_to_people_and_programs() -> None:
    facts = json.loads(run("env", "--json").stdout)
    assert {"specdeft", "python", "torch", "transformers", "platform", "devices"} <= facts.keys()
    assert f"specdeft         {facts['specdeft']}" in run("env").stdout
