"""The fused backward pass on Hopper: what it supports, the order of its tiles, its results."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import flash_gpu_programs as programs
from kernels import test_flash_pallas_gpu as flash
from kernels.flash_gpu_programs import CAUSAL, H200

from ejkernel import settings
from ejkernel.kernels.common import mosaic_gpu
from ejkernel.kernels.flash_attention import pallas_sm90
from ejkernel.kernels.flash_attention.pallas_sm90 import backward_fused
from ejkernel.kernels.flash_attention.pallas_sm90.backward_fused import (
    BLOCK_Q,
    query_tile,
    query_tile_order,
)
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import TileListShape
from ejkernel.ops.config import BwdParams
from ejkernel.ops.platform import Platform
from ejkernel.types.rules import Band

NONDETERMINISTIC = BwdParams(deterministic=False)
CALLS = {
    name: flash.INTERPRETED[name]
    for name in (
        "plain",
        "causal",
        "window",
        "blind",
        "packed",
        "lengths",
        "dense",
        "lengths_apart",
        "dims_apart",
        "float16",
        "odd_lengths",
    )
}
CALLS["other_dims"] = {"queries": 192, "head_dim": 128, "value_dim": 64, "mask": CAUSAL}
CALLS["past_the_last_key"] = {"queries": 128, "keys": 190}

needs_newer_jax = pytest.mark.skipif(
    backward_fused.why_not(*programs.call()) is not None,
    reason=str(backward_fused.why_not(*programs.call())),
)


@needs_newer_jax
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 96, "value_dim": 40, "mask": CAUSAL}, None),
        ({"head_dim": 80}, "needs a head dim of 64, 96, 128, got 80"),
        ({"value_dim": 192}, "needs a value dim of at most 128, got 192"),
        ({"sinks": True, "dropout": True}, "does not support sinks, dropout"),
        ({"bias": (1, 8, 4096, 4096), "soft_cap": 50.0}, "does not support bias, logits_soft_cap"),
    ],
)
def test_a_call_is_refused_with_its_reason(change, reason):
    assert backward_fused.why_not(*programs.call(**change)) == reason


@needs_newer_jax
def test_it_is_taken_where_bits_may_differ():
    """By default they may not; and cuDNN, which is nondeterministic too, is preferred then."""
    backward = pallas_sm90.IMPLEMENTATION.backward
    assert backward is not None
    call = (*programs.call(mask=CAUSAL), H200)
    assert backward.guess(*call, deterministic=False) == NONDETERMINISTIC
    assert backward.guess(*call).deterministic is None
    assert backward.yields_to(*call) == frozenset()
    with settings.override(deterministic=True):
        assert backward.yields_to(*call) == {Platform.CUDA}
        # With a bias it is slower than two kernels of ours.
        assert backward.yields_to(*programs.call(bias=programs.PAIRS), H200) == frozenset()
    capped = (*programs.call(mask=CAUSAL, soft_cap=50.0), H200)
    assert backward.guess(*capped, deterministic=False) == backward.guess(*capped)


@pytest.mark.parametrize("wave", [0, 1])
def test_every_tile_is_processed_once(wave):
    """Up or down, from wherever a key block begins; partial tiles are known wherever they come."""
    lists = TileListShape(batch=1, heads=1, row_blocks=3, column_blocks=7)
    count, partial = np.array([7, 4, 1], np.int32), np.array([2, 1, 1], np.int32)
    index = np.array([[5, 6, 0, 1, 2, 3, 4], [6, 3, 4, 5, 0, 0, 0], [0] * 7], np.int32)
    refs = {"count": count, "partial": partial, "index": index.reshape(-1)}
    refs = {name: jnp.asarray(array) for name, array in refs.items()}

    def tile(key_block, j, padded_keys=False):
        order = query_tile_order(refs, lists, 0, 0, jnp.int32(key_block), jnp.int32(wave))
        return query_tile(refs, lists, order, jnp.int32(j), padded_keys)

    for key_block in range(lists.row_blocks):
        found = [tile(key_block, j) for j in range(count[key_block])]
        places = [int(start) // BLOCK_Q for start, _ in found]
        assert sorted(places) == sorted(index[key_block, : count[key_block]])
        marked = {int(start) // BLOCK_Q for start, is_partial in found if is_partial}
        assert marked == set(index[key_block, : partial[key_block]])
    assert bool(tile(2, 0, padded_keys=True)[1])


def test_key_blocks_that_see_everything_begin_apart():
    lists = TileListShape(batch=1, heads=1, row_blocks=4, column_blocks=8)
    rows, columns = lists.row_blocks, lists.column_blocks
    refs = {"count": jnp.full(rows, columns), "partial": jnp.zeros(rows, jnp.int32)}
    refs["index"] = jnp.tile(jnp.arange(columns), rows)
    orders = [
        query_tile_order(refs, lists, 0, 0, jnp.int32(key_block), jnp.int32(0))
        for key_block in range(rows)
    ]
    for j in range(columns):
        starts = {int(query_tile(refs, lists, x, jnp.int32(j), False)[0]) for x in orders}
        assert len(starts) == rows


def test_registers_of_all_warpgroups_fit():
    """With more than there are at launch, a thread block waits for ever."""
    consumer, producer = backward_fused.REGISTERS
    at_launch = mosaic_gpu.REGISTER_FILE // (128 * 3) // 8 * 8
    assert 2 * consumer + producer <= 3 * at_launch
    assert consumer % 8 == producer % 8 == 0
    assert producer <= at_launch <= consumer


FUSED = [name for name in programs.PROGRAMS if name.startswith("fused-")]


@flash.needs_assembler
@needs_newer_jax
@pytest.mark.parametrize("part", range(2))
def test_every_kernel_assembles_without_spills(part):
    flash._check_assembly(FUSED[part::2])


def _call(name):
    inputs, spec = programs.call(**(flash.SMALL | CALLS[name]))
    return flash._draw(inputs), spec


@flash.needs_interpreter
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "causal" else [pytest.mark.slow]) for name in CALLS],
)
def test_interpreted_it_computes_gradients(name):
    with settings.override(interpret=True):
        flash._check_backward(*_call(name), NONDETERMINISTIC)


@flash.needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "packed", "odd_lengths"])
def test_every_access_is_ordered_by_a_barrier(name, monkeypatch):
    monkeypatch.setattr(mosaic_gpu.versions, "detect_races", True)
    with settings.override(interpret=True):
        flash._check_backward(*_call(name), NONDETERMINISTIC)


@pytest.mark.gpu
@needs_newer_jax
@pytest.mark.parametrize("name", CALLS)
def test_small_calls_on_the_card(name):
    """Several times, because an error that moves is a race; bits may differ."""
    for _ in range(3):
        flash._check_backward(*_call(name), NONDETERMINISTIC)


@pytest.mark.gpu
@needs_newer_jax
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128)])
@pytest.mark.parametrize("mask", [None, CAUSAL, Band(-1023, 0)])
def test_long_calls_on_the_card(mask, dims):
    """Long enough for several items a thread block, and for all stages to be reused."""
    inputs, spec = programs.call(head_dim=dims[0], value_dim=dims[1], mask=mask)
    for _ in range(2):
        flash._check_backward(flash._draw(inputs), spec, NONDETERMINISTIC)
