"""Token trees: their shape, the shipped ones, the search for good ones, drawing.

Importing it loads neither torch nor numpy.
"""

from specdeft.trees.dynamic import DynamicTree, dynamic_size, general_shape
from specdeft.trees.search import best_family, counts_from_ranks, expected_tau
from specdeft.trees.shelf import KnownTree, describe, known_trees, save_family
from specdeft.trees.show import draw_text
from specdeft.trees.svg import draw_svg
from specdeft.trees.topology import Tree

__all__ = [
    "DynamicTree",
    "KnownTree",
    "Tree",
    "best_family",
    "counts_from_ranks",
    "describe",
    "draw_svg",
    "draw_text",
    "dynamic_size",
    "expected_tau",
    "general_shape",
    "known_trees",
    "save_family",
]
