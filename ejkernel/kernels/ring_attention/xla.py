"""Ring attention anywhere XLA runs: the hops of `ring`, each by XLA's flash attention."""

import functools

import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import xla
from ejkernel.kernels.flash_attention.xla.backward import backward
from ejkernel.kernels.flash_attention.xla.forward import forward
from ejkernel.kernels.ring_attention import ring
from ejkernel.kernels.ring_attention.inputs import Outputs
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.ops.platform import Device


def _attend(
    inputs: flash.Inputs,
    spec: flash.Spec,
    params: FwdParams,
    device: Device,
    incoming: ring.Incoming,
) -> tuple[flash.Outputs, ring.Incoming]:
    blocks = xla.block_sizes(params, xla.heuristic_forward(inputs, spec))
    part = forward(_wide(inputs), spec, *blocks)
    return ring.wait_for_both(part, incoming)


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
    part = backward(_wide(inputs), residuals, d_outputs, spec, *blocks)
    return ring.wait_for_both(part, incoming)


def _wide(inputs: flash.Inputs) -> flash.Inputs:
    """In float32, so that the results of a hop are."""
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query, key, value = (x.astype(dtype) for x in inputs[:3])
    return inputs._replace(query=query, key=key, value=value)


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=functools.partial(ring.forward, _attend),
        features=ALL_FEATURES,
        heuristic=functools.partial(ring.heuristic, xla.IMPLEMENTATION.forward),
    ),
    backward=Pass(
        run=functools.partial(ring.backward, _differentiate),
        features=ALL_FEATURES,
        heuristic=functools.partial(ring.heuristic, xla.IMPLEMENTATION.backward),
    ),
)
