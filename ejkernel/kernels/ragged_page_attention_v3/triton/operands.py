"""A call over pages in the form in which the Triton kernels take it.

The unit of work is a *tile*: some rows of queries against `block_k` keys of one key head. A block
of queries of one sequence and one key head is an *item* of as many tiles as its rows may see. All
tiles stand in one line, item after item; every program takes an equal share of that line, whatever
the lengths are. So the work is even, and what is cut between programs, and has to be put together
afterwards, is bounded by their number.

Items of many rows use the same keys as their neighbours, so neighbours should be worked on at the
same time, by different programs: items are dealt out to the programs like cards, and the line is
what the first has, what the second has, and so on.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from ejkernel import settings
from ejkernel.kernels.common.paged import cache_axes
from ejkernel.kernels.common.triton.bridge import matmul_precision
from ejkernel.kernels.common.triton.device_types import StaticArguments
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import (
    Shape,
    capability,
    padded,
    static_sizes,
    values_of,
)
from ejkernel.ops.platform import Device

_LOG2_E = math.log2(math.e)
LARGE = 2**31
# Tiles that could be read while an item begins: some 2 us, in which a program reads 32 KiB.
_OPENING = 1
# Of four bytes the even ones ($0) and the odd ones ($1) as float16, in PTX.
_FROM_BYTES = {
    "e4m3": """{
        .reg .b32 sorted;
        .reg .b16 even, odd;
        prmt.b32 sorted, $2, $2, 0x3120;
        mov.b32 {even, odd}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
    }""",
    # The upper half of a float16.
    "e5m2": """{
        prmt.b32 $0, $2, 0, 0x2404;
        and.b32 $1, $2, 0xff00ff00;
    }""",
    # 1024 and the byte as a number without sign; 1024 + 128 is then too much.
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
class Mode(StaticArguments):
    """All that is static of a launch."""

    programs: int
    narrow_rows: int  # rows of a tile of a sequence with few queries
    narrow_tokens: int
    wide_rows: int  # and of one with many; 0 where all are taken as having few
    wide_tokens: int
    rows: int  # the most rows of a tile
    block_k: int
    pages_of_tile: int  # 1, 2 or 4; 0: any number, read for every position
    opening: int  # what beginning an item costs, in tiles
    items: int  # at most, where there is a list of them
    batch: int
    per_batch: int  # sequences of a row; in a list also one for the queries of no sequence
    sequences: int
    search: int  # how many are looked at at once
    tokens: int
    heads: int
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    head_width: int  # head_dim, rounded up to what a tile can have
    value_width: int
    page_size: int
    pages: int
    table_width: int
    k_page: int  # strides
    k_slot: int
    k_head: int
    v_page: int
    v_slot: int
    v_head: int
    v_first: int  # where the values begin
    far: bool  # offsets need 64 bits
    window: int
    scale: float
    soft_cap: float
    plain: bool  # logits are products times a positive number that is known
    factor: float  # of the logits in base 2
    k_scale: bool
    v_scale: bool
    sinks: bool
    operands: str  # "own", or what the queries become to meet the cache: "half", "single"
    eight: str  # what a cache of 8 bits holds: "e4m3", "e5m2" or "int8"
    bits: bool  # its floats are read as integers
    pairs: bool  # tiles of few rows read two of its columns at a time
    assembly: str  # which makes float16 of them
    precision: str
    edge_stages: int | None  # of the loop over tiles that are seen in part; None: as the launch has
    combine_rows: int  # what a program of the second kernel takes at once
    combine_parts: int
    combine_chunks: int  # programs of it for one of the first
    combine_clear: int  # and those beside, for queries of no sequence


class Operands(NamedTuple):
    """The arrays of a launch, in the order in which the kernels take them."""

    query: Any
    keys: Any
    values: Any
    table: Any  # [b * s, j]
    info: Any  # of sequences: first row of queries, queries, tokens, whether a page is missing
    items: Any  # [3, items]: sequence, block of queries, key head
    ends: Any  # [items], where the tiles of each end in the line
    k_scale: Any
    v_scale: Any
    sinks: Any


class Plan(NamedTuple):
    """A launch of a call."""

    mode: Mode
    operands: Operands


def plan(inputs: Inputs, spec: Spec, shape: Shape, device: Device) -> Plan:
    """The plan of a call in tiles of this shape."""
    mode = Mode(**_geometry(inputs, spec, shape), **_weights(inputs, spec, device))
    nothing = inputs.query  # stands for what a kernel does not read
    given = lambda x: nothing if x is None else x.astype(jnp.float32)
    if mode.wide_rows:
        info = _info(inputs, mode)
        items, ends = _line(info[:, 1], info[:, 2], mode)
    else:
        info, items, ends = lengths(inputs), nothing, nothing
    sinks = inputs.sinks
    if sinks is not None:
        sinks = logsumexp(sinks.astype(jnp.float32), axis=-1)
        sinks = jnp.broadcast_to(sinks, (mode.heads,))
    keys, values = inputs.key_pages, values_of(inputs)
    if mode.bits:
        # Triton refuses even pointers to what a device does not know.
        keys, values = (jax.lax.bitcast_convert_type(x, jnp.int8) for x in (keys, values))
    table = jnp.asarray(inputs.page_indices).reshape(-1, mode.table_width)
    operands = Operands(
        inputs.query, keys, values, table, info, items, ends,
        given(inputs.k_scale), given(inputs.v_scale), given(sinks),
    )  # fmt: skip
    return Plan(mode, operands)


def _geometry(inputs: Inputs, spec: Spec, shape: Shape) -> dict[str, Any]:
    sizes = static_sizes(inputs, spec)
    combined = inputs.value_pages is None
    axes = cache_axes(spec.kv_layout, combined)
    values = values_of(inputs)
    k_strides, v_strides = (strides(x.shape, axes) for x in (inputs.key_pages, values))
    b, t, heads, head_dim = inputs.query.shape
    s, j = inputs.page_indices.shape[1:]
    group = heads // sizes.kv_heads
    narrowest = 32 if _pairs(inputs) else 16
    narrow = max(16, padded(group))
    queries = min(narrow // group, -(-t // s))  # of an item of few rows, on average
    items, per_batch = 0, s
    if shape.rows:
        # Each sequence may have one block that is not full.
        per_batch = s + 1
        blocks = b * (per_batch + t // (shape.rows // group))
        items = blocks * sizes.kv_heads + shape.programs
    return {
        "programs": shape.programs,
        "narrow_rows": narrow,
        "narrow_tokens": narrow // group,
        "wide_rows": shape.rows,
        "wide_tokens": shape.rows // group,
        "rows": max(narrow, shape.rows),
        "block_k": shape.block_k,
        "pages_of_tile": _pages_of_tile(shape.block_k, sizes.page_size),
        "opening": _OPENING,
        "items": items,
        "batch": b,
        "per_batch": per_batch,
        "sequences": b * per_batch,
        "search": min(1024, padded(items or b * s)),
        "tokens": t,
        "heads": heads,
        "kv_heads": sizes.kv_heads,
        "group": group,
        "head_dim": head_dim,
        "value_dim": values.shape[-1],
        "head_width": max(narrowest, padded(head_dim)),
        "value_width": max(narrowest, padded(values.shape[-1])),
        "page_size": sizes.page_size,
        "pages": sizes.pages,
        "table_width": j,
        "k_page": k_strides["p"],
        "k_slot": k_strides["c"],
        "k_head": k_strides["k"],
        "v_page": v_strides["p"],
        "v_slot": v_strides["c"],
        "v_head": v_strides["k"],
        "v_first": v_strides["w"] if combined else 0,
        "far": max(inputs.key_pages.size, values.size) >= LARGE,
        # Stages for a few tiles are of no use; where pages are wide the other way costs more.
        "edge_stages": 1 if padded(max(head_dim, values.shape[-1])) <= 128 else None,
        # Few rows are cut into many parts, many rows into few.
        "combine_rows": 8 if shape.rows else 1,
        "combine_parts": 1 if shape.rows else _parts(inputs),
        "combine_chunks": shape.rows // 8 or min(narrow, max(4, queries * group)),
        "combine_clear": 0 if shape.rows else min(b * t, shape.programs),
    }


def _pairs(inputs: Inputs) -> bool:
    """Whether tiles of few rows read the cache two columns at a time."""
    query, keys, values = inputs.query, inputs.key_pages, values_of(inputs)
    even = keys.shape[-1] % 2 == 0 and values.shape[-1] % 2 == 0
    return even and np.dtype(keys.dtype).itemsize == 1 and np.dtype(query.dtype).itemsize == 2


def _parts(inputs: Inputs) -> int:
    """How many parts of few rows are put together at once: more would not stay in registers."""
    width = padded(values_of(inputs).shape[-1])
    if width <= 128:
        return 32 if width <= 64 else 16
    return 8 if np.dtype(inputs.query.dtype).itemsize == 2 else 4


def _pages_of_tile(block_k: int, page_size: int) -> int:
    if page_size % block_k == 0:
        return 1
    return block_k // page_size if block_k in (2 * page_size, 4 * page_size) else 0


def strides(shape: tuple[int, ...], axes: str) -> dict[str, int]:
    """How far apart the neighbours of each axis lie."""
    return {letter: math.prod(shape[i + 1 :]) for i, letter in enumerate(axes)}


def _weights(inputs: Inputs, spec: Spec, device: Device) -> dict[str, Any]:
    """How products become weights, and in which dtype."""
    query, cache = (np.dtype(x.dtype) for x in (inputs.query, inputs.key_pages))
    operands, eight, bits, assembly = "own", "", False, ""
    if cache.itemsize == 1:
        # Both kinds of 8-bit floats, and integers, are exact in float16, and quickly made.
        operands = "half" if query == jnp.bfloat16 else "own"
        eight = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}.get(cache.name, "int8")
        native = capability(device) >= (8, 9) or eight != "e4m3"
        bits = eight != "int8" and (settings.interpret() or not native)
        assembly = _FROM_BYTES[eight] if native and not settings.interpret() else ""
    elif query != cache and query.itemsize == 2:
        operands = "single"
    cap = spec.logits_soft_cap or 0.0
    plain = not cap and inputs.k_scale is None and spec.softmax_scale > 0 and operands != "half"
    return {
        "window": spec.sliding_window or 0,
        "scale": spec.softmax_scale,
        "soft_cap": cap,
        "plain": plain,
        "factor": (cap or (spec.softmax_scale if plain else 1.0)) * _LOG2_E,
        "k_scale": inputs.k_scale is not None,
        "v_scale": inputs.v_scale is not None,
        "sinks": inputs.sinks is not None,
        "operands": operands,
        "eight": eight,
        "bits": bits,
        "pairs": _pairs(inputs),
        "assembly": assembly,
        "precision": matmul_precision(np.float32 if operands == "single" else query),
    }


def lengths(inputs: Any) -> jax.Array:
    """[3, sequences]: first row of queries, queries, tokens.

    Chosen by number and not stacked, which is one small kernel and not a slower one.
    """
    starts, lens, kv_lens = (
        jnp.asarray(x, jnp.int32).reshape(1, -1)
        for x in (inputs.query_starts, inputs.query_lens, inputs.kv_lens)
    )
    lens = jnp.clip(lens, 0, inputs.query.shape[1])
    kv_lens = jnp.maximum(kv_lens, 0)
    number = jnp.arange(3, dtype=jnp.int32)[:, None]
    return jnp.where(number == 0, starts, jnp.where(number == 1, lens, kv_lens))


def _info(inputs: Inputs, mode: Mode) -> jax.Array:
    """[sequences, 4]: what the programs have to know of each sequence.

    The queries behind those of all sequences, which give 0, stand as a sequence without tokens.
    """
    starts, lens, kv_lens, table = (
        jnp.asarray(x, jnp.int32)
        for x in (inputs.query_starts, inputs.query_lens, inputs.kv_lens, inputs.page_indices)
    )
    t, size = mode.tokens, mode.page_size
    lens = jnp.clip(lens, 0, t)
    kv_lens = jnp.clip(kv_lens, 0, mode.table_width * size)
    page = jnp.arange(mode.table_width, dtype=jnp.int32)
    used = page < -(-kv_lens // size)[..., None]
    if mode.window:
        oldest = jnp.maximum(kv_lens - lens - mode.window + 1, 0)
        used &= page >= (oldest // size)[..., None]
    missing = (used & ((table < 0) | (table >= mode.pages))).any(-1).astype(jnp.int32)
    behind = jnp.where(lens > 0, starts + lens, 0).max(1, keepdims=True)
    none = jnp.zeros_like(behind)
    columns = ((starts, behind), (lens, t - behind), (kv_lens, none), (missing, none))
    return jnp.stack([jnp.concatenate(pair, 1).reshape(-1) for pair in columns], -1)


def _line(lens: jax.Array, kv_lens: jax.Array, mode: Mode) -> tuple[jax.Array, jax.Array]:
    """The items in the order of the line, and where the tiles of each end."""
    tokens = jnp.where(lens <= mode.narrow_tokens, mode.narrow_tokens, mode.wide_tokens)
    blocks = -(-lens // tokens)
    upto = _sums(blocks * mode.kv_heads)  # items of the sequences
    index = jnp.arange(mode.items, dtype=jnp.int32)
    hand = jnp.maximum(-(-upto[-1] // mode.programs), 1)  # cards of a player
    item = index % hand * mode.programs + index // hand
    there = (item < upto[-1]) & (index < hand * mode.programs)
    sequence = jnp.searchsorted(upto, item, side="right", method="compare_all").astype(jnp.int32)
    sequence = jnp.minimum(sequence, lens.shape[0] - 1)
    lens, kv_lens, tokens, blocks, upto = (
        x[sequence] for x in (lens, kv_lens, tokens, blocks, upto)
    )
    number = item - upto + blocks * mode.kv_heads
    blocks = jnp.maximum(blocks, 1)
    head, block = number // blocks, number % blocks

    first = kv_lens - lens + block * tokens
    last = jnp.minimum(first + tokens, kv_lens) - 1
    end = jnp.maximum(last + mode.block_k, 0) // mode.block_k
    begin = jnp.zeros_like(end)
    if mode.window:
        begin = jnp.maximum(first - mode.window + 1, 0) // mode.block_k
    # A block that sees nothing still has results to write.
    tiles = jnp.where(there, jnp.maximum(end - begin, 1), 0)
    return jnp.stack([sequence, block, head]), _sums(tiles)


def _sums(x: jax.Array) -> jax.Array:
    """Cumulative sums; few of them under a triangle, which is one small kernel."""
    if x.shape[0] > 1024:
        return jnp.cumsum(x, dtype=jnp.int32)
    index = jnp.arange(x.shape[0])
    return jnp.where(index[None, :] <= index[:, None], x[None, :], 0).sum(1, dtype=jnp.int32)
