"""Kernels run here in Triton's interpreter, on the CPU, with every uninitialised tensor full of NaN.

Triton decides at import whether its functions are compiled or interpreted, and other tests of the same process may have
imported it already, or may need the compiled kernels (tests/gpu). So the `kernels` fixture imports a second, private
copy of triton and of the kernel module under TRITON_INTERPRET=1, and puts sys.modules and the environment back as they
were: nobody else sees the copy, whatever the order of the tests. Only triton's C extension is shared.
"""

import importlib
import importlib.util
import os
import sys
from types import ModuleType

import pytest
import torch

KERNELS = "specdeft.attention.deft_flatten"
PARTS = tuple(f"specdeft.attention.{name}" for name in ("deft_flatten", "merge", "partition"))  # they import triton

# without triton (it exists for Linux only) there is no kernel to test
collect_ignore = [] if importlib.util.find_spec("triton") else ["test_compiled.py", "test_kernels.py"]


def _replaced(name: str) -> bool:
    return name in PARTS or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The kernel module, interpreted."""
    import specdeft.attention as package

    known = {name: sys.modules.pop(name) for name in list(sys.modules) if _replaced(name)}
    attributes = {name.rpartition(".")[2]: vars(package).get(name.rpartition(".")[2]) for name in PARTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        try:
            return importlib.import_module(KERNELS)
        finally:
            for name in filter(_replaced, list(sys.modules)):
                del sys.modules[name]
            sys.modules.update(known)
            for name, module in attributes.items():
                if module is None:
                    vars(package).pop(name, None)
                else:
                    setattr(package, name, module)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty and torch.empty_like give starts as NaN, so that a row nobody wrote cannot pass a comparison."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)

        def poison(*args, real=real, **kwargs):
            tensor = real(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poison)
