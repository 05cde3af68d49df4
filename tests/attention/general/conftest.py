"""The kernels for general trees, in Triton's interpreter: a private copy, as tests/attention/conftest.py explains."""

import importlib
import importlib.util
import os
import sys
from types import ModuleType

import pytest

PACKAGE = "specdeft.attention"
KERNELS = f"{PACKAGE}.general.kernels"

collect_ignore = [] if importlib.util.find_spec("triton") else ["test_compiled.py", "test_cut.py", "test_kernels.py"]


def _private(name: str) -> bool:
    """Triton, and what of our attention was made by it."""
    if name.split(".")[0] == "triton":
        return not name.startswith("triton._C")
    return name.startswith(PACKAGE) and "tl" in vars(sys.modules[name])


@pytest.fixture(scope="session")
def interpreted() -> ModuleType:
    """The kernel module, interpreted."""
    known = {name: sys.modules.pop(name) for name in list(sys.modules) if _private(name)}
    packages = {name: sys.modules[name] for name in (PACKAGE, f"{PACKAGE}.general") if name in sys.modules}
    attributes = {name: dict(vars(package)) for name, package in packages.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        try:
            return importlib.import_module(KERNELS)
        finally:
            for name in filter(_private, list(sys.modules)):
                del sys.modules[name]
            sys.modules.update(known)
            for name, package in packages.items():
                vars(package).clear()
                vars(package).update(attributes[name])


@pytest.fixture
def kernels(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Plans made on the CPU take the interpreted kernels."""
    from specdeft.attention.general import plan

    monkeypatch.setattr(plan, "kernels_for", lambda *args: interpreted)
    return interpreted
