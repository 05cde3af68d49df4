"""Linear layers that read the same input, computed as one: queries, keys and values; gate and up projections.

With few rows a matrix product costs its weights' way through memory and a launch, so one wide product beats three
narrow ones. Their weights are moved to lie behind each other (the parameters stay parameters, with the same values),
and a graph that torch.compile has traced gets one product where neighbours are multiplied with the same tensor.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as transformers' modules call them


def pack(model: nn.Module) -> None:
    """Move the weights of sibling layers together, where they are plain `nn.Linear` layers; a second call does nothing.

    Each weight becomes a view of its group's tensor. Moving the model to another device or dtype takes them apart.
    """
    for parent in model.modules():
        for names in _SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            weights = [layer.weight for layer in layers if type(layer) is nn.Linear]
            alike = {(weight.shape[1], weight.dtype, weight.device, weight.is_contiguous()) for weight in weights}
            if len(weights) < len(names) or len(alike) > 1 or adjacent(weights) or weights[0].device.type == "meta":
                continue
            together = torch.cat([weight.data for weight in weights])
            for weight, rows in zip(weights, together.split([len(weight) for weight in weights]), strict=True):
                weight.data = rows


def adjacent(weights: list[Tensor]) -> bool:
    """Whether each weight's rows begin where those of the one before it end, in one storage."""
    return all(
        before.untyped_storage()._cdata == after.untyped_storage()._cdata
        and before.storage_offset() + before.numel() == after.storage_offset()
        for before, after in pairwise(weights)
    )


def fuse(module: fx.GraphModule) -> int:
    """Replace products of one input with adjacent weights, as Dynamo traced them, by one product. Returns how many."""
    readers: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.nn.functional.linear and not node.kwargs:
            readers[node.args[0]].append(node)
    fused = 0
    for source, nodes in readers.items():
        weights: list[Any] = [node.args[1] for node in nodes]
        biases: list[Any] = [node.args[2] if len(node.args) > 2 else None for node in nodes]
        values = [weight.meta.get("example_value") for weight in weights]
        all_or_none = len({bias is None for bias in biases}) == 1
        if len(nodes) > 1 and all_or_none and all(isinstance(value, Tensor) for value in values) and adjacent(values):
            _replace(module.graph, source, nodes, weights, values, biases)
            fused += 1
    module.graph.lint()
    module.recompile()
    return fused


def _replace(
    graph: fx.Graph, source: fx.Node, nodes: list[fx.Node], weights: list[Any], values: list[Tensor], biases: list[Any]
) -> None:
    rows, width = [len(value) for value in values], values[0].shape[1]
    with graph.inserting_before(nodes[0]):
        place = ((sum(rows), width), (width, 1), values[0].storage_offset())
        weight = graph.call_function(torch.as_strided, (weights[0], *place))
        bias = None if biases[0] is None else graph.call_function(torch.cat, (biases,))
        product = graph.call_function(torch.nn.functional.linear, (source, weight, bias))
        split = graph.call_function(torch.split, (product, rows, -1))
        parts = [graph.call_function(operator.getitem, (split, index)) for index in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)
