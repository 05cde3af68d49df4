"""Heads on a CUDA device: drafts as on the CPU, what a prefix layer remembers, and a few steps of training."""

from __future__ import annotations

import copy
import hashlib
import warnings

import pytest
import torch

import specdeft
from specdeft.generation import captured
from specdeft.generation.fill import draft
from specdeft.generation.memory import Memory
from specdeft.generation.tensors import tree_tensors
from specdeft.heads import DraftHeads
from specdeft.train import TokenData, train
from specdeft.train.data import pack
from specdeft.trees import Tree
from tests.tiny import FAMILIES, VOCAB, plain, prompts, tiny

pytestmark = pytest.mark.gpu

# float32 sums of hundreds of products of size 1, in another order and without TF32
CLOSE = 1e-4
# two guesses whose logits differ by less may change places between devices; logits are of size 10
NEAR_TIE = 1e-3
TREE = Tree.from_paths([(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 0, 0), (0, 0, 1), (0, 2, 0), (1, 1, 2)], "odd-11")
KINDS = [("hydra", 1), ("hydra", 3), ("recurrent", 1), ("recurrent", 2), ("medusa", 2)]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def random_heads(kind: str, num_layers: int, **options: object) -> DraftHeads:
    heads = DraftHeads.for_model(tiny(), kind=kind, num_heads=3, num_layers=num_layers, **options)
    generator = torch.Generator().manual_seed(num_layers)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return heads


def on_cuda(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return copy.deepcopy(module).to("cuda", dtype)


@pytest.mark.parametrize("few", [None, [3, 1, 16, 5, 7, 11]])
@pytest.mark.parametrize(("kind", "num_layers"), KINDS)
def test_cuda_drafts_what_the_cpu_drafts(kind: str, num_layers: int, few: list[int] | None) -> None:
    model, heads = tiny(), random_heads(kind, num_layers, vocab_ids=few)
    theirs, moved = on_cuda(model), on_cuda(heads)
    hidden, token = torch.randn(33, 144, generator=torch.Generator().manual_seed(1)), torch.arange(33) % VOCAB
    with torch.no_grad():
        on_cpu, _ = draft(heads, TREE, token, hidden, model.lm_head, model.get_input_embeddings())
        found, _ = draft(moved, TREE, token.cuda(), hidden.cuda(), theirs.lm_head, theirs.get_input_embeddings())
        found = found.cpu()  # [B, N]
        parts, parted = tree_tensors(TREE, torch.device("cpu")), 0
        for b, node in (found != on_cpu).nonzero().tolist():
            parent = int(parts.parent[node])
            if found[b, parent] != on_cpu[b, parent]:
                continue  # what follows another token is another question
            parted += 1
            depth = int(parts.depth[node])
            path = on_cpu[b, parts.paths[node][:depth]]
            seen = torch.cat([path, path.new_zeros(3 - depth)])
            embedded = model.get_input_embeddings()(seen)[None]
            logits = heads.logits(hidden[b : b + 1], model.lm_head, embedded)[0, depth - 1]
            place = {token: place for place, token in enumerate(range(VOCAB) if few is None else few)}
            one, other = (logits[place[int(each[b, node])]] for each in (found, on_cpu))
            assert abs(float(one - other)) < NEAR_TIE
    assert parted < 3
    assert len(on_cpu.unique()) > 5


def test_the_prefix_layers_memory_on_cuda_is_the_layer_over_the_whole_text() -> None:
    layer = random_heads("hydra", 1, prefix=True).prefix
    assert layer is not None
    cuda = on_cuda(layer)
    texts, at = torch.randn(2, 60, 144, generator=torch.Generator().manual_seed(2)), [5, 29]
    with torch.no_grad():
        memory = Memory(cuda, batch=2, slots=80)
        for b in range(2):
            state = memory.prefill(b, texts[b, : at[b]].cuda())
            torch.testing.assert_close(state.cpu(), layer(texts[b : b + 1, : at[b]])[0, -1], atol=CLOSE, rtol=CLOSE)
        for counts in ([3, 1], [1, 4], [0, 2], [4, 4]):
            rows = torch.stack([texts[b, at[b] : at[b] + 4] for b in range(2)]).cuda()
            state = memory.extend(rows, torch.tensor(counts, device="cuda")).cpu()
            for b in range(2):
                at[b] += counts[b]
                if counts[b]:
                    wanted = layer(texts[b : b + 1, : at[b]])[0, -1]
                    torch.testing.assert_close(state[b], wanted, atol=CLOSE, rtol=CLOSE)
    assert memory.cache.lengths.tolist() == at


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent"])
def test_text_behind_a_prefix_layer_stays_the_models_own(kind: str, graph: bool) -> None:
    model, heads = on_cuda(tiny()), on_cuda(random_heads(kind, 2, prefix=True))
    batch = [prompts(1, length=n, seed=n)[0] for n in (1, 7, 30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as: cannot be captured
        results = specdeft.generate(model, heads, batch, tree=TREE, max_new_tokens=40, graph=graph)
    for ids, result in zip(batch, results, strict=True):
        assert result.token_ids == plain(model, ids, 40)
    assert sum(result.stats.accepted for result in results) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_of_every_family_is_captured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle heads ask the host and are served without a graph; ordinary ones never are."""
    made: list[object] = []
    real = captured.Captured.__init__

    def counting(self: object, *arguments: object) -> None:
        made.append(self)
        real(self, *arguments)

    monkeypatch.setattr(captured.Captured, "__init__", counting)
    original = tiny(family)
    heads = on_cuda(DraftHeads.for_model(original, num_heads=3))
    model = on_cuda(original)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be captured.*")
        results = specdeft.generate(model, heads, prompts(2), tree=TREE, max_new_tokens=24)
    assert [result.token_ids for result in results] == [plain(model, ids, 24) for ids in prompts(2)]
    assert len(made) == 1
    specdeft.forget_graphs(model)


def cycles() -> TokenData:
    """Rows of a fixed cycle of tokens: each token settles all later ones."""
    cycle = [2, 9, 4, 13, 7, 11, 3, 16, 5, 12]
    rows = [[cycle[(start + i) % len(cycle)] for i in range(40 + start)] for start in range(24)]
    return pack([(row[:3], row[3:]) for row in rows], VOCAB, {})


@pytest.mark.parametrize("keep_states", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2},
        {"kind": "hydra", "num_layers": 2, "prefix": True},
        {"kind": "recurrent", "prefix": True, "compile": True},
        {"draft_vocab_size": 11, "compile": True},
    ],
    ids=["medusa", "hydra-prefix", "recurrent-prefix-compiled", "few-compiled"],
)
def test_a_few_steps_in_bfloat16_lower_the_loss_and_leave_the_base_alone(options: dict, keep_states: bool) -> None:
    model = on_cuda(tiny(), torch.bfloat16)
    before, lines = digest(model), []
    heads = train(
        model, None, cycles(), num_heads=3, epochs=40, batch_tokens=400, learning_rate=3e-3, keep_states=keep_states,
        log=lines.append, **options,
    )  # fmt: skip
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "loss " in line]
    assert len(losses) >= 2
    assert losses[-1] < 0.7 * losses[0]
    assert digest(model) == before
    assert all(parameter.dtype == torch.float32 for parameter in heads.parameters())
    assert all(bool(parameter.isfinite().all()) for parameter in heads.parameters())


def test_a_training_step_asks_the_host_nothing() -> None:
    """Between looks, steps are only queued; the first look is at step 0, the next at LOOK_EVERY."""
    from specdeft.train import run

    model, real, modes = on_cuda(tiny(), torch.bfloat16), run.Run._take_step, []

    def watched(self: run.Run, rows: object, progress: float, interrupt: object) -> None:
        quiet = 5 <= self.step < run.LOOK_EVERY
        modes.append(quiet)
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
        try:
            real(self, rows, progress, interrupt)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.Run, "_take_step", watched)
        options = {"kind": "hydra", "prefix": True, "num_heads": 3, "keep_states": True}
        train(model, None, cycles(), max_steps=12, epochs=99, batch_tokens=400, log=lambda line: None, **options)
    assert sum(modes) == 7


def digest(model: torch.nn.Module) -> str:
    parts = (parameter.detach().cpu().view(torch.uint8).numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()
