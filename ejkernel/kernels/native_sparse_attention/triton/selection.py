"""The choice of blocks in Triton: scores of the mean keys and an online top-k, in one kernel.

One program chooses the blocks of a tile of tokens for one key head. It visits the mean keys twice:
for the log-sum-exp of each row, then for the weights, whose sums over the query heads are the
scores. The best so far are kept sorted in registers, so that no array has an entry for each pair of
a token and a block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.common.triton.device_types import Pointer, Scalar, StaticArguments, Tensor
from ejkernel.kernels.native_sparse_attention import selection
from ejkernel.kernels.native_sparse_attention.inputs import Selection, SelectionInputs, Spec
from ejkernel.kernels.native_sparse_attention.triton.configs import MAX_HEAD_DIM
from ejkernel.kernels.native_sparse_attention.triton.tile import load_keys, load_rows
from ejkernel.ops.implementation import Implementation, Pass, yields_to_xla
from ejkernel.ops.platform import Device

tl: Any = None

_ROWS, _BLOCK = 64, 64
_EXACT_ROWS, _EXACT_BLOCK = 16, 16  # float32 in full precision has no tensor cores
_MOST_CHOSEN = 128
_NUM_WARPS, _NUM_STAGES = 4, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionStaticArguments(StaticArguments):
    """Compile-time constants; a row is a query head of a token, as in the attention kernels."""

    length: int
    heads: int
    kv_heads: int
    group: int
    group_width: int
    head_dim: int
    head_width: int
    means: int  # mean keys of a row
    chosen: int  # blocks of a token
    tokens: int  # of a tile
    block: int  # mean keys that are visited at once, and scores that are kept
    precision: str
    exp2_scale: float

    @property
    def rows(self) -> int:
        return self.tokens * self.group_width

    @property
    def tiles(self) -> int:
        return -(-self.length // self.tokens)

    @property
    def mean_stride(self) -> int:
        return self.kv_heads * self.head_dim


def run(
    inputs: SelectionInputs, spec: Spec, params: None, device: Device
) -> tuple[Selection, tuple[()]]:
    """The blocks of each token: its own first, then by falling score."""
    count = inputs.places.shape[0]
    candidates = selection.candidates(inputs, spec)
    others = min(count - 1, candidates.means.shape[1])
    chosen = None
    if others > 0:
        static = _static_arguments(inputs, spec, candidates.means, others)
        batch, length = inputs.query.shape[:2]
        shape = (batch, length, static.kv_heads, others)
        (chosen,) = launch(
            selection_kernel,
            [inputs.query, candidates.means, candidates.limits],
            [jax.ShapeDtypeStruct(shape, jnp.int32)],
            static,
            LaunchConfig(batch * static.kv_heads * static.tiles, _NUM_WARPS, _NUM_STAGES),
            device,
        )
    return Selection(selection.with_own(inputs, spec, chosen)), ()


def _static_arguments(
    inputs: SelectionInputs, spec: Spec, means: jax.Array, others: int
) -> SelectionStaticArguments:
    _, length, kv_heads, group, head_dim = inputs.query.shape
    width = 1 << (group - 1).bit_length()
    exact = np.dtype(inputs.query.dtype).itemsize == 4
    rows, block = (_EXACT_ROWS, _EXACT_BLOCK) if exact else (_ROWS, _BLOCK)
    return SelectionStaticArguments(
        length=length,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        group=group,
        group_width=width,
        head_dim=head_dim,
        head_width=bridge.padded_size(head_dim),
        means=means.shape[1],
        chosen=others,
        tokens=max(1, rows // width),
        block=max(block, bridge.padded_size(others)),
        precision=bridge.matmul_precision(inputs.query.dtype),
        exp2_scale=spec.softmax_scale * LOG2_E,
    )


@triton_jit
def selection_kernel(
    query: Pointer, means: Pointer, limits: Pointer, chosen: Pointer,
    static: SelectionStaticArguments,
):  # fmt: skip
    """The blocks of highest score of a tile of tokens, from the start of their sequences."""
    program = tl.program_id(0)
    tile = static.tiles - 1 - program % static.tiles
    kv_head = program // static.tiles % static.kv_heads
    batch = tl.cast(program // (static.tiles * static.kv_heads), tl.int64)
    start = batch * static.length + tile * static.tokens
    query += (start * static.heads + kv_head * static.group) * static.head_dim
    means += batch * (static.means * static.mean_stride) + kv_head * static.head_dim
    chosen += (start * static.kv_heads + kv_head) * static.chosen

    row = tl.arange(0, static.rows)
    head = row % static.group_width
    token = tile * static.tokens + row // static.group_width
    inside = (token < static.length) & (head < static.group)
    q = load_rows(
        query, row // static.group_width * static.heads + head, inside, static.head_dim,
        static.head_width,
    )  # fmt: skip
    row_first = tl.load(limits + token, mask=inside, other=0)
    row_end = tl.load(limits + static.length + token, mask=inside, other=0)
    first = tl.min(tl.where(row_first < row_end, row_first, static.means), 0)
    last = tl.max(row_end, 0)
    # The running max starts at a finite number: -inf minus it is -inf, not NaN.
    row_max = tl.full([static.rows], static.float32_min, tl.float32)
    row_sum = tl.full([static.rows], 0.0, tl.float32)
    for mean in range(first, last, static.block):
        x = _logits(q, means, mean, last, row_first, row_end, static)
        new_max = tl.maximum(row_max, tl.max(x, 1))
        row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(x - new_max[:, None]), 1)
        row_max = new_max
    # For a row that sees no mean exp2(logits - inf) is 0, whatever the logits.
    seen = row_sum > 0.0
    lse = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("inf"))

    member = tl.arange(0, static.tokens)
    token = tile * static.tokens + member
    token_first = tl.load(limits + token, mask=token < static.length, other=0)
    token_end = tl.load(limits + 2 * static.length + token, mask=token < static.length, other=0)
    # In one integer the score, and after it the index, of which the lower one wins.
    best = tl.full([static.tokens, static.block], -1, tl.int64)
    for mean in range(first, last, static.block):
        x = _logits(q, means, mean, last, row_first, row_end, static)
        weights = tl.exp2(x - lse[:, None])
        weights = tl.reshape(weights, [static.tokens, static.group_width, static.block])
        score = tl.sum(weights, 1).to(tl.int32, bitcast=True).to(tl.int64)
        index = (mean + tl.arange(0, static.block))[None, :]
        rank = (score << 32) | (0x7FFFFFFF - index).to(tl.int64)
        allowed = (index >= token_first[:, None]) & (index < token_end[:, None])
        rank = tl.sort(tl.where(allowed, rank, -1), 1)
        # The larger ones of a falling and a rising sequence are the best of both.
        best = tl.sort(tl.maximum(best, rank), 1, descending=True)
    index = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32) - token_first[:, None]
    column = tl.arange(0, static.block)[None, :]
    at = chosen + member[:, None] * (static.kv_heads * static.chosen) + column
    mask = (token < static.length)[:, None] & (column < static.chosen)
    tl.store(at, tl.where(best >= 0, index, -1), mask=mask)


@triton_jit
def _logits(
    q: Tensor, means: Pointer, mean: Scalar, last: Scalar, row_first: Tensor, row_end: Tensor,
    static: SelectionStaticArguments,
):  # fmt: skip
    """Logits in base 2 of the mean keys that the rows see, -inf of the others."""
    k = load_keys(
        means, mean, last, static.mean_stride, static.head_dim, static.head_width, static.block
    )
    x = tl.dot(q, tl.trans(k), input_precision=static.precision) * static.exp2_scale
    index = (mean + tl.arange(0, static.block))[None, :]
    visible = (index >= row_first[:, None]) & (index < row_end[:, None])
    return tl.where(visible, x, float("-inf"))


def why_not(inputs: SelectionInputs, spec: Spec, device: Device) -> str | None:
    """Why the kernel does not support a call, or None."""
    query, key = inputs[:2]
    if query.dtype != key.dtype:
        return "takes query and key of one dtype"
    group, head_dim = query.shape[3:]
    if head_dim > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM} and this one is {head_dim}"
    most = _EXACT_ROWS if np.dtype(query.dtype).itemsize == 4 else _ROWS
    if group > most:
        return f"takes up to {most} query heads to a key head, not {group}"
    if (count := inputs.places.shape[0]) > _MOST_CHOSEN:
        return f"chooses up to {_MOST_CHOSEN} blocks and not {count}"
    return bridge.why_not(device, query.dtype)


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run, features=frozenset({"cu_seqlens"}), why_not=why_not, yields_to=yields_to_xla
    )
)
