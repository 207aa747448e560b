"""Flash attention on XLA computes the definition, block by block, and only the blocks it must."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from tiers import quick

from ejkernel.kernels.flash_attention import reference, xla
from ejkernel.kernels.flash_attention.inputs import Dropout, Inputs, Outputs, Spec
from ejkernel.modules import flash_attention
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.types.rules import (
    Band,
    Blocks,
    Chunks,
    Dense,
    Everything,
    KeyLength,
    QueryLength,
    Rule,
    Segments,
)

EPS = float(np.finfo(np.float32).eps)
LENGTHS = jnp.array([21, 0])
IDS = jnp.array(np.repeat([[0, 1, 2, -1], [3, 0, 3, 3]], [10, 12, 10, 8], axis=1))
COIN = jnp.array(np.random.default_rng(9).random((2, 4, 40, 40)) < 0.6)


def inputs_of(
    batch=2, queries=40, keys=40, heads=4, kv_heads=2, head_dim=16, value_dim=16,
    bias=None, sinks=None, mask=None, dropout=False, seed=0,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    return Inputs(
        query=normal(batch, queries, heads, head_dim),
        key=normal(batch, keys, kv_heads, head_dim),
        value=normal(batch, keys, kv_heads, value_dim),
        bias=None if bias is None else normal(*bias),
        sinks=None if sinks is None else normal(*sinks),
        mask=Everything() if mask is None else mask,
        dropout=Dropout(np.int32(3), np.arange(batch) + 5, np.arange(heads)) if dropout else None,
    )


def cast(inputs, dtype):
    return inputs._replace(
        **{
            name: jnp.asarray(x, dtype)
            for name, x in zip(inputs._fields[:5], inputs[:5], strict=True)
            if x is not None
        }
    )


def cotangents(outputs):
    rng = np.random.default_rng(1)
    return Outputs(*(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in outputs))


def expected(inputs, spec, rounded=lambda x: x):
    """Outputs and gradients of the definition in float64."""

    def run(floats):
        return reference.forward(Inputs(*floats, *inputs[5:]), spec, rounded)

    with jax.enable_x64(True):
        outputs, pull_back = jax.vjp(run, cast(inputs, jnp.float64)[:5])
        return outputs, pull_back(cotangents(outputs))[0]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def actual(inputs, spec, block_q, block_k):
    forward = FwdParams(q_blocksize=block_q, kv_blocksize=block_k)
    backward = BwdParams(q_blocksize=block_q, kv_blocksize=block_k)
    outputs, residuals = xla.run_forward(inputs, spec, forward)
    return outputs, xla.run_backward(inputs, residuals, cotangents(outputs), spec, backward)


def distance(one, other):
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.where(one == other, 0.0, np.abs(one - other))
    return np.inf if np.isnan(gap).any() else gap.max(initial=0.0)


def check(inputs, spec, dtype, blocks):
    inputs = cast(inputs, dtype)
    exact = expected(inputs, spec)
    coarse = expected(inputs, spec, lambda x: x.astype(dtype).astype(x.dtype))
    for block_q, block_k in blocks:
        got = actual(inputs, spec, block_q, block_k)
        assert got[0].out.dtype == dtype
        assert got[0].lse.dtype == jnp.promote_types(dtype, jnp.float32)
        assert [d is None for d in got[1]] == [x is None for x in inputs[:5]] + [True, True]
        for floor, parts in ((32, 0), (128, 1)):
            for name, x, truth, rough in zip(
                got[parts]._fields, got[parts], exact[parts], coarse[parts], strict=False
            ):
                if x is None:
                    continue
                assert x.shape == truth.shape
                truth = np.asarray(truth)
                largest = np.abs(truth[np.isfinite(truth)]).max(initial=0.0)
                allowed = 2 * distance(rough, truth) + floor * EPS * largest
                assert distance(x, truth) <= allowed, (name, block_q, block_k)


CASES = {
    "plain": {},
    "one_key_head": {"kv_heads": 1, "mask": Band(None, 0)},
    "equal_heads": {"kv_heads": 4, "mask": Band(-9, 3)},
    "odd_lengths": {"queries": 33, "keys": 45, "value_dim": 24, "mask": Band(None, 5)},
    "segments": {"mask": Segments(IDS, IDS) & Band(None, 0), "sinks": (4, 2)},
    "segments_shared": {"mask": Segments(IDS[:1], IDS[:1])},
    "lengths": {"mask": KeyLength(LENGTHS) & QueryLength(30), "sinks": (1, 3)},
    "chunks": {"mask": Chunks(16) | Band(-3, 0)},
    "bias": {"bias": (2, 4, 40, 40), "soft_cap": 2.0},
    "bias_of_heads_and_keys": {"bias": (1, 4, 1, 40), "mask": Band(None, 0)},
    "bias_of_rows": {"bias": (2, 1, 39, 1), "queries": 39},
    "mask_of_heads": {"mask": Dense(COIN[:1]) & Band(None, 0), "bias": (1, 4, 40, 40)},
    "mask_of_everything": {"mask": Dense(COIN), "sinks": (4, 1)},
    "dropout": {"dropout_prob": 0.3, "mask": Band(None, 0)},
    "decode": {"queries": 1, "mask": KeyLength(LENGTHS + 1)},
    "all_at_once": {
        "queries": 37, "bias": (1, 4, 37, 40), "mask": Band(-20, 3) & Dense(COIN[:, :1, :37]),
        "soft_cap": 3.0, "sinks": (4, 2), "value_dim": 24, "dropout_prob": 0.2,
    },
}  # fmt: skip


def call(soft_cap=None, dropout_prob=0.0, **arguments):
    spec = Spec(softmax_scale=0.3, logits_soft_cap=soft_cap, dropout_prob=dropout_prob)
    return inputs_of(dropout=dropout_prob > 0, **arguments), spec


@pytest.mark.parametrize("name", quick(CASES, "all_at_once"))
def test_float32_is_as_good_as_float32_can_be(name):
    check(*call(**CASES[name]), jnp.float32, [(16, 8)])


@pytest.mark.parametrize(
    "name", quick(["plain", "odd_lengths", "segments", "decode", "all_at_once"], "all_at_once")
)
def test_a_call_of_a_single_block_needs_no_loop(name):
    inputs, spec = call(**CASES[name])
    check(inputs, spec, jnp.float32, [(64, 64)])
    if not inputs.mask.batched:
        program = actual.lower(cast(inputs, jnp.float32), spec, 64, 64).as_text()
        assert "stablehlo.while" not in program


SOME_BLOCKS = Blocks(jnp.array(np.random.default_rng(4).random((2, 1, 20, 20)) < 0.5), 2, 2)
LISTED = {
    "blocks": {"mask": SOME_BLOCKS},
    "blocks_of_heads": {"mask": Blocks(COIN[:1, :, :20, :20], 2, 2), "sinks": (4, 2)},
    "ragged_blocks": {"mask": SOME_BLOCKS, "queries": 39, "keys": 37, "bias": (2, 1, 39, 37)},
    "bias_of_keys": {"mask": SOME_BLOCKS & Band(None, 3), "bias": (1, 4, 1, 40), "soft_cap": 2.0},
    "bias_of_rows": {"mask": SOME_BLOCKS | Band(-3, 0), "bias": (1, 1, 40, 1), "dropout_prob": 0.3},
}


@pytest.mark.parametrize("name", quick(LISTED, "blocks_of_heads"))
def test_small_blocks_of_a_list_share_tiles(name):
    """Twenty blocks of two: lists of about ten, eight of which stand in a first tile."""
    check(*call(**LISTED[name]), jnp.float32, [(2, 2)])


@pytest.mark.parametrize("blocks", quick([(1, 4), (4, 1), (1, 1)], (1, 4)), ids=str)
def test_blocks_of_one_query_or_key_are_no_broadcast_axis(blocks):
    """Several of them in a tile: their gradients of a bias are not one gradient."""
    check(
        *call(queries=12, keys=12, bias=(2, 4, 12, 12), mask=Band(None, 0)), jnp.float32, [blocks]
    )


@pytest.mark.parametrize("dtype", quick([jnp.bfloat16, jnp.float16], jnp.bfloat16))
@pytest.mark.parametrize("name", quick(["all_at_once", "segments"], "segments"))
def test_narrow_dtypes_accumulate_in_float32(name, dtype):
    check(*call(**CASES[name]), dtype, [(7, 13)])


def test_a_single_query_in_bfloat16_has_gradients_over_several_blocks():
    check(*call(**CASES["decode"]), jnp.bfloat16, [(1, 8)])


def test_float64_accumulates_in_float64():
    inputs, spec = call(**CASES["all_at_once"])
    with jax.enable_x64(True):
        inputs = cast(inputs, jnp.float64)
        truth, got = expected(inputs, spec), actual(inputs, spec, 16, 8)
    for x, exact in zip(jax.tree.leaves(got), jax.tree.leaves(truth), strict=True):
        assert x.dtype == jnp.float64
        finite = np.asarray(exact)[np.isfinite(exact)]
        assert distance(x, exact) <= 1e-13 * np.abs(finite).max()


@pytest.mark.parametrize(
    ("blinded_by", "blocks", "sinks"),
    [
        ("mask", (16, 8), None),
        ("mask", (16, 8), (4, 2)),
        ("mask", (64, 64), (1, 1)),
        ("bias", (16, 8), (4, 2)),
    ],
)
def test_rows_that_see_nothing_are_zero_and_have_no_gradient(blinded_by, blocks, sinks):
    """Rows 0 to 19 see nothing: not a key, though there may be sinks."""
    inputs = cast(inputs_of(sinks=sinks, bias=(1, 1, 40, 40)), jnp.float32)
    if blinded_by == "mask":
        inputs = inputs._replace(mask=Band(None, -20))
    else:
        inputs = inputs._replace(bias=inputs.bias.at[:, :, :20].set(-jnp.inf))
    (out, lse), gradients = actual(inputs, Spec(softmax_scale=0.3), *blocks)
    assert (out[:, :20] == 0).all()
    assert (lse[..., :20] == -jnp.inf).all()
    assert (gradients.query[:, :20] == 0).all()
    assert (gradients.bias[:, :, :20] == 0).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, gradients)))
    assert np.isfinite(lse[..., 20:]).all()
    assert (out[:, 20:] != 0).all()


@pytest.mark.parametrize(("sinks", "shift"), [(0.0, 1e4), (500.0, 0.0), (-np.inf, 0.0)])
def test_extreme_logits_and_sinks_stay_finite(sinks, shift):
    inputs = cast(inputs_of(sinks=(4, 2), bias=(1, 1, 1, 40)), jnp.float32)
    inputs = inputs._replace(sinks=inputs.sinks + sinks, bias=inputs.bias + shift)
    outputs, gradients = actual(inputs, Spec(softmax_scale=0.3), 16, 8)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((outputs, gradients)))


POISONED = {
    "per_row": (KeyLength(jnp.array([16, 40])), np.s_[0, 16:]),
    "per_head": (
        Dense(jnp.tile(jnp.arange(40) < jnp.array([16, 16, 40, 40])[None, :, None, None], (40, 1))),
        np.s_[:, 16:, 0],
    ),
    "causal": (Band(None, -16), np.s_[:, 24:]),
}


@pytest.mark.parametrize("name", POISONED)
def test_blocks_that_the_mask_excludes_are_not_read(name):
    """A NaN in a block that is computed and masked would still reach the output, as 0 * NaN."""
    mask, where = POISONED[name]
    inputs = cast(inputs_of(), jnp.float32)
    inputs = inputs._replace(
        key=inputs.key.at[where].set(np.nan), value=inputs.value.at[where].set(np.nan), mask=mask
    )
    outputs, gradients = actual(inputs, Spec(softmax_scale=0.3), 8, 8)
    assert not any(np.isnan(x).any() for x in jax.tree.leaves((outputs, gradients)))
    assert (gradients.key[where] == 0).all()
    assert (gradients.value[where] == 0).all()


def test_query_blocks_that_see_nothing_are_not_read():
    inputs = cast(inputs_of(mask=QueryLength(jnp.array([16, 40]))), jnp.float32)
    inputs = inputs._replace(query=inputs.query.at[0, 16:].set(np.nan))
    outputs, gradients = actual(inputs, Spec(softmax_scale=0.3), 8, 8)
    assert not any(np.isnan(x).any() for x in jax.tree.leaves((outputs, gradients)))


@dataclasses.dataclass(frozen=True, eq=False)
class Contradiction(Rule):
    """Says of its blocks that every pair is visible, and of every pair that it is not."""

    def sliced(self, q_start, q_len, k_start, k_len):
        return self

    def allowed(self, q_len, kv_len):
        return jnp.zeros((1, 1, 1), bool)

    def block_bounds(self, grid):
        return jnp.ones((1, 1, 1), bool), jnp.ones((1, 1, 1), bool)


def test_full_blocks_run_unmasked():
    inputs = cast(inputs_of(), jnp.float32)
    spec = Spec(softmax_scale=0.3)
    plain = actual(inputs, spec, 8, 8)
    full = actual(inputs._replace(mask=Contradiction()), spec, 8, 8)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(full), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def program(length, blocks=(64, 64), **arguments):
    inputs, spec = call(batch=1, queries=length, keys=length, **arguments)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cast(inputs, "float32"))
    return actual.lower(shapes, spec, *blocks)


def test_memory_grows_with_the_length_and_not_with_its_square():
    used = [
        program(length, (256, 256), mask=Band(None, 0)).compile().memory_analysis()
        for length in (4096, 8192)
    ]
    assert used[1].temp_size_in_bytes <= 2.2 * used[0].temp_size_in_bytes


def test_loops_over_blocks_are_loops_in_the_program():
    """Two matmuls forward, five backward and one for the row sums, however many blocks."""
    short, long = (program(n, mask=Band(None, 0)).as_text() for n in (256, 1024))
    assert short.count("dot_general") == long.count("dot_general") == 8


def test_neither_keys_nor_bias_nor_mask_are_ever_expanded():
    """The largest array of the program is an input or a tile, though T * S is far larger."""
    length = 1024
    ids = jnp.arange(length)[None] // 100
    lowered = program(
        length, heads=6, kv_heads=1, bias=(1, 1, 1, length), mask=Segments(ids, ids) & Band(None, 0)
    )
    shapes = re.findall(r"\b(?:f32|s32|pred)\[([\d,]+)\]", lowered.compile().as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest == length * 6 * 16 < length * length / 10


def test_the_same_call_gives_the_same_bits():
    inputs, spec = call(**CASES["all_at_once"])
    inputs = cast(inputs, jnp.float32)
    one, other = (actual(inputs, spec, 16, 8) for _ in range(2))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_runs_where_shard_map_tracks_what_varies():
    """Loops that started from plain zeros would be refused: what they carry varies."""
    inputs = cast(inputs_of(mask=Band(None, 0)), jnp.float32)
    spec, params = Spec(softmax_scale=0.3), FwdParams(q_blocksize=8, kv_blocksize=8)

    def run(query, key, value):
        return xla.run_forward(Inputs(query, key, value, mask=Band(None, 0)), spec, params)[0]

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = PartitionSpec(None, None, "x")
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(split, split, split),
        out_specs=Outputs(split, PartitionSpec(None, "x")),
    )
    got, plain = jax.jit(sharded)(*inputs[:3]), jax.jit(run)(*inputs[:3])
    for a, b in zip(got, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def shapes_of(**arguments):
    inputs = inputs_of(**arguments)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), inputs)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 5000), (17, 100), (128, 128), (1000, 4097)])
@pytest.mark.parametrize("mask", [None, Band(None, 0), Band(-256, 0), Chunks(64) & Band(None, 0)])
def test_the_chosen_blocks_fit_and_waste_little(lengths, mask):
    inputs = shapes_of(queries=lengths[0], keys=lengths[1], mask=mask)
    spec = Spec(softmax_scale=0.3)
    chosen = [xla.heuristic_forward(inputs, spec), xla.heuristic_backward(inputs, spec)]
    listed = xla.candidates_forward(inputs, spec)
    assert len(set(listed)) == len(listed)
    for blocks in [*chosen, *listed, *xla.candidates_backward(inputs, spec)]:
        for length, block in zip(lengths, blocks, strict=True):
            padded = math.ceil(length / block) * block
            assert 1 <= block <= length
            assert padded - length < 16 * math.ceil(length / block)


def test_a_narrow_window_gets_narrow_blocks():
    spec = Spec(softmax_scale=0.3)
    wide = shapes_of(queries=8192, keys=8192, mask=Band(None, 0))
    narrow = wide._replace(mask=Band(None, 0) & Band(-128, 128))
    assert math.prod(xla.heuristic_forward(narrow, spec)) < math.prod(
        xla.heuristic_forward(wide, spec)
    )


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ((64, 64), (64, 64)),
        ((16, 128), (16, 128)),
        ((1, 10), (16, 20)),  # too small alone
        ((512, 1536), (256, 512)),  # a part of the mask's blocks
        ((257, 64), (256, 64)),  # no part of it would do
    ],
)
def test_a_mask_of_blocks_gets_its_blocks(given, chosen):
    grid = tuple(-(-4096 // size) for size in given)
    mask = Blocks(jnp.zeros((1, 1, *grid), bool), *given)
    inputs = shapes_of(queries=4096, keys=4096)
    for rule in (mask, mask & Band(None, 0), mask | Chunks(64)):
        inputs = inputs._replace(mask=rule)
        spec = Spec(softmax_scale=0.3)
        assert xla.heuristic_forward(inputs, spec) == chosen
        assert xla.heuristic_backward(inputs, spec) == chosen
        assert chosen in xla.candidates_forward(inputs, spec)


def test_a_dense_mask_that_is_a_constant_is_not_evaluated_by_the_compiler(compilations):
    """Which took it half a minute at this length."""
    mask = jnp.asarray(np.random.default_rng(0).random((1, 2048, 2048)) < 0.5)
    x = jnp.ones((1, 2048, 1, 16))
    jax.jit(lambda q: flash_attention(q, x, x, attention_mask=mask)).lower(x).compile()
    assert sum(compilations) < 10
