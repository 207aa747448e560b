"""Parts of arrays that belong to one block, or to several that stand side by side in a tile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def blocks_of(blocks: Any) -> tuple:
    """The blocks of a tile along one axis."""
    return blocks if isinstance(blocks, tuple) else (blocks,)


def first_time(blocks: tuple, size: int) -> jax.Array:
    """What of a tile is not there already: behind its end a list repeats its last block."""
    places = jnp.stack([jnp.int32(-1), *blocks])
    return jnp.repeat(places[1:] != places[:-1], size)


def positions(blocks: Any, size: int) -> jax.Array:
    """Where the queries or keys of a tile stand in their sequence."""
    return joined([at * size + jnp.arange(size, dtype=jnp.int32) for at in blocks_of(blocks)], 0)


def joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def add_blocks(x: jax.Array, tile: jax.Array, axis: int, blocks: Any, start: Callable) -> jax.Array:
    """`x` with the parts of a tile along `axis` added, each from where `start(block)` says."""
    if not isinstance(blocks, tuple):
        return add(x, tile, start(blocks))
    size, places = tile.shape[axis] // len(blocks), jnp.stack(blocks)

    # A loop, because a chain of updates is not always done in place.
    def one(n: Any, x: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(tile, n * size, size, axis)
        return add(x, part, start(places[n]))

    return lax.fori_loop(jnp.int32(0), jnp.int32(len(blocks)), one, x)


def pad(x: jax.Array, axis: int, length: int, fill: float) -> jax.Array:
    if x.shape[axis] == length:
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, padding, constant_values=fill)


def cut(x: Any, start: tuple, sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(jnp.asarray(x), [jnp.int32(at) for at in start], sizes)


def update(x: jax.Array, part: jax.Array, start: tuple) -> jax.Array:
    return lax.dynamic_update_slice(x, part, [jnp.int32(at) for at in start])


def add(x: jax.Array, part: jax.Array, start: tuple) -> jax.Array:
    return update(x, part + cut(x, start, part.shape), start)
