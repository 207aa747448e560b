"""The combine kernel of split-KV: merges the partial softmax of items that programs shared."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar
from ejkernel.kernels.ragged_page_attention_v3.triton.attention import (
    PartialSoftmax,
    result_shapes,
)
from ejkernel.kernels.ragged_page_attention_v3.triton.operands import (
    PagedOperands,
    PagedStaticArguments,
)
from ejkernel.kernels.ragged_page_attention_v3.triton.tile import store_results
from ejkernel.ops.platform import Device

tl: Any = None

_NUM_WARPS, _NUM_STAGES = 4, 1


def combine(
    out: jax.Array,
    lse: jax.Array,
    partial: PartialSoftmax,
    static: PagedStaticArguments,
    operands: PagedOperands,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp with the rows of split items filled in, in place."""
    programs = static.programs * static.combine_chunks + static.combine_padding_programs
    out, lse = launch(
        combine_kernel,
        [
            *(partial.split_info, partial.acc, partial.row_max, partial.row_sum),
            *(operands.sequence_info, operands.v_scale, operands.sinks, out, lse),
        ],
        result_shapes(operands.query, static),
        static,
        LaunchConfig(programs, _NUM_WARPS, _NUM_STAGES),
        device,
        aliases={7: 0, 8: 1},
    )
    return out, lse


@triton_jit
def combine_kernel(
    split_info: Pointer, partial_acc: Pointer, partial_max: Pointer, partial_sum: Pointer,
    sequence_info: Pointer, v_scale: Pointer, sinks: Pointer, old_out: Pointer, old_lse: Pointer,
    out: Pointer, lse: Pointer, static: PagedStaticArguments,
):  # fmt: skip
    """Some rows of the split item that `program` started.

    The last programs write zeros for tokens of no sequence, where those are not in a work list.
    """
    number = tl.program_id(0)
    program = number // static.combine_chunks
    if program < static.programs:
        _combine_item(
            split_info, partial_acc, partial_max, partial_sum, v_scale, sinks, out, lse, program,
            number - program * static.combine_chunks, static,
        )  # fmt: skip
    elif static.prefill_rows == 0:
        first = number - static.programs * static.combine_chunks
        for token in range(first, static.batch * static.tokens, static.combine_padding_programs):
            _zero_padding_token(sequence_info, v_scale, sinks, out, lse, token, static)


@triton_jit
def _combine_item(
    split_info: Pointer, partial_acc: Pointer, partial_max: Pointer, partial_sum: Pointer,
    v_scale: Pointer, sinks: Pointer, out: Pointer, lse: Pointer, program: Scalar, chunk: Scalar,
    static: PagedStaticArguments,
):  # fmt: skip
    """The rows of one chunk of the item; a loop strides over further chunks if there are more."""
    size: tl.constexpr = static.combine_rows
    remaining = tl.load(split_info + program * 8)
    batch = tl.load(split_info + program * 8 + 1)
    row = tl.load(split_info + program * 8 + 2)
    valid_tokens = tl.load(split_info + program * 8 + 3)
    head = tl.load(split_info + program * 8 + 4)
    share = tl.load(split_info + program * 8 + 5)
    end = tl.where(remaining > 0, valid_tokens * static.group, 0)
    count = 1 + (remaining + share - 1) // tl.maximum(share, 1)
    if static.combine_chunks * size >= static.max_rows:  # at most one chunk: no loop
        if chunk * size < end:
            _combine_rows(
                partial_acc, partial_max, partial_sum, v_scale, sinks, out, lse,
                program, count, batch, row, valid_tokens, head, chunk * size, static,
            )  # fmt: skip
    else:
        for first in range(chunk * size, end, static.combine_chunks * size):
            _combine_rows(
                partial_acc, partial_max, partial_sum, v_scale, sinks, out, lse,
                program, count, batch, row, valid_tokens, head, first, static,
            )  # fmt: skip


@triton_jit
def _combine_rows(
    partial_acc: Pointer, partial_max: Pointer, partial_sum: Pointer, v_scale: Pointer,
    sinks: Pointer, out: Pointer, lse: Pointer, program: Scalar, count: Scalar, batch: Scalar,
    row: Scalar, valid_tokens: Scalar, head: Scalar, first: Scalar, static: PagedStaticArguments,
):  # fmt: skip
    """Merge the rows from `first` on of the `count` splits of an item."""
    size: tl.constexpr = static.combine_rows
    row_index = first + tl.arange(0, size)
    acc = tl.full([size, static.value_width], 0.0, tl.float32)
    row_max = tl.full([size], static.float32_min, tl.float32)
    row_sum = tl.full([size], 0.0, tl.float32)
    for begin in range(0, count, static.combine_splits):
        split = begin + tl.arange(0, static.combine_splits)
        # The first split has odd index, in the program that started the item; see PartialSoftmax.
        partial_index = 2 * (program + split) + (split == 0).to(tl.int32)
        at = partial_index[:, None] * static.max_rows + row_index[None, :]
        valid = (split < count)[:, None]
        column = tl.arange(0, static.value_width)[None, None, :]
        x = tl.load(
            partial_acc + at[:, :, None] * static.value_width + column,
            mask=valid[:, :, None],
            other=0.0,
        )
        split_max = tl.load(partial_max + at, mask=valid, other=static.float32_min)
        split_sum = tl.load(partial_sum + at, mask=valid, other=0.0)
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        weight = tl.exp2(split_max - new_max[None, :])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(split_sum * weight, 0)
        acc = acc * alpha[:, None] + tl.sum(x * weight[:, :, None], 0)
        row_max = new_max
    store_results(
        acc,
        row_max,
        row_sum,
        v_scale,
        sinks,
        out,
        lse,
        batch,
        row,
        valid_tokens,
        head,
        row_index,
        static,
    )


@triton_jit
def _zero_padding_token(
    sequence_info: Pointer, v_scale: Pointer, sinks: Pointer, out: Pointer, lse: Pointer,
    token: Scalar, static: PagedStaticArguments,
):  # fmt: skip
    """Zero output of a token past the end of all sequences of its batch row."""
    batch = token // static.tokens
    row = token - batch * static.tokens
    end = 0
    for chunk in range(0, static.sequences_per_batch, static.search_block):
        index = chunk + tl.arange(0, static.search_block)
        at = sequence_info + batch * static.sequences_per_batch + index
        start = tl.load(at, mask=index < static.sequences_per_batch, other=0)
        length = tl.load(at + static.sequences, mask=index < static.sequences_per_batch, other=0)
        end = tl.maximum(end, tl.max(tl.where(length > 0, start + length, 0), 0))
    if row >= end:
        row_index = tl.arange(0, static.decode_rows)
        acc = tl.full([static.decode_rows, static.value_width], 0.0, tl.float32)
        zeros = tl.full([static.decode_rows], 0.0, tl.float32)
        for head in range(static.kv_heads):
            store_results(
                acc, zeros, zeros, v_scale, sinks, out, lse, batch, row, 1, head, row_index,
                static,
            )  # fmt: skip
