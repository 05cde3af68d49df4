"""What a method is to the harness: a case makes it ready, and then it is launched over one KV set at a time.

Nothing here knows a particular method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specdeft.evaluate.attention.case import Case
from specdeft.evaluate.attention.traffic import Moved


class NotHere(Exception):
    """A method that cannot run this cell: no GPU, a package that is missing, a tree it was not made for."""


@dataclass(frozen=True)
class Ready:
    """A method, prepared for one case.

    Attributes:
        launch: KV set -> output [Q, Hq, D]. Only this is timed.
        real, paper: bytes per launch, counted as they are and as DeFT's tables count; None where nobody can tell.
        plan: what the host must do when the tree changes, or when a length does and the method reads it on the host.
        step: what must be done each decoding step although the tree stays; None if nothing.
        note: what a reader of the table should know.
    """

    launch: Callable[[int], Tensor]
    real: Moved | None = None
    paper: Moved | None = None
    plan: Callable[[], object] | None = None
    step: Callable[[], object] | None = None
    note: str = ""


Prepare = Callable[[Case], Ready]
