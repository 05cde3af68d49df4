"""A character tokenizer made on the spot: no download, a BOS or none, a chat template or none."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast


def toy_tokenizer(adds_bos: bool, chat_template: str | None, size: int = 0) -> PreTrainedTokenizerFast:
    """Ids: 0 <pad>, 1 <bos>, 2 <eos>, 3 <unk>, then a..z and some signs."""
    vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", *string.ascii_lowercase, " ", "\n", ".", "?", ":"]
    vocabulary += [f"<{i}>" for i in range(len(vocabulary), size)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = chat_template
    return fast
