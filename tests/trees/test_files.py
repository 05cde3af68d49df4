"""Tree files: what is written comes back, and what is wrong is refused with a next step."""

import json
import os
from pathlib import Path

import pytest

from specdeft.errors import SpecdeftError
from specdeft.trees import Tree, describe, known_trees, save_family


def test_a_saved_tree_comes_back_with_its_name_source_and_purpose(tmp_path: Path) -> None:
    tree = Tree.from_paths([[0], [3], [0, 7]], name="naïve")
    tree.save(tmp_path / "file.json", source="here", about="nothing much")
    again = describe(tmp_path / "file.json")
    assert again.tree == tree
    assert (again.name, again.source, again.about) == ("naïve", "here", "nothing much")
    assert Tree.load(str(tmp_path / "file.json")).name == "naïve"


def test_a_saved_tree_is_small_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "star.json"
    Tree.star(200).save(path)
    lines = path.read_text().splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == [
        '"name"',
        '"parents"',
        '"ranks"',
        '"source"',
        '"about"',
    ]
    assert path.stat().st_size < 2000


def test_an_unnamed_tree_takes_the_name_of_its_file(tmp_path: Path) -> None:
    Tree([-1, 0], [0, 0]).save(tmp_path / "mine.json")
    assert Tree.load(tmp_path / "mine.json").name == "mine"
    (tmp_path / "bare.json").write_text('{"parents": [-1], "ranks": [0]}')
    assert Tree.load(tmp_path / "bare.json").name == "bare"


def test_saving_replaces_the_file_whole_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tree.json"
    Tree.chain(1).save(path)
    Tree.chain(2).save(path)
    assert Tree.load(path) == Tree.chain(2)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(SpecdeftError, match=r"tree\.json cannot be written: No space left on device"):
        Tree.chain(3).save(path)
    assert Tree.load(path) == Tree.chain(2)
    assert os.listdir(tmp_path) == ["tree.json"]


def test_saving_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecdeftError, match="cannot be written: No such file or directory"):
        Tree.chain(1).save(tmp_path / "none" / "tree.json")


MALFORMED = {
    "not JSON": ("{parents: [-1]}", "is malformed: expected one JSON object"),
    "cut short": ('{"parents": [-1', "is malformed"),
    "empty": ("", "is malformed"),
    "not text": (b"\xff\xfe\x00", "is malformed"),
    "nested without end": ("[" * 100_000, "is malformed"),
    "a list": ("[[0], [0, 0]]", "expected one JSON object, got a list"),
    "unknown key": (
        '{"parents": [-1], "ranks": [0], "depth": 0}',
        "unknown key: expected only name, parents, ranks, source, about, got 'depth'",
    ),
    "repeated key": ('{"parents": [-1], "ranks": [0], "ranks": [1]}', "the key 'ranks' more than once"),
    "no ranks": ('{"parents": [-1]}', "expected 'ranks' to be a list of integers, got no such key"),
    "ranks are text": ('{"parents": [-1], "ranks": "0"}', "expected 'ranks' to be a list of integers, got '0'"),
    "name is a number": ('{"name": 1, "parents": [-1], "ranks": [0]}', "expected 'name' to be text, got 1"),
    "fractions": ('{"parents": [-1, 0.0], "ranks": [0, 0]}', r"parents\[1\] must be an integer, got 0.0"),
    "no tree": ('{"parents": [-1, 1], "ranks": [0, 0]}', "node 1 is its own ancestor"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_file_is_refused_with_its_path(fault: str, tmp_path: Path) -> None:
    content, message = MALFORMED[fault]
    path = tmp_path / "broken.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SpecdeftError, match=message) as caught:
        Tree.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecdeftError, match=r"none\.json does not exist.*specdeft trees ls"):
        Tree.load(str(tmp_path / "none.json"))
    with pytest.raises(SpecdeftError, match="cannot be read: Is a directory"):
        Tree.load(tmp_path)


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(
        SpecdeftError, match=r"No tree named 'medusa63' is shipped; the nearest are medusa-63.*specdeft trees ls"
    ):
        Tree.load("medusa63")
    with pytest.raises(SpecdeftError, match=r"No tree named '\?' is shipped; \d+ others are.*specdeft trees ls"):
        Tree.load("?")


def test_a_name_cannot_leave_the_shelf() -> None:
    with pytest.raises(SpecdeftError, match="No tree named"):
        Tree.load("../trees/medusa-63")


def test_a_family_is_saved_under_its_names(tmp_path: Path) -> None:
    family = [Tree.chain(1), Tree.star(2)]
    paths = save_family(family, tmp_path, source="measured", about="a family")
    assert [path.name for path in paths] == ["chain-1.json", "star-2.json"]
    assert [Tree.load(path) for path in paths] == family
    assert json.loads(paths[1].read_text())["source"] == "measured"


def test_a_family_without_distinct_names_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for family in ([Tree.chain(1), Tree([-1], [0])], [Tree.chain(1), Tree.chain(1)]):
        with pytest.raises(SpecdeftError, match="expected a distinct name for each"):
            save_family(family, tmp_path, source="", about="")
    assert not list(tmp_path.iterdir())


def test_known_trees_are_listed_in_numeric_order() -> None:
    names = [known.name for known in known_trees()]
    family = [name for name in names if name.startswith("deft-")]
    assert family == ["deft-32", "deft-64", "deft-96", "deft-128", "deft-256"]
    assert {"medusa-63", "chain-4"} <= set(names)
