"""How often each rank path was the model's own continuation, measured once per set of heads and kept beside them.

From these counts trees are built and the tokens per pass that a tree promises are foretold. Counted are the positions
at which passes begin: a pass begins where the one before it stopped guessing right, and there the text is harder than
on average.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdeft.errors import SpecdeftError
from specdeft.trees import Tree, best_family, counts_from_ranks, expected_tau

if TYPE_CHECKING:
    import numpy as np

FILE = "calibration.json"
KEPT = 4096  # likeliest paths written: far more than the largest tree holds
REFERENCE_NODES = 64  # where passes begin depends on the tree, though little; this size stands for all
ROUNDS = 3  # tree -> where its passes begin -> tree; it no longer changes after that


@dataclass(frozen=True)
class Calibration:
    """`counts[path]` of `total` positions had their true continuation at exactly the ranks of `path`."""

    total: int
    counts: Mapping[tuple[int, ...], int]
    source: str = ""

    @classmethod
    def from_ranks(cls, ranks: "np.ndarray", step: "np.ndarray", source: str = "") -> "Calibration":
        """Counts at the positions where passes of a well-fitted tree begin; ranks [M, K] and step [M] as measured."""
        found = cls(len(ranks), counts_from_ranks(ranks), source)
        for _ in range(ROUNDS):
            if not found.counts:  # not one true token among the guesses
                break
            nodes = min(REFERENCE_NODES, 1 + len(found.counts))
            (tree,) = best_family(found.counts, found.total, [nodes], "reference")
            begins = pass_starts(ranks, step, tree)
            found = cls(len(begins), counts_from_ranks(ranks[begins]), source)
        return found

    def expected_tau(self, tree: Tree) -> float:
        """Tokens per verify pass that the counts promise for `tree`."""
        return expected_tau(tree, self.counts, self.total)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `calibration.json` into a heads folder, with the likeliest paths only."""
        likeliest = sorted(self.counts.items(), key=lambda pair: (-pair[1], len(pair[0]), pair[0]))[:KEPT]
        path = Path(folder) / FILE
        body = ",\n".join(f"    [{json.dumps(list(ranks))}, {count}]" for ranks, count in likeliest)
        head = f'{{\n  "total": {self.total},\n  "source": {json.dumps(self.source)},\n  "counts": [\n'
        path.write_text(f"{head}{body}\n  ]\n}}\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Calibration | None":
        """The counts beside the heads in `folder`, None when there are none. SpecdeftError for a malformed file."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            counts = {tuple(int(rank) for rank in ranks): int(count) for ranks, count in found["counts"]}
            return cls(int(found["total"]), counts, str(found.get("source", "")))
        except (ValueError, KeyError, TypeError) as error:
            raise SpecdeftError(f"{path} is malformed: expected total and counts ({error})") from error


def pass_starts(ranks: "np.ndarray", step: "np.ndarray", tree: Tree) -> "np.ndarray":
    """Positions [P] at which decoding with `tree` begins its passes, when position i's true tokens have ranks[i]."""
    import numpy as np

    held = set(tree.paths)
    starts, following = [], 0
    for position, (row, place) in enumerate(zip(ranks.tolist(), step.tolist(), strict=True)):
        if place == 0:  # a new answer
            following = position
        if position == following:
            starts.append(position)
            depth = 0
            while depth < len(row) and tuple(row[: depth + 1]) in held:
                depth += 1
            following = position + depth + 1
    return np.array(starts, dtype=np.int64)
