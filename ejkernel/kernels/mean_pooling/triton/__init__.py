"""Mean pooling on NVIDIA GPUs since Ampere, in Triton: dispatch, and what the kernels support.

The kernels are bandwidth bound: a forward pass reads `x` once, a backward pass writes its gradient
once. `configs` says how the tokens and columns are divided among programs.
"""

import math

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.mean_pooling.config import MeanPoolingConfig
from ejkernel.kernels.mean_pooling.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.mean_pooling.triton import configs
from ejkernel.kernels.mean_pooling.triton.kernels import (
    broadcast_gradient,
    broadcast_packed_gradient,
    combine,
    sum_packed,
    sum_padded,
)
from ejkernel.ops.implementation import Implementation, Pass, yields_to_xla
from ejkernel.ops.platform import Device


def run_forward(
    inputs: Inputs, spec: Spec, params: MeanPoolingConfig, device: Device
) -> tuple[Outputs, tuple[()]]:
    """The means; there are no residuals."""
    x, mask = inputs.x, inputs.attention_mask
    tiles = configs.from_params(params, x)
    if inputs.cu_seqlens is None:
        sums = sum_padded(x, mask, tiles, device)
        if sums.shape[1] > 1:
            sums = combine(sums, mask, None, x, tiles, device)
        return Outputs(sums), ()
    batch = jnp.broadcast_shapes(x.shape[:-2], inputs.cu_seqlens.shape[:-1])
    boundaries = _flat_boundaries(inputs)
    x = x.reshape(-1, *x.shape[-2:])
    partials = sum_packed(x, boundaries, tiles, device)
    out = combine(partials, None, boundaries, x, tiles, device)
    return Outputs(out.reshape(*batch, *out.shape[1:])), ()


def run_backward(
    inputs: Inputs,
    _: tuple[()],
    d_outputs: Outputs,
    spec: Spec,
    params: MeanPoolingConfig,
    device: Device,
) -> Inputs:
    """The gradient of each mean, divided by the number of its tokens, for each of them."""
    x, d_out = inputs.x, d_outputs.out
    tiles = configs.from_params(params, x)
    if inputs.cu_seqlens is None:
        return Inputs(
            broadcast_gradient(d_out[:, 0], inputs.attention_mask, x.shape[1], tiles, device)
        )
    lead = (x.shape[:-2], inputs.cu_seqlens.shape[:-1], d_out.shape[:-2])
    batch = jnp.broadcast_shapes(*lead)
    d_out = jnp.broadcast_to(d_out, (*batch, *d_out.shape[-2:]))
    d_out = d_out.reshape(math.prod(batch), *d_out.shape[-2:])
    d_x = broadcast_packed_gradient(d_out, _flat_boundaries(inputs), x.shape[-2], tiles, device)
    return Inputs(d_x.reshape(*batch, *d_x.shape[1:]))


def _flat_boundaries(inputs: Inputs) -> jax.Array:
    """The boundaries of each packed row, [1 or b, c]."""
    boundaries = jnp.asarray(inputs.cu_seqlens).astype(jnp.int32)
    return boundaries.reshape(-1, boundaries.shape[-1])


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call, or None."""
    return bridge.why_not(device, inputs.x.dtype)


_OPTIONS = {
    "features": frozenset({"attention_mask", "cu_seqlens"}),
    "why_not": why_not,
    "yields_to": yields_to_xla,
}
IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        heuristic=configs.heuristic_forward,
        candidates=configs.candidates_forward,
        **_OPTIONS,
    ),
    backward=Pass(
        run=run_backward,
        heuristic=configs.heuristic_backward,
        candidates=configs.candidates_backward,
        **_OPTIONS,
    ),
)
