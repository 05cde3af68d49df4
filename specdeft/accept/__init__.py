"""Acceptance rules: greedy and sample are lossless, typical is not.

Choose which drafted tokens the model agrees with. Knows nothing of models, caches or kernels.
"""

from specdeft.accept.at_once import greedy_at_once
from specdeft.accept.typical import typical, typical_threshold
from specdeft.accept.walk import Verdict, greedy, sample, walk

__all__ = ["Verdict", "greedy", "greedy_at_once", "sample", "typical", "typical_threshold", "walk"]
