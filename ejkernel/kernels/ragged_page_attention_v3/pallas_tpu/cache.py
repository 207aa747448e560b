"""How a TPU kernel sees the cache: pages as rows of keys and values, without moving the cache.

XLA keeps an array on a TPU in tiles of its last two axes, and where few heads would fill a tile
badly it puts the slots of a page there instead. A page is taken as it lies, so that a kernel
copies whole pages from the caller's own array:

    rows of a page    (slot, head), or (head, slot) where the heads come first
    combined          the heads are keys and values in turn
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.paged import cache_axes
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec


class Cache(NamedTuple):
    """What is static about a cache as a kernel sees it, arrays of [pages, *page, dim].

    Attributes:
        page: the axes of a page: one of rows, or two.
        pages: how many there are.
        slots: tokens of a page.
        heads: key heads.
        dims: head dims of keys and values.
        dtype: of both.
        combined: whether keys and values are one array.
        heads_first: whether the rows of a page are (head, slot).
        swapped: whether they are not as the caller wrote them.
        strided: whether the pages are the second axis of the arrays.
    """

    page: tuple[int, ...]
    pages: int
    slots: int
    heads: int
    dims: tuple[int, int]
    dtype: Any
    combined: bool
    heads_first: bool
    swapped: bool
    strided: bool

    @property
    def arrays(self) -> int:
        """How many arrays there are."""
        return 1 if self.combined else 2

    @property
    def parts(self) -> int:
        """Heads of a page for each key head: one, or two where it is combined."""
        return 2 if self.combined else 1

    @property
    def rows(self) -> int:
        """Rows of a page."""
        return self.slots * self.heads * self.parts

    @property
    def page_in_words(self) -> bool:
        """Whether two heads of a token, of two bytes each, share a word of 32 bits."""
        even = self.heads * self.parts % 2 == 0
        return len(self.page) == 1 and not self.heads_first and even


def cache_of(inputs: Inputs, spec: Spec) -> Cache:
    """The cache of a call, of whose arrays only the shapes are asked."""
    combined = inputs.value_pages is None
    axes = cache_axes(spec.kv_layout, combined)
    sizes = dict(zip(axes, inputs.key_pages.shape, strict=True))
    heads, slots = sizes["k"] * (2 if combined else 1), sizes["c"]
    values = inputs.key_pages if inputs.value_pages is None else inputs.value_pages
    dims = (sizes["h"], values.shape[-1])
    heads_first = spec.kv_layout != "NHD"
    strided = spec.kv_layout == "HNPD"
    swapped = not heads_first and not _fills_tiles(heads, inputs.key_pages.dtype)
    heads_first |= swapped
    page = (heads, slots) if heads_first else (slots, heads)
    if not strided and all(_same_as_flat(page, dim) for dim in dims):
        page = (heads * slots,)
    return Cache(
        page=page,
        pages=sizes["p"],
        slots=slots,
        heads=sizes["k"],
        dims=dims,
        dtype=inputs.key_pages.dtype,
        combined=combined,
        heads_first=heads_first,
        swapped=swapped,
        strided=strided,
    )


def arrays_of(inputs: Inputs, spec: Spec) -> list[jax.Array]:
    """The arrays of a call as `cache_of` describes them."""
    cache = cache_of(inputs, spec)
    axes = cache_axes(spec.kv_layout, cache.combined)
    given = [x for x in (inputs.key_pages, inputs.value_pages) if x is not None]
    arrays = [_with_heads_together(x, axes) for x in given]
    if cache.swapped:
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    if len(cache.page) == 1:
        arrays = [x.reshape(x.shape[0], -1, x.shape[-1]) for x in arrays]
    return arrays


def _with_heads_together(x: jax.Array, axes: str) -> jax.Array:
    """Keys and values of a combined cache as heads in turn: one axis where there were two."""
    if "w" not in axes:
        return x
    at = axes.index("w")
    return x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])


def _fills_tiles(rows: int, dtype: Any) -> bool:
    """Whether XLA keeps an array with so many rows as it is written."""
    packed = 4 // jnp.dtype(dtype).itemsize
    return rows % 8 == 0 or rows in (x for x in (1, 2, 4) if x >= packed)


def _same_as_flat(page: tuple[int, int], width: int) -> bool:
    """Whether a page in tiles is the same bytes as its rows in tiles."""
    return width <= 128 or page[1] % 8 == 0 or page[0] == 1
