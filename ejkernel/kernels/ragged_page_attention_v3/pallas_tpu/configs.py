"""The layout of the cache, the sizes of a kernel's tiles and blocks, its memory and its arrays.

XLA stores an array on a TPU in tiles of its last two axes. Where few heads would fill a tile badly
it stores the slots of a page along that axis instead. The kernels read pages in the stored order,
so that they copy whole pages out of the caller's own array:

    rows of a page    (slot, head), or (head, slot) where the heads come first
    combined          keys and values alternate along the heads
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.scipy.special import logsumexp
from jax.typing import DTypeLike

from ejkernel.kernels.common.integers import next_power_of_two
from ejkernel.kernels.common.mosaic_tpu.memory import (
    MEBIBYTE,
    VMEM_SHARE,
    core_of,
    vmem_bytes,
)
from ejkernel.kernels.common.mosaic_tpu.vectors import LANES, ArrayOrRef, VmemRef
from ejkernel.kernels.common.paged import cache_axes, operand_dtype
from ejkernel.kernels.common.refs import Ref
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.schedule import TABLE_CHUNK
from ejkernel.ops.platform import Device

TABLE_LEAD = 2  # steps by which the copies of the page table precede those of the pages

# Bytes of keys and values of a packed block: the copies of a few such blocks hide their latency.
_BLOCK_BYTES, _MAX_COLUMNS = 2 * MEBIBYTE, 4096
_POSITIONS = 512  # of a block whose keys and values are sorted by head
_ROWS = 512  # queries times heads on one key head, where there are many queries
_PACKED_ROWS = 64  # most rows that are multiplied with the keys of all heads at once
_STAGES = 4  # blocks in VMEM

# Chips whose two cores share one memory and one program, and chips with such a name and one core.
_TWO_CORES = ("TPU v4", "TPU v5p", "TPU v5")
_ONE_CORE = ("TPU v4 lite", "TPU v5 lite", "TPU v5e")


class CacheLayout(NamedTuple):
    """The cache in the order that a kernel reads, arrays of [num_pages, *page_shape, head_dim].

    Attributes:
        page_shape: the axes of a page: one of rows, or two.
        num_pages: pages of the cache.
        page_size: tokens of a page.
        kv_heads: key heads.
        head_dims: head dims of keys and values.
        dtype: of both.
        combined: whether keys and values are one array.
        heads_first: whether the rows of a page are (head, slot).
        transposed: whether that order is not the caller's.
        pages_second: whether the pages are the second axis of the arrays.
    """

    page_shape: tuple[int, ...]
    num_pages: int
    page_size: int
    kv_heads: int
    head_dims: tuple[int, int]
    dtype: np.dtype
    combined: bool
    heads_first: bool
    transposed: bool
    pages_second: bool

    @property
    def num_arrays(self) -> int:
        """Arrays of the cache."""
        return 1 if self.combined else 2

    @property
    def rows_per_head(self) -> int:
        """Rows of a page for each slot and key head: one, or two where it is combined."""
        return 2 if self.combined else 1

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return self.page_size * self.kv_heads * self.rows_per_head

    @property
    def heads_share_words(self) -> bool:
        """Whether two heads of a token, of two bytes each, share a word of 32 bits."""
        even = self.kv_heads * self.rows_per_head % 2 == 0
        return len(self.page_shape) == 1 and not self.heads_first and even


def cache_layout(inputs: Inputs, spec: Spec) -> CacheLayout:
    """The layout of the cache of a call, from the shapes of its arrays."""
    combined = inputs.value_pages is None
    axes = cache_axes(spec.kv_layout, combined)
    sizes = dict(zip(axes, inputs.key_pages.shape, strict=True))
    heads, slots = sizes["k"] * (2 if combined else 1), sizes["c"]
    values = inputs.key_pages if inputs.value_pages is None else inputs.value_pages
    dims = (sizes["h"], values.shape[-1])
    heads_first = spec.kv_layout != "NHD"
    pages_second = spec.kv_layout == "HNPD"
    transposed = not heads_first and not _fills_tiles(heads, inputs.key_pages.dtype)
    heads_first |= transposed
    page = (heads, slots) if heads_first else (slots, heads)
    if not pages_second and all(_same_as_flat(page, dim) for dim in dims):
        page = (heads * slots,)
    return CacheLayout(
        page_shape=page,
        num_pages=sizes["p"],
        page_size=slots,
        kv_heads=sizes["k"],
        head_dims=dims,
        dtype=inputs.key_pages.dtype,
        combined=combined,
        heads_first=heads_first,
        transposed=transposed,
        pages_second=pages_second,
    )


def cache_arrays(inputs: Inputs, spec: Spec) -> list[jax.Array]:
    """The arrays of the cache of a call in the order of its `cache_layout`."""
    layout = cache_layout(inputs, spec)
    axes = cache_axes(spec.kv_layout, layout.combined)
    given = [x for x in (inputs.key_pages, inputs.value_pages) if x is not None]
    arrays = [_with_heads_merged(x, axes) for x in given]
    if layout.transposed:
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    if len(layout.page_shape) == 1:
        arrays = [x.reshape(x.shape[0], -1, x.shape[-1]) for x in arrays]
    return arrays


def _with_heads_merged(x: jax.Array, axes: str) -> jax.Array:
    """The head axis and the key or value axis of a combined cache as one axis."""
    if "w" not in axes:
        return x
    at = axes.index("w")
    return x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])


def _fills_tiles(rows: int, dtype: DTypeLike) -> bool:
    """Whether XLA stores an array with this many rows in the order of its axes."""
    packed = 4 // jnp.dtype(dtype).itemsize
    return rows % 8 == 0 or rows in (x for x in (1, 2, 4) if x >= packed)


def _same_as_flat(page: tuple[int, int], width: int) -> bool:
    """Whether a page in tiles is the same bytes as its rows in tiles."""
    return width <= 128 or page[1] % 8 == 0 or page[0] == 1


class PagedKernelConfig(NamedTuple):
    """The static sizes of a kernel.

    Attributes:
        tile_queries: queries of a tile.
        block_pages: pages of a block.
        stages: blocks that VMEM holds.
        packed: whether the queries of all heads are multiplied with all rows of a page at once.
        cores: how many cores share the tiles.
        table_stride: entries of the page table that a sequence has.
        window: how many positions a query sees; None: all.
        out_dtype: the dtype of the output.
    """

    tile_queries: int
    block_pages: int
    stages: int
    packed: bool
    cores: int
    table_stride: int
    window: int | None
    out_dtype: np.dtype

    @property
    def table_stages(self) -> int:
        """Chunks of the page table that SMEM holds, a power of two."""
        return 1 << (self.stages + TABLE_LEAD - 1).bit_length()

    @property
    def table_chunk(self) -> int:
        """Entries of the page table that are copied at once."""
        return max(self.block_pages, TABLE_CHUNK)


def kernel_configs(
    inputs: Inputs, spec: Spec, params: PagedConfig, device: Device | None
) -> list[PagedKernelConfig]:
    """A kernel for sequences with one query and one for the others, that fit into VMEM."""
    layout = cache_layout(inputs, spec)
    t, heads = inputs.query.shape[1:3]
    queries = params.queries_per_block
    if queries is None:
        queries = min(max(8, _ROWS * layout.kv_heads // heads), next_power_of_two(t))
    sizes = (1,) if t == 1 else (1, max(queries, 2))
    return [_fitting(inputs, spec, layout, size, params.pages_per_block, device) for size in sizes]


def _fitting(
    inputs: Inputs,
    spec: Spec,
    layout: CacheLayout,
    size: int,
    pages: int | None,
    device: Device | None,
) -> PagedKernelConfig:
    """The kernel for tiles of `size` queries: smaller blocks, then fewer stages, until it fits."""
    packed = size * inputs.query.shape[2] <= _PACKED_ROWS or size == 1
    kind = "" if device is None else device.kind
    config = PagedKernelConfig(
        tile_queries=size,
        block_pages=next_power_of_two(pages or _most_pages(inputs, layout, packed)),
        stages=_STAGES,
        packed=packed,
        cores=2 if kind.startswith(_TWO_CORES) and not kind.startswith(_ONE_CORE) else 1,
        table_stride=0,
        window=spec.sliding_window,
        out_dtype=spec.out_dtype(inputs.query.dtype),
    )
    budget = VMEM_SHARE * core_of(device).vmem
    rows = size * inputs.query.shape[2] // layout.kv_heads
    most = config.block_pages
    # In this order, each down to its bound: queries, pages, then more of both, then stages.
    for name, least in (
        ("tile_queries", size if packed else max(2, size * 128 // rows)),
        ("block_pages", most if pages else min(most, max(1, 128 // layout.page_size))),
        ("tile_queries", size if packed else 2),
        ("stages", 3),
        ("block_pages", most if pages else 1),
        ("stages", 2),
    ):
        while getattr(config, name) > least and vmem_estimate(inputs, layout, config) > budget:
            now = getattr(config, name)
            config = config._replace(
                **{name: now - 1 if name == "stages" else max(least, now // 2)}
            )
    return config


def _most_pages(inputs: Inputs, layout: CacheLayout, packed: bool) -> int:
    """The pages of a block of the preferred size, and at most those of the table."""
    itemsize = jnp.dtype(layout.dtype).itemsize
    page = layout.page_size * layout.kv_heads * sum(layout.head_dims) * itemsize
    pages = min(_BLOCK_BYTES // page, _MAX_COLUMNS // (layout.page_size * layout.kv_heads))
    pages = max(1, pages if packed else _POSITIONS // layout.page_size)
    pages = next_power_of_two(pages + 1) // 2  # the power of two below
    return min(pages, next_power_of_two(inputs.page_indices.shape[-1]))


def vmem_estimate(inputs: Inputs, layout: CacheLayout, config: PagedKernelConfig) -> int:
    """Bytes of VMEM that a kernel takes: its scratch memory and the temporaries of a step."""
    arrays = scratch_shapes(inputs, config, layout).values()
    kept = sum(vmem_bytes(x.shape, x.dtype) for x in arrays if str(x.memory_space) == "vmem")
    dtype = operand_dtype(inputs.query.dtype, layout.dtype)
    heads = inputs.query.shape[2]
    rows = config.tile_queries * heads // (1 if config.packed else layout.kv_heads)
    columns = config.block_pages * layout.page_size * (layout.kv_heads if config.packed else 1)
    tiles = 4 * vmem_bytes((min(rows, 256), columns), jnp.float32)
    width = max(layout.head_dims)
    block = 2 * vmem_bytes((config.block_pages * layout.page_rows, width), dtype)
    results = 2 * vmem_bytes((config.tile_queries * heads, width), jnp.float32)
    factors = 3 * vmem_bytes((heads, LANES), jnp.float32)
    return kept + tiles + block + results + factors


def scratch_shapes(
    inputs: Inputs, config: PagedKernelConfig, layout: CacheLayout
) -> dict[str, pl.MemoryRef]:
    """The scratch memory of a kernel, by the names of its refs."""
    heads, head_dim = inputs.query.shape[2:]
    parts = 1 if config.packed else layout.kv_heads
    size, stages, pages = config.tile_queries, config.stages, config.block_pages
    rows = size * heads // parts
    lane_rows = -(-rows // LANES)
    value_dim = layout.head_dims[1]
    dtype = operand_dtype(inputs.query.dtype, layout.dtype)
    columns = pages * layout.page_size * (layout.kv_heads if config.packed else 1)
    arrays: dict[str, pl.MemoryRef] = {
        "cursors": pltpu.SMEM((6,), jnp.int32),
        "pages_copied": pltpu.SMEM((stages,), jnp.int32),
        "pages_missing": pltpu.SMEM((stages,), jnp.int32),
        "table_entries": pltpu.SMEM((config.table_stages * config.table_chunk,), jnp.int32),
        "query_tiles": pltpu.VMEM((2, size, heads, head_dim), inputs.query.dtype),
        "out_tiles": pltpu.VMEM((2, size, heads, value_dim), config.out_dtype),
        "lse_tiles": pltpu.VMEM((2, parts, lane_rows, LANES), jnp.float32),
        "query_rows": pltpu.VMEM((parts, rows, head_dim), dtype),
        "row_max": pltpu.VMEM((parts, rows, LANES), jnp.float32),
        "row_sum": pltpu.VMEM((parts, rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((parts, rows, value_dim), jnp.float32),
        "column_offsets": pltpu.VMEM((1, columns), jnp.int32),
    }
    if config.packed:
        arrays["head_mask"] = pltpu.VMEM((rows, columns), jnp.float32)
    if config.packed and layout.kv_heads > 1:
        arrays["nonfinite"] = pltpu.VMEM((rows, value_dim), jnp.float32)
        arrays["rerun"] = pltpu.SMEM((1,), jnp.int32)
    for i, width in enumerate(layout.head_dims[: layout.num_arrays]):
        block = (stages, pages, *layout.page_shape, width)
        arrays[f"kv_blocks{i}"] = pltpu.VMEM(block, layout.dtype)
        if not config.packed:
            by_head = (layout.kv_heads * layout.rows_per_head, columns, width)
            arrays[f"kv_by_head{i}"] = pltpu.VMEM(by_head, dtype)
    semaphores = {
        "table_semaphores": config.table_stages,
        "page_semaphores": stages,
        "query_semaphores": 2,
        "out_semaphores": 2,
        "lse_semaphores": 2,
    }
    return arrays | {name: pltpu.SemaphoreType.DMA((n,)) for name, n in semaphores.items()}


class HeadFactors(NamedTuple):
    """A number for each query head, in all lanes, [parts, heads of a part, LANES] each."""

    logits: ArrayOrRef | None
    values: ArrayOrRef | None
    sinks: ArrayOrRef | None


class KernelRefs(NamedTuple):
    """The arrays of a kernel. The scratch arrays have two tiles or `stages` blocks."""

    page_table: Ref
    query: Ref
    cache: tuple[Ref, ...]
    head_factors: HeadFactors
    out: Ref
    lse: Ref
    cursors: Ref  # tile, block and step of the next table copy, then of the next page copy
    pages_copied: Ref  # pages of each block that were copied
    pages_missing: Ref  # the table entries of each block combined by or
    table_entries: Ref
    kv_blocks: tuple[VmemRef, ...]
    query_tiles: Ref
    out_tiles: Ref
    lse_tiles: Ref
    query_rows: Ref  # by part
    row_max: Ref
    row_sum: Ref
    acc: Ref
    column_offsets: Ref  # from the start of a block to the position of each column
    table_semaphores: Ref
    page_semaphores: Ref
    query_semaphores: Ref
    out_semaphores: Ref
    lse_semaphores: Ref
    kv_by_head: tuple[Ref, ...]  # by head: keys and values
    head_mask: Ref | None = (
        None  # packed: inf in the columns of a row's own key head, -inf elsewhere
    )
    nonfinite: Ref | None = (
        None  # packed, several heads: above 0 where a result was NaN or infinite
    )
    rerun: Ref | None = None  # packed, several heads: whether one was


def head_factors(inputs: Inputs, spec: Spec, parts: int) -> HeadFactors:
    """The factors of a call; None where all heads have the same."""
    heads = inputs.query.shape[2]

    def spread(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x.astype(jnp.float32)[:, None], (x.shape[0], heads // x.shape[0]))
        x = x.reshape(parts, heads // parts, 1)
        return jnp.broadcast_to(x, (*x.shape[:2], LANES))

    k_scale, v_scale, sinks = inputs.k_scale, inputs.v_scale, inputs.sinks
    return HeadFactors(
        None if k_scale is None else spread(k_scale.astype(jnp.float32) * spec.softmax_scale),
        None if v_scale is None else spread(v_scale),
        None if sinks is None else spread(logsumexp(sinks.astype(jnp.float32), axis=-1)),
    )
