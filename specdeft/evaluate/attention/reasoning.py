"""Trees of thoughts, replayed from the files of DeFT's benchmark: which nodes live at a step, and how long each is.

Format (github.com/LINs-lab/DeFT, dataset/generation/Reasoning): a list of {"incompleted", "prompt", "data": {id: {"id",
"value", "start", "end", "children"}}}. `value` is a node's tokens; a root lives until step 0, every other node
decodes one token at each of the steps `start`..`end`; a node whose children have all ended is pruned with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention.workloads import Workload

FILES = {"sorting": "sorting128ToT", "document": "docmergeToT", "keyword": "keywordToT", "set": "set128ToT"}
MOST_STEPS = 1999  # the benchmark's scripts stop there


@dataclass(frozen=True)
class Thought:
    """A node: the steps at which it decodes, its parent (-1 for the root), and a root's own rows."""

    parent: int
    start: int
    end: int
    rows: int


@dataclass(frozen=True)
class Thoughts:
    """One tree of thoughts: nodes with parents before children, and its last step."""

    name: str
    nodes: tuple[Thought, ...]

    @property
    def steps(self) -> int:
        """Decoding steps, as far as the benchmark runs them."""
        return min(MOST_STEPS, max(node.end for node in self.nodes))

    @property
    def prompt(self) -> int:
        """Rows of the prompt."""
        return self.nodes[0].rows


def find_folder(folder: Path) -> Path:
    """The folder that holds the files: the one given, or its Reasoning/. Raises SpecdeftError if neither does."""
    for candidate in (folder, folder / "Reasoning"):
        if all((candidate / f"{name}.json").is_file() for name in FILES.values()):
            return candidate
    wanted = ", ".join(f"{name}.json" for name in FILES.values())
    raise SpecdeftError(f"{folder} does not hold {wanted} (dataset/generation/Reasoning of github.com/LINs-lab/DeFT)")


def read_thoughts(path: Path) -> list[Thoughts]:
    """The trees of a file. A tree without nodes is left out; one that was recorded incompletely ends earlier.

    Raises SpecdeftError for a file of another form.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        trees = [_tree(f"{path.stem}/{number}", entry["data"]) for number, entry in enumerate(found)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecdeftError(f"{path} is no file of trees of thoughts ({error!r})") from error
    return [tree for tree in trees if tree is not None]


def at_step(tree: Thoughts, step: int, name: str, prompt: int | None = None) -> Workload:
    """The tree as it stands while step 1..steps is decoded: the live leaves ask, over all rows that they see.

    `prompt` replaces the rows of the root. Raises ValueError for a step at which nothing decodes.
    """
    live = [i for i, node in enumerate(tree.nodes) if node.parent >= 0 and node.start <= step <= node.end]
    if not live:
        raise ValueError(f"{tree.name} decodes nothing at step {step} of {tree.steps}")
    seen = {0}
    for node in live:
        while node >= 0:
            seen.add(node)
            node = tree.nodes[node].parent
    kept = sorted(seen)
    place = {node: i for i, node in enumerate(kept)}
    rows = [tree.nodes[i].rows if i == 0 else min(step, tree.nodes[i].end) - tree.nodes[i].start + 1 for i in kept]
    if prompt is not None:
        rows[0] = prompt
    return Workload(
        f"{name} step {step}",
        "reasoning",
        tuple(place.get(tree.nodes[i].parent, -1) for i in kept),
        tuple(rows),
        tuple(place[node] for node in live),
        None,
        {"length": rows[0], "file": name, "step": step, "steps": tree.steps},
    )


def sampled(tree: Thoughts, count: int) -> list[int]:
    """`count` steps, evenly from the first to the last, without those at which nothing decodes."""
    steps = sorted({1 + (2 * i + 1) * (tree.steps - 1) // (2 * count) for i in range(count)})
    return [step for step in steps if any(n.parent >= 0 and n.start <= step <= n.end for n in tree.nodes)]


def _tree(name: str, data: dict[str, dict[str, Any]]) -> Thoughts | None:
    if not data:
        return None
    by_id = {int(key): entry for key, entry in data.items()}
    parents = {int(child): key for key, entry in by_id.items() for child in entry["children"]}
    order, place, nodes = [0], {0: 0}, []
    for key in order:  # breadth first: parents before children
        entry = by_id[key]
        parent = place[parents[key]] if key in parents else -1
        nodes.append(Thought(parent, int(entry["start"]), int(entry["end"]), int(entry["value"])))
        for child in entry["children"]:
            if int(child) in by_id:
                place[int(child)] = len(order)
                order.append(int(child))
    return Thoughts(name, tuple(nodes)) if len(nodes) > 1 else None
