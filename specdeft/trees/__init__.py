"""Token trees: their shape, the shipped ones, the search for good ones, drawing.

Importing it loads neither torch nor numpy.
"""

from specdeft.trees.search import best_family, counts_from_ranks, expected_tau
from specdeft.trees.shelf import KnownTree, describe, known_trees, save_family
from specdeft.trees.show import draw_text
from specdeft.trees.svg import draw_svg
from specdeft.trees.topology import Tree

__all__ = [
    "KnownTree",
    "Tree",
    "best_family",
    "counts_from_ranks",
    "describe",
    "draw_svg",
    "draw_text",
    "expected_tau",
    "known_trees",
    "save_family",
]
