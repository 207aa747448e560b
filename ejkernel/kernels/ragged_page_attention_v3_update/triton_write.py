"""In-place write of new tokens into the pages of a KV cache, one Triton kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.paged import cache_axes, stored
from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, padded_size, triton_jit
from ejkernel.kernels.common.triton.device_types import (
    INT32_ELEMENTS,
    Pointer,
    StaticArguments,
    Tensor,
)
from ejkernel.kernels.ragged_page_attention_v3.triton.operands import sequence_lengths, strides
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import Inputs, Spec
from ejkernel.ops.platform import Device

tl: Any = None

_MAX_HEADS_PER_PROGRAM = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWriteStaticArguments(StaticArguments):
    """Compile-time constants of the kernel."""

    tokens: int  # of a batch row
    sequences_per_batch: int
    sequences: int
    search_block: int  # sequences that a search compares at once
    kv_heads: int
    heads_per_program: int
    head_chunks: int
    page_size: int
    pages: int
    table_width: int
    int64_offsets: bool
    head_dim: int
    head_width: int  # head_dim, padded to a tile
    k_page_stride: int
    k_token_stride: int
    k_head_stride: int
    value_dim: int
    value_width: int
    v_page_stride: int
    v_token_stride: int
    v_head_stride: int


def write_cache(inputs: Inputs, spec: Spec, device: Device) -> tuple[jax.Array, jax.Array]:
    """The pages of keys and values after the write."""
    caches = inputs.key_pages, inputs.value_pages
    scales = inputs.k_scale, inputs.v_scale
    new = [
        stored(x.reshape(-1, *x.shape[2:]), scale, cache.dtype)
        for x, scale, cache in zip((inputs.key, inputs.value), scales, caches, strict=True)
    ]
    # Bits are copied: Triton does not support all 8-bit dtypes on all devices.
    as_bits = np.dtype(caches[0].dtype).itemsize == 1 and caches[0].dtype != jnp.int8
    if as_bits:
        new, caches = (
            [jax.lax.bitcast_convert_type(x, jnp.int8) for x in some] for some in (new, caches)
        )
    static = _static_arguments(inputs, spec)
    table = jnp.asarray(inputs.page_indices).reshape(-1, static.table_width)
    pages = launch(
        cache_write_kernel,
        [*new, sequence_lengths(inputs), table, *caches],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
        static,
        LaunchConfig(inputs.query.shape[0] * static.tokens * static.head_chunks, 4, 1),
        device,
        aliases={4: 0, 5: 1},
    )
    if as_bits:
        pages = [jax.lax.bitcast_convert_type(x, inputs.key_pages.dtype) for x in pages]
    return pages[0], pages[1]


def _static_arguments(inputs: Inputs, spec: Spec) -> CacheWriteStaticArguments:
    axes = cache_axes(spec.kv_layout)
    k_strides, v_strides = (strides(x.shape, axes) for x in (inputs.key_pages, inputs.value_pages))
    pages, size, kv_heads = (inputs.key_pages.shape[axes.index(letter)] for letter in "pck")
    b, s, width = inputs.page_indices.shape
    heads = min(_MAX_HEADS_PER_PROGRAM, padded_size(kv_heads))
    return CacheWriteStaticArguments(
        tokens=inputs.query.shape[1],
        sequences_per_batch=s,
        sequences=b * s,
        search_block=min(1024, padded_size(s)),
        kv_heads=kv_heads,
        heads_per_program=heads,
        head_chunks=-(-kv_heads // heads),
        page_size=size,
        pages=pages,
        table_width=width,
        int64_offsets=max(inputs.key_pages.size, inputs.value_pages.size) >= INT32_ELEMENTS,
        head_dim=inputs.key.shape[-1],
        head_width=padded_size(inputs.key.shape[-1]),
        k_page_stride=k_strides["p"],
        k_token_stride=k_strides["c"],
        k_head_stride=k_strides["k"],
        value_dim=inputs.value.shape[-1],
        value_width=padded_size(inputs.value.shape[-1]),
        v_page_stride=v_strides["p"],
        v_token_stride=v_strides["c"],
        v_head_stride=v_strides["k"],
    )


@triton_jit
def cache_write_kernel(
    new_keys: Pointer, new_values: Pointer, sequence_info: Pointer, page_table: Pointer,
    old_keys: Pointer, old_values: Pointer, keys: Pointer, values: Pointer,
    static: CacheWriteStaticArguments,
):  # fmt: skip
    """Write some heads of one token, if it belongs to a sequence that has a page for it."""
    number = tl.program_id(0) // static.head_chunks
    batch = number // static.tokens
    row = number - batch * static.tokens
    # The first sequence that ends after the token; empty ones end where they start.
    sequence = batch * static.sequences_per_batch
    for chunk in range(0, static.sequences_per_batch, static.search_block):
        index = chunk + tl.arange(0, static.search_block)
        valid = index < static.sequences_per_batch
        at = sequence_info + batch * static.sequences_per_batch + index
        start = tl.load(at, mask=valid, other=2147483647)
        length = tl.load(at + static.sequences, mask=valid, other=0)
        sequence += tl.sum((start + length <= row).to(tl.int32), 0)
    sequence = tl.minimum(sequence, (batch + 1) * static.sequences_per_batch - 1)
    start = tl.load(sequence_info + sequence)
    length = tl.load(sequence_info + static.sequences + sequence)
    position = tl.load(sequence_info + 2 * static.sequences + sequence) - length + row - start
    valid = (row >= start) & (row < start + length)
    valid = valid & (position >= 0) & (position < static.table_width * static.page_size)
    page = tl.load(
        page_table + sequence * static.table_width + position // static.page_size,
        mask=valid,
        other=-1,
    )
    place = page
    if static.int64_offsets:
        place = tl.cast(page, tl.int64)
    if (page >= 0) & (page < static.pages):
        slot = position % static.page_size
        head = tl.program_id(0) % static.head_chunks * static.heads_per_program + tl.arange(
            0, static.heads_per_program
        )
        token = tl.cast(number, tl.int64) * static.kv_heads
        _copy_heads(
            new_keys + token * static.head_dim,
            keys + place * static.k_page_stride + slot * static.k_token_stride, head,
            static.k_head_stride, static.head_dim, static.head_width, static,
        )  # fmt: skip
        _copy_heads(
            new_values + token * static.value_dim,
            values + place * static.v_page_stride + slot * static.v_token_stride, head,
            static.v_head_stride, static.value_dim, static.value_width, static,
        )  # fmt: skip


@triton_jit
def _copy_heads(
    source: Pointer, target: Pointer, head: Tensor, stride: tl.constexpr, dim: tl.constexpr,
    width: tl.constexpr, static: CacheWriteStaticArguments,
):  # fmt: skip
    column = tl.arange(0, width)[None, :]
    mask = (head < static.kv_heads)[:, None] & (column < dim)
    x = tl.load(source + head[:, None] * dim + column, mask=mask)
    if static.int64_offsets:
        head = tl.cast(head, tl.int64)  # its stride is that of all pages where heads come first
    tl.store(target + head[:, None] * stride + column, x, mask=mask)
