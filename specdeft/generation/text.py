"""Turn a growing list of token ids into text pieces that never have to be taken back.

A piece is handed out once it cannot change any more: never half a character, never half of a pair of byte tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # what decoders print for an unfinished UTF-8 sequence
_CLEAN_UP_REACH = 4  # characters: clean-up joins " n't", " 've" and the like to the word before
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # byte fallback: one bad byte spoils the whole run of them


class Detokenizer:
    """Incremental decoding of one sequence.

    Decodes a window of recent tokens twice, without and with the newest ones; the difference is new text. The window
    keeps leading-space rules of sentencepiece-like tokenizers right, and its length does not grow with the text.
    Tokenizers that clean up spaces rewrite what stands just before a mark, so for them a few characters are held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._ids: list[int] = []
        self._window, self._read = 0, 0  # ids[window:read] were read before and stay as context
        self._text = ""  # handed out so far

    def push(self, ids: list[int]) -> str:
        """Text that has become certain with these tokens; may be empty."""
        self._ids += ids
        if not self._ids or self._ends_in_a_byte():
            return ""
        if self._cleans_up:
            return self._hand_out(self._decode(self._ids)[:-_CLEAN_UP_REACH])
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return self._hand_out(self._text + after[len(before) :])

    def finish(self, text: str) -> str:
        """What is left to hand out when the whole text is known."""
        return self._hand_out(text)

    def _hand_out(self, text: str) -> str:
        """The part of `text` that is new."""
        if len(text) <= len(self._text) or not text.startswith(self._text):
            return ""
        piece, self._text = text[len(self._text) :], text
        return piece

    def _ends_in_a_byte(self) -> bool:
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        return convert is not None and bool(_BYTE_TOKEN.fullmatch(str(convert(self._ids[-1]))))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
