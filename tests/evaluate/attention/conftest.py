"""Small cells on the CPU, shared by the tests of the attention harness."""

import pytest
import torch

from specdeft.evaluate.attention.case import Case, make_case
from specdeft.evaluate.attention.shapes import Shape
from specdeft.evaluate.attention.workloads import Workload, star, token_tree
from specdeft.trees import Tree

SHAPE = Shape("tiny", 4, 2, 16, 3)
CPU = torch.device("cpu")


def workloads() -> dict[str, Workload]:
    """A token tree, a star, and a tree of thoughts with queries on leaves and inside."""
    thoughts = Workload("thoughts", "reasoning", (-1, 0, 0, 1, 1), (20, 7, 5, 3, 4), (2, 3, 4))
    return {"token-tree": token_tree(Tree.load("deft-32"), 40), "star": star(3, 20, 9), "thoughts": thoughts}


@pytest.fixture(params=list(workloads()))
def case(request: pytest.FixtureRequest) -> Case:
    """A float32 case of each workload, with two sets of KV."""
    return make_case(workloads()[request.param], SHAPE, torch.float32, CPU)
