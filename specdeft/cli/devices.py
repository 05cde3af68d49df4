"""A device named on a command line, checked before anything is measured on it. Loads no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def find_device(name: str | None) -> torch.device:
    """The device of a name, by default cuda where there is one, else cpu.

    Raises SpecdeftError for a name that is none of cpu, cuda and cuda:N, and for a GPU that is not there.
    """
    import torch

    from specdeft.errors import SpecdeftError

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SpecdeftError(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise SpecdeftError(
            f"--device {name}: PyTorch {torch.__version__} sees {count} CUDA devices. Try without --device"
        )
    return device
