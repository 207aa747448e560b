"""Which hops of a ring a mask needs, and how much work each device has in them: on the host.

In hop `d` device `i` attends to the keys of device `(i - d) mod n`. A hop that no device needs is
neither computed nor sent. What counts is what is known when the program is made: rules of numbers,
and of arrays those that are at hand. Arrays that are traced may need any hop.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention.static_arrays import evaluate
from ejkernel.kernels.ring_attention.inputs import Hop
from ejkernel.types.placement import Placement, ShardPositions, placed_rule
from ejkernel.types.rules import And, Dense, Everything, Or, Rule
from ejkernel.xla_utils.concrete import concrete_value


def needed_hops(
    rule: Rule, q_len: int, kv_len: int, shards: int, placement: Placement
) -> tuple[Hop, ...] | None:
    """The hops that some device may need; None: all of them, as far as is known.

    Args:
        rule: the mask of the whole sequences.
        q_len: queries of the whole sequence.
        kv_len: keys of the whole sequence.
        shards: devices of the ring.
        placement: which tokens each of them holds.

    >>> from ejkernel.types.rules import Band
    >>> [hop.distance for hop in needed_hops(Band(-100, 0), 512, 512, 8, "contiguous")]
    [0, 1, 2]
    """
    # Of documents that are not known yet, a device may need no key even where its mask allows some.
    # Striped shards have tokens of every document of some length: a test would skip nothing.
    certain = placement == "striped" or _is_known(rule)
    rule = known(rule)
    if isinstance(rule, Everything) or 0 in (q_len, kv_len):
        return None
    needed = _needed_shards(rule, q_len, kv_len, shards, placement)
    device = np.arange(shards)
    by_hop = [needed[device, (device - distance) % shards] for distance in range(shards)]
    hops = [Hop(i, certain and bool(of.all())) for i, of in enumerate(by_hop) if of.any() or i == 0]
    return tuple(hops)


def tiles_per_hop(
    rule: Rule,
    q_len: int,
    kv_len: int,
    shards: int,
    placement: Placement,
    block_q: int = 512,
    block_k: int = 512,
) -> np.ndarray:
    """How many tiles each device computes in each hop, `[hops, devices]`, summed over batch rows.

    Args:
        rule: the mask of the whole sequences, its arrays at hand.
        q_len: queries of the whole sequence.
        kv_len: keys of the whole sequence.
        shards: devices of the ring.
        placement: which tokens each of them holds.
        block_q: queries in a tile.
        block_k: keys in a tile.

    >>> from ejkernel.types.rules import Band
    >>> tiles_per_hop(Band(None, 0), 32, 32, 2, "contiguous", 8, 8).tolist()
    [[3, 3], [0, 4]]
    >>> tiles_per_hop(Band(None, 0), 32, 32, 2, "zigzag", 8, 8).tolist()
    [[3, 3], [2, 2]]
    """
    q_size, kv_size = q_len // shards, kv_len // shards

    def tiles(rule: Rule, i: jax.Array, j: jax.Array) -> jax.Array:
        of = lambda shard, size: ShardPositions.of(shard, shards, placement, size)
        placed = placed_rule(rule, of(i, q_size), of(j, kv_size))
        some, _ = placed.blocks(q_size, kv_size, block_q, block_k)
        return some.sum(dtype=jnp.int32)

    arrays = list(map(np.asarray, jax.tree.leaves(rule)))
    jaxpr = jax.make_jaxpr(tiles)(rule, jnp.int32(0), jnp.int32(0))
    count = lambda i, j: evaluate(jaxpr, *arrays, *(np.asarray(x, np.int32) for x in (i, j)))[0]
    return np.array(
        [[count(i, (i - hop) % shards) for i in range(shards)] for hop in range(shards)]
    )


def balance(tiles: np.ndarray) -> float:
    """The largest work of a device in each hop, summed, over the mean work of a device.

    1 is perfect: no device waits for another.

    >>> balance(np.array([[3, 3], [0, 4]]))
    1.4
    """
    return float(tiles.max(1).sum() / tiles.sum(0).mean())


def known(rule: Rule) -> Rule:
    """What of a rule holds whatever its traced arrays are; arrays at hand become NumPy's."""
    if isinstance(rule, And):
        return functools.reduce(lambda a, b: a & b, map(known, rule.rules), Everything())
    if isinstance(rule, Or):
        return functools.reduce(lambda a, b: a | b, map(known, rule.rules), Or(()))
    if isinstance(rule, Dense):  # to read all of it takes longer than the hops that it may save
        return Everything()
    leaves, treedef = jax.tree.flatten(rule)
    values = list(map(concrete_value, leaves))
    if any(x is None for x in values):
        return Everything()
    return jax.tree.unflatten(treedef, values)


def _is_known(rule: Rule) -> bool:
    """Whether `known` leaves nothing out."""
    if isinstance(rule, And | Or):
        return all(map(_is_known, rule.rules))
    leaves = jax.tree.leaves(rule)
    return not isinstance(rule, Dense) and all(concrete_value(x) is not None for x in leaves)


def _needed_shards(
    rule: Rule, q_len: int, kv_len: int, shards: int, placement: Placement
) -> np.ndarray:
    """Whether queries of a shard may see keys of another, `[shards, shards]`."""
    if placement == "striped":  # every shard has tokens everywhere
        return np.ones((shards, shards), bool)
    pieces = 2 * shards if placement == "zigzag" else shards
    sizes = (q_len, kv_len, q_len // pieces, kv_len // pieces)
    jaxpr = jax.make_jaxpr(lambda rule: rule.blocks(*sizes)[0])(rule)
    try:
        (of_rows,) = evaluate(jaxpr, *jax.tree.leaves(rule))
    except NotImplementedError:
        return np.ones((shards, shards), bool)
    some: np.ndarray = np.any(of_rows.reshape(-1, pieces, pieces), axis=0)
    if placement == "zigzag":
        index = np.arange(shards)
        held = np.stack([index, pieces - 1 - index], 1)  # the pieces of each shard
        pairs: np.ndarray = some[held[:, None, :, None], held[None, :, None, :]]
        return np.any(pairs, axis=(2, 3))
    return some
