"""Find the shipped content (trained heads, tree topologies, evaluation workloads) and the user's cache.

Content is data and lives beside the package, not inside it: `heads/`, `trees/`, `eval/` at the top of a checkout,
`specdeft/_content/` in an installed wheel. This module knows where those folders are and nothing of what is in them.
"""

import os
from pathlib import Path
from typing import Literal, get_args

from specdeft.errors import SpecdeftError

ContentKind = Literal["heads", "trees", "eval"]


def content_dir(kind: ContentKind) -> Path:
    """The folder that holds the shipped content of one kind.

    Raises ValueError for a kind that does not exist and SpecdeftError when the installation carries no such folder.
    """
    if kind not in get_args(ContentKind):
        raise ValueError(f"content kind must be one of {', '.join(get_args(ContentKind))}, got {kind!r}")
    package = Path(__file__).resolve().parent
    candidates = (package / "_content" / kind, package.parent / kind)
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise SpecdeftError(
        f"The shipped {kind}/ folder is missing: expected {candidates[0]} (installed) or {candidates[1]} (checkout). "
        "Reinstall specdeft, or run it from a complete checkout."
    )


def cache_dir() -> Path:
    """`$SPECDEFT_CACHE`, else `$XDG_CACHE_HOME/specdeft`, else `~/.cache/specdeft`. Not created here."""
    if path := os.environ.get("SPECDEFT_CACHE"):
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdeft"
