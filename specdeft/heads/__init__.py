"""Draft heads: small networks that guess the tokens after the next one from the model's last hidden state.

Knows how heads are computed, stored and matched to a base model; knows nothing of trees, caches or kernels.
"""

from specdeft.heads.files import HeadsConfig
from specdeft.heads.fingerprint import fingerprint
from specdeft.heads.hydra import HydraHeads
from specdeft.heads.model import Draft, DraftHeads
from specdeft.heads.recurrent import RecurrentHeads

__all__ = ["Draft", "DraftHeads", "HeadsConfig", "HydraHeads", "RecurrentHeads", "fingerprint"]
