"""Grouped matmul on NVIDIA GPUs since Ampere, in Triton: no row is moved, no group is padded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.triton import bridge as triton_bridge
from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch, matmul_precision
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec, has_weight
from ejkernel.kernels.grouped_matmul.triton import kernels as triton_gpu_kernels
from ejkernel.kernels.grouped_matmul.triton.configs import Shape, config, fitted, of_sums, shapes
from ejkernel.kernels.grouped_matmul.triton.plan import (
    Layout,
    Mode,
    flat,
    layout,
    lead_of,
    most_tiles,
    tile_list,
)
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_BAND = 16  # tiles


def run_forward(
    inputs: Inputs, spec: Spec, params: GroupedMatmulConfig, device: Device
) -> tuple[Outputs, tuple[()]]:
    """The product of each row and its weight; the backward pass needs nothing of it."""
    lead = lead_of(inputs)
    existing = inputs.existing_out
    if existing is not None:
        existing = flat(existing, lead)
    out = _times_weights(
        flat(inputs.inputs, lead),
        inputs.weights,
        spec.transpose_rhs,
        layout(inputs, lead),
        _shape(params),
        spec.output_dtype(inputs),
        existing,
        device,
    )
    return Outputs(out.reshape(*lead, -1, out.shape[-1])), ()


def run_backward(
    inputs: Inputs,
    _: tuple[()],
    d_outputs: Outputs,
    spec: Spec,
    params: GroupedMatmulConfig,
    device: Device,
) -> Inputs:
    """Gradients: the rows times the transposed weights, and for each weight a sum over its rows."""
    lead = lead_of(inputs, d_outputs.out)
    rows = flat(inputs.inputs, lead)
    d_out = flat(d_outputs.out, lead).astype(rows.dtype)
    where, shape = layout(inputs, lead), _shape(params)
    d_rows = _times_weights(
        d_out, inputs.weights, not spec.transpose_rhs, where, shape, rows.dtype, None, device
    )
    pair = (d_out, rows) if spec.transpose_rhs else (rows, d_out)
    d_weights = _rows_times_rows(
        triton_bridge.interpreted_after(pair[0], d_rows),
        pair[1],
        where,
        shape,
        inputs.weights.dtype,
        device,
    )
    d_existing = None
    if inputs.existing_out is not None:
        d_existing = jnp.where(has_weight(inputs)[..., None], 0, d_outputs.out)
        d_existing = d_existing.astype(inputs.existing_out.dtype)
    return type(inputs)(
        d_rows.reshape(*lead, -1, d_rows.shape[-1]), d_weights, existing_out=d_existing
    )


def _times_weights(
    rows: jax.Array,
    weights: jax.Array,
    transposed: bool,
    where: Layout,
    shape: Shape,
    dtype: Any,
    existing: jax.Array | None,
    device: Device,
) -> jax.Array:
    """Each row times its weight, or its transpose; [m, k] to [m, n]."""
    (m, k), n = rows.shape, weights.shape[1 if transposed else 2]
    shape = fitted(shape, n, k, rows.dtype == jnp.float32)
    tiles = most_tiles(m, weights.shape[0], shape.block_m)
    mode = Mode(
        m=m,
        n=n,
        k=k,
        weights=weights.shape[0],
        block_m=shape.block_m,
        block_n=shape.block_n,
        block_k=shape.block_k,
        tiles=tiles,
        # Where a weight has one tile there is nothing to share.
        band=_BAND if shape.block_m >= 64 else 1,
        gathers=where.order is not None,
        transposed=transposed,
        existing=existing is not None,
        precision=matmul_precision(rows.dtype),
    )
    nothing = jnp.zeros((16,), dtype)
    (out,) = launch(
        triton_gpu_kernels.multiply,
        [
            rows,
            weights,
            _order(where),
            tile_list(where.edges, shape.block_m, tiles),
            nothing if existing is None else existing,
        ],
        [jax.ShapeDtypeStruct((m, n), dtype)],
        mode,
        LaunchConfig(tiles * mode.n_blocks, shape.warps, shape.stages),
        device,
    )
    return out


def _rows_times_rows(
    left: jax.Array, right: jax.Array, where: Layout, shape: Shape, dtype: Any, device: Device
) -> jax.Array:
    """For each weight the sum over its rows of `left[r] right[r]^T`, [e, m, n]."""
    (rows, m), n = left.shape, right.shape[1]
    weights = where.edges.shape[0] - 3
    shape = of_sums(shape, m, n, left.dtype == jnp.float32, where.order is not None)
    mode = Mode(
        m=m,
        n=n,
        k=rows,
        weights=weights,
        block_m=shape.block_m,
        block_n=shape.block_n,
        block_k=shape.block_k,
        tiles=0,
        band=_BAND,
        gathers=where.order is not None,
        transposed=False,
        existing=False,
        precision=matmul_precision(left.dtype),
    )
    (out,) = launch(
        triton_gpu_kernels.sum_rows,
        [left, right, _order(where), where.edges],
        [jax.ShapeDtypeStruct((weights, m, n), dtype)],
        mode,
        LaunchConfig(weights * mode.m_blocks * mode.n_blocks, shape.warps, shape.stages),
        device,
    )
    return out


def _order(where: Layout) -> jax.Array:
    return jnp.zeros((16,), jnp.int32) if where.order is None else where.order


def _shape(params: GroupedMatmulConfig) -> Shape:
    return Shape(
        params.block_m, params.block_n, params.block_k, params.num_warps, params.num_stages
    )


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why this device cannot run the kernels on this call."""
    dtypes = {np.dtype(x.dtype) for x in inputs[:2]}
    if len(dtypes) > 1:
        return "takes inputs and weights of one dtype"
    return triton_bridge.why_not(device, *dtypes, spec.output_dtype(inputs))


_FEATURES = frozenset(
    {
        "existing_out",
        "group_ids",
        "group_sizes",
        "groups",
        "preferred_element_type",
        "transpose_rhs",
    }
)

_PASS = {
    "features": _FEATURES,
    "why_not": why_not,
    "heuristic": lambda *call: config(shapes(*call)[0]),
    "candidates": lambda *call: [config(shape) for shape in shapes(*call)],
}
IMPLEMENTATION = Implementation(
    forward=Pass(run=run_forward, **_PASS), backward=Pass(run=run_backward, **_PASS)
)
