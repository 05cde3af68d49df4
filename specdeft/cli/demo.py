"""`specdeft demo`: the real model drafts and verifies before your eyes, then decodes plainly, and both are compared."""

import json
import sys
import time
from typing import Any

import click

from specdeft.cli.options import drafting_options, heads_for, json_option, model_options

PROMPT = "Give me five tips for a good night's sleep."
WARM_UP_TOKENS = 4


@click.command(short_help="See it work: a drafted answer, a plain one, and the ratio.")
@click.option("--prompt", default=PROMPT, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=192, show_default=True)
@model_options
@drafting_options
@json_option
def demo(prompt: str, max_new_tokens: int, as_json: bool, **given: Any) -> None:
    """Stream an answer through drafted trees, decode the same prompt plainly, compare texts and speed.

    \b
    specdeft demo
    specdeft demo --prompt "Why do cats purr?" --tree 64
    """
    heads_name = heads_for(given["model"], given["heads"])
    _say("Loading the model ...")

    import specdeft
    from specdeft.evaluate.plain import compare, plain_generate
    from specdeft.evaluate.provenance import provenance
    from specdeft.generation.choose_tree import choose_tree
    from specdeft.generation.prompts import chat_ids

    heads = specdeft.DraftHeads.from_pretrained(heads_name)
    model, tokenizer = specdeft.load_model(given["model"], dtype=given["dtype"], device=given["device"])
    messages = [{"role": "user", "content": prompt}]
    ids = chat_ids(tokenizer, messages) if tokenizer.chat_template else list(tokenizer(prompt)["input_ids"])
    # the tree itself, since "auto" would draft only as long as that is faster: this is to show what drafting does
    tree, _ = choose_tree(given["tree"], heads, model.device, model.get_output_embeddings().weight.shape[0])
    options = {"tokenizer": tokenizer, "tree": tree, "chunk_size": given["chunk_size"]}
    specdeft.generate(model, heads, ids, max_new_tokens=WARM_UP_TOKENS, **options)
    plain_generate(model, ids, WARM_UP_TOKENS)

    _say(f"\n{given['model']} with {heads_name}, {str(model.dtype).removeprefix('torch.')} on {model.device}\n")
    _say(f"> {prompt}\n")
    began = time.perf_counter()
    stream = specdeft.stream(model, heads, ids, max_new_tokens=max_new_tokens, **options)
    for piece in stream:
        if not as_json:
            click.echo(piece, nl=False)
            sys.stdout.flush()
    seconds = time.perf_counter() - began
    result = stream.result
    assert result is not None
    _say("\n\nThe same prompt by plain model.generate ...")
    plain = plain_generate(model, ids, max_new_tokens)
    same = compare(
        model,
        lambda: specdeft.load_model(given["model"], dtype="float32", device=given["device"])[0],
        ids,
        result.token_ids,
        plain.token_ids,
    )
    stats = result.stats
    figures = {
        "tree": stats.tree,
        "tokens": len(result.token_ids),
        "passes": stats.steps,
        "tau": stats.tau,
        "depths": [count / stats.steps for count in stats.accepted_per_depth] if stats.steps else [],
        "seconds": seconds,
        "tokens_per_second": len(result.token_ids) / seconds,
        "plain_tokens": len(plain.token_ids),
        "plain_seconds": plain.seconds,
        "plain_tokens_per_second": len(plain.token_ids) / plain.seconds,
        "ratio": (len(result.token_ids) / seconds) / (len(plain.token_ids) / plain.seconds),
        "finish_reason": result.finish_reason,
        **same,
    }
    if as_json:
        settings = {"model": given["model"], "heads": heads_name, "prompt": prompt, "max_new_tokens": max_new_tokens}
        document = {"kind": "demo", "settings": settings, "summary": figures, "provenance": provenance(model)}
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo("\n".join(_lines(figures)))
    if not (same["equal"] or same["near_tie"]):
        raise SystemExit(1)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _lines(figures: dict[str, Any]) -> list[str]:
    from specdeft.evaluate.near_tie import MAX_ULPS

    if figures["equal"]:
        verdict = "the two texts are the same, token for token"
    elif figures["near_tie"]:
        verdict = (
            f"the two texts part at a near-tie: two logits within {MAX_ULPS} units in the last place of the larger one"
        )
    else:
        verdict = "THE TWO TEXTS DIFFER: please report this"
    return [
        "",
        f"tokens            {figures['tokens']} in {figures['passes']} passes (ended by {figures['finish_reason']})",
        f"tree              {figures['tree']}",
        f"tau               {figures['tau']:.2f} tokens per pass",
        "accepted at depth " + ", ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(figures["depths"], 1)),
        f"specdeft          {figures['tokens_per_second']:.1f} tokens/s",
        f"model.generate    {figures['plain_tokens_per_second']:.1f} tokens/s",
        f"ratio             {figures['ratio']:.2f}{_why_slow(figures)}",
        f"check             {verdict}",
    ]


def _why_slow(figures: dict[str, Any]) -> str:
    """Below 1, what ate the gain: a pass over the tree costs more plain steps than it yields tokens."""
    if figures["ratio"] >= 1 or not figures["passes"]:
        return ""
    cost = (figures["seconds"] / figures["passes"]) / (figures["plain_seconds"] / figures["plain_tokens"])
    why = f"a pass yields {figures['tau']:.2f} tokens but costs {cost:.2f} plain steps here"
    return f" (slower: {why}; generate(tree='auto') notices, and decodes plainly)"
