"""Several processes as one: what Hugging Face Accelerate gives a training loop, and nothing where there is one process.

The heads are small, so their gradients travel as one flat sum per step. Knows no models and no losses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdeft.errors import SpecdeftError


class Workers:
    """The processes of one training run, and its trackers.

    Args:
        device: the model's; where it is a CPU, processes talk through gloo.
        log_with: names of trackers that Accelerate knows ("tensorboard", "wandb", ...) or its tracker objects.
        folder: where trackers write.
        settings: what trackers record of the run.

    Raises:
        SpecdeftError: a tracker whose package is not installed.
    """

    def __init__(
        self,
        device: torch.device,
        log_with: Sequence[Any] = (),
        folder: str | os.PathLike[str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.device, self._accelerator = device, None
        if launched() == 1 and not log_with:
            return
        from accelerate import Accelerator

        for name in log_with:
            _check_tracker(name)
        where = None if folder is None else str(folder)
        self._accelerator = Accelerator(cpu=device.type == "cpu", log_with=list(log_with) or None, project_dir=where)
        if log_with:
            plain = (int, float, str, bool)
            config = {key: value for key, value in (settings or {}).items() if isinstance(value, plain)}
            self._accelerator.init_trackers("specdeft", config=config)

    @property
    def count(self) -> int:
        """Processes."""
        return 1 if self._accelerator is None else self._accelerator.num_processes

    @property
    def rank(self) -> int:
        """This process's number from 0; number 0 speaks and writes."""
        return 0 if self._accelerator is None else self._accelerator.process_index

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over all processes, the same in each."""
        if self._accelerator is None or self.count == 1:
            return values
        total: Tensor = self._accelerator.reduce(values, "sum")
        return total

    def sum_gradients(self, parameters: Iterable[nn.Parameter], beside: Tensor) -> Tensor:
        """Every gradient becomes the sum over processes; returns that of `beside` [n] float32, in the same exchange."""
        if self.count == 1:
            return beside
        trained = list(parameters)
        for parameter in trained:  # a process without rows in this step adds nothing
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([*(p.grad.flatten() for p in trained if p.grad is not None), beside])
        parts = self.sum(flat).split([*(p.numel() for p in trained), len(beside)])
        for parameter, part in zip(trained, parts[:-1], strict=True):
            parameter.grad = part.view_as(parameter).clone()
        return parts[-1]

    def wait(self) -> None:
        """Let the others catch up."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def track(self, values: dict[str, float], step: int) -> None:
        """Hand numbers to the trackers, if any."""
        if self._accelerator is not None:
            self._accelerator.log(values, step=step)

    def close(self) -> None:
        """Finish the trackers."""
        if self._accelerator is not None:
            self._accelerator.end_training()


def launched() -> int:
    """How many processes `accelerate launch` or torchrun started with this one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def main_process() -> bool:
    """Whether this is the process that speaks and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def place_of(device: str | None) -> torch.device:
    """This process's device among several: its own GPU, or the CPU if there are none or `device` asks for it."""
    from accelerate import PartialState

    found: torch.device = PartialState(cpu=device == "cpu").device
    return found


def _check_tracker(name: Any) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

    if isinstance(name, GeneralTracker):
        return
    known, installed = sorted(map(str, LOGGER_TYPE_TO_CLASS)), sorted(map(str, get_available_trackers()))
    if name not in known:
        raise SpecdeftError(f"Accelerate has no tracker {name!r}; it has {', '.join(known)}")
    if name not in installed:
        raise SpecdeftError(f"{name} is not installed here: pip install {name}, or leave --log-with away")
