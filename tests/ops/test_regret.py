"""`benchmarks/regret.py` covers the operations with GPU kernels, and several of its runs add up."""

import importlib
from pathlib import Path

import jax
import pytest

from ejkernel import kernel_registry
from ejkernel.cli import subjects
from ejkernel.ops.platform import Backend

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def regret(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("regret")


def test_every_operation_with_gpu_kernels_of_its_own_is_drawn(regret):
    backends = lambda name: {x.backend for x in kernel_registry.list_implementations(name)}
    own = {
        subject.name
        for subject in subjects.every()
        if subject.name != "scaled_dot_product_attention"  # a special case of flash attention
        and Backend.GPU in backends(subject.name)
    }
    assert set(regret.OPS) == own


def test_a_call_is_the_same_in_every_run(regret):
    one, other = (regret.call("mean_pooling", 3) for _ in range(2))
    assert one.key == other.key
    assert regret.call("mean_pooling", 4).key != one.key
    assert {type(x) for x in jax.tree.leaves(one.inputs.x)} == {jax.ShapeDtypeStruct}


def test_a_pass_that_was_cut_is_measured_by_the_next_run(regret):
    row = {"op": "mean_pooling", "number": 0, "direction": "forward"}
    rows = [row | {"regret": 0.0}, row | {"number": 1, "failed": "no memory"}]
    assert regret.missing(rows, [("mean_pooling", 0), ("mean_pooling", 1)]) == [
        ("mean_pooling", 0, "backward"),
        ("mean_pooling", 1, "forward"),
        ("mean_pooling", 1, "backward"),
    ]


def test_every_row_keeps_the_run_that_measured_it(regret):
    row = {"op": "mean_pooling", "number": 0, "direction": "forward"}
    held = {"runs": [], "calls": []}
    held = regret.merged(held, [row, row | {"number": 1, "failed": "x"}], {"commit": "a"})
    held = regret.merged(held, [row | {"number": 1, "regret": 0.1}], {"commit": "b"})
    assert held["runs"] == [{"commit": "a"}, {"commit": "b"}]
    found = [(x["number"], x["run"], x.get("regret")) for x in held["calls"]]
    assert found == [(0, 0, None), (1, 1, 0.1)]
