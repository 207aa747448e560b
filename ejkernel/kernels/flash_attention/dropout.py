"""Dropout whose bits depend on the position of an element, not on how the work is tiled.

Every element of the attention matrix has 32 bits made from (seed, batch, head, row, column).
All arithmetic is on unsigned 32-bit integers and wraps around; `>>` shifts in zeros.

    mix(x):    x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16

    chain(x):  x = mix(x + batch * 0x9E3779B9);  x = mix(x + head * 0x9E3779B9)
               x = mix(x + row * 0x9E3779B9)
    a = chain(mix(seed))                two numbers for each row, so that two of the many rows
    b = chain(mix(seed ^ 0x5BD1E995))   do not come to share one sequence

    x = a + column * 0x9E3779B9         for each element: three multiplications
    x ^= x >> 16;  x *= 0x7FEB352D
    x ^= x >> 15;  x ^= b;  x *= 0x846CA68B
    bits = x ^ (x >> 16)

The element is dropped when `bits < threshold`, an unsigned comparison, with
`threshold = 2 * floor(probability * 2**31)`. It is even, so half of each may be compared instead,
which is the same whether or not a compiler takes them for signed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

_STRIDE = 0x9E3779B9


class Dropout(NamedTuple):
    """The counters of a call: a shard carries the global indices of its rows and heads.

    Where queries or keys are a share of a sequence, `rows` or `columns` say which, in the form that
    `position` reads. Ring attention alone gives them.
    """

    seed: Int[Array, ""]
    batch_index: Int[Array, "b"]
    head_index: Int[Array, "n"]
    rows: Int[Array, "4"] | None = None
    columns: Int[Array, "4"] | None = None

    @property
    def of_shares(self) -> bool:
        """Whether queries or keys are a share of a sequence, whose positions are counted."""
        return self.rows is not None or self.columns is not None


def position(share: Any, index: jax.Array) -> jax.Array:
    """The position of each token of a share: `a + b i`, and d more for `i >= c`.

    `share` holds (a, b, c, d), or is None where the index is the position.
    """
    if share is None:
        return index
    return share[0] + share[1] * index + jnp.where(index >= share[2], share[3], 0)


def threshold(probability: float) -> int:
    """The number below which an element's bits drop it."""
    return 2 * min(int(probability * 2.0**31), 2**31 - 1)


def bits(
    seed: ArrayLike, batch: ArrayLike, head: ArrayLike, row: ArrayLike, column: ArrayLike
) -> jax.Array:
    """The 32 random bits of each element, `uint32`, of the shape the indices broadcast to."""
    seed, batch, head, row, column = map(_unsigned, (seed, batch, head, row, column))
    first, second = (
        _chain(_mix(x), batch, head, row) for x in (seed, seed ^ np.uint32(0x5BD1E995))
    )
    x = first + column * np.uint32(_STRIDE)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ second) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def keep(
    probability: float,
    seed: ArrayLike,
    batch: ArrayLike,
    head: ArrayLike,
    row: ArrayLike,
    column: ArrayLike,
) -> jax.Array:
    """Whether each element survives dropout with this probability; indices broadcast.

    >>> import jax.numpy as jnp
    >>> kept = keep(0.25, 7, 0, 0, jnp.arange(100)[:, None], jnp.arange(100))
    >>> kept.shape, round(float(kept.mean()), 2)
    ((100, 100), 0.75)
    """
    half = np.uint32(threshold(probability) // 2)
    return bits(seed, batch, head, row, column) >> 1 >= half


def _unsigned(index: ArrayLike) -> jax.Array:
    index = jnp.asarray(index)
    if index.dtype in (jnp.int32, jnp.uint32):
        return jax.lax.bitcast_convert_type(index, jnp.uint32)
    return index.astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _chain(x: jax.Array, *counters: jax.Array) -> jax.Array:
    for counter in counters:
        x = _mix(x + counter * np.uint32(_STRIDE))
    return x
