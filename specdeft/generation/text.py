"""Turn a growing list of token ids into text pieces that never have to be taken back.

A piece is handed out once it cannot change any more: never half a character, never half of a pair of byte tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # what decoders print for an unfinished UTF-8 sequence


class Detokenizer:
    """Incremental decoding of one sequence.

    Decodes a window of recent tokens twice, without and with the newest ones; the difference is new text. The window
    keeps leading-space rules of sentencepiece-like tokenizers right, and its length does not grow with the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window, self._read = 0, 0  # ids[window:read] were read before and stay as context
        self._emitted: list[str] = []

    def push(self, ids: list[int]) -> str:
        """Text that has become certain with these tokens; may be empty."""
        self._ids += ids
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._ids)
        piece = after[len(before) :]
        self._emitted.append(piece)
        return piece

    def finish(self, text: str) -> str:
        """What is left to hand out when the whole text is known."""
        so_far = "".join(self._emitted)
        return text[len(so_far) :] if text.startswith(so_far) else ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
