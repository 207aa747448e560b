"""The backward pass of one kernel on Hopper: who is served, which tiles it walks, its results."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import flash_gpu_programs as programs
from kernels import test_flash_pallas_gpu as flash
from kernels.flash_gpu_programs import CAUSAL, H200

from ejkernel import settings
from ejkernel.kernels.common import mosaic_gpu
from ejkernel.kernels.flash_attention import pallas_sm90 as pallas_gpu
from ejkernel.kernels.flash_attention.pallas_sm90 import backward_fused as pallas_gpu_joint
from ejkernel.kernels.flash_attention.pallas_sm90.backward_fused_walk import QUERIES, Tiles
from ejkernel.ops.config import BwdParams
from ejkernel.ops.platform import Platform
from ejkernel.types.rules import Band

UNORDERED = BwdParams(deterministic=False)
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
    pallas_gpu_joint.why_not(*programs.call()) is not None,
    reason=str(pallas_gpu_joint.why_not(*programs.call())),
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
    assert pallas_gpu_joint.why_not(*programs.call(**change)) == reason


@needs_newer_jax
def test_it_is_taken_where_bits_may_differ():
    """By default they may not; and cuDNN, whose bits differ too, goes first then."""
    backward = pallas_gpu.IMPLEMENTATION.backward
    assert backward is not None
    call = (*programs.call(mask=CAUSAL), H200)
    assert backward.guess(*call, deterministic=False) == UNORDERED
    assert backward.guess(*call).ordered is None
    assert backward.behind(*call) == frozenset()
    with settings.override(deterministic=True):
        assert backward.behind(*call) == {Platform.CUDA}
        # With a bias it is slower than two kernels of ours.
        assert backward.behind(*programs.call(bias=programs.PAIRS), H200) == frozenset()
    capped = (*programs.call(mask=CAUSAL, soft_cap=50.0), H200)
    assert backward.guess(*capped, deterministic=False) == backward.guess(*capped)


@pytest.mark.parametrize("lap", [0, 1])
def test_every_tile_is_visited_once(lap):
    """Up or down, from wherever a line begins; partial ones are known wherever they come."""
    lines, blocks = 3, 7
    count, partial = np.array([7, 4, 1], np.int32), np.array([2, 1, 1], np.int32)
    index = np.array([[5, 6, 0, 1, 2, 3, 4], [6, 3, 4, 5, 0, 0, 0], [0] * 7], np.int32)
    refs = {"count": count, "partial": partial, "index": index.reshape(-1)}
    refs = {name: jnp.asarray(array) for name, array in refs.items()}
    work = types.SimpleNamespace(
        refs=refs, lines=lines, blocks=blocks, list_rows=1, list_heads=1, ragged=False
    )
    for line in range(lines):
        tiles = Tiles(work, 0, 0, jnp.int32(line), jnp.int32(lap))
        found = [tiles.tile(jnp.int32(j)) for j in range(count[line])]
        places = [int(start) // QUERIES for start, _ in found]
        assert sorted(places) == sorted(index[line, : count[line]])
        hiding = {int(start) // QUERIES for start, hides in found if hides}
        assert hiding == set(index[line, : partial[line]])
    work.ragged = True
    assert bool(Tiles(work, 0, 0, jnp.int32(2), jnp.int32(lap)).tile(jnp.int32(0))[1])


def test_lines_that_see_everything_begin_apart():
    lines, blocks = 4, 8
    refs = {"count": jnp.full(lines, blocks), "partial": jnp.zeros(lines, jnp.int32)}
    refs["index"] = jnp.tile(jnp.arange(blocks), lines)
    work = types.SimpleNamespace(
        refs=refs, lines=lines, blocks=blocks, list_rows=1, list_heads=1, ragged=False
    )
    walks = [Tiles(work, 0, 0, jnp.int32(line), jnp.int32(0)) for line in range(lines)]
    for j in range(blocks):
        assert len({int(walk.tile(jnp.int32(j))[0]) for walk in walks}) == lines


def test_registers_of_all_warpgroups_fit():
    """More than there are at the start, and a block of threads waits for ever."""
    holding, serving = pallas_gpu_joint.REGISTERS
    at_start = mosaic_gpu.REGISTER_FILE // (128 * 3) // 8 * 8
    assert 2 * holding + serving <= 3 * at_start
    assert holding % 8 == serving % 8 == 0
    assert serving <= at_start <= holding


JOINT = [name for name in programs.PROGRAMS if name.startswith("joint-")]


@flash.needs_assembler
@needs_newer_jax
@pytest.mark.parametrize("part", range(2))
def test_every_kernel_assembles_without_spills(part):
    flash._check_assembly(JOINT[part::2])


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
        flash._check_backward(*_call(name), UNORDERED)


@flash.needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "packed", "odd_lengths"])
def test_every_access_is_ordered_by_a_barrier(name, monkeypatch):
    monkeypatch.setattr(mosaic_gpu.versions, "detect_races", True)
    with settings.override(interpret=True):
        flash._check_backward(*_call(name), UNORDERED)


@pytest.mark.gpu
@needs_newer_jax
@pytest.mark.parametrize("name", CALLS)
def test_small_calls_on_the_card(name):
    """Several times, because an error that moves is a race; bits may differ."""
    for _ in range(3):
        flash._check_backward(*_call(name), UNORDERED)


@pytest.mark.gpu
@needs_newer_jax
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128)])
@pytest.mark.parametrize("mask", [None, CAUSAL, Band(-1023, 0)])
def test_long_calls_on_the_card(mask, dims):
    """Long enough for several units a block of threads and all slots to be used again."""
    inputs, spec = programs.call(head_dim=dims[0], value_dim=dims[1], mask=mask)
    for _ in range(2):
        flash._check_backward(flash._draw(inputs), spec, UNORDERED)
