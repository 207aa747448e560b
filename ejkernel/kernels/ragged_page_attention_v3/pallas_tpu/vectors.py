"""Numbers along the lanes and rows of a TPU's registers, for kernels over pages."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SHUFFLED = 16  # rows of two bytes in a register


def divided(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of small numbers; kernels have no division of integers."""
    if by & (by - 1) == 0:
        quotient = jax.lax.shift_right_logical(x, by.bit_length() - 1)
    else:
        quotient = jnp.floor((x.astype(jnp.float32) + 0.5) * (1.0 / by)).astype(jnp.int32)
    return quotient, x - quotient * by


def across(x: jax.Array, width: int) -> jax.Array:
    """A number for each row, the same in all lanes, over so many columns."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def lane_sums(x: jax.Array) -> jax.Array:
    """Sums along the rows, but for the last: one for each lane."""
    missing = -x.shape[1] % LANES
    if missing:
        x = jnp.concatenate([x, jnp.zeros((x.shape[0], missing), x.dtype)], axis=1)
    parts = [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]
    return functools.reduce(jnp.add, parts)


def along_lanes(x: jax.Array) -> jax.Array:
    """A column [rows, 1] as rows of lanes, [rows / LANES rounded up, LANES]."""
    diagonal = (LANES, LANES)
    own = jax.lax.broadcasted_iota(jnp.int32, diagonal, 0) == jax.lax.broadcasted_iota(
        jnp.int32, diagonal, 1
    )
    lines = []
    for start in range(0, x.shape[0], LANES):
        some = x[start : start + LANES]
        count = some.shape[0]
        wide = jnp.where(own[:count], jnp.broadcast_to(some, (count, LANES)), 0.0)
        lines.append(wide.sum(axis=0, keepdims=True))
    return jnp.concatenate(lines, axis=0)


def swapped_halves(upper: jax.Array, lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lower 16 bits of two arrays of words, and the upper ones, as words again."""
    change = ((upper >> 16) ^ lower) & 0xFFFF
    return upper ^ (change << 16), lower ^ change


def shuffled(number: jax.Array) -> jax.Array:
    """Which row of 16 stands where, once `swapped_halves` has met its two registers of 8."""
    group, inside = divided(number, SHUFFLED)
    word, half = divided(inside, 2)
    return group * SHUFFLED + half * 8 + word


def taken_apart(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Even rows and odd ones, both in the order of `shuffled`; of two bytes each."""
    width = rows.shape[1]
    words = pltpu.bitcast(rows, jnp.uint32).reshape(-1, 2, 8, width)
    even, odd = (
        pltpu.bitcast(x.reshape(-1, width), rows.dtype)
        for x in swapped_halves(words[:, 0], words[:, 1])
    )
    return even, odd
