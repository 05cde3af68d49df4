"""A JSONL file of records, one flushed line each, that a stopped run can go on with. Knows not what is measured."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdeft.errors import SpecdeftError

Record = dict[str, Any]


def finished(path: Path | None, settings: dict[str, Any]) -> dict[str, Record]:
    """By id, the records without error that an earlier run with the same `settings` left in `path`.

    A last line that was cut short is removed from the file. Raises SpecdeftError when the file holds something else, or
    was written with other settings, naming the first that differs.
    """
    if path is None or not path.exists() or not path.stat().st_size:
        return {}
    *whole, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:  # no newline at the end: the writer was stopped in the middle of this record
        path.write_text("".join(line + "\n" for line in whole), encoding="utf-8")
    try:
        header, *records = (json.loads(line) for line in whole)
        found = header["settings"]
        by_id = {record["id"]: record for record in records if "error" not in record}
    except (ValueError, KeyError, TypeError) as error:
        raise SpecdeftError(f"{path} holds no records of this command ({error!r}). Give another --out") from error
    for key, value in json.loads(json.dumps(settings)).items():
        if found.get(key) != value:
            raise SpecdeftError(
                f"{path} was written with {key} {found.get(key)!r}, this run has {value!r}. Give another --out"
            )
    return by_id


@contextmanager
def appending(path: Path | None, settings: dict[str, Any]) -> Iterator[Callable[[Record], None]]:
    """Yields write(record). A new file begins with the settings; without a path nothing is written."""
    if path is None:
        yield lambda record: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:

        def write(record: Record) -> None:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()

        if not file.tell():
            write({"settings": settings})
        yield write


def line_by_line(result: dict[str, Any]) -> str:
    """A result as JSON: every key on a line of its own, and every entry of its lists."""
    parts = []
    for key, value in result.items():
        if isinstance(value, list) and value:
            entries = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in value)
            parts.append(f" {json.dumps(key)}: [\n{entries}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(parts) + "\n}"
