"""Hydra checkpoints: the modules that write them, built anew, and the imported heads, say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from specdeft.errors import SpecdeftError
from specdeft.heads import DraftHeads, HydraHeads
from specdeft.heads.formats import heads_for, read_heads
from specdeft.heads.formats.hydra import DECODER_LAYER, HydraParts
from tests.heads.formats.making import HIDDEN, SAME, base_model, hidden_states, write_folder
from tests.tiny import VOCAB

# norms and rotations in float32: 7 digits, on values of size 10
CLOSE = 1e-5
CONFIG = {"hydra_head_arch": "mlp", "grounded_heads": True, "base_model_name_or_path": "a/b"}


class Block(nn.Module):
    def __init__(self, conditions: int) -> None:
        super().__init__()
        self.linear = nn.Linear((conditions + 1) * HIDDEN, HIDDEN)
        self.res_connection = nn.Linear((conditions + 1) * HIDDEN, HIDDEN) if conditions else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


class Hydra(nn.Module):
    """`spaced` puts dropout before every module, as the architecture with a prefix layer does."""

    def __init__(self, heads: int, layers: int, spaced: bool = False) -> None:
        super().__init__()
        dropout = [nn.Dropout(0.0)] if spaced else []
        self.input_embed_fn = nn.Embedding(VOCAB, HIDDEN)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(*dropout, Block(head + 1), *[*dropout, Block(0)] * (layers - 1)) for head in range(heads)
        )
        outputs = (nn.Linear(HIDDEN, VOCAB) for _ in range(heads))
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(*dropout, out) if spaced else out for out in outputs)

    def forward(self, hidden: Tensor, path: Tensor) -> Tensor:
        logits = []
        for head, (mlp, output) in enumerate(zip(self.hydra_mlp, self.hydra_lm_head, strict=True)):
            x = torch.cat([hidden, self.input_embed_fn(path[:, : head + 1]).flatten(1)], dim=-1)
            logits.append(output(mlp(x)))
        return torch.stack(logits, dim=1)


def hydra(heads: int = 3, layers: int = 2, spaced: bool = False) -> Hydra:
    torch.manual_seed(heads + layers)
    return Hydra(heads, layers, spaced).double()


@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("spaced", [False, True])
def test_imported_heads_say_what_the_original_modules_say(
    tmp_path: Path, heads: int, layers: int, spaced: bool
) -> None:
    original, model = hydra(heads, layers, spaced), base_model()
    found = read_heads(write_folder(tmp_path, "hydra_lm_head.pt", original.state_dict(), CONFIG))
    assert (found.format, found.base) == ("hydra", "a/b")
    ours = heads_for(found.parts, model)
    assert isinstance(ours, HydraHeads)
    assert (ours.num_heads, ours.config.num_layers, ours.config.lm_head) == (heads, layers, "own")
    path = torch.randint(VOCAB, (7, heads), generator=torch.Generator().manual_seed(0))
    logits = ours.logits(hidden_states(), path=original.input_embed_fn(path))
    torch.testing.assert_close(logits, original(hidden_states(), path), atol=SAME, rtol=SAME)


def test_each_level_drafts_what_the_original_head_ranks_first(tmp_path: Path) -> None:
    original, model = hydra(3, 2), base_model()
    ours = heads_for(read_heads(write_folder(tmp_path, "hydra_lm_head.pt", original.state_dict())).parts, model)
    path = torch.randint(VOCAB, (7, 3), generator=torch.Generator().manual_seed(1))
    expected = original(hidden_states(), path).argmax(-1)
    for depth in range(3):
        tokens = path[:, None, : depth + 1]
        draft = ours.propose_level(hidden_states(), tokens, original.input_embed_fn, None, 1)
        assert torch.equal(draft.ids[:, 0, 0], expected[:, depth])


def test_the_output_layer_of_the_base_is_shared_again(tmp_path: Path) -> None:
    original, model = hydra(), base_model()
    for output in original.hydra_lm_head:
        output.weight.data.copy_(model.get_output_embeddings().weight)
        output.bias.data.zero_()
    write_folder(tmp_path, "hydra_lm_head.pt", original.state_dict())
    assert heads_for(read_heads(tmp_path).parts, model).config.lm_head == "shared"
    original.hydra_lm_head[2].bias.data[3] = 1.0
    write_folder(tmp_path, "hydra_lm_head.pt", original.state_dict())
    assert heads_for(read_heads(tmp_path).parts, model).config.lm_head == "own"


def prefix_of(groups: int = 1, eps: float = 1e-2, theta: float = 500.0) -> LlamaModel:
    """A decoder layer and norm of three attention heads, `groups` of which share keys; nothing at its default."""
    config = LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=3, num_key_value_heads=3 // groups, intermediate_size=40,
        num_hidden_layers=1, vocab_size=VOCAB, rms_norm_eps=eps,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    torch.manual_seed(groups)
    layer = LlamaModel(config).double().eval()
    for name, parameter in layer.named_parameters():
        nn.init.uniform_(parameter, 0.5, 1.5) if "norm" in name else nn.init.normal_(parameter, std=0.2)
    return layer


def prefixed(tmp_path: Path, layer: LlamaModel) -> tuple[Hydra, Path]:
    original = hydra(spaced=True)
    tensors = {f"prefix_embeding_layer.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors |= {"prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    config = {**CONFIG, "hydra_head_arch": "prefix-mlp"}
    return original, write_folder(tmp_path, "hydra_lm_head.pt", tensors | original.state_dict(), config)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("eps", [1e-2, 0.3])
def test_a_prefix_layer_says_what_the_original_layer_says(tmp_path: Path, groups: int, eps: float) -> None:
    model, layer = base_model(), prefix_of(groups, eps)
    original, folder = prefixed(tmp_path, layer)
    changed = {"num_key_value_heads": 3 // groups, "rms_norm_eps": eps, "rope_parameters": layer.config.rope_parameters}
    for name, value in changed.items():
        setattr(model.config, name, value)
    parts = read_heads(folder).parts
    assert isinstance(parts, HydraParts)
    assert parts.prefix is not None
    assert tuple(parts.prefix) == DECODER_LAYER
    ours = heads_for(parts, model)
    ours.save_pretrained(tmp_path / "ours")
    ours = DraftHeads.from_pretrained(tmp_path / "ours")
    assert ours.prefix is not None
    assert (ours.config.prefix.norm_eps, ours.config.prefix.rope_theta) == (eps, 500.0)
    hidden = hidden_states(7)[None]
    read = ours.prefix(hidden)
    with torch.no_grad():
        wanted = layer(inputs_embeds=hidden).last_hidden_state
    # rotations are computed in float32 on both sides, norms in float32 too
    torch.testing.assert_close(read, wanted, atol=CLOSE, rtol=CLOSE)
    path = torch.randint(VOCAB, (7, 3), generator=torch.Generator().manual_seed(0))
    logits = ours.logits(read[0], path=original.input_embed_fn(path))
    torch.testing.assert_close(logits, original(wanted[0], path), atol=20 * CLOSE, rtol=20 * CLOSE)


def test_a_prefix_layer_that_the_base_cannot_have_built_is_named(tmp_path: Path) -> None:
    _, folder = prefixed(tmp_path, prefix_of(3))
    parts, model = read_heads(folder).parts, base_model()
    model.config.num_key_value_heads = 3
    with pytest.raises(SpecdeftError, match=r"k_proj\.weight has shape \[16, 48\], expected \[48, 48\]"):
        heads_for(parts, model)
    model.config.num_key_value_heads = 1
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(SpecdeftError, match=r"scales rotary positions \(linear\)"):
        heads_for(parts, model)


@pytest.mark.parametrize(
    "name",
    [
        "hydra_mlp.1.0.linear.weight",
        "hydra_mlp.0.0.res_connection.bias",
        "hydra_mlp.2.1.linear.bias",
        "hydra_lm_head.0.bias",
        "hydra_lm_head.2.weight",
    ],
)
def test_a_missing_tensor_and_one_of_another_shape_are_named(tmp_path: Path, name: str) -> None:
    tensors = hydra().state_dict()
    wrong = {**tensors, name: torch.zeros(5, 5)}
    with pytest.raises(SpecdeftError, match=f"{name} has shape"):
        read_heads(write_folder(tmp_path / "shape", "hydra_lm_head.pt", wrong))
    del tensors[name]
    with pytest.raises(SpecdeftError, match=f"missing tensor {name}"):
        read_heads(write_folder(tmp_path / "missing", "hydra_lm_head.pt", tensors))


def test_other_tensors_and_architectures_are_refused(tmp_path: Path) -> None:
    tensors = hydra().state_dict()
    write_folder(tmp_path / "eagle", "hydra_lm_head.pt", tensors, {"hydra_head_arch": "eagle-attn"})
    write_folder(tmp_path / "extra", "hydra_lm_head.pt", {**tensors, "hydra_mlp.0.0.gate.weight": torch.zeros(1)})
    write_folder(tmp_path / "none", "hydra_lm_head.pt", {"hydra_lm_head.0.bias": torch.zeros(3)})
    for folder, message in (
        ("eagle", "eagle-attn.*only mlp and prefix-mlp"),
        ("extra", r"unexpected tensor hydra_mlp\.0\.0\.gate\.weight"),
        ("none", "holds no Hydra heads"),
    ):
        with pytest.raises(SpecdeftError, match=message):
            read_heads(tmp_path / folder)
