"""Ring attention anywhere XLA runs, its calls of flash attention by XLA's.

Tiles are computed in float32, from keys in the dtype in which they are transferred.
"""

import functools

import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import xla
from ejkernel.kernels.flash_attention.xla.backward import backward
from ejkernel.kernels.flash_attention.xla.forward import forward
from ejkernel.kernels.ring_attention import methods, ring
from ejkernel.kernels.ring_attention.inputs import Outputs
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import ALL_FEATURES, Implementation
from ejkernel.ops.platform import Device


def _attend(
    inputs: flash.Inputs,
    spec: flash.Spec,
    params: FwdParams,
    device: Device,
    incoming: ring.Incoming,
) -> tuple[flash.Outputs, ring.Incoming]:
    blocks = xla.block_sizes(params, xla.heuristic_forward(inputs, spec))
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    return ring.wait_for_both(forward(inputs, spec, *blocks, dtype), incoming)


def _differentiate(
    inputs: flash.Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: flash.Spec,
    params: BwdParams,
    device: Device,
    incoming: ring.Incoming,
) -> tuple[flash.Inputs, ring.Incoming]:
    blocks = xla.block_sizes(params, xla.heuristic_backward(inputs, spec))
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    part = backward(inputs, residuals, d_outputs, spec, *blocks, dtype)
    return ring.wait_for_both(part, incoming)


IMPLEMENTATION = Implementation(
    forward=methods.pass_of(
        xla.IMPLEMENTATION.forward,
        functools.partial(methods.forward, _attend),
        features=ALL_FEATURES,
    ),
    backward=methods.pass_of(
        xla.IMPLEMENTATION.backward,
        functools.partial(methods.backward, _differentiate),
        features=ALL_FEATURES,
    ),
)
