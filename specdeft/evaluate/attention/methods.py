"""Every method by name, and what each is. Imports the methods only when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention import OURS, own, peers, peers_flashinfer
from specdeft.evaluate.attention.case import Case
from specdeft.evaluate.attention.method import NotHere, Prepare, Ready


@dataclass(frozen=True)
class Method:
    """A name, whose it is ("specdeft", "peer", or "baseline": written here after its paper), what it is, the method."""

    name: str
    of: str
    about: str
    prepare: Prepare


def _spec_infer(case: Case) -> Ready:
    try:
        from specdeft.evaluate.attention.peers_triton import bit_masked
    except ImportError as error:
        raise NotHere(f"Triton cannot be imported ({error})") from error
    return bit_masked(case)


METHODS = {
    method.name: method
    for method in (
        Method(OURS, "specdeft", "DeFT-Flatten, as tree_attention and node_attention choose it", own.flatten),
        Method("deft-flatten-paged", "specdeft", "the same over pages of 16 rows", own.flatten_paged),
        Method("deft-flatten-triton", "specdeft", "its Triton kernel, where Gluon is chosen", own.flatten_triton),
        Method("deft-flatten-nodes", "specdeft", "the kernels for nodes, on a token tree", own.nodes_of_token_tree),
        Method("deft-node", "specdeft", "the paper's ablation", partial(own.nodes, variant="deft-node")),
        Method(
            "deft-node-chunk", "specdeft", "the paper's ablation", partial(own.nodes, variant="deft-node-chunk")
        ),
        Method("q-guided", "baseline", "every query over its own path: Flash-Decoding, Radix", peers.per_query),
        Method("specinfer", "baseline", "every query over all rows under its bit mask: SpecInfer", _spec_infer),
        Method("dense-mask", "baseline", "eager products under a dense mask: Medusa", peers.dense_mask),
        Method("sdpa", "peer", "scaled_dot_product_attention with a mask, cuDNN on a GPU", peers.sdpa_masked),
        Method("fa2-merge", "peer", "FlashAttention-2 over the prefix, then the tree, merged", peers.flash_prefix),
        Method("flex", "peer", "FlexAttention with a block mask made by hand", peers.flex),
        Method("flashinfer", "peer", "FlashInfer: prefix, tree under a mask, merged", peers_flashinfer.two_pass),
        Method("flashinfer-mask", "peer", "FlashInfer: one pass under a mask", peers_flashinfer.custom_mask),
    )
}  # fmt: skip


def find_method(name: str) -> Method:
    """The method of that name; `deft-flatten@512` is DeFT-Flatten with chunks of 512 rows.

    Raises SpecdeftError for a name that there is not.
    """
    if name in METHODS:
        return METHODS[name]
    base, _, rows = name.partition("@")
    if base == OURS and rows.isdecimal():
        return Method(name, "specdeft", f"chunks of {rows} rows", partial(own.flatten, chunk_size=int(rows)))
    raise SpecdeftError(f"no method {name!r}: there are {', '.join(METHODS)}, and {OURS}@ROWS for a chunk size")
