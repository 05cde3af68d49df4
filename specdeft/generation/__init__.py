"""Decoding: `generate` and `stream`. The loop is in loop.py; read that first."""

from specdeft.generation.api import Stream, generate, stream
from specdeft.generation.captured import forget as forget_graphs
from specdeft.generation.result import Result, Stats

__all__ = ["Result", "Stats", "Stream", "forget_graphs", "generate", "stream"]
