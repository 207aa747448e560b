"""The bytes that a device sends are those of the formulas in docs/sharding.md."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import bytes_sent
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiers import quick

from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    gla_attention,
    grouped_matmul,
    native_sparse_attention,
    page_attention,
    ring_attention,
)
from ejkernel.parallel import combine, dispatch

if len(jax.devices()) < 8:
    pytest.skip("eight devices are needed", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"
MESH = Mesh(np.array(jax.devices()[:8]), ("x",))
# No two are alike, so that no letter can stand for another. XLA sends bfloat16 as float32 on a CPU.
SIZES = {"d": 8, "b": 2, "t": 64, "s": 128, "n": 16, "k": 8, "h": 6, "v": 12, "hops": 8}
SIZES |= {"r": 48, "w": 10, "u": 14, "e": 32}
DTYPE = jnp.float16


def shape(letters):
    return jax.ShapeDtypeStruct([SIZES.get(x, 4) for x in letters], DTYPE)


QUERY, KEY, VALUE = map(shape, ("btnh", "bskh", "bskv"))
OF_QUERIES = (QUERY, *map(shape, ("btkh", "btkv")))  # as many keys as queries
OVER_AXIS = {"axis_name": "x", "mesh": MESH}
HEADS = {"mesh": MESH, "in_specs": (P(None, None, "x"),) * 3}
EXPERTS = {"mesh": MESH, "in_specs": (P(), P("x"), P())}


def ring(method, **options):
    return functools.partial(ring_attention, method=method, **OVER_AXIS, **options)


def paged(query, keys, values):
    lengths, tables = np.array([20, 9]), np.arange(16).reshape(2, 8)
    return page_attention(query, keys, values, lengths, tables, **OVER_AXIS)


def grouped(rows, weights):
    return grouped_matmul(rows, weights, np.arange(SIZES["r"]) % SIZES["e"], **EXPERTS)


# What a row of the page contains, a call that it describes, its arrays, sizes that are others.
CALLS = {
    "batch and heads": (
        "batch, heads",
        functools.partial(flash_attention, **HEADS),
        (QUERY, KEY, VALUE),
        {},
    ),
    "ring": ('method="ring"', ring("ring"), (QUERY, KEY, VALUE), {}),
    "window": (
        'method="ring"',
        ring("ring", causal=True, sliding_window=(10, 0)),
        OF_QUERIES,
        {"s": SIZES["t"], "hops": 3},
    ),
    "all_gather": ('method="all_gather"', ring("all_gather"), (QUERY, KEY, VALUE), {}),
    "all_to_all": ('method="all_to_all"', ring("all_to_all"), (QUERY, KEY, VALUE), {}),
    "block-sparse": (
        "[block-sparse]",
        functools.partial(blocksparse_attention, **OVER_AXIS),
        (QUERY, KEY, VALUE),
        {},
    ),
    "native sparse": (
        "[native sparse]",
        functools.partial(native_sparse_attention, block_counts=2, block_size=4, **OVER_AXIS),
        OF_QUERIES,
        {"s": SIZES["t"]},
    ),
    "linear": (
        "[`gla_attention`]",
        functools.partial(gla_attention, **OVER_AXIS),
        (*OF_QUERIES, shape("btkh")),
        {},
    ),
    "grouped": ("experts, with `mesh=`", grouped, (shape("rw"), shape("ewu")), {}),
}


def formulas(row, column, sizes):
    """The values of the formulas in a cell of the table."""
    (line,) = (x for x in PAGE.read_text().splitlines() if x.startswith("|") and row in x)
    cell = line.strip("|").split("|")[column]
    return [eval(formula, {}, sizes) for formula in re.findall(r"`(.*?)`", cell)]


def stated(row, column, sizes):
    """The sum of the formulas in a cell of the table."""
    return sum(formulas(row, column, sizes))


def forward_pass(run, *arrays):
    return jax.jit(run).lower(*arrays).compile()


def backward_pass(run, *arrays):
    """By itself, as where a layer's backward pass runs long after its forward pass."""
    pull_back = jax.eval_shape(lambda *x: jax.vjp(run, *x)[1], *arrays)
    along = jax.eval_shape(run, *arrays)
    return jax.jit(lambda pull_back, along: pull_back(along)).lower(pull_back, along).compile()


@pytest.mark.parametrize("name", quick(CALLS, "ring", "all_to_all", "linear"))
def test_a_device_sends_the_bytes_of_the_page(name):
    row, run, arrays, others = CALLS[name]
    sizes = {**SIZES, **others, "i": DTYPE.dtype.itemsize}
    forward = bytes_sent(forward_pass(run, *arrays), 8)
    assert forward == stated(row, 3, sizes)
    assert bytes_sent(backward_pass(run, *arrays), 8) == stated(row, 4, sizes)
    assert (forward > 0) == (name != "batch and heads")


def test_decode_over_pages_sends_the_bytes_of_the_page():
    pages = [jax.ShapeDtypeStruct((64, 4, SIZES["k"], SIZES[x]), DTYPE) for x in "hv"]
    run = forward_pass(paged, shape("bnh"), *pages)
    assert bytes_sent(run, 8) == stated("pages of a cache", 3, SIZES | {"t": 1})


def test_dispatch_sends_the_bytes_of_the_page():
    """On a CPU `capacity` rows go to each other device, whether in use or not."""
    ids, capacity, split = np.arange(SIZES["r"]) % SIZES["e"], 4, P("x")

    def local(rows, weights, ids):
        rows, sizes, plan = dispatch(
            rows, ids, axis_name="x", experts=SIZES["e"], capacity=capacity
        )
        return combine(grouped_matmul(rows, weights, group_sizes=sizes), plan)

    layer = jax.shard_map(local, mesh=MESH, in_specs=split, out_specs=split)
    run, arrays = lambda *x: layer(*x, ids), (shape("rw"), shape("ewu"))
    rows = capacity * (SIZES["d"] - 1)
    exchanged, numbers = formulas("experts, with `dispatch`", 3, SIZES)
    sent = bytes_sent(forward_pass(run, *arrays), 8)
    assert sent == exchanged + numbers * rows * DTYPE.dtype.itemsize
    (numbers,) = formulas("experts, with `dispatch`", 4, SIZES)
    sent = bytes_sent(backward_pass(run, *arrays), 8)
    assert sent == numbers * rows * DTYPE.dtype.itemsize
