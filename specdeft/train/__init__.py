"""Training of draft heads: the model writes its own data, heads learn from it, held-out rows measure them.

Knows models, heads and token ids; knows nothing of trees, kernels or the decoding loop.
"""

from specdeft.train.data import TokenData
from specdeft.train.loop import train
from specdeft.train.measure import accuracy, measure_ranks
from specdeft.train.selfdistill import answer, distill, sample_user_turns

__all__ = ["TokenData", "accuracy", "answer", "distill", "measure_ranks", "sample_user_turns", "train"]
