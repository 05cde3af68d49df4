"""The wheel: one name in site-packages, with the content and without the results."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specdeft import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SHELVES = ("heads", "trees", "eval")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built with the tools that are installed."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_adds_exactly_one_name_to_site_packages(wheel: zipfile.ZipFile) -> None:
    names = {name.split("/")[0] for name in wheel.namelist()}
    assert names == {"specdeft", f"specdeft-{__version__}.dist-info"}


def test_the_wheel_holds_the_content_of_every_shelf(wheel: zipfile.ZipFile) -> None:
    inside = set(wheel.namelist())
    expected = {"specdeft/py.typed"}
    for pattern in ("heads/**/*", "trees/**/*", "eval/README.md", "eval/workloads/**/*"):
        files = {f"specdeft/_content/{path.relative_to(ROOT)}" for path in ROOT.glob(pattern) if path.is_file()}
        assert files, pattern
        expected |= files
    assert expected <= inside


def test_the_wheel_holds_no_results_no_tests_and_no_python_in_the_content(wheel: zipfile.ZipFile) -> None:
    for name in wheel.namelist():
        assert "/results/" not in name
        assert "tests" not in name.split("/")
        assert not (name.startswith("specdeft/_content/") and name.endswith(".py"))


def test_the_installed_package_finds_its_content(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import specdeft; from specdeft.evaluate.workload import read_workload\n"
        "print(specdeft.__file__, specdeft.Tree.load('medusa-63').size, len(read_workload('mixed')))"
    )
    isolated = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=isolated, check=True
    )
    assert out.stdout.split() == [str(tmp_path / "specdeft" / "__init__.py"), "64", "20"]


def test_the_entry_point_is_the_command_line(wheel: zipfile.ZipFile) -> None:
    entry = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "specdeft = specdeft.cli:main" in wheel.read(entry).decode()


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("shelf", SHELVES)
def test_a_shelf_holds_no_python_and_its_readme_first_names_its_reader(shelf: str) -> None:
    assert not list((ROOT / shelf).rglob("*.py"))
    first = (ROOT / shelf / "README.md").read_text(encoding="utf-8").splitlines()[0]
    assert "specdeft." in first
