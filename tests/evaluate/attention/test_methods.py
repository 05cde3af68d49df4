"""Every method that a CPU can run gives exact attention, and a wrong one would be seen."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention import table
from specdeft.evaluate.attention.case import how_many_sets, make_case
from specdeft.evaluate.attention.exact import TOLERANCES, exact_attention, relative_error, worst_row_error
from specdeft.evaluate.attention.method import NotHere
from specdeft.evaluate.attention.methods import METHODS, find_method
from specdeft.evaluate.attention.peers import flex_with
from tests.evaluate.attention.conftest import CPU, SHAPE, workloads

NEEDS_GPU = {"deft-flatten-triton", "specinfer", "flex", "flashinfer", "flashinfer-mask"}
ONE_SEQUENCE = {"deft-flatten-paged", "deft-flatten-nodes"}  # another name for deft-flatten elsewhere


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NEEDS_GPU] + ["deft-flatten@32"])
def test_a_method_gives_exact_attention_over_every_set(case, name):
    if case.workload.tree is None and name in ONE_SEQUENCE:
        with pytest.raises(NotHere):
            find_method(name).prepare(case)
        return
    ready = find_method(name).prepare(case)
    for index in range(len(case.flats)):
        assert worst_row_error(ready.launch(index), exact_attention(case, index)) < TOLERANCES[torch.float32]
    if name in (*table.PEERS, "q-guided", "dense-mask"):
        assert ready.plan is not None  # a new tree is work for all of them
    for work in (ready.plan, ready.step):
        if work is not None:
            work()


@pytest.mark.parametrize("name", sorted(NEEDS_GPU))
def test_what_needs_a_gpu_says_so(case, name):
    with pytest.raises(NotHere):
        find_method(name).prepare(case)


def test_the_peers_that_a_whole_run_has_are_those_of_the_table():
    assert [name for name, method in METHODS.items() if method.of == "peer"] == list(table.PEERS)
    assert set(table.ABLATIONS) < METHODS.keys()


def test_flex_attention_under_our_block_mask_is_exact(case):
    from torch.nn.attention.flex_attention import flex_attention

    out = flex_with(case, flex_attention).launch(0)
    assert worst_row_error(out, exact_attention(case, 0)) < TOLERANCES[torch.float32]


@pytest.fixture(scope="module")
def interpreted():
    """The module of SpecInfer's kernel, made by a private copy of Triton that interprets (see tests/attention)."""
    pytest.importorskip("triton")
    name = "specdeft.evaluate.attention.peers_triton"

    def private(each: str) -> bool:
        return each == name or (each.split(".")[0] == "triton" and not each.startswith("triton._C"))

    known = {each: sys.modules.pop(each) for each in list(sys.modules) if private(each)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            return importlib.import_module(name)
        finally:
            for each in filter(private, list(sys.modules)):
                del sys.modules[each]
            sys.modules.update(known)


def test_specinfers_kernel_is_exact(case, interpreted):
    ready = interpreted.bit_masked(case, processors=4)
    assert worst_row_error(ready.launch(1), exact_attention(case, 1)) < TOLERANCES[torch.float32]


def test_a_wrong_mask_does_not_pass_behind_a_long_prefix():
    """The largest tree rows weigh as much as all before them: one row too few shows."""
    case = make_case(workloads()["token-tree"], SHAPE, torch.bfloat16, CPU)
    right = exact_attention(case, 0)
    case.visible[5, 40 + 0] = False
    assert worst_row_error(exact_attention(case, 0), right) > TOLERANCES[torch.bfloat16]


def test_errors_are_relative_and_not_a_number_is_infinite():
    exact = torch.ones(2, 1, 4)
    out = exact.clone()
    out[1] *= 1.1
    assert relative_error(out, exact) == pytest.approx(0.1 / 2**0.5, rel=1e-4)
    assert worst_row_error(out, exact) == pytest.approx(0.1, rel=1e-4)
    out[0, 0, 0] = torch.nan
    assert worst_row_error(out, exact) == float("inf")


def test_the_same_rows_lie_in_both_layouts(case):
    for (k, v), (pool_k, pool_v) in zip(case.flats, case.pools, strict=True):
        for flat, pool in ((k, pool_k), (v, pool_v)):
            rows = pool.flatten(0, 1)[case.slots]  # [R, Hkv, D]
            assert torch.equal(rows.transpose(0, 1), flat[0, :, : case.rows])
    assert torch.equal(case.unpacked(case.packed), case.q)


def test_sets_outgrow_the_cache_also_for_the_smallest_model(monkeypatch):
    gpu = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 << 30, 141 << 30))
    smallest = 2 * 1088 * 3 * 64 * 2  # SmolLM2-135M, 1024 + 32 rows
    cuda = torch.device("cuda")
    assert how_many_sets(smallest, cuda) * smallest > 3 * gpu.L2_cache_size
    assert how_many_sets(1 << 30, cuda) == 2
    assert how_many_sets(smallest, torch.device("cpu")) == 2


@pytest.mark.parametrize("name", ["deft-flaten", "deft-flatten@", "deft-node@64"])
def test_a_method_that_there_is_not_is_an_error_with_the_names(name):
    with pytest.raises(SpecdeftError, match="deft-flatten, "):
        find_method(name)
