"""Forward in Triton: online softmax over blocks of keys (https://arxiv.org/abs/2307.08691).

One program has one block of queries of one head. It first walks the key blocks that it sees whole,
without a mask, and then those that it sees in part.
"""

# Annotations stay text: Triton reads them, and it may not be here.
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ejkernel.kernels.common.triton.bridge import Launch, kernel, launch
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.triton.operands import Plan, plan
from ejkernel.kernels.flash_attention.triton.tile import (
    block_at,
    kept,
    list_at,
    load_rows,
    logits,
    store_rows,
    visible,
    walk,
)

tl: Any = None


def forward(inputs: Inputs, spec: Spec, block_q: int, block_k: int, warps: int, stages: int):
    """Output and log-sum-exp of a call, in blocks of these sizes."""
    planned = plan(inputs, spec, block_q, block_k)
    out, lse = launch(
        attend,
        operands(inputs, planned),
        results(inputs),
        planned.mode,
        Launch(inputs.query.shape[0] * planned.mode.heads * planned.mode.q_blocks, warps, stages),
    )
    return Outputs(out, lse)


def operands(inputs: Inputs, planned: Plan) -> list[jax.Array]:
    """What the kernel reads."""
    sinks = jnp.zeros((16,), jnp.float32)
    if inputs.sinks is not None:
        sinks = logsumexp(inputs.sinks.astype(jnp.float32), axis=-1)
        sinks = jnp.broadcast_to(sinks, (inputs.query.shape[2],))
    return [*inputs[:3], sinks, *planned.operands]


def results(inputs: Inputs) -> list[jax.ShapeDtypeStruct]:
    """What the kernel writes."""
    b, t, n, _ = inputs.query.shape
    out = jax.ShapeDtypeStruct((b, t, n, inputs.value.shape[3]), inputs.query.dtype)
    return [out, jax.ShapeDtypeStruct((b, n, t), jnp.float32)]


@kernel
def attend(
    query, key, value, sinks, rows, columns, table, bias, counters, bounds, index, out, lse,
    mode: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a block of queries."""
    program = tl.program_id(0)
    # The longest rows of a causal mask first, so that the last programs to start are short ones.
    i = mode.q_blocks - 1 - program % mode.q_blocks
    head = program // mode.q_blocks % mode.heads
    batch = program // (mode.q_blocks * mode.heads)
    group: tl.constexpr = mode.heads // mode.kv_heads
    q_stride: tl.constexpr = mode.heads * mode.head_dim
    o_stride: tl.constexpr = mode.heads * mode.value_dim
    k_stride: tl.constexpr = mode.kv_heads * mode.head_dim
    v_stride: tl.constexpr = mode.kv_heads * mode.value_dim
    row = tl.cast(batch, tl.int64)
    query += row * (mode.q_len * q_stride) + head * mode.head_dim
    key += row * (mode.kv_len * k_stride) + head // group * mode.head_dim
    value += row * (mode.kv_len * v_stride) + head // group * mode.value_dim
    out += row * (mode.q_len * o_stride) + head * mode.value_dim
    lse += (row * mode.heads + head) * mode.q_len

    q_start = i * mode.block_q
    q = load_rows(
        query, q_start, mode.q_len, q_stride, mode.head_dim, mode.head_width, mode.block_q,
        mode.ragged_queries,
    )  # fmt: skip
    total = tl.full([mode.block_q, mode.value_width], 0.0, tl.float32)
    # The peak starts at a finite number: -inf less than that is still -inf, not NaN.
    peak = tl.full([mode.block_q], -3.4028234663852886e38, tl.float32)
    mass = tl.full([mode.block_q], 0.0, tl.float32)

    first, full_first, full_end, end = walk(i, batch, head, bounds, mode)
    listed = list_at(i, batch, head, index, mode)
    for step in range(full_end - full_first):
        j = block_at(step, True, first, full_first, full_end, listed, mode)
        total, peak, mass = _step(
            total, peak, mass, q, q_start, j * mode.block_k, batch, head, key, value,
            rows, columns, table, bias, counters, False, mode,
        )  # fmt: skip
    if mode.masked:
        for step in range(full_first - first + end - full_end):
            j = block_at(step, False, first, full_first, full_end, listed, mode)
            total, peak, mass = _step(
                total, peak, mass, q, q_start, j * mode.block_k, batch, head, key, value,
                rows, columns, table, bias, counters, True, mode,
            )  # fmt: skip

    seen = mass > 0.0
    whole = mass
    if mode.sinks:
        whole += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - peak)
    whole = tl.where(seen, whole, 1.0)
    if mode.dropout:
        total = total * mode.grow
    total = total / whole[:, None]
    store_rows(
        out, total, q_start, mode.q_len, o_stride, mode.value_dim, mode.value_width, mode.block_q
    )
    natural = (peak + tl.log2(tl.where(seen, mass, 1.0))) * 0.6931471805599453
    at = q_start + tl.arange(0, mode.block_q)
    tl.store(lse + at, tl.where(seen, natural, float("-inf")), mask=at < mode.q_len)


@kernel
def _step(
    total, peak, mass, q, q_start, k_start, batch, head, key, value,
    rows, columns, table, bias, counters, masked: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """The softmax so far, with one more block of keys."""
    k_stride: tl.constexpr = mode.kv_heads * mode.head_dim
    v_stride: tl.constexpr = mode.kv_heads * mode.value_dim
    edge: tl.constexpr = masked and mode.ragged_keys
    k = load_rows(
        key, k_start, mode.kv_len, k_stride, mode.head_dim, mode.head_width, mode.block_k, edge
    )
    x = tl.dot(q, tl.trans(k), input_precision=mode.precision)
    x = logits(x, q_start, k_start, batch, head, bias, edge, mode, False)
    if masked:
        seen = visible(q_start, k_start, batch, head, rows, columns, table, mode, False)
        x = tl.where(seen, x, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(x, 1) * mode.factor)
    weights = tl.exp2(x * mode.factor - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    mass = mass * shrink + tl.sum(weights, 1)
    if mode.dropout:
        keep = kept(q_start, k_start, batch, head, counters, mode, False)
        weights = tl.where(keep, weights, 0.0)
    v = load_rows(
        value, k_start, mode.kv_len, v_stride, mode.value_dim, mode.value_width, mode.block_k, edge
    )
    total = total * shrink[:, None]
    total = tl.dot(weights.to(v.dtype), v, total, input_precision=mode.precision)
    return total, new_peak, mass
