"""Where the files of named heads lie. Loads none of them."""

from pathlib import Path


def heads_folder(name_or_path: str) -> Path:
    """A folder here of that name, else its place on the shelf, where heads from the Hub are not."""
    from specdeft.content import content_dir

    return Path(name_or_path) if Path(name_or_path).is_dir() else content_dir("heads") / name_or_path
