"""A training run under way: one forward pass of the base per step, checks, checkpoints, and going on after a stop.

Knows data, losses and the optimiser; knows nothing of decoding.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from specdeft.errors import SpecdeftError
from specdeft.heads import files
from specdeft.train import checkpoint
from specdeft.train.batches import batches, make_batch, trainable
from specdeft.train.checkpoint import Checkpoint
from specdeft.train.data import TokenData
from specdeft.train.interrupt import Interrupt
from specdeft.train.limits import Limits, rate, warm_up_steps
from specdeft.train.progress import line, numbers
from specdeft.train.work import Work
from specdeft.train.workers import Workers

LOOK_EVERY = 50  # steps between looks at the loss on a GPU, where each look waits for the device
SPEAK_EVERY = 10.0  # seconds between lines where 50 steps take longer


class Run:
    """A training run under way: heads, optimiser, counters and clock."""

    def __init__(
        self,
        work: Work,
        workers: Workers,
        data: TokenData,
        limits: Limits,
        settings: dict[str, Any],
        out: str | os.PathLike[str] | None,
        save_every: float,
        log: Callable[[str], None],
    ) -> None:
        self.work, self.workers, self.data, self.limits = work, workers, data, limits
        self.settings, self.out, self.save_every, self.log = settings, out, save_every, log
        self.heads, self.cuda = work.heads, work.cuda
        self.parameters = list(self.heads.parameters())
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.heads, settings["weight_decay"]), lr=settings["learning_rate"], betas=(0.9, 0.98),
            fused=self.cuda,
        )  # fmt: skip
        self.labels = trainable(data)
        self.step_tokens = settings["batch_tokens"] * workers.count
        self.warm_up = warm_up_steps(settings["epochs"] * int(data.offsets[-1]) / self.step_tokens)
        self.step = self.seen = 0
        self.earlier, self.began = 0.0, time.monotonic()  # seconds before this process, and when it began
        self.agreed = 0.0  # the clock that all processes go by
        self.saved = self.spoke = self.began
        self.good = self._copy()

    def restore(self, state: Checkpoint) -> None:
        """Take a stopped run's place."""
        self.heads.load_state_dict(state.heads)
        self.optimizer.load_state_dict(state.optimizer)
        self.step, self.seen, self.earlier = state.step, state.seen, state.seconds
        self.agreed, self.good = state.seconds, self._copy()
        self.say(f"resumed at step {self.step}, {self.seen} labels")

    def go(self, interrupt: Interrupt) -> None:
        """Step until a limit is reached or someone asks to stop."""
        for rows in itertools.islice(self._order(), self.step, None):
            if self.workers.count == 1:
                self.agreed = self.seconds
            progress = self.limits.progress(self.seen, self.step, self.agreed)
            if progress >= 1:
                return
            self._take_step(rows, progress, interrupt)

    def finish(self) -> None:
        """Write the heads, forget the checkpoint."""
        if not all(bool(torch.isfinite(value).all()) for value in self.parameters):
            raise self._stopped()
        if self.out is not None and self.workers.rank == 0:
            self.heads.save_pretrained(self.out)
            checkpoint.remove(self.out)
        self.workers.wait()
        self.workers.close()
        self.say(f"trained {self.step} steps, {self.seen} labels, {self.seconds:.0f} s")

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a stop included."""
        return self.earlier + time.monotonic() - self.began

    def say(self, text: str) -> None:
        """Log from one process only."""
        if self.workers.rank == 0:
            self.log(text)

    def _order(self) -> Iterator[np.ndarray]:
        for epoch in itertools.count():
            yield from batches(self.data, self.step_tokens, self.settings["seed"], epoch)

    def _take_step(self, rows: np.ndarray, progress: float, interrupt: Interrupt) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings["learning_rate"] * rate(progress, self.step, self.warm_up)
        slow = self.workers.count == 1 and time.monotonic() - self.spoke > SPEAK_EVERY
        shown = self.step % LOOK_EVERY == 0 or slow
        count, mine = int(self.labels[rows].sum()), rows[self.workers.rank :: self.workers.count]
        losses, accuracy = torch.zeros(self.heads.num_heads, device=self.work.device), None
        if len(mine):
            losses, accuracy = self.work.losses(make_batch(self.data, mine), mine, count, shown)
            losses.sum().backward()
        asked = interrupt.asked
        beside = losses.detach()
        if self.workers.count > 1:
            beside = torch.cat([beside, torch.tensor([self.seconds, float(asked)], device=self.work.device)])
        beside = self.workers.sum_gradients(self.parameters, beside)
        norm = clip_grad_norm_(self.parameters, self.settings["clip"])
        if shown or not self.cuda or (asked and self.workers.count == 1):
            self._look(beside.tolist(), float(norm), accuracy, progress, asked)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seen, self.step = self.seen + count, self.step + 1

    def _look(
        self, beside: list[float], norm: float, accuracy: dict[int, list[float]] | None, progress: float, asked: bool
    ) -> None:
        """Between a step's gradient and its update: the weights are still those of `step` whole steps."""
        losses = beside[: self.heads.num_heads]
        if self.workers.count > 1:
            self.agreed = beside[-2] / self.workers.count
            asked = beside[-1] > 0
        if not all(map(math.isfinite, [*losses, norm])):
            raise self._stopped()
        self.good = self._copy()
        if accuracy is not None and self.workers.rank == 0:
            self.spoke = time.monotonic()
            lr, epoch = self.optimizer.param_groups[0]["lr"], self.seen / int(self.labels.sum())
            speed = self.seen / max(self.seconds, 1e-9)
            self.say(line(progress, self.step, epoch, losses, accuracy, lr, speed, self.agreed))
            self.workers.track(numbers(losses, accuracy, lr), self.step)
        if asked or time.monotonic() - self.saved > self.save_every:
            self._save()
        if asked:
            self.workers.close()
            where = "" if self.out is None else f", saved in {self.out}: go on with resume (--resume)"
            self.say(f"stopped at step {self.step}{where}")
            raise KeyboardInterrupt

    def _save(self) -> None:
        self.saved = time.monotonic()
        if self.out is None or self.workers.rank != 0:
            return
        files.write(self.out, self.heads.config, self.good)
        Checkpoint(
            self.heads.config, self.settings, self.step, self.seen, self.seconds, self.good, self.optimizer.state_dict()
        ).save(self.out)

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.heads.state_dict().items()}

    def _stopped(self) -> SpecdeftError:
        self.heads.load_state_dict(self.good)
        if self.out is not None and self.workers.rank == 0:
            self.heads.save_pretrained(self.out)
        return SpecdeftError(
            f"the loss is not finite at step {self.step}: stopped, the heads are those of the last good check"
            f"{'' if self.out is None else f', saved in {self.out}'}; try a lower learning rate than "
            f"{self.settings['learning_rate']}"
        )


def decay_groups(heads: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Parameters for an optimiser: matrices with weight decay, biases and the weights of norms without."""
    small = [name for name, _ in heads.named_parameters() if "bias" in name or "norm" in name]
    return [
        {"params": [p for name, p in heads.named_parameters() if (name in small) is which], "weight_decay": rate}
        for which, rate in ((False, decay), (True, 0.0))
    ]
