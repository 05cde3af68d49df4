"""Whole decoding on a CUDA device: bfloat16 under the near-tie rule, float32 exactly, through the Triton kernels."""

from __future__ import annotations

import pytest
import torch

import specdeft
import specdeft.attention
from specdeft.evaluate.near_tie import first_difference
from specdeft.heads import DraftHeads
from tests.tiny import FAMILIES, OracleHeads, plain, prompts, tiny

pytestmark = pytest.mark.gpu

QUESTIONS = [
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "What is 17 times 23? Show the steps.",
    "Write a Python function that reverses a list.",
    "Give me a recipe for pancakes.",
]
TOKENS = 64


@pytest.fixture(scope="module")
def kernel_calls(module_patch: pytest.MonkeyPatch) -> list[str]:
    """Counts launches of the Triton path, so that a silent fall-back cannot pass."""
    kernels = specdeft.attention.path_for("cuda", torch.bfloat16, 64)
    assert kernels.__name__.endswith("deft_flatten"), "Triton is missing"
    calls: list[str] = []
    real = kernels.tree_attention

    def counting(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append("triton")
        return real(*args, **kwargs)

    module_patch.setattr(kernels, "tree_attention", counting)
    return calls


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def heads() -> DraftHeads:
    return DraftHeads.from_pretrained("smollm2-135m-instruct-medusa")


@pytest.fixture(scope="module")
def models() -> dict[torch.dtype, object]:
    return {
        dtype: specdeft.load_model("smollm2-135m-instruct", dtype=dtype, device="cuda")[0]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }


@pytest.fixture(scope="module")
def tokenizer():
    from specdeft.models import load_tokenizer

    return load_tokenizer("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def chats(tokenizer) -> list[list[int]]:
    from specdeft.generation.prompts import chat_ids

    return [chat_ids(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def truths(models, chats) -> dict[torch.dtype, list[list[int]]]:
    """What plain generation says, per dtype and question."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return {dtype: [plain(model, ids, TOKENS) for ids in chats] for dtype, model in models.items()}


@pytest.mark.parametrize("tree", [32, 64, 256, "chain-4"])
def test_float32_is_exact_on_the_real_model(tree, models, heads, chats, truths, kernel_calls) -> None:
    kernel_calls.clear()
    for ids, truth in zip(chats, truths[torch.float32], strict=True):
        out = specdeft.generate(models[torch.float32], heads, ids, tree=tree, max_new_tokens=TOKENS)
        assert out.token_ids == truth
        assert out.stats.accepted > 0
    assert len(kernel_calls) >= 30  # 30 layers, launched while a round is captured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tree", [32, 64, 256])
def test_16_bit_differs_at_near_ties_only(tree, dtype, models, heads, chats, truths, kernel_calls) -> None:
    kernel_calls.clear()
    tau = []
    for ids, theirs in zip(chats, truths[dtype], strict=True):
        out = specdeft.generate(models[dtype], heads, ids, tree=tree, max_new_tokens=TOKENS)
        found = first_difference(models[torch.float32], ids, out.token_ids, theirs, dtype)
        assert found is None or found.is_near_tie, found
        tau.append(out.stats.tau)
    assert sum(tau) / len(tau) > 1.3  # the trained heads at work
    assert len(kernel_calls) >= 30  # 30 layers, launched while a round is captured


def test_a_batch_equals_its_rows_alone_in_float32(models, heads, chats, truths) -> None:
    together = specdeft.generate(models[torch.float32], heads, chats, tree=64, max_new_tokens=TOKENS)
    assert [row.token_ids for row in together] == truths[torch.float32]


def test_sampling_is_reproducible_and_independent_of_the_tree(models, heads, chats) -> None:
    model = models[torch.float32]
    options = {"acceptance": "sample", "temperature": 0.8, "seed": 1, "max_new_tokens": 64}
    texts = {tuple(specdeft.generate(model, heads, chats[0], tree=tree, **options).token_ids) for tree in (32, 64, 256)}
    assert len(texts) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_in_float32_on_the_kernels(family: str, kernel_calls) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny(family)
    heads = [OracleHeads.of(model, ids, 32) for ids in prompts(2)]
    truths = [plain(model, ids, 32) for ids in prompts(2)]
    kernel_calls.clear()
    try:
        model.to("cuda")
        for ids, oracle, truth in zip(prompts(2), heads, truths, strict=True):
            oracle.__dict__["states"] = oracle.states.cuda()
            out = specdeft.generate(model, oracle.to("cuda"), ids, tree="medusa-63", max_new_tokens=32)
            assert out.token_ids == truth == plain(model, ids, 32)
            assert out.stats.accepted > 0
    finally:
        model.to("cpu")
    assert kernel_calls
