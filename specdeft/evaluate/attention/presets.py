"""The cells of each preset: which workloads, over which heads, and which methods by default. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention import OURS
from specdeft.evaluate.attention.reasoning import FILES, Thoughts, at_step, find_folder, read_thoughts, sampled
from specdeft.evaluate.attention.shapes import SHAPES, Shape, find_shape
from specdeft.evaluate.attention.workloads import Workload, star, token_tree
from specdeft.trees import Tree

PAPER = "paper"
QUICK = "quick"
NODES = (32, 64, 128, 256)
LENGTHS = (1024, 4096, 16384, 65536, 131072)
LONGEST = {131072: (64, 256)}  # node counts at lengths where not all are measured
SHORT = {"smollm2-135m": (1024, 4096, 8192), "codellama-7b": LENGTHS[:4], "codellama-34b": LENGTHS[:4]}
SLOW = {"flex": ((4096, 64), (16384, 64))}  # (L, N) at which a method that compiles for long is measured by default
CHUNKS_AT = ((4096, 64), (16384, 64), (65536, 64))
CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)

BRANCHES, PROMPT, GENERATED = (20, 30, 50), 4000, 400
SPECULATIVE = (1016, 6000, 1507)  # rows at the first and last of so many steps
PROMPTS = (1000, 5000, 8000, 10000)  # the paper's table 7
FEW_STEPS = 4
PAPER_METHODS = (OURS, "deft-node", "deft-node-chunk", "q-guided", "specinfer", "dense-mask", "fa2-merge")


@dataclass(frozen=True)
class Cell:
    """A workload over heads, and the methods to measure on it; None for those that were asked for or all."""

    shape: Shape
    workload: Workload
    only: tuple[str, ...] | None = None

    @property
    def id(self) -> str:
        """Unique in a run."""
        return f"{self.shape.name} {self.workload.name}"


def grid(
    shape_name: str, lengths: Sequence[int] = (), nodes: Sequence[int] = (), chunk_sizes: Sequence[int] | None = None
) -> list[Cell]:
    """Token trees of N nodes behind L rows, by default as the preset has them; then the ablation over chunk sizes."""
    shape = find_shape(shape_name)
    sizes = tuple(nodes) or NODES
    trees = {size: Tree.load(f"deft-{size}") for size in sizes}
    cells = []
    for length in tuple(lengths) or SHORT.get(shape.name, LENGTHS):
        usual = sizes if nodes else LONGEST.get(length, sizes)
        cells += [Cell(shape, token_tree(trees[size], length)) for size in usual]
    chunks = CHUNKS if chunk_sizes is None else tuple(chunk_sizes)
    ablation = tuple(f"{OURS}@{rows}" for rows in chunks)
    if chunk_sizes is not None:
        return [*cells, *(replace(cell, only=ablation) for cell in cells if ablation)]
    places = [(cell.workload.length, cell.workload.size) for cell in cells]
    return [*cells, *(replace(cell, only=ablation) for cell, at in zip(cells, places, strict=True) if at in CHUNKS_AT)]


def quick() -> list[Cell]:
    """Every kind of cell at its smallest: whether everything works, in seconds and also on a CPU. No times to quote."""
    heads = "4x2x16"
    return [*grid(heads, (100,), (32,), (32,)), Cell(find_shape(heads), star(3, 60, 9))]


def paper(data: Path, trees: int = 1, steps: int = 16) -> list[Cell]:
    """What the paper's tables measure: few-shot stars, trees of thoughts, token trees, sampled over their steps.

    Args:
        data: the folder of DeFT's reasoning trees.
        trees, steps: how many trees of each kind, and how many steps of each.

    Raises:
        SpecdeftError: the folder does not hold them.
    """
    llama, folder = SHAPES["llama3-8b"], find_folder(data)
    cells = [*_stars(llama), *_speculative(llama)]
    for column, file in FILES.items():
        whole = _whole_trees(read_thoughts(folder / f"{file}.json"))[:trees]
        for number, tree in enumerate(whole):
            for step in sampled(tree, steps):
                work = at_step(tree, step, f"{column} {number}")
                cells.append(Cell(llama, _marked(work, column, tree.steps)))
        if column == "sorting":
            cells += [
                Cell(
                    llama, _marked(at_step(whole[0], step, f"sorting {rows}+", rows), f"prompt {rows}", whole[0].steps)
                )
                for rows in PROMPTS
                for step in sampled(whole[0], FEW_STEPS)
            ]
    return [*cells, *_stars(SHAPES["codellama-7b"])]


def methods_by_default(preset: str, names: Sequence[str]) -> tuple[str, ...]:
    """The methods of a preset, of those there are."""
    return PAPER_METHODS if preset == PAPER else tuple(names)


def left_out(method: str, workload: Workload) -> str:
    """Why a method is not measured here unless asked for; empty if it is."""
    places = SLOW.get(method)
    if places is None or (workload.length, workload.size) in places:
        return ""
    return "compiles for long: measured at " + " and ".join(f"L={length} N={n}" for length, n in places)


def _whole_trees(trees: list[Thoughts]) -> list[Thoughts]:
    """Those with as many nodes as the largest: recorded to the end."""
    if not trees:
        raise SpecdeftError("no tree of thoughts has nodes")
    most = max(len(tree.nodes) for tree in trees)
    return [tree for tree in trees if len(tree.nodes) == most]


def _stars(shape: Shape) -> list[Cell]:
    grown = [(2 * i + 1) * GENERATED // (2 * FEW_STEPS) for i in range(FEW_STEPS)]
    return [
        Cell(shape, _marked(star(branches, PROMPT, rows), f"b{branches}", GENERATED - 1))
        for branches in BRANCHES
        for rows in grown
    ]


def _speculative(shape: Shape) -> list[Cell]:
    first, last, steps = SPECULATIVE
    lengths = [first + (2 * i + 1) * (last - first) // (2 * FEW_STEPS) for i in range(FEW_STEPS)]
    return [
        Cell(shape, _marked(token_tree(Tree.load(f"deft-{size}"), length), f"t{size}", steps))
        for size in NODES
        for length in lengths
    ]


def _marked(workload: Workload, column: str, steps: int) -> Workload:
    """The workload with its column in the paper's tables, and the steps of the whole run that it is a sample of."""
    return replace(workload, facts=workload.facts | {"column": column, "run_steps": steps})
