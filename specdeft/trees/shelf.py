"""The shelf of trees: what is shipped, what each is for, and how a new family is put there.

Knows files and trees; not heads, not models.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specdeft.errors import SpecdeftError
from specdeft.trees.files import find_tree, read_tree_file, shipped_names
from specdeft.trees.topology import Tree, tree_of


@dataclass(frozen=True)
class KnownTree:
    """A tree with what its file says of it: `source` is where the shape comes from, `about` what it is good for."""

    tree: Tree
    source: str
    about: str

    @property
    def name(self) -> str:
        """The name that `Tree.load` takes."""
        return self.tree.name or ""


def describe(name_or_path: str | os.PathLike[str]) -> KnownTree:
    """One tree with its source and purpose. Takes and raises what `Tree.load` does."""
    path = find_tree(name_or_path)
    content = read_tree_file(path)
    return KnownTree(tree_of(content, path), content.source, content.about)


def known_trees() -> list[KnownTree]:
    """All shipped trees, sorted by name (numbers in their numeric order)."""
    return [describe(name) for name in shipped_names()]


def save_family(trees: Iterable[Tree], folder: str | os.PathLike[str], *, source: str, about: str) -> list[Path]:
    """Write each tree to `folder`/<its name>.json, all with the same `source` and `about`; returns the paths written.

    Raises SpecdeftError, before anything is written, when a tree has no name or shares it with another.
    """
    family = list(trees)
    names = [tree.name for tree in family]
    for name in names:
        if not name or names.count(name) > 1:
            raise SpecdeftError(f"Trees are saved under their names: expected a distinct name for each, got {names}")
    paths = [Path(folder) / f"{name}.json" for name in names]
    for tree, path in zip(family, paths, strict=True):
        tree.save(path, source=source, about=about)
    return paths
