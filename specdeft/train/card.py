"""The README of a set of heads, from the record of its training: what it is, what it cost, how well it guesses.

Knows the record's fields; knows no heads and no files.
"""

from __future__ import annotations

from typing import Any

MARK = "<!-- written by specdeft train -->"


def card(name: str, recipe: dict[str, Any], config: dict[str, Any]) -> str:
    """Markdown for the heads called `name`: `recipe` as in recipe.json, `config` as in config.json."""
    settings, data, provenance = recipe["settings"], recipe["data"], recipe["provenance"]
    depths = len(recipe["accuracy"]["top1"])
    few = f", guessing {config['draft_vocab_size']} of {config['vocab_size']} tokens" * bool(config["draft_vocab_size"])
    few += ", behind a prefix attention layer" * bool(config["prefix"])
    output = "the base model's output layer" if config["lm_head"] == "shared" else "output layers of their own"
    lines = [
        MARK,
        f"# {name}",
        "",
        f"{config['num_heads']} {config['kind']} heads of {config['num_layers']} blocks with {output}{few}, for "
        f"{config['base_model']} (fingerprint {config['fingerprint']}).",
        "",
        "```python",
        f'heads = specdeft.DraftHeads.from_pretrained("{name}")',
        "```",
        "",
        "## Training",
        "",
        f"{data['answer_tokens_trained_on']} answer tokens, epochs {settings['epochs']}, seed {settings['seed']}, "
        f"{recipe['seconds']:.0f} s on {provenance['device']} ({recipe['processes']} processes):",
        "",
        "```",
        str(provenance["command"]),
        "```",
        "",
        f"## On {settings['held_out']} held-out rows",
        "",
        "Share of positions whose true token is among the first k guesses:",
        "",
        "| | " + " | ".join(f"depth {depth}" for depth in range(1, depths + 1)) + " |",
        "| --- |" + " --- |" * depths,
        *(
            f"| {top} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"
            for top, shares in recipe["accuracy"].items()
        ),
        "",
        "Tokens per pass that this promises with the trees in `trees/` (held-out rows are of the training data's kind; "
        "other prompts may be harder):",
        "",
        "| nodes | " + " | ".join(recipe["tau"]) + " |",
        "| --- |" + " --- |" * len(recipe["tau"]),
        "| tau | " + " | ".join(f"{tau:.2f}" for tau in recipe["tau"].values()) + " |",
        "",
    ]
    return "\n".join(lines)
