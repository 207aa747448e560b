"""Ring attention anywhere XLA runs, its calls of flash attention by XLA's.

Each hop is a branch, whether or not it may be left out. Otherwise XLA interleaves the operations of
a hop with its transfers where it sees fit, and holds half as many arrays again.
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
    return ring.wait_for_both(forward(_wide(inputs), spec, *blocks), incoming)


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
    """In float32, so that the results of a call are."""
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    wide = lambda x: None if x is None else x.astype(dtype)
    query, key, value, bias = map(wide, inputs[:4])
    return inputs._replace(query=query, key=key, value=value, bias=bias)


IMPLEMENTATION = Implementation(
    forward=methods.pass_of(
        xla.IMPLEMENTATION.forward,
        functools.partial(methods.forward, _attend, branches=True),
        features=ALL_FEATURES,
    ),
    backward=methods.pass_of(
        xla.IMPLEMENTATION.backward,
        functools.partial(methods.backward, _differentiate, branches=True),
        features=ALL_FEATURES,
    ),
)
