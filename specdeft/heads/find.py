"""Where heads of a name are: a folder, the shelf of shipped heads, or the Hugging Face hub. Reads none of them."""

from __future__ import annotations

import os
from pathlib import Path

from specdeft.errors import SpecdeftError
from specdeft.heads import files


def find_heads(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of heads by shipped name, folder, file in one, or hub name. SpecdeftError lists what is shipped."""
    from specdeft.content import content_dir

    path = Path(name_or_path)
    if path.exists():
        return path if path.is_dir() else path.parent
    name = os.fspath(name_or_path)
    shipped = content_dir("heads")
    if "/" not in name and (shipped / name / files.CONFIG_FILE).is_file():
        return shipped / name
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name, allow_patterns=[files.CONFIG_FILE, files.WEIGHTS_FILE]))
        except Exception as error:
            raise SpecdeftError(f"no folder {name} here, and the hub gave no heads of that name: {error}") from error
    known = sorted(p.parent.name for p in shipped.glob(f"*/{files.CONFIG_FILE}"))
    raise SpecdeftError(f"no heads named {name!r}: not a folder, and shipped are {', '.join(known) or 'none'}")
