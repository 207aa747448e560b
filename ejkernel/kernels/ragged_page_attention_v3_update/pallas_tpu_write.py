"""Writes new tokens into the pages of a cache on TPU, where it lies: its arrays are the results.

One item of the list is one page that gets tokens. Where a slot of a page can be written alone, the
tokens are copied there. Where slots share a tile, as they do when the heads come first, the page
is brought in, mended and brought back; several are on their way at once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import settings
from ejkernel.kernels.common.paged import cache_axes, stored
from ejkernel.kernels.common.tpu_memory import MEBIBYTE, vmem_bytes
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu_cache import cache_of
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu_copies import in_pieces
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import Inputs, Spec, reading_inputs

_UNDER_WAY = 8  # pages at once; a power of two
_Act = Callable[[Any], None]


class Places(NamedTuple):
    """The pages that get tokens, [pages] each, and how many they are."""

    page: jax.Array
    slot: jax.Array  # the first that is written
    row: jax.Array  # of the first token among all
    tokens: jax.Array
    count: jax.Array


def most_places(inputs: Inputs, slots: int) -> int:
    """How many pages can get tokens."""
    b, t = inputs.query.shape[:2]
    return min(b * t, b * t // slots + 2 * inputs.kv_lens.size)


def written(inputs: Inputs, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the cache with the new tokens."""
    cache = cache_of(reading_inputs(inputs, spec, inputs.key_pages, inputs.value_pages), spec)
    places = _places(inputs, spec)
    pages = []
    for tokens, scale, given in (
        (inputs.key, inputs.k_scale, inputs.key_pages),
        (inputs.value, inputs.v_scale, inputs.value_pages),
    ):
        new = stored(tokens.reshape(-1, *tokens.shape[2:]), scale, given.dtype)
        array = jnp.swapaxes(given, 1, 2) if cache.swapped else given
        array = _write(places, new, array, cache.slots, cache.heads_first, cache.strided)
        pages.append(jnp.swapaxes(array, 1, 2) if cache.swapped else array)
    return pages[0], pages[1]


def _places(inputs: Inputs, spec: Spec) -> Places:
    axes = cache_axes(spec.kv_layout)
    pages, slots = (inputs.key_pages.shape[axes.index(letter)] for letter in "pc")
    b, t = inputs.query.shape[:2]
    table = jnp.asarray(inputs.page_indices)
    table = table.reshape(-1, table.shape[-1])
    starts = jnp.asarray(inputs.query_starts) + t * jnp.arange(b, dtype=jnp.int32)[:, None]
    lengths, kv_lengths = jnp.clip(inputs.query_lens, 0, t), jnp.asarray(inputs.kv_lens)
    starts, lengths, kv_lengths = (x.reshape(-1) for x in (starts, lengths, kv_lengths))
    # The positions that are written: not before the first, nor past the table.
    begin = jnp.maximum(kv_lengths - lengths, 0)
    end = jnp.minimum(kv_lengths, table.shape[1] * slots)
    starts = starts + begin - (kv_lengths - lengths)

    counts = jnp.where(end > begin, (end - 1) // slots - begin // slots + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(most_places(inputs, slots), dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, ends.shape[0] - 1)
    number = (begin // slots)[sequence] + index - (ends - counts)[sequence]
    first = jnp.maximum(begin[sequence], number * slots)
    tokens = jnp.minimum(end[sequence], (number + 1) * slots) - first
    page = table[sequence, jnp.clip(number, 0, table.shape[1] - 1)]
    there = (page >= 0) & (page < pages) & (index < ends[-1])
    return Places(
        page=jnp.where(there, page, 0),
        slot=first - number * slots,
        row=starts[sequence] + first - begin[sequence],
        tokens=jnp.where(there, tokens, 0),
        count=ends[-1:],
    )


def _write(
    places: Places, new: jax.Array, array: jax.Array, slots: int, heads_first: bool, strided: bool
) -> jax.Array:
    """`array` with the tokens `new` [tokens, k, h] in their places."""
    body, memory, needed = _copies, [], 0
    if heads_first:
        body = _mends
        page = (new.shape[1], slots, new.shape[2])
        shapes = [(_UNDER_WAY, *page), (_UNDER_WAY, slots, *new.shape[1:])]
        memory = [pltpu.VMEM(shape, array.dtype) for shape in shapes]
        memory.append(pltpu.SemaphoreType.DMA((_UNDER_WAY,)))
        needed = sum(vmem_bytes(x, array.dtype) for x in shapes) + 4 * vmem_bytes(page, jnp.float32)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        lambda *refs: body(Places(*refs[:5]), refs[5], refs[7], refs[8:], slots, strided),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(places),
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA((_UNDER_WAY,)), *memory],
        ),
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={len(places) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=max(16 * MEBIBYTE, 2 * needed),
            disable_bounds_checks=True,  # pages and slots are within the cache
        ),
        interpret=settings.interpret(),
    )(*places, new, array)


def _copies(places: Places, new: Any, pages: Any, scratch: Any, slots: int, strided: bool) -> None:
    """Every token goes where it belongs."""
    (sent,) = scratch

    def each(item: Any, act: Any) -> None:
        semaphore = sent.at[item & (_UNDER_WAY - 1)]

        def one(skipped: Any, piece: int) -> None:
            source = new.at[pl.ds(places.row[item] + skipped, piece)]
            target = pages.at[places.page[item], pl.ds(places.slot[item] + skipped, piece)]
            act(pltpu.make_async_copy(source, target, semaphore))

        in_pieces(places.tokens[item], min(slots, new.shape[0]), one)

    _pipelined(places, lambda item: each(item, _start), None, lambda item: each(item, _wait))


def _mends(places: Places, new: Any, pages: Any, scratch: Any, slots: int, strided: bool) -> None:
    """Every page is brought in, gets its tokens and goes back."""
    sent, page_kept, tokens_kept, arrived = scratch

    def page_copy(item: Any, semaphores: Any, back: bool = False) -> Any:
        number, place = places.page[item], item & (_UNDER_WAY - 1)
        there = pages.at[:, number] if strided else pages.at[number]
        ends = (page_kept.at[place], there) if back else (there, page_kept.at[place])
        return pltpu.make_async_copy(*ends, semaphores.at[place])

    def brought(item: Any, act: Any) -> None:
        place = item & (_UNDER_WAY - 1)

        def one(skipped: Any, piece: int) -> None:
            source = new.at[pl.ds(places.row[item] + skipped, piece)]
            target = tokens_kept.at[place, pl.ds(places.slot[item] + skipped, piece)]
            act(pltpu.make_async_copy(source, target, arrived.at[place]))

        @pl.when(places.tokens[item] > 0)
        def _():
            act(page_copy(item, arrived))
            in_pieces(places.tokens[item], min(slots, new.shape[0]), one)

    def mend(item: Any) -> None:
        brought(item, _wait)

        @pl.when(places.tokens[item] > 0)
        def _():
            place, first = item & (_UNDER_WAY - 1), places.slot[item]
            slot = jax.lax.broadcasted_iota(jnp.int32, (1, slots, 1), 1)
            fresh = (slot >= first) & (slot < first + places.tokens[item])
            tokens = tokens_kept[place].astype(jnp.float32).swapaxes(0, 1)
            page = page_kept[place].astype(jnp.float32)
            page_kept[place] = jnp.where(fresh, tokens, page).astype(page_kept.dtype)
            page_copy(item, sent, back=True).start()

    def gone(item: Any) -> None:
        pl.when(places.tokens[item] > 0)(lambda: page_copy(item, sent, back=True).wait())

    _pipelined(places, lambda item: brought(item, _start), mend, gone)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _pipelined(places: Places, begin: _Act, mend: _Act | None, end: _Act) -> None:
    """`begin`, `mend` and `end` of every item, each as soon as its place in the ring allows."""
    count = places.count[0]
    ahead = 0 if mend is None else _UNDER_WAY // 2

    @pl.loop(0, count + ahead)
    def _(item):
        pl.when((item >= _UNDER_WAY) & (item < count))(lambda: end(item - _UNDER_WAY))
        pl.when(item < count)(lambda: begin(item))
        if mend is not None:
            pl.when(item >= ahead)(functools.partial(mend, item - ahead))

    @pl.loop(jnp.maximum(count - _UNDER_WAY, 0), count)
    def _(item):
        end(item)
