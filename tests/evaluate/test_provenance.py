"""Where numbers come from: always something, and nothing of where files lay."""

from __future__ import annotations

import pytest

from specdeft.evaluate.provenance import command, environment, provenance
from tests.tiny import tiny


def test_the_environment_names_versions_and_devices() -> None:
    facts = environment()
    assert facts["torch"]
    assert facts["transformers"]
    assert facts["cpu_threads"] >= 1
    assert isinstance(facts["devices"], list)


def test_a_measurement_carries_command_date_device_and_dtype() -> None:
    facts = provenance(tiny())
    assert facts["dtype"] == "float32"
    assert "threads" in facts["device"]
    assert facts["date"].endswith("Z")
    assert facts["command"]


def test_of_an_absolute_path_the_command_keeps_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/specdeft", "eval", "--workload", "/home/me/questions.jsonl", "a b"])
    assert command() == "specdeft eval --workload questions.jsonl 'a b'"
    monkeypatch.setattr("sys.argv", ["/usr/lib/specdeft/__main__.py", "env"])
    assert command() == "specdeft env"


def test_a_broken_torch_does_not_break_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 1 / 0)
    assert "ZeroDivisionError" in environment()["torch_error"]
