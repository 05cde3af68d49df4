"""A transformers causal LM seen as two calls: prefill a prompt, verify a token tree."""

from specdeft.target.hook import cache_argument
from specdeft.target.probe import check_kind
from specdeft.target.target import Target, max_positions_of, vocab_size_of

__all__ = ["Target", "cache_argument", "check_kind", "max_positions_of", "vocab_size_of"]
