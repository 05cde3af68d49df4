"""How long a method takes on the device. Knows that a launch is given the index of a KV set, and nothing else of it.

On CUDA a graph of several launches, each over the next set of KV, is replayed between two events: neither Python nor
a warm cache is measured. Where a method cannot be captured, events stand around launches from Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

# A graph holds SHORT_LAUNCHES launches, or LONG_LAUNCHES where one takes longer than this from Python.
SHORT_US = 1000.0
SHORT_LAUNCHES, LONG_LAUNCHES = 24, 4
LEAST_REPLAYS, MOST_REPLAYS = 3, 2000
WARM_UP = 0.5  # of the seconds that are measured: an idle GPU clocks higher, until its power limit acts

Launch = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch: median of the repeats, and the range that the middle 80 % of them lie in.

    `by` is how: "graph", "events" or "clock"; `repeats` counts replays of `launches` launches each. `why` says why a
    method on CUDA is not timed by graph.
    """

    us: float
    low_us: float
    high_us: float
    by: str
    repeats: int
    launches: int
    why: str = ""


def time_launches(launch: Launch, sets: int, device: torch.device, seconds: float, *, graph: bool = True) -> Timing:
    """Time `launch(0)`, `launch(1)`, ... over `sets` sets: about `seconds` long (but at least three repeats).

    Half as long goes before, unmeasured.
    """
    if device.type != "cuda":
        return _by_clock(launch, sets, seconds)
    estimate = _estimate_us(launch, sets)
    count = launches_in_a_graph(estimate, sets)
    if graph:
        try:
            return _by_graph(launch, sets, count, seconds)
        except Exception as error:  # whatever forbids capture: the method is timed all the same
            why = f"not captured: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            torch.cuda.synchronize(device)
    else:
        why = "it synchronises with the host"
    return _by_events(launch, sets, count, repeats_within(seconds, estimate * count), why)


def launches_in_a_graph(estimate_us: float, sets: int) -> int:
    """A multiple of `sets`, so that replays go on rotating: many short launches, few long ones."""
    least = SHORT_LAUNCHES if estimate_us < SHORT_US else LONG_LAUNCHES
    return sets * math.ceil(least / sets)


def repeats_within(seconds: float, estimate_us: float) -> int:
    """How often something of that length fits into `seconds`."""
    return max(LEAST_REPLAYS, min(MOST_REPLAYS, int(seconds * 1e6 / max(estimate_us, 1e-3))))


def median_us(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Wall time of work on the host, waiting for what it asks of the device; the first call is not counted."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - began)
    return 1e6 * median(times[1:])


def _summary(times: Sequence[float], by: str, launches: int, why: str = "") -> Timing:
    ordered = sorted(times)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return Timing(median(ordered), low, high, by, len(ordered), launches, why)


def _estimate_us(launch: Launch, sets: int) -> float:
    """A rough time of one launch, after the first ones have compiled what they need."""
    for index in range(2):
        launch(index % sets)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for index in range(2):
        launch(index % sets)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / 2


def _by_graph(launch: Launch, sets: int, launches: int, seconds: float) -> Timing:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a stream needs once is made before capture
        launch(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index % sets)
    repeats = repeats_within(seconds, _events(graph.replay, 2)[-1])
    _events(graph.replay, max(1, int(WARM_UP * repeats)))
    times = _events(graph.replay, repeats)
    return _summary([each / launches for each in times], "graph", launches)


def _by_events(launch: Launch, sets: int, launches: int, repeats: int, why: str) -> Timing:
    def some() -> None:
        for index in range(launches):
            launch(index % sets)

    return _summary([each / launches for each in _events(some, repeats)], "events", launches, why)


def _events(work: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each repeat, between events."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def _by_clock(launch: Launch, sets: int, seconds: float) -> Timing:
    launch(0)
    began = time.perf_counter()
    launch(1 % sets)
    estimate = time.perf_counter() - began
    times = []
    for index in range(repeats_within(seconds, estimate * 1e6)):
        began = time.perf_counter()
        launch(index % sets)
        times.append((time.perf_counter() - began) * 1e6)
    return _summary(times, "clock", 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
