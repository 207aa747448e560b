"""The selected branch, forward: online softmax over the blocks that some tokens have chosen.

One program computes the query heads of one key head for a tile of neighbouring tokens. It visits
the union of their lists (https://arxiv.org/abs/2502.11089, section 3.4, has one token in a tile).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer
from ejkernel.kernels.native_sparse_attention.inputs import Branch, Inputs
from ejkernel.kernels.native_sparse_attention.triton.configs import SelectedTileConfig
from ejkernel.kernels.native_sparse_attention.triton.lists import TileLists
from ejkernel.kernels.native_sparse_attention.triton.operands import SelectedStaticArguments
from ejkernel.kernels.native_sparse_attention.triton.tile import (
    first_query,
    head_pointers,
    load_key_tile,
    load_rows,
    load_span,
    load_value_tile,
    store_rows,
    tile_list,
    tile_position,
    tile_rows,
    tile_tokens,
    visible_keys,
)
from ejkernel.ops.platform import Device

tl: Any = None


def forward(
    inputs: Inputs,
    lists: TileLists,
    static: SelectedStaticArguments,
    config: SelectedTileConfig,
    device: Device,
) -> Branch:
    """Output and log-sum-exp of the selected branch."""
    b, t, n = inputs.query.shape[:3]
    out, lse = launch(
        forward_kernel,
        [*inputs[:3], *lists],
        [
            jax.ShapeDtypeStruct((b, t, n, static.value_dim), inputs.query.dtype),
            jax.ShapeDtypeStruct((b, t, n), jnp.float32),
        ],
        static,
        LaunchConfig(static.programs, config.warps, config.stages),
        device,
    )
    return Branch(out, jnp.swapaxes(lse, 1, 2))


@triton_jit
def forward_kernel(
    query: Pointer, key: Pointer, value: Pointer,
    tiles: Pointer, counts: Pointer, spans: Pointer, members: Pointer,
    out: Pointer, lse: Pointer, static: SelectedStaticArguments,
):  # fmt: skip
    """Output and log-sum-exp of a tile of queries."""
    tile, head_block, kv_head, batch = tile_position(tl.program_id(0), static)
    count, spans, members = tile_list(tile, kv_head, batch, counts, spans, members, static)
    tile_start, tile_end = tile_tokens(tile, tiles, static)
    q_start = first_query(batch, tile_start, kv_head, static)
    query += q_start * static.head_dim
    out += q_start * static.value_dim
    lse += q_start
    key, value = head_pointers(key, value, batch, kv_head, static)

    member, row, inside = tile_rows(tile_start, tile_end, head_block, static)
    token = tile_start + member
    q = load_rows(query, row, inside, static.head_dim, static.head_width)
    acc = tl.full([static.rows, static.value_width], 0.0, tl.float32)
    # The running max starts at a finite number: -inf minus it is -inf, not NaN.
    row_max = tl.full([static.rows], static.float32_min, tl.float32)
    row_sum = tl.full([static.rows], 0.0, tl.float32)
    next_start, next_end = load_span(0, count, spans, tile_end, static)
    for step in range(count * static.steps):
        start, end = next_start, next_end
        # Prefetched a step ahead, so that no load waits for its own address.
        next_start, next_end = load_span(step + 1, count, spans, tile_end, static)
        k = load_key_tile(key, start, end, static)
        x = tl.dot(q, tl.trans(k), input_precision=static.precision) * static.exp2_scale
        visible = visible_keys(step, start, end, token, member, members, static)
        x = tl.where(visible, x, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, 1))
        weights = tl.exp2(x - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(weights, 1)
        v = load_value_tile(value, start, end, static)
        acc = acc * alpha[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=static.precision)
        row_max = new_max

    seen = row_sum > 0.0
    denominator = tl.where(seen, row_sum, 1.0)
    store_rows(out, acc / denominator[:, None], row, inside, static.value_dim, static.value_width)
    natural = (row_max + tl.log2(denominator)) * static.ln_2
    tl.store(lse + row, tl.where(seen, natural, float("-inf")), mask=inside)
