"""Shapes without weights: a record says how much each pass yields, and the pass does all of its work."""

import json

import pytest
import torch
from click.testing import CliRunner

from specdeft.cli import main
from specdeft.errors import SpecdeftError
from specdeft.evaluate.throughput.replay import by_replay, read_accepted
from specdeft.evaluate.throughput.shaped import random_heads, random_model, random_prompts
from specdeft.trees import Tree
from tests.tiny import tiny

TREE = Tree.load("medusa-63")


@pytest.fixture
def shaped(tmp_path):
    """A folder with nothing but the configuration of a tiny model."""
    tiny().config.save_pretrained(tmp_path / "shape")
    return str(tmp_path / "shape")


def deft_file(folder, counts):
    path = folder / "accepted.json"
    path.write_text(json.dumps({"Records": [{"Accept_length": counts}]}))
    return path


@pytest.mark.parametrize("batch", [1, 3])
def test_every_pass_yields_what_the_record_says(shaped, batch):
    model = random_model(shaped, torch.float32, "cpu")
    found = by_replay(
        model, random_prompts(model, batch, 9), 20, heads=random_heads(model, 4), tree=TREE, accepted=[3, 1, 5, 9]
    )
    # the first token comes with the prompt, 9 is more than the tree is deep, and the last pass is cut at 20:
    assert found.passes == 7  # 1 and 3 + 1 + 5 + 5 + 3 + 1 + 1
    assert [len(ids) for ids in found.token_ids] == [20] * batch


def test_a_mean_becomes_a_list_that_has_it():
    assert read_accepted("1") == [1] * 1000
    counts = read_accepted("2.5")
    assert set(counts) == {2, 3}
    assert sum(counts) / len(counts) == 2.5
    assert sum(read_accepted("3.26")) == 3260


def test_a_file_of_defts_is_read_and_a_round_without_tokens_counts_as_one(tmp_path):
    assert read_accepted(str(deft_file(tmp_path, [0, 2, 5]))) == [1, 2, 5]


@pytest.mark.parametrize("counts", [[], "abc", [1.5], [-1]])
def test_a_file_with_something_else_is_refused(tmp_path, counts):
    with pytest.raises(SpecdeftError, match="Accept_length"):
        read_accepted(str(deft_file(tmp_path, counts)))


@pytest.mark.parametrize(
    ("source", "says"), [("0.5", "at least"), ("inf", "at least"), ("nowhere.json", "cannot read")]
)
def test_no_record_at_all_is_refused(source, says):
    with pytest.raises(SpecdeftError, match=says):
        read_accepted(source)


def test_an_unknown_shape_is_refused_by_name():
    with pytest.raises(SpecdeftError, match="llama3-8b"):
        random_model("llama9", torch.float32, "cpu")


def test_random_weights_are_the_same_for_a_seed_and_end_no_text(shaped):
    one, two = (random_model(shaped, torch.float32, "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert one.generation_config.eos_token_id is None


def test_the_command_replays_beside_plain_decoding_and_claims_no_equal_texts(shaped, tmp_path):
    options = ["--shape", shaped, "--replay", str(deft_file(tmp_path, [2, 4])), "--tree", "medusa-63", "--limit", "1"]
    options += ["--prompt-tokens", "9", "--max-new-tokens", "13", "--device", "cpu", "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(main, ["eval", "throughput", *options])
    assert ran.exit_code == 0, ran.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["kind"], result["settings"]["replay"]) == ("replay", "accepted")
    records = {record["way"]: record for record in result["records"]}
    assert set(records) == {"plain", "medusa-style", "specdeft"}
    assert records["specdeft"]["tau"] == pytest.approx(3.0)  # 2 + 4 + 2 + 4 = 12
    assert records["medusa-style"]["tau"] == pytest.approx(3.0)
    assert all("equal" not in record for record in records.values())


def test_a_shape_without_a_record_is_refused_before_anything_is_made():
    ran = CliRunner().invoke(main, ["eval", "throughput", "--shape", "llama3-8b"])
    assert ran.exit_code == 2
    assert "--replay" in ran.output
