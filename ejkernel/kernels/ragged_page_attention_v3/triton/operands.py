"""Arguments of the paged kernels: static arguments, operands, the work list.

A *tile* is some rows of queries against `block_k` keys of one key head. A *work item* is a block of
queries of one sequence and one key head; it has as many tiles as its rows may see. The tiles of all
items form one list. Every program takes an equal share of it, whatever the lengths are (stream-K).
The number of items that are split between programs, whose partial results have to be combined, is
bounded by the number of programs.

Items of many rows read the same keys as their neighbours. They are distributed to the programs
round robin, so that neighbours are processed at the same time and share keys in the L2 cache: the
list is the items of the first program, then those of the second, and so on.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from ejkernel import settings
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.paged import cache_axes
from ejkernel.kernels.common.triton.bridge import matmul_precision, padded_size
from ejkernel.kernels.common.triton.device_types import INT32_ELEMENTS, StaticArguments
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import (
    PagedTileConfig,
    cache_sizes,
    capability,
    values_of,
)
from ejkernel.ops.platform import Device

# Tiles that could be loaded while an item starts: about 2 us, in which a program loads 32 KiB.
_ITEM_OVERHEAD = 1
# PTX that converts four bytes to float16: the even ones ($0) and the odd ones ($1).
_CONVERT_ASM = {
    "e4m3": """{
        .reg .b32 sorted;
        .reg .b16 even, odd;
        prmt.b32 sorted, $2, $2, 0x3120;
        mov.b32 {even, odd}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
    }""",
    # The upper byte of a float16.
    "e5m2": """{
        prmt.b32 $0, $2, 0, 0x2404;
        and.b32 $1, $2, 0xff00ff00;
    }""",
    # 1024 plus the unsigned byte (byte + 128), minus 1024 + 128.
    "int8": """{
        .reg .b32 some, much;
        xor.b32 some, $2, 0x80808080;
        mov.b32 much, 0x64806480;
        prmt.b32 $0, some, 0x64646464, 0x4240;
        prmt.b32 $1, some, 0x64646464, 0x4341;
        sub.rn.f16x2 $0, $0, much;
        sub.rn.f16x2 $1, $1, much;
    }""",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedStaticArguments(StaticArguments):
    """Compile-time constants of the kernels."""

    programs: int
    decode_rows: int  # rows of a tile of a sequence with few queries
    decode_tokens: int
    prefill_rows: int  # the same for many queries; 0 where all sequences are taken as decode
    prefill_tokens: int
    max_rows: int  # the larger of the two
    block_k: int
    pages_per_tile: int  # 1, 2 or 4; 0: any number, the page is loaded for every position
    item_overhead: int  # time to start an item, in tiles
    items: int  # an upper bound, where there is a work list
    batch: int
    sequences_per_batch: int  # in a work list with one more, for tokens of no sequence
    sequences: int
    search_block: int  # sequences or items that a search compares at once
    tokens: int
    heads: int
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    head_width: int  # head_dim, padded to a tile
    value_width: int
    page_size: int
    pages: int
    table_width: int
    k_page_stride: int
    k_token_stride: int
    k_head_stride: int
    v_page_stride: int
    v_token_stride: int
    v_head_stride: int
    v_offset: int  # of the values in a page that holds keys and values
    int64_offsets: bool
    window: int
    scale: float
    soft_cap: float
    plain: bool  # the logits are products times a positive constant
    exp2_scale: float  # logits in base 2, divided by those after scale and soft cap
    k_scale: bool
    v_scale: bool
    sinks: bool
    float32_out: bool  # the output is a partial result, in float32
    compute_dtype: str  # of the matmuls: "own" (that of the query), "half" or "single"
    cache_format: str  # of an 8-bit cache: "e4m3", "e5m2" or "int8"
    cache_as_bits: bool  # 8-bit floats are loaded as integers
    column_pairs: bool  # decode tiles load two 8-bit columns at a time
    convert_asm: str  # PTX that converts 8-bit numbers to float16
    precision: str
    partial_stages: int | None  # of the loop over masked tiles; None: those of the launch
    combine_rows: int  # rows that a program of the combine kernel merges at once
    combine_splits: int  # splits that it loads at once
    combine_chunks: int  # programs of the combine kernel for each program of the attention kernel
    combine_padding_programs: int  # programs of the combine kernel for tokens of no sequence


class PagedOperands(NamedTuple):
    """Arrays of the attention kernel, in the order of its parameters."""

    query: jax.Array
    keys: jax.Array
    values: jax.Array
    page_table: jax.Array  # [b * s, j]
    # Decode: [3, sequences], else [sequences, 4]: first row of queries, number of queries, number
    # of tokens in the cache, and whether a page is missing.
    sequence_info: jax.Array
    work_items: jax.Array  # [3, items]: sequence, block of queries, key head
    work_ends: jax.Array  # [items]: end of the tiles of each item in the work list
    k_scale: jax.Array
    v_scale: jax.Array
    sinks: jax.Array


def kernel_arguments(
    inputs: Inputs, spec: Spec, config: PagedTileConfig, device: Device
) -> tuple[PagedStaticArguments, PagedOperands]:
    """The arguments of both kernels for a call."""
    static = PagedStaticArguments(
        **_geometry(inputs, spec, config), **_softmax(inputs, spec, device)
    )
    unused = inputs.query
    in_float32 = lambda x: unused if x is None else x.astype(jnp.float32)
    if static.prefill_rows:
        sequence_info = _sequence_info(inputs, static)
        work_items, work_ends = _work_list(sequence_info[:, 1], sequence_info[:, 2], static)
    else:
        sequence_info, work_items, work_ends = sequence_lengths(inputs), unused, unused
    sinks = inputs.sinks
    if sinks is not None:
        sinks = logsumexp(sinks.astype(jnp.float32), axis=-1)
        sinks = jnp.broadcast_to(sinks, (static.heads,))
    keys, values = inputs.key_pages, values_of(inputs)
    if static.cache_as_bits:
        # Triton refuses even pointers to dtypes that a device does not support.
        keys, values = (jax.lax.bitcast_convert_type(x, jnp.int8) for x in (keys, values))
    page_table = jnp.asarray(inputs.page_indices).reshape(-1, static.table_width)
    operands = PagedOperands(
        query=inputs.query,
        keys=keys,
        values=values,
        page_table=page_table,
        sequence_info=sequence_info,
        work_items=work_items,
        work_ends=work_ends,
        k_scale=in_float32(inputs.k_scale),
        v_scale=in_float32(inputs.v_scale),
        sinks=in_float32(sinks),
    )
    return static, operands


def _geometry(inputs: Inputs, spec: Spec, config: PagedTileConfig) -> dict[str, Any]:
    sizes = cache_sizes(inputs, spec)
    combined = inputs.value_pages is None
    axes = cache_axes(spec.kv_layout, combined)
    values = values_of(inputs)
    k_strides, v_strides = (strides(x.shape, axes) for x in (inputs.key_pages, values))
    b, t, heads, head_dim = inputs.query.shape
    s, j = inputs.page_indices.shape[1:]
    group = heads // sizes.kv_heads
    min_width = 32 if _column_pairs(inputs) else 16
    decode_rows = max(16, padded_size(group))
    decode_queries = min(decode_rows // group, -(-t // s))  # of an item, on average
    items, per_batch = 0, s
    if config.prefill_rows:
        # Each sequence may have one block that is partially filled.
        per_batch = s + 1
        blocks = b * (per_batch + t // (config.prefill_rows // group))
        items = blocks * sizes.kv_heads + config.programs
    return {
        "programs": config.programs,
        "decode_rows": decode_rows,
        "decode_tokens": decode_rows // group,
        "prefill_rows": config.prefill_rows,
        "prefill_tokens": config.prefill_rows // group,
        "max_rows": max(decode_rows, config.prefill_rows),
        "block_k": config.block_k,
        "pages_per_tile": _pages_per_tile(config.block_k, sizes.page_size),
        "item_overhead": _ITEM_OVERHEAD,
        "items": items,
        "batch": b,
        "sequences_per_batch": per_batch,
        "sequences": b * per_batch,
        "search_block": min(1024, padded_size(items or b * s)),
        "tokens": t,
        "heads": heads,
        "kv_heads": sizes.kv_heads,
        "group": group,
        "head_dim": head_dim,
        "value_dim": values.shape[-1],
        "head_width": max(min_width, padded_size(head_dim)),
        "value_width": max(min_width, padded_size(values.shape[-1])),
        "page_size": sizes.page_size,
        "pages": sizes.pages,
        "table_width": j,
        "k_page_stride": k_strides["p"],
        "k_token_stride": k_strides["c"],
        "k_head_stride": k_strides["k"],
        "v_page_stride": v_strides["p"],
        "v_token_stride": v_strides["c"],
        "v_head_stride": v_strides["k"],
        "v_offset": v_strides["w"] if combined else 0,
        "int64_offsets": max(inputs.key_pages.size, values.size) >= INT32_ELEMENTS,
        # Pipelining a few masked tiles gains nothing; with wide heads one stage costs more.
        "partial_stages": 1 if padded_size(max(head_dim, values.shape[-1])) <= 128 else None,
        # Items of few rows have many splits, items of many rows few.
        "combine_rows": 8 if config.prefill_rows else 1,
        "combine_splits": 1 if config.prefill_rows else _combine_splits(inputs),
        "combine_chunks": config.prefill_rows // 8
        or min(decode_rows, max(4, decode_queries * group)),
        "combine_padding_programs": 0 if config.prefill_rows else min(b * t, config.programs),
    }


def _column_pairs(inputs: Inputs) -> bool:
    """Whether decode tiles load the cache two columns at a time."""
    query, keys, values = inputs.query, inputs.key_pages, values_of(inputs)
    even = keys.shape[-1] % 2 == 0 and values.shape[-1] % 2 == 0
    return even and np.dtype(keys.dtype).itemsize == 1 and np.dtype(query.dtype).itemsize == 2


def _combine_splits(inputs: Inputs) -> int:
    """Splits that are loaded at once in decode: more would not fit in registers."""
    width = padded_size(values_of(inputs).shape[-1])
    if width <= 128:
        return 32 if width <= 64 else 16
    return 8 if np.dtype(inputs.query.dtype).itemsize == 2 else 4


def _pages_per_tile(block_k: int, page_size: int) -> int:
    if page_size % block_k == 0:
        return 1
    return block_k // page_size if block_k in (2 * page_size, 4 * page_size) else 0


def strides(shape: tuple[int, ...], axes: str) -> dict[str, int]:
    """Strides of a row-major array by axis letter."""
    return {letter: math.prod(shape[i + 1 :]) for i, letter in enumerate(axes)}


def _softmax(inputs: Inputs, spec: Spec, device: Device) -> dict[str, Any]:
    """From products to weights, and the dtypes of the matmuls."""
    query, cache = (np.dtype(x.dtype) for x in (inputs.query, inputs.key_pages))
    compute_dtype, cache_format, as_bits, convert_asm = "own", "", False, ""
    if cache.itemsize == 1:
        # 8-bit floats and integers are exact in float16, and cheap to convert.
        compute_dtype = "half" if query == jnp.bfloat16 else "own"
        cache_format = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}.get(cache.name, "int8")
        native = capability(device) >= (8, 9) or cache_format != "e4m3"
        as_bits = cache_format != "int8" and (settings.interpret() or not native)
        convert_asm = _CONVERT_ASM[cache_format] if native and not settings.interpret() else ""
    elif query != cache and query.itemsize == 2:
        compute_dtype = "single"
    cap = spec.logits_soft_cap or 0.0
    plain = (
        not cap and inputs.k_scale is None and spec.softmax_scale > 0 and compute_dtype != "half"
    )
    return {
        "window": spec.sliding_window or 0,
        "scale": spec.softmax_scale,
        "soft_cap": cap,
        "plain": plain,
        "exp2_scale": (cap or (spec.softmax_scale if plain else 1.0)) * LOG2_E,
        "k_scale": inputs.k_scale is not None,
        "v_scale": inputs.v_scale is not None,
        "sinks": inputs.sinks is not None,
        "float32_out": spec.float32_out,
        "compute_dtype": compute_dtype,
        "cache_format": cache_format,
        "cache_as_bits": as_bits,
        "column_pairs": _column_pairs(inputs),
        "convert_asm": convert_asm,
        "precision": matmul_precision(np.float32 if compute_dtype == "single" else query),
    }


@runtime_checkable
class PagedSequences(Protocol):
    """The inputs of an op over pages that describe its sequences."""

    @property
    def query(self) -> jax.Array: ...

    @property
    def query_starts(self) -> jax.Array: ...

    @property
    def query_lens(self) -> jax.Array: ...

    @property
    def kv_lens(self) -> jax.Array: ...


def sequence_lengths(inputs: PagedSequences) -> jax.Array:
    """[3, sequences]: first row of queries, number of queries, number of tokens.

    A select by index and not a stack: XLA makes it one small kernel, which is faster.
    """
    starts, lens, kv_lens = (
        jnp.asarray(x, jnp.int32).reshape(1, -1)
        for x in (inputs.query_starts, inputs.query_lens, inputs.kv_lens)
    )
    lens = jnp.clip(lens, 0, inputs.query.shape[1])
    kv_lens = jnp.maximum(kv_lens, 0)
    number = jnp.arange(3, dtype=jnp.int32)[:, None]
    return jnp.where(number == 0, starts, jnp.where(number == 1, lens, kv_lens))


def _sequence_info(inputs: Inputs, static: PagedStaticArguments) -> jax.Array:
    """[sequences, 4]: the same, and whether a page is missing.

    The tokens past the end of all sequences of a batch row, whose output is 0, form one more
    sequence, with an empty cache.
    """
    starts, lens, kv_lens, table = (
        jnp.asarray(x, jnp.int32)
        for x in (inputs.query_starts, inputs.query_lens, inputs.kv_lens, inputs.page_indices)
    )
    t, size = static.tokens, static.page_size
    lens = jnp.clip(lens, 0, t)
    kv_lens = jnp.clip(kv_lens, 0, static.table_width * size)
    page = jnp.arange(static.table_width, dtype=jnp.int32)
    used = page < -(-kv_lens // size)[..., None]
    if static.window:
        oldest = jnp.maximum(kv_lens - lens - static.window + 1, 0)
        used &= page >= (oldest // size)[..., None]
    missing = (used & ((table < 0) | (table >= static.pages))).any(-1).astype(jnp.int32)
    end = jnp.where(lens > 0, starts + lens, 0).max(1, keepdims=True)
    none = jnp.zeros_like(end)
    columns = ((starts, end), (lens, t - end), (kv_lens, none), (missing, none))
    return jnp.stack([jnp.concatenate(pair, 1).reshape(-1) for pair in columns], -1)


def _work_list(
    lens: jax.Array, kv_lens: jax.Array, static: PagedStaticArguments
) -> tuple[jax.Array, jax.Array]:
    """The items in the order of the work list, and the end of the tiles of each."""
    tokens = jnp.where(lens <= static.decode_tokens, static.decode_tokens, static.prefill_tokens)
    blocks = -(-lens // tokens)
    item_ends = _cumulative_sums(blocks * static.kv_heads)  # of the sequences
    index = jnp.arange(static.items, dtype=jnp.int32)
    per_program = jnp.maximum(-(-item_ends[-1] // static.programs), 1)
    item = index % per_program * static.programs + index // per_program  # round robin
    valid = (item < item_ends[-1]) & (index < per_program * static.programs)
    sequence = jnp.searchsorted(item_ends, item, side="right", method="compare_all")
    sequence = jnp.minimum(sequence.astype(jnp.int32), lens.shape[0] - 1)
    lens, kv_lens, tokens, blocks, item_ends = (
        x[sequence] for x in (lens, kv_lens, tokens, blocks, item_ends)
    )
    number = item - item_ends + blocks * static.kv_heads
    blocks = jnp.maximum(blocks, 1)
    head, block = number // blocks, number % blocks

    first = kv_lens - lens + block * tokens
    last = jnp.minimum(first + tokens, kv_lens) - 1
    end = jnp.maximum(last + static.block_k, 0) // static.block_k
    begin = jnp.zeros_like(end)
    if static.window:
        begin = jnp.maximum(first - static.window + 1, 0) // static.block_k
    # A block that sees no key still has results to write.
    tiles = jnp.where(valid, jnp.maximum(end - begin, 1), 0)
    return jnp.stack([sequence, block, head]), _cumulative_sums(tiles)


def _cumulative_sums(x: jax.Array) -> jax.Array:
    """Cumulative sums; of a short vector by a triangular mask, which XLA makes one small kernel."""
    if x.shape[0] > 1024:
        return jnp.cumsum(x, dtype=jnp.int32)
    index = jnp.arange(x.shape[0])
    return jnp.where(index[None, :] <= index[:, None], x[None, :], 0).sum(1, dtype=jnp.int32)
