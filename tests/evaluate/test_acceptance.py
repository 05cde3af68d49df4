"""A workload decoded in batches is the workload decoded one by one; failures stay with the prompt that fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.evaluate import acceptance
from specdeft.evaluate.acceptance import Settings, run
from specdeft.evaluate.workload import Item
from specdeft.heads import DraftHeads
from specdeft.trees import Tree
from tests.tiny import prompts, tiny
from tests.toy_tokenizer import toy_tokenizer

TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)], "bush-7")
LETTERS = "abcdefghijklmnop"
COUNTED = ("id", "category", "tokens", "passes", "accepted", "accepted_per_depth", "finish_reason")


def items(count: int = 7) -> list[Item]:
    """Texts of 3 to 3 + count letters, of two categories."""
    lines = [prompts(1, length=3 + i, seed=i)[0] for i in range(count)]
    return [
        Item(str(i), "even" if i % 2 == 0 else "odd", "".join(LETTERS[token % 12] for token in line))
        for i, line in enumerate(lines)
    ]


def settings(**changes: object) -> Settings:
    made = Settings("tiny", "heads", "bush-7", 7, "letters", "0" * 64, 7, 20, "float32")
    return replace(made, **changes)


def measure(found: list[Item], chosen: Settings, **options: object) -> list[dict]:
    model = tiny(vocab_size=48)
    heads = DraftHeads.for_model(model, num_heads=2, seed=0)
    return run(
        model,
        toy_tokenizer(adds_bos=False, chat_template=None, size=48),
        heads,
        TREE,
        found,
        chosen,
        in_float32=lambda: model,
        **options,
    )


@pytest.fixture
def ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some texts end by themselves, after different lengths."""
    monkeypatch.setattr(tiny(vocab_size=48).generation_config, "eos_token_id", [9, 20, 31, 33, 40])


@pytest.mark.usefixtures("ends_early")
@pytest.mark.parametrize("batch", [3, 7])
def test_batches_count_what_prompts_alone_count_and_equal_plain_decoding(batch: int) -> None:
    alone = measure(items(), settings(check_lossless=True))
    together = measure(items(), settings(check_lossless=True, batch=batch))
    for one, two in zip(alone, together, strict=True):
        assert {name: one[name] for name in COUNTED} == {name: two[name] for name in COUNTED}
        assert one["equal"]
        assert two["equal"]
        assert one["plain_tokens"] == two["plain_tokens"] == two["tokens"]
    assert len({record["tokens"] for record in together}) > 2, "no raggedness: nothing was tested"
    assert sum(record["accepted"] for record in together) > 0


def test_so_many_prompts_from_all_over_are_compared() -> None:
    records = measure(items(), settings(check_lossless=True, batch=4, compare=3))
    assert [record["id"] for record in records] == list("0123456")
    assert [record["id"] for record in records if "equal" in record] == ["0", "2", "4"]
    assert all(record["equal"] for record in records if "equal" in record)


def test_a_batch_that_fails_is_tried_in_halves_and_only_the_prompt_at_fault_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, sizes = acceptance.generate, []

    def fails_on_the_fourth(model: object, heads: object, texts: list[str], **options: object) -> object:
        if options["max_new_tokens"] == 20:
            sizes.append(len(texts))
            if items()[3].prompt in texts:
                raise torch.OutOfMemoryError("no memory") if len(texts) > 1 else ValueError("no such prompt")
        return real(model, heads, texts, **options)

    monkeypatch.setattr(acceptance, "generate", fails_on_the_fourth)
    records = measure(items(), settings(batch=7))
    assert sizes == [7, 3, 4, 2, 1, 1, 2]
    assert [record["id"] for record in records if "error" in record] == ["3"]
    assert records[3]["error"] == "ValueError: no such prompt"


def test_a_stopped_run_goes_on_in_batches_of_what_is_left(tmp_path: Path) -> None:
    file, said = tmp_path / "records.jsonl", []
    measure(items(), settings(batch=3), records=file)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]))
    records = measure(items(), settings(batch=3), records=file, say=said.append)
    assert [line.split()[0] for line in said] == ["5/7", "6/7", "7/7"]
    assert [record["id"] for record in records] == list("0123456")
    with pytest.raises(SpecdeftError, match="batch 3, this run has 2"):
        measure(items(), settings(batch=2), records=file)


def test_a_batchs_time_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "WARM_UP_TOKENS", 1)
    records = measure(items(), settings(batch=7))
    assert len({record["seconds"] for record in records}) == 1
