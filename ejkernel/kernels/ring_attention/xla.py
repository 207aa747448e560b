"""Ring attention anywhere XLA runs: the hops of `ring`, each by XLA's flash attention."""

import functools
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import xla
from ejkernel.kernels.flash_attention.xla import backward as xla_backward
from ejkernel.kernels.flash_attention.xla import forward as xla_forward
from ejkernel.kernels.ring_attention import ring
from ejkernel.kernels.ring_attention.inputs import Outputs
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass


def _attend(
    inputs: flash.Inputs, spec: flash.Spec, params: FwdParams, ahead: Any
) -> tuple[flash.Outputs, Any]:
    return ring.meet(xla_forward.forward(_wide(inputs), spec, *_blocks(params)), ahead)


def _differentiate(
    inputs: flash.Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: flash.Spec,
    params: BwdParams,
    ahead: Any,
) -> tuple[flash.Inputs, Any]:
    wide = _wide(inputs)
    part = xla_backward.backward(wide, residuals, d_outputs, spec, *_blocks(params))
    return ring.meet(part, ahead)


def _wide(inputs: flash.Inputs) -> flash.Inputs:
    """Float32 in gives float32 out, whatever travels."""
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query, key, value = (x.astype(dtype) for x in inputs[:3])
    return inputs._replace(query=query, key=key, value=value)


def _blocks(params: FwdParams | BwdParams) -> tuple[Any, Any]:
    return params.q_blocksize, params.kv_blocksize


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=functools.partial(ring.forward, _attend),
        features=ALL_FEATURES,
        heuristic=functools.partial(ring.params, xla.IMPLEMENTATION.forward),
    ),
    backward=Pass(
        run=functools.partial(ring.backward, _differentiate),
        features=ALL_FEATURES,
        heuristic=functools.partial(ring.params, xla.IMPLEMENTATION.backward),
    ),
)
