"""Flash attention on NVIDIA GPUs since Ampere, in Triton."""

import numpy as np
from jax.typing import DTypeLike

from ejkernel.kernels.common.sinks import per_sink, share_of_sinks
from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.flash_attention.inputs import KERNEL_FEATURES, Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.triton.backward import (
    backward_row_terms,
    keys_and_values_backward,
    queries_backward,
)
from ejkernel.kernels.flash_attention.triton.bias_grad import bias_backward
from ejkernel.kernels.flash_attention.triton.configs import (
    backward_configs,
    backward_kernel_configs,
    backward_params,
    forward_config,
    forward_configs,
    forward_params,
)
from ejkernel.kernels.flash_attention.triton.forward import forward
from ejkernel.kernels.flash_attention.triton.operands import kernel_arguments
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_MAX_HEAD_DIM = 256


def run_forward(
    inputs: Inputs,
    spec: Spec,
    params: FwdParams | None,
    device: Device,
    dtype: DTypeLike | None = None,
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals; in `dtype`, or in that of the query."""
    config = forward_config(inputs, spec, params or FwdParams(), device)
    outputs = forward(inputs, spec, config, device, dtype or inputs.query.dtype)
    return outputs, outputs


def run_backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: BwdParams | None,
    device: Device,
    dtype: DTypeLike | None = None,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none. In `dtype`, or in theirs."""
    dkdv, dq = backward_kernel_configs(inputs, spec, params or BwdParams(), device)
    terms = backward_row_terms(inputs, residuals, d_outputs)
    d_out = d_outputs.out.astype(inputs.query.dtype)
    by_key = kernel_arguments(inputs, spec, dkdv.block_q, dkdv.block_k, by_key_block=True)
    by_query = kernel_arguments(inputs, spec, dq.block_q, dq.block_k)
    run = device, dtype
    d_key, d_value = keys_and_values_backward(inputs, d_out, terms, by_key, dkdv, *run)
    terms = terms._replace(lse=bridge.interpreted_after(terms.lse, d_key))
    d_query, row_dot = queries_backward(inputs, d_out, terms, by_query, dq, *run)
    d_bias = d_sinks = None
    if inputs.bias is not None:
        terms = terms._replace(lse=bridge.interpreted_after(terms.lse, d_query))
        d_bias = bias_backward(inputs, d_out, terms, by_query, dq, *run)
    if inputs.sinks is not None:
        taken = row_dot * share_of_sinks(residuals.lse, inputs.sinks)
        d_sinks = per_sink(-taken.sum((0, 2)), inputs.sinks)
    return Inputs(d_query, d_key, d_value, bias=d_bias, sinks=d_sinks, mask=None)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support this call on this device; None when they do."""
    dtypes = {np.dtype(x.dtype) for x in inputs[:3]}
    if len(dtypes) > 1:
        return "takes query, key and value of one dtype"
    if (head_dim := max(inputs.query.shape[3], inputs.value.shape[3])) > _MAX_HEAD_DIM:
        return f"takes head dims up to {_MAX_HEAD_DIM} and this one is {head_dim}"
    return bridge.why_not(device, *dtypes)


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=KERNEL_FEATURES,
        why_not=why_not,
        heuristic=lambda *call: forward_params(forward_configs(*call)[0]),
        candidates=lambda *call: [forward_params(x) for x in forward_configs(*call)],
    ),
    backward=Pass(
        run=run_backward,
        features=KERNEL_FEATURES,
        why_not=why_not,
        heuristic=lambda *call: backward_params(backward_configs(*call)[0]),
        candidates=lambda *call: [backward_params(x) for x in backward_configs(*call)],
    ),
)
