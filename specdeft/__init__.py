"""specdeft: several tokens per forward pass from a Hugging Face causal language model, without changing what it says.

The public names, and nothing else. Each is imported when it is first used, so `import specdeft` needs neither torch nor
a moment.
"""

from typing import TYPE_CHECKING, Any

from specdeft.errors import SpecdeftError

if TYPE_CHECKING:
    from specdeft.attention import tree_attention
    from specdeft.generation import forget_graphs, generate, stream
    from specdeft.heads import DraftHeads
    from specdeft.models import load_model
    from specdeft.trees import Tree

__version__ = "0.1.0"

__all__ = [
    "DraftHeads",
    "SpecdeftError",
    "Tree",
    "__version__",
    "forget_graphs",
    "generate",
    "load_model",
    "stream",
    "tree_attention",
]

_HOMES = {
    "DraftHeads": "specdeft.heads",
    "Tree": "specdeft.trees",
    "forget_graphs": "specdeft.generation",
    "generate": "specdeft.generation",
    "load_model": "specdeft.models",
    "stream": "specdeft.generation",
    "tree_attention": "specdeft.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdeft' has no attribute {name!r}. Public names: {', '.join(__all__)}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
