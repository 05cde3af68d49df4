"""A tiny saved model with untrained heads, small enough to run every command on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specdeft.cli import main
from specdeft.heads import DraftHeads
from tests.tiny import tiny
from tests.toy_tokenizer import toy_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Saved:
    """Folders of a saved model and its heads, and the options that name them."""

    model: Path
    heads: Path

    @property
    def options(self) -> list[str]:
        return ["--model", str(self.model), "--heads", str(self.heads), "--device", "cpu"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Vocabulary of 48: wide enough for the toy tokenizer, narrow enough that untrained heads are right at times."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny(vocab_size=48)
    model.save_pretrained(folder / "model")
    toy_tokenizer(adds_bos=True, chat_template=TEMPLATE, size=48).save_pretrained(folder / "model")
    DraftHeads.for_model(model, num_heads=2, seed=0).save_pretrained(folder / "heads")
    return Saved(folder / "model", folder / "heads")


def run(*arguments: object, stdin: str | None = None) -> Result:
    """One command line in this process; stdout and stderr apart."""
    return CliRunner().invoke(main, [str(each) for each in arguments], input=stdin)
