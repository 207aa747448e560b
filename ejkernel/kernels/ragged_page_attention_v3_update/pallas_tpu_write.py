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
from ejkernel.kernels.common.mosaic_tpu.memory import MEBIBYTE, core_of, vmem_bytes
from ejkernel.kernels.common.paged import cache_axes, stored
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.cache import cache_of
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.copies import in_pieces
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import Inputs, Spec, reading_inputs
from ejkernel.ops.platform import Device, device_of

_MOST_UNDER_WAY = 8  # pages at once; a power of two
_SHARE = 0.9  # of VMEM; the compiler needs some for itself
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


class Mending(NamedTuple):
    """Memory for mending pages: of `heads`, `slots` and columns, and their tokens as they come."""

    page: tuple[int, int, int]
    dtype: Any

    @classmethod
    def of(cls, tokens: Any, pages: Any, slots: int) -> "Mending":
        return cls((tokens.shape[-2], slots, tokens.shape[-1]), pages.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        heads, slots, columns = self.page
        return self.page, (slots, heads, columns)

    def bytes(self, under_way: int) -> int:
        """What so many pages under way take in VMEM, and the one that is mended."""
        each = sum(vmem_bytes(shape, self.dtype) for shape in self.shapes)
        return under_way * each + 4 * vmem_bytes(self.page, jnp.float32)

    def most(self, device: Device) -> int:
        """How many pages may be under way, a power of two; 0 if there is no room for one."""
        room, count = _SHARE * core_of(device).vmem, _MOST_UNDER_WAY
        while count and self.bytes(count) > room:
            count //= 2
        return count


def has_room(inputs: Inputs, spec: Spec, device: Device) -> bool:
    """Whether a page can be mended, if pages have to be."""
    cache = cache_of(reading_inputs(inputs, spec, inputs.key_pages, inputs.value_pages), spec)
    if not cache.heads_first:
        return True
    pairs = ((inputs.key, inputs.key_pages), (inputs.value, inputs.value_pages))
    return all(Mending.of(*pair, cache.slots).most(device) for pair in pairs)


def written(inputs: Inputs, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the cache with the new tokens."""
    cache = cache_of(reading_inputs(inputs, spec, inputs.key_pages, inputs.value_pages), spec)
    places, device = _places(inputs, spec), device_of(jax.tree.leaves(inputs))
    pages = []
    for tokens, scale, given in (
        (inputs.key, inputs.k_scale, inputs.key_pages),
        (inputs.value, inputs.v_scale, inputs.value_pages),
    ):
        new = stored(tokens.reshape(-1, *tokens.shape[2:]), scale, given.dtype)
        array = jnp.swapaxes(given, 1, 2) if cache.swapped else given
        page = Mending.of(tokens, given, cache.slots)
        under_way = max(1, page.most(device)) if cache.heads_first else 0
        array = _write(places, new, array, page, under_way, cache.strided)
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
    places: Places, new: jax.Array, array: jax.Array, page: Mending, under_way: int, strided: bool
) -> jax.Array:
    """`array` with the tokens `new` [tokens, k, h]: mended, or copied if 0 are under way."""
    memory = [pltpu.SemaphoreType.DMA((_MOST_UNDER_WAY,))]
    body, slots, needed = _copies, page.page[1], 0
    if under_way:
        body, needed = _mends, page.bytes(under_way)
        memory = [pltpu.SemaphoreType.DMA((under_way,))] * 2
        memory += [pltpu.VMEM((under_way, *shape), array.dtype) for shape in page.shapes]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        lambda *refs: body(Places(*refs[:5]), refs[5], refs[7], refs[8:], slots, strided),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(places),
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=memory,
        ),
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={len(places) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=max(16 * MEBIBYTE, int(needed / _SHARE)),
            disable_bounds_checks=True,  # pages and slots are within the cache
        ),
        interpret=settings.interpret(),
    )(*places, new, array)


def _copies(places: Places, new: Any, pages: Any, scratch: Any, slots: int, strided: bool) -> None:
    """Every token goes where it belongs."""
    (sent,) = scratch
    under_way = sent.shape[0]

    def each(item: Any, act: Any) -> None:
        semaphore = sent.at[item & (under_way - 1)]

        def one(skipped: Any, piece: int) -> None:
            source = new.at[pl.ds(places.row[item] + skipped, piece)]
            target = pages.at[places.page[item], pl.ds(places.slot[item] + skipped, piece)]
            act(pltpu.make_async_copy(source, target, semaphore))

        in_pieces(places.tokens[item], min(slots, new.shape[0]), one)

    end = lambda item: each(item, _wait)
    _pipelined(places, under_way, lambda item: each(item, _start), None, end)


def _mends(places: Places, new: Any, pages: Any, scratch: Any, slots: int, strided: bool) -> None:
    """Every page is brought in, gets its tokens and goes back."""
    sent, arrived, page_kept, tokens_kept = scratch
    under_way = sent.shape[0]

    def page_copy(item: Any, semaphores: Any, back: bool = False) -> Any:
        number, place = places.page[item], item & (under_way - 1)
        there = pages.at[:, number] if strided else pages.at[number]
        ends = (page_kept.at[place], there) if back else (there, page_kept.at[place])
        return pltpu.make_async_copy(*ends, semaphores.at[place])

    def brought(item: Any, act: Any) -> None:
        place = item & (under_way - 1)

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
            place, first = item & (under_way - 1), places.slot[item]
            slot = jax.lax.broadcasted_iota(jnp.int32, (1, slots, 1), 1)
            fresh = (slot >= first) & (slot < first + places.tokens[item])
            tokens = tokens_kept[place].astype(jnp.float32).swapaxes(0, 1)
            page = page_kept[place].astype(jnp.float32)
            page_kept[place] = jnp.where(fresh, tokens, page).astype(page_kept.dtype)
            page_copy(item, sent, back=True).start()

    def gone(item: Any) -> None:
        pl.when(places.tokens[item] > 0)(lambda: page_copy(item, sent, back=True).wait())

    _pipelined(places, under_way, lambda item: brought(item, _start), mend, gone)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _pipelined(places: Places, under_way: int, begin: _Act, mend: _Act | None, end: _Act) -> None:
    """`begin`, `mend` and `end` of every item, each as soon as its place in the ring allows."""
    count = places.count[0]
    ahead = 0 if mend is None else under_way // 2

    @pl.loop(0, count + ahead)
    def _(item):
        pl.when((item >= under_way) & (item < count))(lambda: end(item - under_way))
        pl.when(item < count)(lambda: begin(item))
        if mend is not None:
            pl.when(item >= ahead)(functools.partial(mend, item - ahead))

    @pl.loop(jnp.maximum(count - under_way, 0), count)
    def _(item):
        end(item)
