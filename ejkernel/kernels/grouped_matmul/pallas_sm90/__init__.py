"""Grouped matmul on Hopper GPUs, in Pallas: who can be served, and with which tiles."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.grouped_matmul.layout import GroupLayout, sorted_backward, sorted_forward
from ejkernel.kernels.grouped_matmul.pallas_sm90.forward import rows_times_weights
from ejkernel.kernels.grouped_matmul.pallas_sm90.plan import ROWS, Tiles, fitting, plan
from ejkernel.kernels.grouped_matmul.pallas_sm90.weights import rows_times_rows
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device, Platform

NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def run_forward(
    inputs: Inputs, spec: Spec, params: GroupedMatmulConfig | None, device: Device
) -> tuple[Outputs, tuple[()]]:
    """The product of each row and its weight; the backward pass needs nothing of it."""
    return sorted_forward(inputs, spec, _times_weights(inputs, params, device)), ()


def run_backward(
    inputs: Inputs,
    _: tuple[()],
    d_outputs: Outputs,
    spec: Spec,
    params: GroupedMatmulConfig | None,
    device: Device,
) -> Inputs:
    """Gradients: the rows times the transposed weights, and for each weight a sum over its rows."""
    tiles = chosen_weight_tiles(inputs, params)

    def weight_gradient(left: Any, right: Any, layout: GroupLayout, dtype: Any) -> jax.Array:
        return rows_times_rows(left, right, layout.starts, layout.ends, tiles, device)

    times_weights = _times_weights(inputs, params, device)
    return sorted_backward(inputs, d_outputs, spec, times_weights, weight_gradient)


def _times_weights(
    inputs: Inputs, params: GroupedMatmulConfig | None, device: Device
) -> Callable[..., jax.Array]:
    """The product of sorted rows and the weights of their groups."""
    tiles = chosen_tiles(inputs, params)

    def run(rows: Any, weights: Any, axis: int, layout: GroupLayout, dtype: Any) -> jax.Array:
        found = plan(layout.starts, layout.ends, rows.shape[0], tiles.block_m)
        return rows_times_weights(rows, weights, found, axis == 2, dtype, tiles, device)

    return run


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What keeps these kernels from taking the call, or None."""
    if reason := gpu.why_not_hopper(device):
        return reason
    dtypes = {jnp.dtype(x.dtype) for x in inputs[:2]}
    if len(dtypes) > 1 or not dtypes <= set(NARROW):
        return f"needs bfloat16 or float16 alone, got {', '.join(sorted(map(str, dtypes)))}"
    if spec.output_dtype(inputs) not in (*NARROW, jnp.dtype(jnp.float32)):
        return f"gives bfloat16, float16 or float32, not {spec.output_dtype(inputs)}"
    k, n = inputs.weights.shape[1:][:: -1 if spec.transpose_rhs else 1]
    for name, size in (("k", k), ("n", n)):
        if size % 8:
            return f"needs {name} to be a multiple of 8, got {size}"
    return None


def why_not_backward(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What keeps the backward kernels from taking the call, or None."""
    if reason := why_not(inputs, spec, device):
        return reason
    if (given := spec.output_dtype(inputs)) != inputs.inputs.dtype:
        return f"takes gradients in the dtype of the inputs, {inputs.inputs.dtype}, not {given}"
    return None


def chosen_tiles(inputs: Inputs, params: GroupedMatmulConfig | None) -> Tiles:
    """The tiles asked for, in sizes that there are; by default those expected to be fastest."""
    if params is None:
        params = _params(_default(inputs))
    block_m = next((size for size in (16, ROWS) if params.block_m <= size), 2 * ROWS)
    return fitting(block_m, _width(params), max(2, params.num_stages))


def chosen_weight_tiles(inputs: Inputs, params: GroupedMatmulConfig | None) -> Tiles:
    """The same for the gradient of the weights, of which tiles always have 128 lines."""
    width, stages = (256, 8) if params is None else (_width(params), max(2, params.num_stages))
    wide = -(-inputs.weights.shape[2] // width) > 8
    return fitting(2 * ROWS, width, stages, band=4 if wide else 8)


def _width(params: GroupedMatmulConfig) -> int:
    return 128 if params.block_n <= 128 else 256


def _rows(inputs: Inputs) -> float:
    """How many a group has on average."""
    shape = inputs.inputs.shape
    return shape[-2] * (shape[0] if len(shape) == 3 else 1) / inputs.weights.shape[0]


def _default(inputs: Inputs) -> Tiles:
    """Tiles with few rows where groups have few: weights are what takes time to bring then.

    Otherwise three steps in flight and room for a whole result, rather than four and half of one.
    """
    if (rows := _rows(inputs)) > 48:
        return fitting(2 * ROWS, 256, stages=3)
    return fitting(16 if rows <= 8 else ROWS, 256)


def _params(tiles: Tiles) -> GroupedMatmulConfig:
    return GroupedMatmulConfig(
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=64,
        num_warps=4 * (tiles.consumers + 1),
        num_stages=tiles.stages,
        platform="pallas",
    )


def heuristic(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    """The tiles expected to be fastest."""
    return _params(_default(inputs))


def candidates(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    """All tiles worth timing: those of few rows took twice to eight times as long with many."""
    few = [(16, 256), (16, 128), (64, 256)]
    sizes = few if _rows(inputs) <= 48 else [(128, 256, 3), (128, 256), (128, 128)]
    return [_params(fitting(*size)) for size in sizes]


def candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    """The same of the backward pass."""
    narrow = [(64, 256)] if _rows(inputs) <= 48 else []
    sizes = [*narrow, (128, 256), (128, 256, 3), (128, 128)]
    return [_params(fitting(*size)) for size in sizes]


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    return _params(fitting(max(ROWS, _default(inputs).block_m), 256))


def yields_to(inputs: Inputs, spec: Spec, device: Device) -> frozenset[Platform]:
    """Rows that are not sorted: Triton's kernels take them from where they are.

    To sort and copy them, and the results back, takes at least as long as those are slower.
    """
    return frozenset() if inputs.group_ids is None else frozenset({Platform.TRITON})


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

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=heuristic,
        candidates=candidates,
        yields_to=yields_to,
    ),
    backward=Pass(
        run=run_backward,
        features=_FEATURES,
        why_not=why_not_backward,
        heuristic=heuristic_backward,
        candidates=candidates_backward,
        yields_to=yields_to,
    ),
)
