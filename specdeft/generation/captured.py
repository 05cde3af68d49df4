"""A round of decoding as a CUDA graph: captured once per shape, replayed for every round of every call that fits.

A model's graphs live as long as the model. They hold the addresses of its weights: when a weight has moved (another
device, a merged adapter), the graphs are captured anew. Knows CUDA graphs; what is captured is `step`'s.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable

import torch
from torch import nn

from specdeft.generation.result import Clock
from specdeft.generation.step import State

MOST = 4  # graphs per model; each keeps its KV slots
SHORTEST = 1024  # slots: what a call needs is rounded up, so that calls of different lengths share a graph


def rounded(slots: int) -> int:
    """The slots of the graph that serves a call of `slots`: a power of two."""
    return max(SHORTEST, 1 << (slots - 1).bit_length())


class Captured:
    """A round and the tensors that it works on. One batch at a time: `taken` while it decodes."""

    def __init__(self, state: State, run: Callable[[Clock], None], key: Hashable, heads: nn.Module) -> None:
        self.state, self.key, self.heads = state, key, weakref.ref(heads)
        self.clock = Clock(state.token.device, in_graph=True)
        self.done = torch.cuda.Event()
        self.taken = True
        state.budget.zero_()  # every sequence has ended: the rounds below commit nothing
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and tuned, tensors of the tree are made
                run(Clock(state.token.device))
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            run(self.clock)
        self.report = [state.report.to("cpu").pin_memory() for _ in range(2)]
        self.logprobs = [state.logprobs.to("cpu").pin_memory() for _ in range(2)]
        self.ready = [torch.cuda.Event() for _ in range(2)]
        self.rounds = 0

    def launch(self) -> None:
        """Issue a round, and the copy of its report; returns at once."""
        self.graph.replay()
        turn = self.rounds % 2
        self.report[turn].copy_(self.state.report, non_blocking=True)
        self.logprobs[turn].copy_(self.state.logprobs, non_blocking=True)
        self.ready[turn].record()
        self.rounds += 1

    def read(self, round_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The report and log-probabilities of that round, one of the last two, once the device is past it."""
        turn = round_index % 2
        self.ready[turn].synchronize()
        return self.report[turn], self.logprobs[turn]

    def release(self) -> None:
        """Let the next batch have it."""
        self.done.record()
        self.taken = False


_POOL: weakref.WeakKeyDictionary[nn.Module, list[Captured]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def addresses(*modules: nn.Module) -> Hashable:
    """Where the weights and buffers of modules lie."""
    return tuple(
        tensor.data_ptr() for module in modules for each in (module.parameters(), module.buffers()) for tensor in each
    )


def acquire(
    model: nn.Module, heads: nn.Module, key: Hashable, state: Callable[[], State], run: Callable[[State, Clock], None]
) -> Captured:
    """The model's graph for `key`, captured now if there is none that is free.

    Args:
        model, heads: whose weights the graph reads.
        key: everything else that a round depends on.
        state: makes the tensors for a new one.
        run: a round on them, with marks for a clock.

    Raises:
        Whatever forbids the capture; nothing is kept then.
    """
    key = (key, addresses(model, heads))
    with _LOCK:
        pool = _POOL.setdefault(model, [])
        pool[:] = [each for each in pool if each.taken or each.heads() is not None]
        for each in pool:
            if each.key == key and each.heads() is heads and not each.taken:
                each.taken = True
                pool.remove(each)
                pool.append(each)  # the newest last
                each.done.wait()
                return each
    tensors = state()
    captured = Captured(tensors, lambda clock: run(tensors, clock), key, heads)
    with _LOCK:
        pool.append(captured)
        idle = [each for each in pool if not each.taken]
        for each in idle[: max(0, len(pool) - MOST)]:
            pool.remove(each)
    return captured


def forget(model: nn.Module) -> None:
    """Drop the model's graphs and the memory that they hold."""
    with _LOCK:
        _POOL.pop(model, None)
