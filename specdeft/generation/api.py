"""The public calls: `generate` for whole answers, `stream` for text as it becomes certain.

Everything a user can get wrong is checked here, before any compute.
"""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdeft.errors import SpecdeftError
from specdeft.generation.arguments import check_options, seeds_of
from specdeft.generation.choose_tree import choose_tree
from specdeft.generation.loop import Decoder
from specdeft.generation.pace import Pace
from specdeft.generation.prompts import read_prompts
from specdeft.generation.result import Result
from specdeft.generation.row import Row
from specdeft.generation.settings import resolve
from specdeft.generation.text import Detokenizer
from specdeft.generation.tuned import find_choice
from specdeft.heads import DraftHeads
from specdeft.target import Target, check_kind, max_positions_of, vocab_size_of
from specdeft.trees import DynamicTree, Tree

MOST_AT_ONCE = 64  # sequences, where nothing is said of batch_size


def generate(
    model: PreTrainedModel | str,
    heads: DraftHeads | str,
    prompt: Any,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tree: Tree | DynamicTree | str | int = "auto",
    chunk_size: int | str = "auto",
    batch_size: int | None = None,
    acceptance: str = "greedy",
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] | None = None,
    eos_token_id: int | list[int] | None = None,
    stop: str | list[str] | None = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    generation_config: GenerationConfig | None = None,
    return_logprobs: bool = False,
    graph: bool = True,
    compile: bool = False,
    prepack: bool = True,
    **unknown: Any,
) -> Any:
    """Generate by verifying drafted token trees. What comes out is what the model alone would have said.

    With "greedy", token for token what `model.generate(do_sample=False)` says in float32; in bfloat16 and float16 texts
    may part where two candidates are a few units in the last place apart. With "sample", the model's own (processed)
    distribution, exactly; a seed need not give plain sampling's draw, but gives the same text for every tree and every
    batch. "typical" is Medusa's LOSSY rule.

    Args:
        model: a loaded transformers causal LM in eval mode, or a name or folder for `load_model`.
        heads: `DraftHeads`, or a shipped name, folder or hub name.
        prompt: text, chat messages, token ids, or a list of any of these (a batch; rows may differ in length).
        tokenizer: for text; by default the one that belongs to the model.
        tree: "auto", a shipped name, a path, a number of nodes from the heads' calibrated family, or a `Tree`; or
            "dynamic-N", the N nodes (2 to 256) that the heads find likeliest, chosen for every sequence and round.
            "auto" takes what `specdeft tune` found best here, if it ran: a tree, or none where drafting is slower. On a
            CPU it drafts only while that is faster than one token per pass, as measured while it decodes.
        chunk_size: rows per KV chunk of DeFT-Flatten, or "auto".
        batch_size: decode at most so many prompts at once, 64 by default; when one ends, the next takes its place.
            Every place has KV rows for the longest of all prompts and its answer. No result depends on it.
        acceptance: "greedy", "sample" (lossless) or "typical" (lossy).
        max_new_tokens: at least 1; without it the generation config decides, as in transformers (20 if it is silent).
        temperature, top_k, top_p, min_p: for "sample" and "typical"; as in transformers. Temperature 0 is greedy.
        seed: every sequence draws from its own stream started at `seed` (a list gives one per prompt). None takes fresh
            seeds from torch's global generator; otherwise the global generator is left alone.
        eos_token_id, stop: token ids and strings that end a sequence; the ending token is kept, nothing follows it.
        logits_processor, stopping_criteria: transformers' own; each processor is called once per emitted token, in
            order, with that sequence's ids, exactly as plain generation does, so stateful ones work ("typical" calls
            them for every drafted node). A step may call them for a few tokens beyond where a stopping criterion ends
            the text. With a batch, give processors that keep no state across sequences.
        generation_config: as for `model.generate`; the model's own is honoured when absent. Beams are refused.
        return_logprobs: also return each token's log-probability under the model's raw logits.
        graph: on a GPU, replay rounds as one CUDA graph. It is captured at the first call of its shape (batch, tree,
            power of two of rows, options) and kept with its KV rows for later ones; see `specdeft.forget_graphs`.
            Processors that look at earlier tokens rule it out, a repetition penalty apart, and so do models that ask
            the host while they run.
        compile: pass the model's layers through torch.compile first: fewer, larger kernels, for up to a minute at the
            first call of a shape. Sums are taken in another order, so in 16 bits near-ties may fall the other way.
        prepack: on a CPU in float32, multiply by a copy of the linear layers' weights in oneDNN's layout, in which a
            pass over a tree takes half the time. The copy is made at the first call and takes as much memory as the
            weights; it is left out where memory is short. It has no effect on a GPU, nor with `compile`.

    Returns:
        A `Result`, or a list of them when `prompt` is a list of prompts.

    Raises:
        ValueError, TypeError: an option that does not exist or is out of range, an empty prompt without BOS.
        SpecdeftError: heads, tree, model and prompt that do not fit together; a file that cannot be read.
    """
    arguments = dict(locals())
    decoding = _prepare(arguments)
    for _ in decoding.steps():
        pass
    return decoding.results() if decoding.batch else decoding.results()[0]


_DEFAULTS: dict[str, Any] = {
    name: option.default
    for name, option in inspect.signature(generate).parameters.items()
    if option.kind is inspect.Parameter.KEYWORD_ONLY
}


def stream(model: PreTrainedModel | str, heads: DraftHeads | str, prompt: Any, **options: Any) -> Stream:
    """Generate for one prompt and hand out text as it becomes certain. Options as in `generate`.

    Iterating yields str pieces, never half a character; their concatenation is the result's text. `.result` holds the
    `Result` once the iteration is over.
    """
    known = {name: options.pop(name, default) for name, default in _DEFAULTS.items()}
    decoding = _prepare({"model": model, "heads": heads, "prompt": prompt, **known, "unknown": options})
    if decoding.batch:
        raise ValueError(f"stream takes one prompt, got a list of {len(decoding.rows)}. Use generate for a batch.")
    if decoding.tokenizer is None:
        raise SpecdeftError("stream yields text and needs a tokenizer: pass tokenizer=.")
    return Stream(decoding)


class Stream:
    """An iterator over text pieces; afterwards `.result` is the whole outcome."""

    def __init__(self, decoding: _Decoding) -> None:
        self.result: Result | None = None
        self._pieces = _pieces(decoding)  # knows nothing of this object: dropping the one ends the other

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.result = end.value or self.result
            raise


def _pieces(decoding: _Decoding) -> Generator[str, None, Result]:
    assert decoding.tokenizer is not None
    text = Detokenizer(decoding.tokenizer)
    for gained in decoding.steps():
        piece = text.push(gained[0])
        if piece:
            yield piece
    result = decoding.results()[0]
    rest = text.finish(result.text or "")
    if rest:
        yield rest
    return result


class _Decoding:
    """One call: its rows, its decoder and its clock."""

    def __init__(
        self, decoder: Decoder, rows: list[Row], batch: bool, tokenizer: PreTrainedTokenizerBase | None, why: str
    ) -> None:
        self.decoder, self.rows, self.batch, self.tokenizer = decoder, rows, batch, tokenizer
        for row in rows:
            row.stats.tree += why

    def steps(self) -> Iterator[list[list[int]]]:
        """Run the decoder, counting for each sequence only the time spent on decoding it after prefill."""
        run = self.decoder.run()
        yield next(run)
        while True:
            before = [(row, row.stats.steps) for row in self.decoder.active]
            began = time.perf_counter()
            gained = next(run, None)
            seconds = time.perf_counter() - began
            for row, steps in before:
                if row.stats.steps > steps:
                    row.stats.step_seconds.append(seconds)
            if gained is None:
                return
            yield gained

    def results(self) -> list[Result]:
        """Outcomes of all rows."""
        out = []
        for row in self.rows:
            for phase, ms in self.decoder.clock.ms.items():
                setattr(row.stats, f"{phase}_ms", ms)
            if self.decoder.pace is not None:
                row.stats.tree += f"; {self.decoder.pace}"
            text = None if self.tokenizer is None else self.tokenizer.decode(row.new, skip_special_tokens=True)
            logprobs = row.logprobs if self.decoder.want_logprobs else None
            out.append(Result(text, row.new, row.finish_reason or "length", row.stats, logprobs))
        return out


def _prepare(a: dict[str, Any]) -> _Decoding:
    """Check every argument and set the decoder up."""
    for name in a["unknown"]:
        near = difflib.get_close_matches(name, _DEFAULTS, n=1, cutoff=0.5)
        raise TypeError(
            f"generate() has no option {name!r}. "
            + (f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(_DEFAULTS)}.")
        )
    a = check_options(a)
    greedy = a["acceptance"] == "greedy" or a["temperature"] == 0
    acceptance = "greedy" if greedy else a["acceptance"]
    model, tokenizer = a["model"], a["tokenizer"]
    if isinstance(model, str):
        from specdeft.models import load_model

        model, own = load_model(model)
        tokenizer = tokenizer or own
    if not isinstance(model, PreTrainedModel):
        raise SpecdeftError(f"model must be a transformers causal LM or a name, got {type(model).__name__}.")
    heads = a["heads"]
    if isinstance(heads, str):
        heads = DraftHeads.from_pretrained(heads, device=model.get_input_embeddings().weight.device)
    if not isinstance(heads, DraftHeads):
        raise SpecdeftError(f"heads must be DraftHeads or a name, got {type(heads).__name__}.")
    check_kind(model)
    heads.check_fits(model)
    vocab_size, max_positions = vocab_size_of(model), max_positions_of(model)
    tree, why = choose_tree(a["tree"], heads, model.device, vocab_size)
    tokenizer = tokenizer or _own_tokenizer(model)
    bos = getattr(tokenizer, "bos_token_id", None)
    bos = model.generation_config.bos_token_id if bos is None else bos
    prompts, batch = read_prompts(a["prompt"], tokenizer, bos, vocab_size)
    seeds = [None] * len(prompts) if greedy else seeds_of(a["seed"], len(prompts))
    settings = resolve(
        model,
        prompts,
        do_sample=not greedy,
        max_positions=max_positions,
        tokenizer=tokenizer,
        generation_config=a["generation_config"],
        logits_processor=a["logits_processor"],
        stopping_criteria=a["stopping_criteria"],
        options={
            "max_new_tokens": a["max_new_tokens"],
            "eos_token_id": a["eos_token_id"],
            "stop_strings": a["stop"],
            **({} if greedy else {name: a[name] for name in ("temperature", "top_k", "top_p", "min_p")}),
        },
    )
    chunk_size, most = a["chunk_size"], a["batch_size"] or MOST_AT_ONCE
    if a["tree"] == "auto":
        length = max(len(ids) + row.max_new_tokens // 2 for ids, row in zip(prompts, settings, strict=True))
        tuned = find_choice(model, heads, model.device, a["compile"], min(len(prompts), most), length)
        if tuned is not None:
            tree, _ = choose_tree(tuned.tree, heads, model.device, vocab_size)
            why, chunk_size = tuned.why, tuned.chunk_size if chunk_size == "auto" else chunk_size
    target = Target(model, chunk_size, a["compile"], a["prepack"])
    target.prepare([(len(ids), row.max_new_tokens) for ids, row in zip(prompts, settings, strict=True)])
    pace = Pace(tree) if a["tree"] == "auto" and isinstance(tree, Tree) and model.device.type == "cpu" else None
    rows = [Row(*each) for each in zip(prompts, settings, seeds, strict=True)]
    decoder = Decoder(target, heads, tree, rows, acceptance, bool(a["return_logprobs"]), a["graph"], pace, most)
    return _Decoding(decoder, rows, batch, tokenizer, why)


@lru_cache(maxsize=8)
def _tokenizer_on_disk(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model name or folder if it is on this machine; no network is asked."""
    from specdeft.models import load_tokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(name, local_only=True)
    except (SpecdeftError, ImportError):
        return None
    return tokenizer


def _own_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved beside the model, if there is one."""
    return _tokenizer_on_disk(model.config.name_or_path) if model.config.name_or_path else None
