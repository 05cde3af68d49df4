"""Shared fixtures: the demonstration model, loaded once for all tests of a process."""

import os

# before torch and transformers are imported: no test asks a model hub, and parallel test processes share the processor
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import Any

import pytest


@pytest.fixture(scope="session")
def real_model() -> tuple[Any, Any]:
    """(model, tokenizer) of the demonstration model in float32 on the CPU; fetched into the user's cache once."""
    from specdeft.models import load_model

    return load_model("smollm2-135m-instruct", dtype="float32", device="cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)
