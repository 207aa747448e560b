"""The figures of attention over pages: time and memory follow the lengths, not the table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.cli import measure
from ejkernel.cli.figures import Figure
from ejkernel.modules import page_attention

_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_SIZE, _TABLE = 8, 2, 64, 16, 512


def _arrays(batch: int) -> tuple[jax.Array, ...]:
    """Query, keys, values and a table in which every sequence has pages of its own, in no order."""
    pages = batch * _TABLE
    keys = jax.random.split(jax.random.key(0), 3)
    cache = (pages, _PAGE_SIZE, _KV_HEADS, _HEAD_DIM)
    table = np.random.default_rng(0).permutation(pages).reshape(batch, _TABLE)
    return (
        jax.random.normal(keys[0], (batch, 1, _HEADS, _HEAD_DIM)),
        jax.random.normal(keys[1], cache),
        jax.random.normal(keys[2], cache),
        jnp.asarray(table, jnp.int32),
    )


@functools.cache
def _compiled():
    return jax.jit(page_attention)


def _run(arrays: tuple[jax.Array, ...], lengths: np.ndarray) -> jax.Array:
    query, keys, values, table = arrays
    return _compiled()(query, keys, values, jnp.asarray(lengths, jnp.int32), table)


def _check(out: jax.Array, arrays: tuple[jax.Array, ...], lengths: np.ndarray) -> None:
    """Compare some sequences with attention written out in float64."""
    query, keys, values, table = (np.asarray(x) for x in arrays)
    for row in range(0, len(lengths), max(1, len(lengths) // 8)):
        length = int(lengths[row])
        key, value = (
            np.repeat(
                x[table[row]].reshape(-1, _KV_HEADS, _HEAD_DIM)[:length].astype(np.float64),
                _HEADS // _KV_HEADS,
                axis=1,
            )
            for x in (keys, values)
        )
        logits = np.einsum("nh,snh->ns", query[row, 0].astype(np.float64), key) * _HEAD_DIM**-0.5
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        expected = np.einsum("ns,snh->nh", weights / weights.sum(-1, keepdims=True), value)
        measure.check_close(out[row, 0], expected, ulps=64)


def _share_of_time(batch: int, few: np.ndarray) -> float:
    """Time of these lengths, as a share of the time with every table full."""
    arrays = _arrays(batch)
    full = np.full(batch, _TABLE * _PAGE_SIZE)
    for lengths in (few, full):
        _check(_run(arrays, lengths), arrays, lengths)
    mine, whole = measure.interleaved(
        lambda: _run(arrays, few), lambda: _run(arrays, full), rounds=10
    )
    return mine / whole


def short_sequences() -> float:
    """8 pages in use of 512 for each sequence, against all of them."""
    return _share_of_time(8, np.full(8, 8 * _PAGE_SIZE))


def uneven_sequences() -> float:
    """One sequence of 8192 tokens and 63 of 128, against 64 of 8192."""
    return _share_of_time(64, np.array([_TABLE * _PAGE_SIZE, *[128] * 63]))


def cache_memory() -> float:
    """Growth of the temporary memory when the cache has 16 times as many pages."""

    def temporary(pages: int) -> int:
        shape = jax.ShapeDtypeStruct
        cache = shape((pages, _PAGE_SIZE, _KV_HEADS, _HEAD_DIM), jnp.float32)
        arguments = (
            shape((8, 1, _HEADS, _HEAD_DIM), jnp.float32),
            cache,
            cache,
            shape((8,), jnp.int32),
            shape((8, _TABLE), jnp.int32),
        )
        return measure.memory(_compiled().lower(*arguments).compile()).temporary

    return temporary(65536) / temporary(4096)


_WHAT = "`page_attention`, 8 query and 2 KV heads of 64, pages of 16, float32"
FIGURES = (
    Figure(
        "page_short",
        f"{_WHAT}: 8 sequences that use 8 of 512 pages each, time relative to all 512 in use",
        "x",
        "lower",
        0.1,
        short_sequences,
        operation="page_attention",
        mask=(),
    ),
    Figure(
        "page_uneven",
        f"{_WHAT}: one sequence of 8192 tokens and 63 of 128, time relative to 64 of 8192",
        "x",
        "lower",
        0.1,
        uneven_sequences,
        operation="page_attention",
        mask=(),
    ),
    Figure(
        "page_memory",
        f"{_WHAT}: temporary memory with a cache of 65536 pages, relative to 4096 pages",
        "x",
        "lower",
        1,
        cache_memory,
        operation="page_attention",
        mask=(),
    ),
)
