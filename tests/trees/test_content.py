"""The shipped content is found beside the package, and its absence is explained."""

import subprocess
import sys
from pathlib import Path

import pytest

import specdeft.content
from specdeft.content import content_dir
from specdeft.errors import SpecdeftError


@pytest.mark.parametrize("kind", ["heads", "trees", "eval"])
def test_content_is_found(kind: specdeft.content.ContentKind) -> None:
    assert content_dir(kind).is_dir()
    assert content_dir(kind).name == kind


def test_a_wheel_reads_its_own_content_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, beside = tmp_path / "specdeft" / "_content" / "trees", tmp_path / "trees"
    inside.mkdir(parents=True)
    beside.mkdir()
    monkeypatch.setattr(specdeft.content, "__file__", str(tmp_path / "specdeft" / "content.py"))
    assert content_dir("trees") == inside.resolve()
    inside.rmdir()
    assert content_dir("trees") == beside.resolve()


def test_missing_content_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdeft.content, "__file__", str(tmp_path / "specdeft" / "content.py"))
    with pytest.raises(
        SpecdeftError, match=r"shipped heads/ folder is missing: expected .*_content.*Reinstall specdeft"
    ):
        content_dir("heads")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="one of heads, trees, eval, got 'docs'"):
        content_dir("docs")  # type: ignore[arg-type]


def test_trees_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, specdeft.trees as t; t.known_trees(); t.draw_svg(t.Tree.load('medusa-63'));"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(specdeft.content.__file__).parents[1],
    )
    assert run.stdout.strip() == "set()"
