"""Measured chunk sizes: which entry counts, and what a damaged table says."""

import pytest
import torch

from specdeft.attention import chunk_table
from specdeft.attention.chunk_table import Entry, measured_chunk, read_table, table_of, user_table, write_table
from specdeft.errors import SpecdeftError

GPU = torch.device("cuda")
ENTRIES = (Entry(128, 16384, 128, 8, 1024), Entry(256, 16384, 128, 8, 2048), Entry(256, 16384, 64, 8, 512))


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A user's table for a GPU that is not there."""
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    table_of.cache_clear()
    write_table(user_table("NVIDIA H100 80GB HBM3"), "NVIDIA H100 80GB HBM3", ENTRIES, {"date": "today"})
    yield
    table_of.cache_clear()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("rows", "slots", "head_dim", "heads", "chunk_size"),
    [
        (128, 16384, 128, 8, 1024),
        (256, 16384, 128, 8, 2048),
        (256, 20000, 128, 8, 2048),  # near
        (150, 16384, 128, 8, 1024),  # nearer to 128 than to 256
        (256, 16384, 64, 8, 512),
        (256, 16384, 96, 8, None),  # another head dim
        (256, 65536, 128, 8, None),  # too far
        (256, 16384, 128, 2, None),
    ],
)
def test_the_nearest_measured_shape_counts(rows, slots, head_dim, heads, chunk_size):
    assert measured_chunk(GPU, rows, slots, head_dim, heads) == chunk_size


@pytest.mark.usefixtures("table")
def test_a_cpu_has_no_table():
    assert measured_chunk(torch.device("cpu"), 128, 16384, 128, 8) is None


def test_a_gpu_nobody_measured_has_no_entries(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))
    table_of.cache_clear()
    assert table_of("NVIDIA Nothing") == ()


def test_a_table_that_was_cut_off_is_named(tmp_path):
    for text in ("{", "[]", '{"entries": [{"rows": 1}]}', '{"entries": [{"rows": 0, "slots": 1, "head_dim": 1}]}'):
        with pytest.raises(SpecdeftError, match=r"h200\.json is no table of chunk sizes .* specdeft tune attention"):
            read_table(text, "h200.json")


def test_every_shipped_table_can_be_read():
    folder = chunk_table.files("specdeft.attention") / "tuned"
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.name.endswith(".json"):
            assert read_table(file.read_text(encoding="utf-8"), file.name)
