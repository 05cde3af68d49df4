"""Tiny random models and an oracle draft, shared by the exactness tests.

A vocabulary of 17 and a large initialisation keep greedy text varied and let even untrained heads be right now and
then; the oracle puts the true token at a random rank most of the time, which exposes a wrong mask, position or commit.
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from specdeft.heads import DraftHeads

VOCAB = 17
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"),
    *("gpt_neox", "granite", "cohere", "gpt_oss"),
)
_MODELS: dict[tuple, transformers.PreTrainedModel] = {}


def tiny(family: str = "llama", seed: int = 0, heads: int = 9, kv: int = 3, head_dim: int = 16, **changes):
    """A three-layer random model of a family in float32, eval mode, without EOS; windows of 8 where it has windows."""
    key = (family, seed, heads, kv, head_dim, tuple(sorted(changes.items())))
    if key in _MODELS:
        return _MODELS[key]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": heads * 16,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "initializer_range": 0.35,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    special = {
        "llama": {},
        "qwen2": {},
        "qwen3": {},
        "mistral": {"sliding_window": 8},
        "gemma2": {
            "sliding_window": 8,
            "layer_types": layer_types,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # transformers 5.17 lets sdpa drop the attention cap in silence
        },
        "gemma3": {"sliding_window": 8, "layer_types": layer_types, "query_pre_attn_scalar": 16},
        "phi3": {"sliding_window": 8},
        "gpt_neox": {},
        "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
        "cohere": {"logit_scale": 0.25},
        "gpt_oss": {
            "sliding_window": 8,
            "layer_types": layer_types,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attn_implementation": "eager",
        },
    }[family]
    if family in ("qwen2", "phi3", "gpt_neox", "granite", "cohere"):
        common.pop("head_dim")
    if family == "gpt_neox":
        common.pop("num_key_value_heads")
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma2"}
    names |= {"gemma3": "Gemma3Text", "phi3": "Phi3", "gpt_neox": "GPTNeoX", "granite": "Granite", "cohere": "Cohere"}
    names |= {"gpt_oss": "GptOss"}
    config = getattr(transformers, names[family] + "Config")(**{**common, **special, **changes})
    model_name = "Gemma3ForCausalLM" if family == "gemma3" else names[family] + "ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config).eval()
    model.generation_config.eos_token_id = None
    if family == "gpt_oss":  # sinks as heavy as scores, or leaving them out would not show
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    if family.startswith("gemma"):  # Gemma scales embeddings by sqrt(hidden): undone, or text repeats one token
        model.get_input_embeddings().weight.data /= (heads * 16) ** 0.5
    _MODELS[key] = model
    return model


def prompts(count: int, length: int = 7, seed: int = 0) -> list[list[int]]:
    """Random prompts of token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (count, length), generator=generator).tolist()


def plain(model, ids: list[int], count: int, **options) -> list[int]:
    """What `model.generate` says, greedily: new tokens only."""
    prompt = torch.tensor([ids], device=model.device)
    # without a mask, generate takes every padding token of the prompt for padding
    options = {"do_sample": False, "max_new_tokens": count, "attention_mask": torch.ones_like(prompt), **options}
    out = model.generate(prompt, **options)
    return out[0, len(ids) :].tolist()


class OracleHeads(DraftHeads):
    """Drafts the truth at a random rank four times out of five; finds its place by the hidden state it is given."""

    HIT = 0.8

    @classmethod
    def of(cls, model, ids: list[int], count: int, num_heads: int = 4, hit: float = HIT) -> OracleHeads:
        base = DraftHeads.for_model(model, kind="medusa", num_heads=num_heads)
        base.__class__ = cls
        truth = plain(model, ids, count + num_heads + 1)
        with torch.no_grad():
            states = []
            handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, x: states.append(x[0]))
            model(torch.tensor([ids + truth]))
            handle.remove()
        base.__dict__["truth"] = truth
        base.__dict__["states"] = states[0][0, len(ids) - 1 :]  # [i] = the state whose next token is truth[i]
        base.__dict__["hit"] = hit
        base.__dict__["generator"] = torch.Generator().manual_seed(len(ids))
        return base

    def propose(self, hidden: Tensor, lm_head, width: int, depths: int | None = None):
        draft = super().propose(hidden, lm_head, width)
        place = int((self.states - hidden[0].float()).norm(dim=-1).argmin())
        ids = draft.ids.clone()
        for k in range(self.num_heads):
            right = self.truth[place + 1 + k] if place + 1 + k < len(self.truth) else 0
            others = [
                t for t in torch.randperm(self.config.vocab_size, generator=self.generator).tolist() if t != right
            ][:width]
            if torch.rand((), generator=self.generator) < self.hit:
                others[int(torch.randint(width, (), generator=self.generator))] = right
            ids[0, k] = torch.tensor(others)
        return type(draft)(ids, draft.log_probs)


def assert_telling(ids: list[int]) -> None:
    """Guard against degenerate text, on which wrong decoders agree with right ones."""
    assert len(set(ids)) >= 5, f"degenerate text {ids}: this test proves nothing"
