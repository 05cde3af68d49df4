"""A transformers causal LM seen as two calls: prefill a prompt, verify a token tree."""

from specdeft.target.target import Target

__all__ = ["Target"]
