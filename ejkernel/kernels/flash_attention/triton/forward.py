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

from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, triton_jit
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.triton.operands import Mode, Plan, plan
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
from ejkernel.ops.platform import Device

tl: Any = None


def forward(
    inputs: Inputs, spec: Spec, block_q: int, block_k: int, warps: int, stages: int, device: Device
):
    """Output and log-sum-exp of a call, in blocks of these sizes."""
    planned = plan(inputs, spec, block_q, block_k)
    out, lse = launch(
        attend,
        operands(inputs, planned),
        results(inputs),
        planned.mode,
        LaunchConfig(
            inputs.query.shape[0] * planned.mode.heads * planned.mode.q_blocks, warps, stages
        ),
        device,
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


@triton_jit
def attend(
    query, key, value, sinks, rows, columns, table, bias, counters, bounds, index, out, lse,
    static: Mode,
):  # fmt: skip
    """Output and log-sum-exp of a block of queries."""
    program = tl.program_id(0)
    # The longest rows of a causal mask first, so that the last programs to start are short ones.
    i = static.q_blocks - 1 - program % static.q_blocks
    head = program // static.q_blocks % static.heads
    batch = program // (static.q_blocks * static.heads)
    group: tl.constexpr = static.heads // static.kv_heads
    q_stride: tl.constexpr = static.heads * static.head_dim
    o_stride: tl.constexpr = static.heads * static.value_dim
    k_stride: tl.constexpr = static.kv_heads * static.head_dim
    v_stride: tl.constexpr = static.kv_heads * static.value_dim
    row = tl.cast(batch, tl.int64)
    query += row * (static.q_len * q_stride) + head * static.head_dim
    key += row * (static.kv_len * k_stride) + head // group * static.head_dim
    value += row * (static.kv_len * v_stride) + head // group * static.value_dim
    out += row * (static.q_len * o_stride) + head * static.value_dim
    lse += (row * static.heads + head) * static.q_len

    q_start = i * static.block_q
    q = load_rows(
        query, q_start, static.q_len, q_stride, static.head_dim, static.head_width, static.block_q,
        static.ragged_queries,
    )  # fmt: skip
    total = tl.full([static.block_q, static.value_width], 0.0, tl.float32)
    # The peak starts at a finite number: -inf less than that is still -inf, not NaN.
    peak = tl.full([static.block_q], -3.4028234663852886e38, tl.float32)
    mass = tl.full([static.block_q], 0.0, tl.float32)

    first, full_first, full_end, end = walk(i, batch, head, bounds, static)
    listed = list_at(i, batch, head, index, static)
    for step in range(full_end - full_first):
        j = block_at(step, True, first, full_first, full_end, listed, static)
        total, peak, mass = _step(
            total, peak, mass, q, q_start, j * static.block_k, batch, head, key, value,
            rows, columns, table, bias, counters, False, static,
        )  # fmt: skip
    if static.masked:
        for step in range(full_first - first + end - full_end):
            j = block_at(step, False, first, full_first, full_end, listed, static)
            total, peak, mass = _step(
                total, peak, mass, q, q_start, j * static.block_k, batch, head, key, value,
                rows, columns, table, bias, counters, True, static,
            )  # fmt: skip

    seen = mass > 0.0
    whole = mass
    if static.sinks:
        whole += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - peak)
    whole = tl.where(seen, whole, 1.0)
    if static.dropout:
        total = total * static.grow
    total = total / whole[:, None]
    store_rows(
        out,
        total,
        q_start,
        static.q_len,
        o_stride,
        static.value_dim,
        static.value_width,
        static.block_q,
    )
    natural = (peak + tl.log2(tl.where(seen, mass, 1.0))) * 0.6931471805599453
    at = q_start + tl.arange(0, static.block_q)
    tl.store(lse + at, tl.where(seen, natural, float("-inf")), mask=at < static.q_len)


@triton_jit
def _step(
    total, peak, mass, q, q_start, k_start, batch, head, key, value,
    rows, columns, table, bias, counters, masked: tl.constexpr, static: tl.constexpr,
):  # fmt: skip
    """The softmax so far, with one more block of keys."""
    k_stride: tl.constexpr = static.kv_heads * static.head_dim
    v_stride: tl.constexpr = static.kv_heads * static.value_dim
    edge: tl.constexpr = masked and static.ragged_keys
    k = load_rows(
        key,
        k_start,
        static.kv_len,
        k_stride,
        static.head_dim,
        static.head_width,
        static.block_k,
        edge,
    )
    x = tl.dot(q, tl.trans(k), input_precision=static.precision)
    x = logits(x, q_start, k_start, batch, head, bias, edge, static, False)
    if masked:
        seen = visible(q_start, k_start, batch, head, rows, columns, table, static, False)
        x = tl.where(seen, x, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(x, 1) * static.factor)
    weights = tl.exp2(x * static.factor - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    mass = mass * shrink + tl.sum(weights, 1)
    if static.dropout:
        keep = kept(q_start, k_start, batch, head, counters, static, False)
        weights = tl.where(keep, weights, 0.0)
    v = load_rows(
        value,
        k_start,
        static.kv_len,
        v_stride,
        static.value_dim,
        static.value_width,
        static.block_k,
        edge,
    )
    total = total * shrink[:, None]
    total = tl.dot(weights.to(v.dtype), v, total, input_precision=static.precision)
    return total, new_peak, mass
