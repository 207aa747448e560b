"""Pages of a KV cache: read, added to and written in place.

The axes of a cache are letters: `p` pages, `c` slots of a page, `k` key heads, `h` head dim, and
`w` where keys and values share one array. Only the pages that are asked for are ever moved into
another order; the cache itself never is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYOUTS = {"NHD": "pckh", "HND": "pkch", "HNPD": "kpch"}


def cache_axes(layout: str, combined: bool = False) -> str:
    """The axes of a cache in this layout; combined, the pair's axis follows that of the heads."""
    axes = LAYOUTS[layout]
    return axes.replace("k", "kw") if combined else axes


def read_pages(cache: jax.Array, ids: jax.Array, axes: str, part: int = 0) -> jax.Array:
    """The pages `ids`, all of them in range, one after the other: [k, len(ids) * c, h]."""
    pages = jnp.take(cache, ids, axis=axes.index("p"), mode="clip")
    if "w" in axes:
        pages = lax.index_in_dim(pages, part, axes.index("w"), keepdims=False)
        axes = axes.replace("w", "")
    pages = pages.transpose([axes.index(letter) for letter in "kpch"])
    return pages.reshape(pages.shape[0], -1, pages.shape[-1])


def add_pages(cache: jax.Array, ids: jax.Array, parts: list[jax.Array], axes: str) -> jax.Array:
    """`cache` with blocks [k, len(ids) * c, h] added to the pages `ids`; ids out of range are left.

    One block, or for a combined cache one for the keys and one for the values.
    """
    page_size = cache.shape[axes.index("c")]
    order = "kpch"
    blocks = [x.reshape(x.shape[0], -1, page_size, x.shape[-1]) for x in parts]
    if "w" in axes:
        block, order = jnp.stack(blocks), "w" + order
    else:
        (block,) = blocks
    block = block.transpose([order.index(letter) for letter in axes])
    return _at(cache, axes, {"p": ids}).add(block.astype(cache.dtype), mode="drop")


def write_tokens(
    cache: jax.Array, page: jax.Array, slot: jax.Array, tokens: jax.Array, axes: str
) -> jax.Array:
    """`cache` with `tokens` [t, k, h] at (page, slot); a page out of range is left unwritten."""
    return _at(cache, axes, {"p": page, "c": slot}).set(_by_token(tokens, axes), mode="drop")


def read_tokens(cache: jax.Array, page: jax.Array, slot: jax.Array, axes: str) -> jax.Array:
    """What lies at (page, slot), [t, k, h]; 0 for a page out of range."""
    return _by_token(_at(cache, axes, {"p": page, "c": slot}).get(mode="fill", fill_value=0), axes)


def _at(cache: jax.Array, axes: str, index: dict[str, jax.Array]) -> Any:
    return cache.at[tuple(index.get(letter, slice(None)) for letter in axes)]


def _by_token(tokens: jax.Array, axes: str) -> jax.Array:
    """[t, k, h] as indexing sees it, and back: the heads come first where they do in the cache."""
    return jnp.swapaxes(tokens, 0, 1) if axes.startswith("k") else tokens


def stored(x: jax.Array, scale: jax.Array | None, dtype: np.dtype) -> jax.Array:
    """New keys or values [t, k, h] as the cache holds them: divided by the scale, then cast.

    Integers are rounded to the nearest; integers and 8-bit floats saturate.
    """
    if scale is not None:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x = x.astype(wide) / scale.astype(wide)[:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(x), limits.min, limits.max).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def operand_dtype(query: np.dtype, cache: np.dtype) -> np.dtype:
    """The dtype in which queries meet cached keys and values: wide enough for both."""
    narrow = jnp.issubdtype(cache, jnp.integer) or jnp.dtype(cache).itemsize == 1
    return query if narrow else jnp.promote_types(query, cache)
