"""What the README shows is what the program gives: its picture, its Python example, its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdeft.trees import Tree, draw_svg

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_picture_is_what_the_command_beside_it_draws() -> None:
    name, ranks = re.search(r"specdeft trees show (\S+) --path (\S+) --svg", README).groups()
    tree, path = Tree.load(name), [0]
    for rank in map(int, ranks.split(",")):
        path.append(next(child for child in tree.children[path[-1]] if tree.ranks[child] == rank))
    assert (ROOT / "docs/img/tree.svg").read_text(encoding="utf-8") == draw_svg(tree, path)


def test_the_python_example_runs(
    real_model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import specdeft

    monkeypatch.setattr(specdeft, "load_model", lambda name: real_model)
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 10
    exec(compile(code, "README.md", "exec"), {})
    text, tau, streamed = re.fullmatch(
        r"(.*)\n([\d.]+) tokens per pass, \d+ tokens/s\n(.*)", capsys.readouterr().out, re.DOTALL
    ).groups()
    assert streamed == text
    assert float(tau) > 1.2


def test_every_linked_file_exists() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("e*/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_make_knows_every_target_that_the_documents_name() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(
            r"`make (\w+)`|^make (\w+)", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target
