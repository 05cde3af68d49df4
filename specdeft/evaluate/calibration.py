"""How often each rank path was the model's own continuation, measured once per set of heads and kept beside them.

From these counts trees are built and the tokens per pass that a tree promises are foretold.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specdeft.errors import SpecdeftError
from specdeft.trees import Tree, expected_tau

FILE = "calibration.json"
KEPT = 4096  # likeliest paths written: far more than the largest tree holds


@dataclass(frozen=True)
class Calibration:
    """`counts[path]` of `total` positions had their true continuation at exactly the ranks of `path`."""

    total: int
    counts: Mapping[tuple[int, ...], int]
    source: str = ""

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
