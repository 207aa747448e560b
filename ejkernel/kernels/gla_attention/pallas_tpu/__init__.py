"""Gated linear attention on TPUs, in Pallas: dispatch, support, chunks that fit into VMEM.

A chunk has `block_q` tokens. A step computes a chunk of `block_k` key heads.
"""

import itertools

import jax.numpy as jnp

from ejkernel.kernels.common.integers import largest_divisor, next_power_of_two
from ejkernel.kernels.common.mosaic_tpu.memory import VMEM_SHARE, core_of, vmem_bytes, vmem_limit
from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec, sequences
from ejkernel.kernels.gla_attention.pallas_tpu import kernels
from ejkernel.kernels.gla_attention.pallas_tpu.chunk_recurrence import levels_of
from ejkernel.kernels.gla_attention.pallas_tpu.kernels import (
    GlaStepSize,
    has_column_decays,
    interleaved_heads,
)
from ejkernel.kernels.gla_attention.xla import Residuals
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_LEAST, _MOST = 16, 256  # tokens of a chunk: a register of bfloat16 rows; tables that fit
_HEADS = 4  # key heads of a step: enough to make its start cheap


def run_forward(
    inputs: Inputs, spec: Spec, params: GLAttentionConfig | None
) -> tuple[Outputs, Residuals]:
    """Output of every token, state after every sequence."""
    size = _size(inputs, params or heuristic_forward(inputs, spec, None))
    vmem = vmem_limit(vmem_of_step(inputs, size))
    return kernels.forward(inputs, spec, size, vmem), Residuals()


def run_backward(
    inputs: Inputs,
    residuals: Residuals,
    d_outputs: Outputs,
    spec: Spec,
    params: GLAttentionConfig | None,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    size = _size(inputs, params or heuristic_backward(inputs, spec, None))
    vmem = vmem_limit(vmem_of_step(inputs, size, backward=True))
    return kernels.backward(inputs, d_outputs, spec, size, vmem)


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device | None) -> GLAttentionConfig:
    """The best chunk that fits, of as many heads as fit."""
    return _heuristic(inputs, device, backward=False)


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device | None) -> GLAttentionConfig:
    """The best chunk that fits, of as many heads as fit."""
    return _heuristic(inputs, device, backward=True)


def _heuristic(inputs: Inputs, device: Device | None, backward: bool) -> GLAttentionConfig:
    size = _fitting(inputs, device, backward) or GlaStepSize(_LEAST, 1)
    return GLAttentionConfig(block_q=size.chunk, block_k=size.heads)


def _fitting(inputs: Inputs, device: Device | None, backward: bool) -> GlaStepSize | None:
    """The largest step that fits: fewer heads first, then fewer tokens, which matmuls need more."""
    longest = 64 if has_column_decays(inputs) else 128
    chunks = [c for c in (256, 128, 64, 32, 16) if c <= longest]
    for chunk, heads in itertools.product(chunks, (_HEADS, 2, 1)):
        size = _clipped(inputs, chunk, heads)
        if vmem_of_step(inputs, size, backward) <= VMEM_SHARE * core_of(device).vmem:
            return size
    return None


def _size(inputs: Inputs, params: GLAttentionConfig) -> GlaStepSize:
    return _clipped(inputs, params.block_q, min(params.block_k, 2 * _HEADS))


def _clipped(inputs: Inputs, chunk: int, heads: int) -> GlaStepSize:
    """A power of two of tokens, no more than a sequence has on average, and a divisor of heads."""
    average = -(-inputs.key.shape[1] // sequences(inputs))
    chunk = min(chunk, _MOST, next_power_of_two(average))
    return GlaStepSize(max(chunk, _LEAST), largest_divisor(inputs.key.shape[2], heads))


def vmem_of_step(inputs: Inputs, size: GlaStepSize, backward: bool = False) -> int:
    """VMEM of a step: double-buffered blocks, the state, and the temporaries of a head."""
    group = inputs.query.shape[2] // inputs.key.shape[2]
    width, columns, dtype = inputs.key.shape[3], inputs.value.shape[3], inputs.query.dtype
    chunk, float32 = size.chunk, jnp.float32
    tokens = lambda of, count, d: vmem_bytes((count * chunk, d), of)
    state = vmem_bytes((columns, width), float32)

    blocks = tokens(dtype, group + 1, width) + tokens(dtype, group + 1, columns) + 2 * state
    arrays, work, tables = 10 if backward else 6, 4 * state, 0
    for decays, d in ((inputs.gate, width), (inputs.gv, columns)):
        if decays is not None and decays.shape[-1] > 1:
            levels = levels_of(chunk)
            arrays += (3 if backward else 1) * levels
            blocks += tokens(float32, 1, d)
            work += 3 * tokens(float32, levels + 2, d)
            tables = vmem_bytes(((levels + 2) * chunk, chunk), jnp.bfloat16)
            if backward:
                tables += vmem_bytes((chunk, (levels + 2) * chunk), jnp.bfloat16)
    if backward:
        blocks, work = 2 * blocks + state, 2 * work
    work += arrays * tokens(float32, group, max(width, columns, chunk))
    work *= interleaved_heads(inputs, size.heads)
    return 2 * (size.heads * blocks + tables) + size.heads * state + work


def why_not_forward(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the forward kernel does not support a call."""
    return _why_not(inputs, device, backward=False)


def why_not_backward(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the backward kernels do not support a call."""
    return _why_not(inputs, device, backward=True)


def _why_not(inputs: Inputs, device: Device, backward: bool) -> str | None:
    dtypes = {str(x.dtype) for x in inputs[:3]}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}:
        return f"needs float32 or bfloat16 alone, got {', '.join(sorted(dtypes))}"
    others = {str(x.dtype) for x in inputs[3:7] if x is not None}
    if not others <= {"float32", "bfloat16"}:
        return f"needs decays and states of float32 or bfloat16, got {', '.join(sorted(others))}"
    size = _fitting(inputs, device, backward)
    if size is None:
        return "heads so large, or so many of a key head, do not fit into VMEM"
    if inputs.cu_seqlens is not None:
        batch, tokens, *_ = inputs.key.shape
        chunks = batch * -(-(tokens + sequences(inputs) * (size.chunk - 1)) // size.chunk)
        if 4 * chunks > VMEM_SHARE * core_of(device).smem:
            return "the list of this many chunks does not fit into scalar memory"
    return None


def _candidates(inputs: Inputs, spec: Spec, device: Device) -> list[GLAttentionConfig]:
    """Chunks and heads worth timing."""
    sizes = dict.fromkeys(
        _clipped(inputs, chunk, heads)
        for chunk, heads in itertools.product((32, 64, 128, 256), (2, 4, 8))
    )
    budget = VMEM_SHARE * core_of(device).vmem
    return [
        GLAttentionConfig(block_q=x.chunk, block_k=x.heads)
        for x in sizes
        if vmem_of_step(inputs, x, backward=True) <= budget
    ]


_FEATURES = frozenset(
    {
        "cu_seqlens",
        "g_gamma",
        "gate",
        "gv",
        "initial_state",
        "reverse",
    }
)

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=_FEATURES,
        why_not=why_not_forward,
        heuristic=heuristic_forward,
        candidates=_candidates,
    ),
    backward=Pass(
        run=run_backward,
        features=_FEATURES,
        why_not=why_not_backward,
        heuristic=heuristic_backward,
        candidates=_candidates,
    ),
)
