"""Ragged attention that writes the cache, on TPUs: one kernel writes in place, others attend.

An item of the work list is a page that gets tokens. Where a slot of a page can be written alone,
the tokens are copied into it. Where slots share a tile, as they do when the heads come first, the
page is read, modified and written back. Several pages are in flight at once.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import settings
from ejkernel.kernels.common.mosaic_tpu.copies import AsyncCopy, for_each_chunk
from ejkernel.kernels.common.mosaic_tpu.memory import MEBIBYTE, core_of, vmem_bytes
from ejkernel.kernels.common.mosaic_tpu.vectors import ArrayOrRef
from ejkernel.kernels.common.paged import cache_axes, stored
from ejkernel.kernels.common.refs import Ref
from ejkernel.kernels.ragged_page_attention_v3 import pallas_tpu as attention
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import KERNEL_FEATURES
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.configs import cache_layout
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import (
    LAYOUTS,
    Inputs,
    Outputs,
    Spec,
    attention_call,
    reading_inputs,
)
from ejkernel.kernels.ragged_page_attention_v3_update.xla import Residuals
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_MOST_IN_FLIGHT = 8  # pages at once; a power of two
_VMEM_SHARE = 0.9  # of VMEM; the compiler needs the rest

CopyAction = Callable[[AsyncCopy], None]
ItemAction = Callable[[jax.Array], None]


def run_forward(
    inputs: Inputs, spec: Spec, params: PagedConfig, device: Device
) -> tuple[Outputs, Residuals]:
    """Outputs, and the residuals among them."""
    pages = write_tokens(inputs, spec, device)
    call = reading_inputs(inputs, spec, *pages)
    results, _ = attention.run_forward(call, spec, params, device=device)
    _, outputs = LAYOUTS[spec.kv_layout]
    return outputs(*results, *pages), Residuals(*results)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call."""
    call = attention_call(inputs, spec)
    if reason := attention.why_not(call, spec, device):
        return reason
    if 16 * max_page_writes(inputs, cache_layout(call, spec).page_size) > core_of(device).smem // 2:
        return "the list of this many pages to write does not fit into scalar memory"
    if not _update_fits(inputs, spec, device):
        return "a page to update does not fit into VMEM"
    return None


def heuristic(inputs: Inputs, spec: Spec, device: Device | None) -> PagedConfig:
    """The empty configuration: the attention chooses for the device."""
    return spec.config()


def candidates(inputs: Inputs, spec: Spec, device: Device) -> list[PagedConfig]:
    """The candidates of the attention."""
    return attention.candidates(attention_call(inputs, spec), spec, device)


class PageWrites(NamedTuple):
    """The pages that get tokens, [pages] each, and how many they are."""

    page: ArrayOrRef
    slot: ArrayOrRef  # the first that is written
    row: ArrayOrRef  # of the first token among all
    tokens: ArrayOrRef
    count: ArrayOrRef


def max_page_writes(inputs: Inputs, page_size: int) -> int:
    """The most pages that a call can write, whatever its lengths."""
    b, t = inputs.query.shape[:2]
    return min(b * t, b * t // page_size + 2 * inputs.kv_lens.size)


# An array, or its shape where a call is only judged.
Shaped = jax.Array | jax.ShapeDtypeStruct


class PageBuffers(NamedTuple):
    """VMEM for pages of [heads, slots, columns] that are updated, and for their tokens."""

    page: tuple[int, int, int]
    dtype: np.dtype

    @classmethod
    def of(cls, tokens: Shaped, pages: Shaped, page_size: int) -> "PageBuffers":
        return cls((tokens.shape[-2], page_size, tokens.shape[-1]), pages.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        heads, slots, columns = self.page
        return self.page, (slots, heads, columns)

    def bytes(self, in_flight: int) -> int:
        """The bytes of VMEM for pages in flight, and for the one that is updated."""
        each = sum(vmem_bytes(shape, self.dtype) for shape in self.shapes)
        return in_flight * each + 4 * vmem_bytes(self.page, jnp.float32)

    def most_in_flight(self, device: Device) -> int:
        """How many pages may be in flight, a power of two; 0 if not even one fits."""
        budget, count = _VMEM_SHARE * core_of(device).vmem, _MOST_IN_FLIGHT
        while count and self.bytes(count) > budget:
            count //= 2
        return count


def _update_fits(inputs: Inputs, spec: Spec, device: Device) -> bool:
    """Whether a page fits into VMEM, if pages have to be updated there."""
    layout = cache_layout(attention_call(inputs, spec), spec)
    if not layout.heads_first:
        return True
    pairs = ((inputs.key, inputs.key_pages), (inputs.value, inputs.value_pages))
    return all(PageBuffers.of(*pair, layout.page_size).most_in_flight(device) for pair in pairs)


def write_tokens(inputs: Inputs, spec: Spec, device: Device) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the cache with the new tokens."""
    layout = cache_layout(attention_call(inputs, spec), spec)
    writes = _page_writes(inputs, spec)
    pages = []
    for tokens, scale, given in (
        (inputs.key, inputs.k_scale, inputs.key_pages),
        (inputs.value, inputs.v_scale, inputs.value_pages),
    ):
        new = stored(tokens.reshape(-1, *tokens.shape[2:]), scale, given.dtype)
        array = jnp.swapaxes(given, 1, 2) if layout.transposed else given
        buffers = PageBuffers.of(tokens, given, layout.page_size)
        in_flight = max(1, buffers.most_in_flight(device)) if layout.heads_first else 0
        array = _write(writes, new, array, buffers, in_flight, layout.pages_second)
        pages.append(jnp.swapaxes(array, 1, 2) if layout.transposed else array)
    return pages[0], pages[1]


def _page_writes(inputs: Inputs, spec: Spec) -> PageWrites:
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
    index = jnp.arange(max_page_writes(inputs, slots), dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, ends.shape[0] - 1)
    number = (begin // slots)[sequence] + index - (ends - counts)[sequence]
    first = jnp.maximum(begin[sequence], number * slots)
    tokens = jnp.minimum(end[sequence], (number + 1) * slots) - first
    page = table[sequence, jnp.clip(number, 0, table.shape[1] - 1)]
    valid = (page >= 0) & (page < pages) & (index < ends[-1])
    return PageWrites(
        page=jnp.where(valid, page, 0),
        slot=first - number * slots,
        row=starts[sequence] + first - begin[sequence],
        tokens=jnp.where(valid, tokens, 0),
        count=ends[-1:],
    )


def _write(
    writes: PageWrites,
    new: jax.Array,
    array: jax.Array,
    buffers: PageBuffers,
    in_flight: int,
    pages_second: bool,
) -> jax.Array:
    """`array` with the tokens `new` [tokens, k, h]: pages updated, or copied if 0 are in flight."""
    scratch = [pltpu.SemaphoreType.DMA((_MOST_IN_FLIGHT,))]
    body, slots, needed = _copy_tokens, buffers.page[1], 0
    if in_flight:
        body, needed = _update_pages, buffers.bytes(in_flight)
        scratch = [pltpu.SemaphoreType.DMA((in_flight,))] * 2
        scratch += [pltpu.VMEM((in_flight, *shape), array.dtype) for shape in buffers.shapes]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        lambda *refs: body(PageWrites(*refs[:5]), refs[5], refs[7], refs[8:], slots, pages_second),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(writes),
            grid=(1,),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={len(writes) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=max(16 * MEBIBYTE, int(needed / _VMEM_SHARE)),
            disable_bounds_checks=True,  # pages and slots are within the cache
        ),
        interpret=settings.interpret(),
    )(*writes, new, array)


def _copy_tokens(
    writes: PageWrites,
    new: Ref,
    pages: Ref,
    scratch: tuple[Ref, ...],
    slots: int,
    pages_second: bool,
) -> None:
    """Copy every token into its slot."""
    (semaphores,) = scratch
    in_flight = semaphores.shape[0]

    def copy(item: jax.Array, act: CopyAction) -> None:
        semaphore = semaphores.at[item & (in_flight - 1)]

        def chunk(offset: jax.Array, size: int) -> None:
            source = new.at[pl.ds(writes.row[item] + offset, size)]
            target = pages.at[writes.page[item], pl.ds(writes.slot[item] + offset, size)]
            act(pltpu.make_async_copy(source, target, semaphore))

        for_each_chunk(writes.tokens[item], min(slots, new.shape[0]), chunk)

    end = lambda item: copy(item, _wait)
    _pipelined(writes, in_flight, lambda item: copy(item, _start), None, end)


def _update_pages(
    writes: PageWrites,
    new: Ref,
    pages: Ref,
    scratch: tuple[Ref, ...],
    slots: int,
    pages_second: bool,
) -> None:
    """Read every page, put its tokens in and write it back."""
    write_semaphores, read_semaphores, page_buffers, token_buffers = scratch
    in_flight = write_semaphores.shape[0]

    def page_copy(item: jax.Array, semaphores: Ref, write: bool = False) -> AsyncCopy:
        number, stage = writes.page[item], item & (in_flight - 1)
        in_hbm = pages.at[:, number] if pages_second else pages.at[number]
        in_vmem = page_buffers.at[stage]
        ends = (in_vmem, in_hbm) if write else (in_hbm, in_vmem)
        return pltpu.make_async_copy(*ends, semaphores.at[stage])

    def read(item: jax.Array, act: CopyAction) -> None:
        stage = item & (in_flight - 1)

        def chunk(offset: jax.Array, size: int) -> None:
            source = new.at[pl.ds(writes.row[item] + offset, size)]
            target = token_buffers.at[stage, pl.ds(writes.slot[item] + offset, size)]
            act(pltpu.make_async_copy(source, target, read_semaphores.at[stage]))

        @pl.when(writes.tokens[item] > 0)
        def _():
            act(page_copy(item, read_semaphores))
            for_each_chunk(writes.tokens[item], min(slots, new.shape[0]), chunk)

    def update(item: jax.Array) -> None:
        read(item, _wait)

        @pl.when(writes.tokens[item] > 0)
        def _():
            stage, first = item & (in_flight - 1), writes.slot[item]
            slot = jax.lax.broadcasted_iota(jnp.int32, (1, slots, 1), 1)
            is_new = (slot >= first) & (slot < first + writes.tokens[item])
            tokens = token_buffers[stage].astype(jnp.float32).swapaxes(0, 1)
            page = page_buffers[stage].astype(jnp.float32)
            page_buffers[stage] = jnp.where(is_new, tokens, page).astype(page_buffers.dtype)
            page_copy(item, write_semaphores, write=True).start()

    def end(item: jax.Array) -> None:
        write = lambda: page_copy(item, write_semaphores, write=True)
        pl.when(writes.tokens[item] > 0)(lambda: write().wait())

    _pipelined(writes, in_flight, lambda item: read(item, _start), update, end)


def _start(copy: AsyncCopy) -> None:
    copy.start()


def _wait(copy: AsyncCopy) -> None:
    copy.wait()


def _pipelined(
    writes: PageWrites,
    in_flight: int,
    begin: ItemAction,
    update: ItemAction | None,
    end: ItemAction,
) -> None:
    """`begin`, `update` and `end` of every item, each as soon as its stage is free."""
    count = writes.count[0]
    ahead = 0 if update is None else in_flight // 2

    @pl.loop(0, count + ahead)
    def _(item: jax.Array):
        pl.when((item >= in_flight) & (item < count))(lambda: end(item - in_flight))
        pl.when(item < count)(lambda: begin(item))
        if update is not None:
            pl.when(item >= ahead)(functools.partial(update, item - ahead))

    @pl.loop(jnp.maximum(count - in_flight, 0), count)
    def _(item: jax.Array):
        end(item)


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=KERNEL_FEATURES,
        why_not=why_not,
        heuristic=heuristic,
        candidates=candidates,
    ),
)
