"""Grouped matmul on TPUs, in Pallas: dispatch, and what the kernels support.

The kernels take rows sorted by group: `forward` the grouped matmul, `weight_grad` its transposed
form. `schedule` lists their steps, `configs` chooses their tiles.
"""

import functools

from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import KERNEL_FEATURES, Inputs, Outputs, Spec
from ejkernel.kernels.grouped_matmul.layout import sorted_backward, sorted_forward
from ejkernel.kernels.grouped_matmul.pallas_tpu.configs import (
    backward_tiles,
    candidates_backward,
    candidates_forward,
    fits_scalar_memory,
    forward_tiles,
    heuristic_backward,
    heuristic_forward,
    schedule_bytes,
)
from ejkernel.kernels.grouped_matmul.pallas_tpu.forward import gmm
from ejkernel.kernels.grouped_matmul.pallas_tpu.weight_grad import tgmm
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def run_forward(
    inputs: Inputs, spec: Spec, params: GroupedMatmulConfig | None, device: Device
) -> tuple[Outputs, tuple[()]]:
    """Each row times its weight; there are no residuals."""
    params = params or heuristic_forward(inputs, spec, device)
    tiles = forward_tiles(params, inputs, spec)
    return sorted_forward(inputs, spec, functools.partial(gmm, tiles=tiles)), ()


def run_backward(
    inputs: Inputs,
    _: tuple[()],
    d_outputs: Outputs,
    spec: Spec,
    params: GroupedMatmulConfig | None,
    device: Device,
) -> Inputs:
    """The gradients of rows, weights and `existing_out`."""
    params = params or heuristic_backward(inputs, spec, device)
    row_tiles, weight_tiles = backward_tiles(params, inputs, spec, device)
    return sorted_backward(
        inputs,
        d_outputs,
        spec,
        functools.partial(gmm, tiles=row_tiles),
        functools.partial(tgmm, tiles=weight_tiles),
    )


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call, or None."""
    dtypes = {str(inputs.inputs.dtype), str(inputs.weights.dtype), str(spec.output_dtype(inputs))}
    if not dtypes <= {"float32", "bfloat16"}:
        return f"needs float32 or bfloat16 alone, got {', '.join(sorted(dtypes))}"
    tile = heuristic_backward(inputs, spec, device).block_m
    if not fits_scalar_memory(schedule_bytes(inputs, tile), device):
        return "cannot hold the schedule of so many tiles and groups in scalar memory"
    return None


_SUPPORT = {"features": KERNEL_FEATURES, "why_not": why_not}
IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward, heuristic=heuristic_forward, candidates=candidates_forward, **_SUPPORT
    ),
    backward=Pass(
        run=run_backward, heuristic=heuristic_backward, candidates=candidates_backward, **_SUPPORT
    ),
)
