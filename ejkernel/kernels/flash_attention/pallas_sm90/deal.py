"""Which block of threads does which unit of work."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# What stays in the cache of an H100 or H200 while other data passes through: a part of its half.
_CACHE_BYTES = 16 * 2**20
# How many numbers are compared rather than sorted.
FEW = 2**25


class Units(NamedTuple):
    """The units of work of a pass: how many there are, and what they share.

    Attributes:
        batch: batch rows.
        heads: heads that have units of their own.
        group: query heads that one unit serves.
        pairs: batch rows times key heads; the units of one read the same arrays.
        shared_bytes: how large these are.
        workers: blocks of threads among which the units are dealt.
    """

    batch: int
    heads: int
    group: int
    pairs: int
    shared_bytes: int
    workers: int


def dealt(lengths: jax.Array, units: Units) -> jax.Array:
    """Which unit each worker does in each lap, [laps, workers]; -1 for none.

    Section by section, so that what the units of a section read stays in the cache. In a section
    the longest are dealt first, there and back again: who got the longest of one lap gets the
    shortest of the next. Every two sections begin with another worker, and the second of them goes
    the other way round, so that what is still uneven, in the same way in all of them, comes to all.
    """
    sections = _sections(lengths.size, units)
    size = lengths.size // sections
    order = sorting(-lengths.reshape(sections, size))
    order = order + size * jnp.arange(sections, dtype=jnp.int32)[:, None]
    place = _places(size, sections, units.workers)
    padding = ((0, 0), (0, place.shape[1] * units.workers - size))
    padded = jnp.pad(order, padding, constant_values=-1).reshape(-1)
    section = np.arange(sections)[:, None, None]
    return padded[np.concatenate(section * place[0].size + place)]


def _places(size: int, sections: int, workers: int) -> np.ndarray:
    """Of so many units, the longest first, which each worker does; [sections, laps, workers]."""
    laps = -(-size // workers)
    place = np.arange(laps * workers).reshape(laps, workers)
    place[1::2] = place[1::2, ::-1]
    turn = lambda i: np.roll(place, i // 2 * 2 * workers // sections, axis=1)
    return np.stack([turn(i)[:, :: -1 if i % 2 else 1] for i in range(sections)])


def dealt_alike(lengths: jax.Array, about: jax.Array, units: Units) -> tuple[jax.Array, jax.Array]:
    """The same where all rows and heads have the same lines, and a number about each of the units.

    From the length of each line and the number about it, in two small kernels on a GPU. Dealt is
    the line that comes so and so far back when they are sorted, for each head of a section.
    """
    (lines,) = lengths.shape
    heads = units.batch * units.heads
    sections = _sections(heads * lines, units)
    heads_at_once = heads // sections
    place = _places(heads_at_once * lines, sections, units.workers)
    # None for the places behind the last: then no line is found.
    rank = (place // heads_at_once).reshape(-1, units.workers, 1)
    head = np.arange(sections)[:, None, None] * heads_at_once + place % heads_at_once
    begin = head.astype(np.int32).reshape(rank.shape) * lines
    line = jnp.arange(lines, dtype=jnp.int32)
    mine, other = lengths[:, None], lengths
    first = (other > mine) | ((other == mine) & (line < line[:, None]))
    found = first.sum(-1, dtype=jnp.int32) == rank  # [laps, workers, lines]
    order = jnp.where(found, begin + line, -1).max(-1)
    return order, jnp.where(found, about, 0).max(-1)


def _sections(count: int, units: Units) -> int:
    """In how many sections to do so many units: few enough that each keeps all workers busy."""
    fit, best = max(1, _CACHE_BYTES // units.shared_bytes), 1
    for sections in range(1, units.pairs + 1):
        if 2 * count < 3 * units.workers * sections:
            break
        if units.pairs % sections == 0:
            best = sections
            if units.pairs // sections <= fit:
                break
    return best


def sorting(numbers: jax.Array) -> jax.Array:
    """What sorts numbers along the last axis, equal ones in the order in which they stand.

    Few are counted and not sorted: two small kernels on a GPU, where a sort takes a dozen. How many
    others come first says where a number goes; then each place looks for the one that goes there.
    """
    size = numbers.shape[-1]
    if numbers.size * size > FEW:
        return jnp.argsort(numbers, axis=-1, stable=True).astype(jnp.int32)
    place = jnp.arange(size, dtype=jnp.int32)
    other, one = numbers[..., None, :], numbers[..., :, None]
    first = (other < one) | ((other == one) & (place < place[:, None]))
    goes = first.sum(-1, dtype=jnp.int32)
    here = goes[..., None, :] == place[:, None]
    return jnp.where(here, place, 0).sum(-1, dtype=jnp.int32)
