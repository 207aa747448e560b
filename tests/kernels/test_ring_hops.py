"""The hops that a mask needs, how evenly they spread the work, and that no others are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import executed
from ring_cases import RING, close, mesh_of
from tiers import quick

from ejkernel.kernels.ring_attention.hops import balance, known, needed_hops, tiles_per_hop
from ejkernel.modules import flash_attention, ring_attention
from ejkernel.parallel import permute_sequence, restore_sequence
from ejkernel.types import MaskInfo
from ejkernel.types.placement import PLACEMENTS, ShardPositions
from ejkernel.types.rules import Band, Chunks, Dense, Everything, Segments

CAUSAL = Band(None, 0)


def documents(length, count, seed):
    """Segment ids of documents of random lengths, packed without padding."""
    ends = np.random.default_rng(seed).choice(np.arange(1, length), count - 1, replace=False)
    ids = np.searchsorted(np.sort(ends), np.arange(length), side="right")
    return jnp.asarray(ids[None].astype(np.int32))


def test_zigzag_shares_causal_work_evenly():
    """Of 128 tiles by 128 a contiguous ring waits almost twice as long."""
    tiles = {x: tiles_per_hop(CAUSAL, 65536, 65536, 8, x) for x in PLACEMENTS}
    assert tiles["zigzag"].sum() == tiles["contiguous"].sum() == 128 * 129 // 2
    assert balance(tiles["zigzag"]) <= 1.1
    assert balance(tiles["striped"]) <= 1.1
    assert balance(tiles["contiguous"]) > 1.8


@pytest.mark.parametrize("seed", quick(range(4), 0))
def test_stripes_share_random_documents_evenly(seed):
    ids = documents(65536, 32, seed)
    tiles = tiles_per_hop(Segments(ids, ids) & CAUSAL, 65536, 65536, 8, "striped")
    assert balance(tiles) <= 1.3


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tiles_are_those_in_which_a_pair_is_allowed(placement):
    rule, length, shards = CAUSAL & Band(-37, 0), 96, 4
    tiles = tiles_per_hop(rule, length, length, shards, placement, 8, 6)
    dense = np.asarray(rule.dense(length, length))[0]
    held = [
        np.asarray(ShardPositions.of(i, shards, placement, 24).positions()) for i in range(shards)
    ]
    for hop in range(shards):
        for i in range(shards):
            part = dense[held[i]][:, held[(i - hop) % shards]]
            exact = part.reshape(3, 8, 4, 6).any((1, 3)).sum()
            # A tile whose band passes between strided tokens is not known to be empty.
            assert exact <= tiles[hop, i] <= exact + (0 if placement == "contiguous" else 3)


MASKS = {
    "window": CAUSAL & Band(-20, 0),
    "both_sides": Band(-9, 5),
    "chunks": CAUSAL & Chunks(16),
    "causal": CAUSAL,
    "future": Band(40, None),
    "documents": Segments(documents(128, 9, 0), documents(128, 9, 0)) & CAUSAL,
    "arrays": Band(jnp.array([-20]), jnp.array([0])),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", MASKS)
def test_needed_hops_are_those_in_which_some_device_sees_something(name, placement):
    rule, length, shards = MASKS[name], 128, 8
    tiles = tiles_per_hop(rule, length, length, shards, placement, 1, 1)
    hops = needed_hops(rule, length, length, shards, placement) or ()
    everyone = {hop.distance: hop.everyone for hop in hops}
    for distance, of_devices in enumerate(tiles):
        if placement == "striped":  # not looked at so closely
            assert everyone[distance]
            continue
        assert (distance in everyone) == (of_devices.any() or distance == 0)
        assert everyone.get(distance, False) == (of_devices > 0).all()


def test_only_what_is_at_hand_counts():
    window = Band(-5, 0)
    ids = jnp.zeros((1, 8), jnp.int32)
    seen = []

    @jax.jit
    def traced(ids):
        seen.append(known(Segments(ids, ids) & window))
        seen.append(known(Segments(ids, ids) | window))
        return ids

    traced(ids)
    assert isinstance(seen[0], Band)
    assert isinstance(seen[1], Everything)
    assert "Segments" in repr(known(Segments(ids, ids) & window))
    assert isinstance(known(Dense(jnp.ones((1, 1, 8, 8), bool))), Everything)


def test_a_device_may_skip_hops_of_documents_that_are_not_known():
    """A zig-zag causal mask alone needs every hop on every device; documents may not."""
    hops = {}

    def traced(ids):
        for placement in PLACEMENTS:
            rule = Segments(ids, ids) & CAUSAL
            hops[placement] = needed_hops(rule, 128, 128, 8, placement)

    jax.eval_shape(traced, jax.ShapeDtypeStruct((1, 128), jnp.int32))
    assert [len(x) for x in hops.values()] == [8, 8, 8]
    assert not any(hop.everyone for hop in (*hops["contiguous"], *hops["zigzag"]))
    assert all(hop.everyone for hop in needed_hops(CAUSAL, 128, 128, 8, "zigzag"))


def executed_permutes(compiled):
    """How many permutes a compiled program makes, those in loops as often as the loops run."""
    return [kind for kind, _ in executed(compiled)].count("collective-permute")


SHARD = 16
WINDOWS = {1: 2, 16: 2, 17: 3, 33: 4, 64: 5, 100: 8}


def lowered(arguments, gradients=False, placement="contiguous"):
    arrays = tuple(jnp.ones((1, 8 * SHARD, 1, size)) for size in (4, 4, 6))
    run = lambda arrays: ring_attention(
        *arrays, axis_name="sp", mesh=RING, method="ring", placement=placement, **arguments
    )
    function = jax.grad(lambda arrays: run(arrays).sum()) if gradients else run
    return jax.jit(function).lower(arrays)


def program(arguments, **options):
    return lowered(arguments, **options).compile()


@pytest.mark.parametrize("width", quick(WINDOWS, 17, 64))
def test_a_window_makes_the_hops_that_it_needs(width):
    """`ceil(width / shard) + 1` of them: keys and values are sent one time less."""
    hops = WINDOWS[width]
    assert hops == -(-width // SHARD) + 1
    window = {"causal": True, "sliding_window": (width, 0)}
    assert executed_permutes(program(window)) == 2 * (hops - 1)


def test_backward_sends_keys_once_less_than_hops_and_gradients_once_for_each():
    window = {"causal": True, "sliding_window": (2 * SHARD, 0)}
    forward, backward = 2 * 2, 2 * 2 + 2 * 3
    text = lowered(window, gradients=True).as_text()
    assert text.count("stablehlo.collective_permute") == forward + backward


@pytest.mark.parametrize("placement", quick(PLACEMENTS[:2], "zigzag"))
def test_hops_that_nobody_needs_are_not_sent(placement):
    """Chunks and documents that end where shards end need no neighbour, a zig-zag window two."""
    size = SHARD // 2 if placement == "zigzag" else SHARD
    ids = jnp.arange(8 * SHARD)[None] // size
    assert executed_permutes(program({"chunk_size": size}, placement=placement)) == 0
    info = {"mask_info": MaskInfo.from_segments(ids)}
    assert executed_permutes(program(info, placement=placement)) == 0
    window = {"causal": True, "sliding_window": (size, 0)}
    neighbours = 2 if placement == "zigzag" else 1
    assert executed_permutes(program(window, placement=placement)) == 2 * neighbours


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_pruned_ring_computes_the_same(placement):
    """With hops that are left out between others, forward and backward."""
    mesh, order = mesh_of(8), {"shards": 8, "placement": placement}
    x = jax.random.normal(jax.random.key(0), (3, 1, 8 * SHARD, 2, 4))
    call = {"causal": True, "sliding_window": (7, 0)}

    def ring(*arrays):
        arrays = (permute_sequence(a, **order) for a in arrays)
        out = ring_attention(
            *arrays, axis_name="sp", mesh=mesh, method="ring", placement=placement, **call
        )
        return restore_sequence(out, **order)

    flash = lambda *arrays: flash_attention(*arrays, **call)
    loss = lambda f: lambda x: jnp.sin(f(*x)).sum()
    got = jax.jit(jax.value_and_grad(loss(ring)))(x)
    jax.tree.map(close, got, jax.value_and_grad(loss(flash))(x))
