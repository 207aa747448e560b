"""New tokens into the pages of a cache where it lies, in one launch of Triton."""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.paged import cache_axes, stored
from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import StaticArguments
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import padded
from ejkernel.kernels.ragged_page_attention_v3.triton.operands import LARGE, lengths, strides
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import Inputs, Spec
from ejkernel.ops.platform import Device

tl: Any = None

_HEADS = 16  # of one program, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode(StaticArguments):
    """All that is static of a launch."""

    tokens: int  # of a row of the batch
    per_batch: int  # sequences of it
    sequences: int
    search: int
    kv_heads: int
    heads: int  # of one program
    chunks: int  # of heads
    page_size: int
    pages: int
    table_width: int
    far: bool  # offsets need 64 bits
    head_dim: int
    head_width: int
    k_page: int  # strides
    k_slot: int
    k_head: int
    value_dim: int
    value_width: int
    v_page: int
    v_slot: int
    v_head: int


def written(inputs: Inputs, spec: Spec, device: Device) -> tuple[jax.Array, jax.Array]:
    """The cache with the new tokens where they belong."""
    caches = inputs.key_pages, inputs.value_pages
    scales = inputs.k_scale, inputs.v_scale
    new = [
        stored(x.reshape(-1, *x.shape[2:]), scale, cache.dtype)
        for x, scale, cache in zip((inputs.key, inputs.value), scales, caches, strict=True)
    ]
    # Bits are moved, whatever they mean: Triton does not know all dtypes on all devices.
    bits = np.dtype(caches[0].dtype).itemsize == 1 and caches[0].dtype != jnp.int8
    if bits:
        new, caches = (
            [jax.lax.bitcast_convert_type(x, jnp.int8) for x in some] for some in (new, caches)
        )
    mode = _mode(inputs, spec)
    table = jnp.asarray(inputs.page_indices).reshape(-1, mode.table_width)
    pages = launch(
        write,
        [*new, lengths(inputs), table, *caches],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
        mode,
        LaunchConfig(inputs.query.shape[0] * mode.tokens * mode.chunks, 4, 1),
        device,
        aliases={4: 0, 5: 1},
    )
    if bits:
        pages = [jax.lax.bitcast_convert_type(x, inputs.key_pages.dtype) for x in pages]
    return pages[0], pages[1]


def _mode(inputs: Inputs, spec: Spec) -> Mode:
    axes = cache_axes(spec.kv_layout)
    k_strides, v_strides = (strides(x.shape, axes) for x in (inputs.key_pages, inputs.value_pages))
    pages, size, kv_heads = (inputs.key_pages.shape[axes.index(letter)] for letter in "pck")
    b, s, width = inputs.page_indices.shape
    heads = min(_HEADS, padded(kv_heads))
    return Mode(
        tokens=inputs.query.shape[1],
        per_batch=s,
        sequences=b * s,
        search=min(1024, padded(s)),
        kv_heads=kv_heads,
        heads=heads,
        chunks=-(-kv_heads // heads),
        page_size=size,
        pages=pages,
        table_width=width,
        far=max(inputs.key_pages.size, inputs.value_pages.size) >= LARGE,
        head_dim=inputs.key.shape[-1],
        head_width=padded(inputs.key.shape[-1]),
        k_page=k_strides["p"],
        k_slot=k_strides["c"],
        k_head=k_strides["k"],
        value_dim=inputs.value.shape[-1],
        value_width=padded(inputs.value.shape[-1]),
        v_page=v_strides["p"],
        v_slot=v_strides["c"],
        v_head=v_strides["k"],
    )


@triton_jit
def write(
    new_keys, new_values, info, table, some_keys, some_values,
    keys, values,
    static: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, if it has a place."""
    number = tl.program_id(0) // static.chunks
    batch = number // static.tokens
    row = number - batch * static.tokens
    # The first sequence that ends behind the token; empty ones end where they begin.
    sequence = batch * static.per_batch
    for chunk in range(0, static.per_batch, static.search):
        index = chunk + tl.arange(0, static.search)
        there = index < static.per_batch
        at = info + batch * static.per_batch + index
        start = tl.load(at, mask=there, other=2147483647)
        length = tl.load(at + static.sequences, mask=there, other=0)
        sequence += tl.sum((start + length <= row).to(tl.int32), 0)
    sequence = tl.minimum(sequence, (batch + 1) * static.per_batch - 1)
    start = tl.load(info + sequence)
    length = tl.load(info + static.sequences + sequence)
    position = tl.load(info + 2 * static.sequences + sequence) - length + row - start
    there = (row >= start) & (row < start + length)
    there = there & (position >= 0) & (position < static.table_width * static.page_size)
    page = tl.load(
        table + sequence * static.table_width + position // static.page_size, mask=there, other=-1
    )
    if (page >= 0) & (page < static.pages):
        if static.far:
            page = tl.cast(page, tl.int64)
        slot = position % static.page_size
        head = tl.program_id(0) % static.chunks * static.heads + tl.arange(0, static.heads)
        token = tl.cast(number, tl.int64) * static.kv_heads
        _move(
            new_keys + token * static.head_dim, keys + page * static.k_page + slot * static.k_slot,
            head, static.k_head, static.head_dim, static.head_width, static,
        )  # fmt: skip
        _move(
            new_values + token * static.value_dim,
            values + page * static.v_page + slot * static.v_slot, head, static.v_head,
            static.value_dim, static.value_width, static,
        )  # fmt: skip


@triton_jit
def _move(
    source, target, head, stride: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    static: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, width)[None, :]
    mask = (head < static.kv_heads)[:, None] & (column < dim)
    x = tl.load(source + head[:, None] * dim + column, mask=mask)
    tl.store(target + head[:, None] * stride + column, x, mask=mask)
