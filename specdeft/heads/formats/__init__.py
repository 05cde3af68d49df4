"""Draft heads from and for other projects: FasterDecoding/Medusa, TGI, vLLM, MLC-LLM, ModelOpt, Hydra.

One file per format says which tensors it holds under which names. Reading (`read_heads`, then `heads_for` a model) and
writing (`export_heads`) are apart and meet only in `Parts`. Knows nothing of trees, training or generation.
"""

from specdeft.heads.formats.fitting import heads_for
from specdeft.heads.formats.reading import READERS, Foreign, read_heads
from specdeft.heads.formats.writing import WRITERS, export_heads, needs_base

__all__ = ["READERS", "WRITERS", "Foreign", "export_heads", "heads_for", "needs_base", "read_heads"]
