"""Flash attention on TPUs, in Pallas: dispatch, and what is supported.

Algorithm: online softmax over tiles (https://arxiv.org/abs/2307.08691).
"""

import jax
from jax.typing import DTypeLike

from ejkernel.kernels.common.mosaic_tpu.memory import vmem_limit
from ejkernel.kernels.flash_attention.inputs import KERNEL_FEATURES, Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_tpu import backward, configs, forward
from ejkernel.kernels.flash_attention.pallas_tpu.configs import (
    candidates_backward,
    candidates_forward,
    heuristic_backward,
    heuristic_forward,
)
from ejkernel.kernels.flash_attention.pallas_tpu.launch import FlashCall, ResultHook
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def run_forward(
    inputs: Inputs,
    spec: Spec,
    params: FwdParams | None,
    device: Device,
    dtype: DTypeLike | None = None,
    on_results: ResultHook | None = None,
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals; in `dtype`, or in that of the query.

    `on_results` is given the results of every kernel, and what it returns is used.
    """
    config = configs.forward_config(inputs, spec, params, device)
    vmem = vmem_limit(configs.forward_bytes(inputs, config.size))
    call = FlashCall(inputs, spec, config.size, vmem=vmem, on_results=on_results)
    outputs = forward.forward(call, dtype or inputs.query.dtype, config.mxu_width)
    return outputs, outputs


def run_backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: BwdParams | None,
    device: Device,
    dtype: DTypeLike | None = None,
    on_results: ResultHook | None = None,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none. In `dtype`, or in theirs."""
    config = configs.backward_config(inputs, spec, params, device)
    needed = configs.backward_bytes(inputs, config.size)
    needed += configs.resident_bytes(inputs, config.size, config.resident_queries)
    vmem = vmem_limit(needed)
    gradients = backward.backward(
        inputs, residuals, d_outputs, spec, config, vmem=vmem, on_results=on_results
    )
    given = inputs._replace(mask=None, dropout=None)
    return jax.tree.map(lambda d, x: d.astype(dtype or x.dtype), gradients, given)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call."""
    dtypes = {str(x.dtype) for x in inputs[:3]}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}:
        return f"needs float32 or bfloat16 alone, got {', '.join(sorted(dtypes))}"
    if not configs.schedule_fits(inputs, heuristic_backward(inputs, spec, device), device):
        return "the list of this many tiles does not fit into scalar memory"
    return None


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=KERNEL_FEATURES,
        why_not=why_not,
        heuristic=heuristic_forward,
        candidates=candidates_forward,
    ),
    backward=Pass(
        run=run_backward,
        features=KERNEL_FEATURES,
        why_not=why_not,
        heuristic=heuristic_backward,
        candidates=candidates_backward,
    ),
)
