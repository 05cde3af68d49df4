"""Tree files: one JSON object per tree, read strictly and written whole.

Knows the keys and where the shipped files are, not what makes a tree.
"""

import difflib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdeft.content import content_dir
from specdeft.errors import SpecdeftError


@dataclass(frozen=True)
class TreeFile:
    """What a tree file says.

    `source` (where the shape comes from) and `about` (what it is good for) are free text for people. The numbers are as
    the file has them, still to be checked.
    """

    name: str
    parents: tuple[Any, ...]
    ranks: tuple[Any, ...]
    source: str = ""
    about: str = ""


def shipped_names() -> list[str]:
    """Names of the trees that come with specdeft, sorted with numbers in their numeric order."""
    return sorted((path.stem for path in content_dir("trees").glob("*.json")), key=_natural)


def find_tree(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a shipped name, or the path itself when it is a path object or a string that ends in .json."""
    if not isinstance(name_or_path, str) or name_or_path.endswith(".json"):
        return Path(name_or_path)
    names = shipped_names()
    if name_or_path in names:
        return content_dir("trees") / f"{name_or_path}.json"
    near = difflib.get_close_matches(name_or_path, names, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(near)}" if near else f"{len(names)} others are"
    raise SpecdeftError(
        f"No tree named {name_or_path!r} is shipped; {hint}. See: specdeft trees ls. "
        "A tree of your own is named by its path, ending in .json."
    )


def read_tree_file(path: Path) -> TreeFile:
    """Read one tree file. `parents` and `ranks` are required; a missing `name` is the file's own.

    Raises SpecdeftError for a file that cannot be read, is not JSON, has an unknown, missing or repeated key, or a
    value of the wrong type. The numbers themselves are not checked here.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        raise SpecdeftError(f"Tree file {path} does not exist. For the shipped ones, see: specdeft trees ls") from None
    except OSError as error:
        raise SpecdeftError(f"Tree file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise SpecdeftError(
            f"Tree file {path} is malformed: expected one JSON object with parents and ranks, got {error}"
        ) from error
    if not isinstance(content, dict):
        raise SpecdeftError(f"Tree file {path} is malformed: expected one JSON object, got a {type(content).__name__}")
    known = TreeFile.__dataclass_fields__
    for key in content:
        if key not in known:
            raise SpecdeftError(f"Tree file {path} has an unknown key: expected only {', '.join(known)}, got {key!r}")
    content.setdefault("name", path.stem)
    for key in ("parents", "ranks"):
        if not isinstance(content.get(key), list):
            got = f"{content[key]!r}" if key in content else "no such key"
            raise SpecdeftError(f"Tree file {path}: expected {key!r} to be a list of integers, got {got}")
        content[key] = tuple(content[key])
    for key in ("name", "source", "about"):
        if not isinstance(content.get(key, ""), str):
            raise SpecdeftError(f"Tree file {path}: expected {key!r} to be text, got {content[key]!r}")
    return TreeFile(**content)


def write_tree_file(path: Path, content: TreeFile) -> None:
    """Write one tree file: a key per line, each list on its line. It appears complete or not at all.

    Raises SpecdeftError when it cannot be written.
    """
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in asdict(content).items()]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise SpecdeftError(f"Tree file {path} cannot be written: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} more than once")
    return dict(pairs)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that reads numbers as numbers: deft-64 before deft-128."""
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in name.split("-")]
