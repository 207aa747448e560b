"""Grouped matmul on NVIDIA GPUs since Ampere, in Triton: dispatch, and what the kernels support.

The kernels gather rows that are not sorted. `operands` has what they are given, `configs` chooses
their tiles.
"""

import numpy as np

from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import KERNEL_FEATURES, Inputs, Outputs, Spec
from ejkernel.kernels.grouped_matmul.layout import batch_shape, existing_gradient, flatten_rows
from ejkernel.kernels.grouped_matmul.triton.configs import candidates, from_params, heuristic
from ejkernel.kernels.grouped_matmul.triton.kernels import gmm, tgmm
from ejkernel.kernels.grouped_matmul.triton.operands import group_offsets
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def run_forward(
    inputs: Inputs, spec: Spec, params: GroupedMatmulConfig, device: Device
) -> tuple[Outputs, tuple[()]]:
    """Each row times its weight; there are no residuals."""
    batch = batch_shape(inputs)
    existing = inputs.existing_out
    if existing is not None:
        existing = flatten_rows(existing, batch)
    out = gmm(
        flatten_rows(inputs.inputs, batch),
        inputs.weights,
        spec.transpose_rhs,
        group_offsets(inputs, batch),
        from_params(params),
        spec.output_dtype(inputs),
        existing,
        device,
    )
    return Outputs(out.reshape(*batch, -1, out.shape[-1])), ()


def run_backward(
    inputs: Inputs,
    _: tuple[()],
    d_outputs: Outputs,
    spec: Spec,
    params: GroupedMatmulConfig,
    device: Device,
) -> Inputs:
    """The gradients of rows, weights and `existing_out`."""
    batch = batch_shape(inputs, d_outputs)
    rows = flatten_rows(inputs.inputs, batch)
    d_out = flatten_rows(d_outputs.out, batch).astype(rows.dtype)
    groups, tiles = group_offsets(inputs, batch), from_params(params)
    d_rows = gmm(
        d_out, inputs.weights, not spec.transpose_rhs, groups, tiles, rows.dtype, None, device
    )
    left, right = (d_out, rows) if spec.transpose_rhs else (rows, d_out)
    left = bridge.interpreted_after(left, d_rows)
    d_weights = tgmm(left, right, groups, tiles, inputs.weights.dtype, device)
    d_existing = existing_gradient(inputs, d_outputs)
    return type(inputs)(
        d_rows.reshape(*batch, -1, d_rows.shape[-1]), d_weights, existing_out=d_existing
    )


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call, or None."""
    dtypes = {np.dtype(x.dtype) for x in inputs[:2]}
    if len(dtypes) > 1:
        return "takes inputs and weights of one dtype"
    return bridge.why_not(device, *dtypes, spec.output_dtype(inputs))


_OPTIONS = {
    "features": KERNEL_FEATURES,
    "why_not": why_not,
    "heuristic": heuristic,
    "candidates": candidates,
}
IMPLEMENTATION = Implementation(
    forward=Pass(run=run_forward, **_OPTIONS), backward=Pass(run=run_backward, **_OPTIONS)
)
