"""The command line starts at once: help needs neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.cli.conftest import run

HEAVY = ("torch", "transformers", "numpy", "triton", "rich", "datasets")
HELP_SECONDS = 0.3  # what a person does not notice
TRIES = 5  # the best of several: another process may hold the cores meanwhile

COMMANDS = [
    [],
    ["demo"],
    ["generate"],
    ["eval"],
    ["eval", "acceptance"],
    ["trees"],
    ["trees", "ls"],
    ["trees", "show"],
    ["trees", "search"],
    ["heads"],
    ["heads", "ls"],
    ["heads", "show"],
    ["distill"],
    ["train"],
    ["env"],
]


def loaded_by(code: str) -> set[str]:
    """Heavy modules that are loaded once `code` has run in a fresh interpreter."""
    ending = f"\nimport sys; print('LOADED', *[m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code + ending], capture_output=True, text=True, check=True).stdout
    return set(out.rsplit("LOADED", 1)[1].split())


def test_help_comes_before_one_could_wonder() -> None:
    seconds = []
    for _ in range(TRIES):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "specdeft", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < HELP_SECONDS


def test_help_imports_nothing_heavy() -> None:
    code = "from specdeft.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass"
    assert loaded_by(code) == set()


def test_importing_the_package_and_its_trees_imports_nothing_heavy() -> None:
    assert loaded_by("import specdeft; specdeft.Tree.load('medusa-63'); specdeft.SpecdeftError") == set()


def test_every_public_name_exists() -> None:
    import specdeft

    for name in specdeft.__all__:
        assert getattr(specdeft, name) is not None
        assert name in dir(specdeft)
    with pytest.raises(AttributeError, match=r"no attribute 'genrate'\. Public names: DraftHeads"):
        _ = specdeft.genrate


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "specdeft")
def test_every_help_opens_with_an_example(command: list[str]) -> None:
    out = run(*command, "-h")
    assert out.exit_code == 0
    beginning = out.stdout.split("Options:")[0]
    assert f"  specdeft {' '.join(command)}".rstrip() in beginning
    assert out.stdout == run(*command, "--help").stdout
