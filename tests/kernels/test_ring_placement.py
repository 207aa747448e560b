"""Whatever the placement and the method, a ring computes what one device does on the whole."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from ring_cases import CALLS, IDS, LENGTH, RING, SMALL, arrays, close, mesh_of, value_and_gradients
from tiers import quick

from ejkernel.modules import flash_attention, ring_attention
from ejkernel.parallel import permute_sequence, restore_sequence
from ejkernel.types import MaskInfo

DROPOUT = {"causal": True, "dropout_prob": 0.4, "dropout_seed": 3}
PLACED_CALLS = {
    **{
        name: CALLS[name] for name in ("plain", "causal", "causal_offset", "window", "bias", "mask")
    },
    **{name: CALLS[name] for name in ("bias_row", "segments", "chained")},
    "chunks": {"chunk_size": 12, "softmax_aux": jnp.ones((4, 2)), "logits_soft_cap": 2.0},
    "dropout": DROPOUT,
    "bias_column": {"bias": jax.random.normal(jax.random.key(7), (2, 4, 1, LENGTH))},
    "bias_shared": {"bias": jax.random.normal(jax.random.key(7), (1, 1, LENGTH, LENGTH))},
}


def placed_ring(placement, mesh, **options):
    """Ring attention of arrays in the order of positions, and its result in that order."""
    order = {"shards": mesh.shape["sp"], "placement": placement}

    def run(*args, bias=None, **kwargs):
        if bias is not None and bias.shape[-2] > 1:
            bias = permute_sequence(bias, **order, axis=-2)
        args = (permute_sequence(x, **order) for x in args)
        call = functools.partial(ring_attention, mesh=mesh, axis_name="sp", placement=placement)
        return restore_sequence(call(*args, bias=bias, **kwargs, **options), **order)

    return run


def same_as_flash_attention(ring, q, k, v, extra):
    flash = dict(extra)
    if size := flash.pop("chunk_size", None):
        at = jnp.arange(LENGTH) // size
        flash |= {"causal": True, "attention_mask": (at[:, None] == at)[None]}
    got = jax.jit(lambda q, k, v: value_and_gradients(ring, q, k, v, extra))(q, k, v)
    jax.tree.map(close, got, value_and_gradients(flash_attention, q, k, v, flash))


PLACED = [f"{name}-{placement}" for name in PLACED_CALLS for placement in ("zigzag", "striped")]


@pytest.mark.parametrize("case", quick(PLACED, "bias-zigzag", "dropout-striped", "segments-zigzag"))
def test_masks_bias_and_dropout_count_positions(case):
    name, placement = case.split("-")
    ring = placed_ring(placement, mesh_of(4), cfg=SMALL, method="ring")
    same_as_flash_attention(ring, *arrays(), PLACED_CALLS[name])


def test_dropout_of_a_contiguous_ring_is_that_of_flash_attention():
    same_as_flash_attention(placed_ring("contiguous", mesh_of(2), cfg=SMALL), *arrays(), DROPOUT)


METHODS = [
    f"{name}-{placement}-{method}"
    for name in PLACED_CALLS
    for placement in ("contiguous", "zigzag", "striped")
    for method in ("all_gather", "all_to_all")
]
SEEN = [
    "bias-zigzag-all_gather",
    "dropout-striped-all_gather",
    "bias-striped-all_to_all",
    "mask-zigzag-all_to_all",
    "dropout-contiguous-all_to_all",
    "bias_shared-zigzag-all_to_all",
    "chunks-zigzag-all_to_all",
]


@pytest.mark.parametrize("case", quick(METHODS, *SEEN))
def test_the_forms_without_a_ring_compute_the_same(case):
    name, placement, method = case.split("-")
    ring = placed_ring(placement, mesh_of(2), cfg=SMALL, method=method)
    same_as_flash_attention(ring, *arrays(), PLACED_CALLS[name])


@pytest.mark.parametrize("method", quick(["ring", "all_gather", "all_to_all"], "all_to_all"))
def test_batch_and_heads_may_be_split_as_well(method):
    """With a bias and a mask that differ between heads, and with dropout."""
    mesh = mesh_of(2, 2, 2, names=("dp", "sp", "tp"))
    spec = P("dp", "sp", "tp", None)
    sharded = {"in_specs": (spec,) * 3, "out_specs": spec}
    ring = placed_ring("zigzag", mesh, method=method, cfg=SMALL, **sharded)
    sinks = jax.random.normal(jax.random.key(5), (4, 2))
    call = PLACED_CALLS["bias"] | PLACED_CALLS["mask"] | DROPOUT | {"softmax_aux": sinks}
    same_as_flash_attention(ring, *arrays(kv_heads=4), call)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_inside_shard_map(method, check_vma):
    """With the segment ids of a device's share, which are placed as its tokens are."""
    q, k, v = arrays()
    sinks = jax.random.normal(jax.random.key(5), (4, 1))
    order = {"shards": 2, "placement": "zigzag"}

    def local(q, k, v, ids, sinks):
        return ring_attention(
            q, k, v, axis_name="sp", causal=True, mask_info=MaskInfo.from_segments(ids),
            softmax_aux=sinks, placement="zigzag", method=method,
        )  # fmt: skip

    spec = P(None, "sp")
    ring = jax.shard_map(
        local, mesh=mesh_of(2), in_specs=(spec,) * 4 + (P(),), out_specs=spec, check_vma=check_vma
    )

    def placed(q, k, v, sinks):
        args = (permute_sequence(x, **order) for x in (q, k, v, IDS))
        return restore_sequence(ring(*args, sinks), **order)

    info = MaskInfo.from_segments(IDS)
    flash = lambda *a: flash_attention(*a[:3], causal=True, mask_info=info, softmax_aux=a[3])
    loss = lambda f: lambda *a: (f(*a) ** 2).sum()
    got = jax.jit(jax.value_and_grad(loss(placed), argnums=(0, 1, 2, 3)))(q, k, v, sinks)
    jax.tree.map(close, got, jax.value_and_grad(loss(flash), argnums=(0, 1, 2, 3))(q, k, v, sinks))


def test_gradients_of_bfloat16_are_added_in_float32():
    """Sinks and bias, too: each hop adds to them."""
    narrow = [x.astype(jnp.bfloat16) for x in arrays()]
    extra = {
        "bias": PLACED_CALLS["bias_column"]["bias"].astype(jnp.bfloat16),
        "softmax_aux": jnp.ones((4, 2), jnp.bfloat16),
    }
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (narrow, extra))
    ring = placed_ring("zigzag", mesh_of(4), cfg=SMALL)
    run = lambda function, args, extra: value_and_gradients(function, *args, extra)
    got = jax.jit(functools.partial(run, ring))(narrow, extra)
    exact = run(flash_attention, *wide)
    for actual, expected in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        error = jnp.abs(actual.astype(jnp.float32) - expected).max()
        assert error <= 2**-7 * jnp.abs(expected).max()


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "snake"}, "placement must be one of contiguous, zigzag, striped, got"),
        ({"method": "tree"}, "method must be one of auto, ring, all_gather, all_to_all, got"),
        ({"method": "all_to_all"}, "multiples of the 8 devices of 'sp', a device has 4 and 2"),
        ({"dropout_prob": 0.1}, "needs dropout_seed="),
    ],
)
def test_a_mistake_is_named(arguments, message):
    with pytest.raises(ValueError, match=f"ring_attention: .*{message}"):
        ring_attention(*arrays(), axis_name="sp", mesh=RING, **arguments)


def test_a_length_that_zigzag_cannot_halve_is_refused():
    q, k, v = (x[:, :24] for x in arrays())
    with pytest.raises(ValueError, match="must be multiples of 16, got 24 and 24"):
        ring_attention(q, k, v, axis_name="sp", mesh=RING, placement="zigzag")
