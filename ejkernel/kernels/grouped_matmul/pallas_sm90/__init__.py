"""Grouped matmul on Hopper GPUs, in Pallas Mosaic GPU: dispatch, and what the kernels support.

The kernels take rows sorted by group: `forward` the grouped matmul, `weight_grad` its transposed
form. `configs` chooses their tiles, `schedule` orders them, `pipeline` has the ring buffer and the
epilogue of both.
"""

import functools

import jax.numpy as jnp

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import KERNEL_FEATURES, Inputs, Outputs, Spec
from ejkernel.kernels.grouped_matmul.layout import sorted_backward, sorted_forward
from ejkernel.kernels.grouped_matmul.pallas_sm90.configs import (
    candidates_backward,
    candidates_forward,
    gmm_tiles,
    heuristic_backward,
    heuristic_forward,
    tgmm_tiles,
)
from ejkernel.kernels.grouped_matmul.pallas_sm90.forward import gmm
from ejkernel.kernels.grouped_matmul.pallas_sm90.weight_grad import tgmm
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device, Platform

_OPERAND_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def run_forward(
    inputs: Inputs, spec: Spec, params: GroupedMatmulConfig | None, device: Device
) -> tuple[Outputs, tuple[()]]:
    """Each row times its weight; there are no residuals."""
    tiles = gmm_tiles(inputs, params)
    return sorted_forward(inputs, spec, functools.partial(gmm, tiles=tiles, device=device)), ()


def run_backward(
    inputs: Inputs,
    _: tuple[()],
    d_outputs: Outputs,
    spec: Spec,
    params: GroupedMatmulConfig | None,
    device: Device,
) -> Inputs:
    """The gradients of rows, weights and `existing_out`."""
    return sorted_backward(
        inputs,
        d_outputs,
        spec,
        functools.partial(gmm, tiles=gmm_tiles(inputs, params), device=device),
        functools.partial(tgmm, tiles=tgmm_tiles(inputs, params), device=device),
    )


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call, or None."""
    if reason := gpu.why_not_hopper(device):
        return reason
    dtypes = {jnp.dtype(x.dtype) for x in inputs[:2]}
    if len(dtypes) > 1 or not dtypes <= set(_OPERAND_DTYPES):
        return f"needs bfloat16 or float16 alone, got {', '.join(sorted(map(str, dtypes)))}"
    if spec.output_dtype(inputs) not in (*_OPERAND_DTYPES, jnp.dtype(jnp.float32)):
        return f"gives bfloat16, float16 or float32, not {spec.output_dtype(inputs)}"
    k, n = inputs.weights.shape[1:][:: -1 if spec.transpose_rhs else 1]
    for name, size in (("k", k), ("n", n)):
        if size % 8:
            return f"needs {name} to be a multiple of 8, got {size}"
    return None


def why_not_backward(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the backward kernels do not support a call, or None."""
    if reason := why_not(inputs, spec, device):
        return reason
    if (given := spec.output_dtype(inputs)) != inputs.inputs.dtype:
        return f"takes gradients in the dtype of the inputs, {inputs.inputs.dtype}, not {given}"
    return None


def yields_to(inputs: Inputs, spec: Spec, device: Device) -> frozenset[Platform]:
    """Triton, if rows are not sorted: its kernels gather them.

    To sort and copy the rows, and the results back, takes at least as long as Triton is slower.
    """
    return frozenset() if inputs.group_ids is None else frozenset({Platform.TRITON})


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=KERNEL_FEATURES,
        why_not=why_not,
        heuristic=heuristic_forward,
        candidates=candidates_forward,
        yields_to=yields_to,
    ),
    backward=Pass(
        run=run_backward,
        features=KERNEL_FEATURES,
        why_not=why_not_backward,
        heuristic=heuristic_backward,
        candidates=candidates_backward,
        yields_to=yields_to,
    ),
)
