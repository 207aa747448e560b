"""Tile sizes of the TPU kernels: what fits into VMEM, what moves the fewest bytes.

Forward, a step multiplies `block_m` rows by `block_n` columns of a weight, `block_k` deep: all of
`k` where that fits, because a block of a weight is then read once for all row tiles of its group.
Backward, a step gives `block_k` columns of the gradient of the rows, and a block of `block_k` by
`block_n` of the gradient of a weight.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.integers import round_up
from ejkernel.kernels.common.mosaic_tpu.memory import MEBIBYTE, core_of, vmem_bytes
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Spec
from ejkernel.kernels.grouped_matmul.layout import batch_shape
from ejkernel.kernels.grouped_matmul.pallas_tpu.block_ops import LANES, UNIT, unit_of
from ejkernel.kernels.grouped_matmul.pallas_tpu.schedule import max_steps
from ejkernel.ops.platform import Device

_ROWS = (512, 256, 128)
_SIZES = (4096, 2048, 1024, 512, 256, 128)
_MAX_SHARE = 0.9  # of VMEM, that a kernel may ask for
_COUNTED_SHARE = 0.7  # of a memory, for what is counted here; the compiler needs some for itself


class TpuTileConfig(NamedTuple):
    """Sizes of the blocks of a step, and the VMEM limit of the kernel."""

    block_m: int
    block_n: int
    block_k: int
    vmem_bytes: int


class GroupedGemmShape(NamedTuple):
    """Sizes of a `gmm` [m, k] x [weights, k, n], or of a `tgmm` [m, k] x [m, n].

    `dtypes` are those of the left operand, the right operand and the result.
    """

    m: int
    weights: int
    k: int
    n: int
    dtypes: tuple[np.dtype, np.dtype, np.dtype]


def forward_shape(inputs: Inputs, spec: Spec) -> GroupedGemmShape:
    """The `gmm` of the forward pass."""
    weights, (one, other) = inputs.weights.shape[0], inputs.weights.shape[1:]
    k, n = (other, one) if spec.transpose_rhs else (one, other)
    dtypes = (inputs.inputs.dtype, inputs.weights.dtype, spec.output_dtype(inputs))
    return GroupedGemmShape(_row_count(inputs), weights, k, n, dtypes)


def backward_shapes(inputs: Inputs, spec: Spec) -> tuple[GroupedGemmShape, GroupedGemmShape]:
    """The `gmm` for the gradient of the rows, and the `tgmm` for that of the weights."""
    rows, weights, k, n, (x, w, out) = forward_shape(inputs, spec)
    row_grad = GroupedGemmShape(rows, weights, n, k, (out, w, x))
    if spec.transpose_rhs:
        return row_grad, GroupedGemmShape(rows, weights, n, k, (out, x, w))
    return row_grad, GroupedGemmShape(rows, weights, k, n, (x, out, w))


def _row_count(inputs: Inputs) -> int:
    """The rows of all calls of a batch."""
    batch = batch_shape(inputs._replace(existing_out=None))
    return inputs.inputs.shape[-2] * (batch[0] if batch else 1)


def schedule_bytes(inputs: Inputs, block_m: int) -> int:
    """What the schedule of a pass takes in scalar memory."""
    weights = inputs.weights.shape[0]
    return 4 * (3 * max_steps(_row_count(inputs), weights, block_m) + 2 * weights)


def fits_scalar_memory(size: int, device: Device) -> bool:
    return size <= _COUNTED_SHARE * core_of(device).smem


def forward_tiles(params: GroupedMatmulConfig, inputs: Inputs, spec: Spec) -> TpuTileConfig:
    """The tiles of the forward pass."""
    return gmm_tiles(forward_shape(inputs, spec), params.block_m, params.block_n, params.block_k)


def backward_tiles(
    params: GroupedMatmulConfig, inputs: Inputs, spec: Spec, device: Device
) -> tuple[TpuTileConfig, TpuTileConfig]:
    """The tiles of the gradient of the rows, and of that of the weights."""
    row_grad, weight_grad = backward_shapes(inputs, spec)
    deep = _best_depth(row_grad, params.block_m, params.block_k, device)
    sizes = (params.block_n, params.block_k)
    return (
        gmm_tiles(row_grad, params.block_m, params.block_k, deep),
        tgmm_tiles(weight_grad, params.block_m, *(sizes[::-1] if spec.transpose_rhs else sizes)),
    )


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    """Of the tiles that fit, those that move the fewest bytes."""
    shape = forward_shape(inputs, spec)
    best = _best(shape, _gmm_traffic, [gmm_tiles(shape, *x) for x in _choices(shape)], device)
    return GroupedMatmulConfig(
        block_m=best.block_m, block_n=best.block_n, block_k=best.block_k, platform="pallas"
    )


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    """The same for the gradient of the weights, in tiles that also fit for that of the rows."""
    row_grad, weight_grad = backward_shapes(inputs, spec)
    choices = [
        tgmm_tiles(weight_grad, block_m, block_n, block_k)
        for block_m, block_n, block_k in _choices(weight_grad, split=True)
    ]
    choices = [
        x
        for x in choices
        if _fits(
            gmm_tiles(row_grad, x.block_m, x.block_n if spec.transpose_rhs else x.block_k, UNIT),
            device,
        )
    ]
    best = _best(weight_grad, _tgmm_traffic, choices, device)
    sizes = (best.block_k, best.block_n)
    block_k, block_n = sizes[::-1] if spec.transpose_rhs else sizes
    return GroupedMatmulConfig(
        block_m=best.block_m, block_n=block_n, block_k=block_k, platform="pallas"
    )


def candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    """All tiles worth timing that fit."""
    shape = forward_shape(inputs, spec)
    found = (
        gmm_tiles(shape, block_m, block_n, block_k)
        for block_m in _ROWS
        for block_n in (2048, 1024, 512)
        for block_k in (shape.k, 2048, 512)
    )
    return [
        GroupedMatmulConfig(
            block_m=x.block_m, block_n=x.block_n, block_k=x.block_k, platform="pallas"
        )
        for x in dict.fromkeys(found)
        if _fits(x, device)
    ]


def candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    """All tiles worth timing that fit."""
    row_grad, weight_grad = backward_shapes(inputs, spec)
    sizes = itertools.product(_ROWS, (1024, 512), (1024, 512))
    k, n = row_grad.n, row_grad.k
    found = (
        GroupedMatmulConfig(
            block_m=_row_block(row_grad, block_m),
            block_n=_column_block(block_n, n),
            block_k=_column_block(block_k, k),
            platform="pallas",
        )
        for block_m, block_n, block_k in sizes
    )
    fits = lambda x: _fits(tgmm_tiles(weight_grad, x.block_m, x.block_n, x.block_k), device)
    return [x for x in dict.fromkeys(found) if fits(x)]


def _choices(shape: GroupedGemmShape, split: bool = False) -> list[tuple[int, int, int]]:
    """Sizes (m, n, k) worth a look, the largest first; `split`: k is always cut."""
    average = shape.m // shape.weights
    rows = [x for x in _ROWS if x <= average] or [_ROWS[-1]]
    depths = _SIZES if split else (shape.k, *_SIZES)
    return list(itertools.product(rows, _SIZES, depths))


def _best(
    shape: GroupedGemmShape,
    traffic: Callable[[GroupedGemmShape, TpuTileConfig], int],
    choices: list[TpuTileConfig],
    device: Device,
) -> TpuTileConfig:
    """The first of those that fit and move the fewest bytes; the smallest if none fits."""
    smallest = min(choices, key=lambda x: x.vmem_bytes)
    fitting = [x for x in choices if _fits(x, device)] or [smallest]
    return min(fitting, key=lambda x: traffic(shape, x))


def _fits(tiles: TpuTileConfig, device: Device) -> bool:
    return tiles.vmem_bytes <= _MAX_SHARE * core_of(device).vmem


def _vmem_limit(estimate: int) -> int:
    """The limit for the compiler, which needs some VMEM for itself."""
    return max(12 * MEBIBYTE, int(estimate / _COUNTED_SHARE))


def gmm_tiles(shape: GroupedGemmShape, block_m: int, block_n: int, block_k: int) -> TpuTileConfig:
    """The tiles of a `gmm` nearest to these sizes that the kernel supports."""
    x, w, out = shape.dtypes
    block_m = _row_block(shape, block_m)
    block_n = _column_block(block_n, shape.n)
    block_k = shape.k if block_k >= shape.k else round_up(block_k, LANES)
    held = 2 * vmem_bytes((block_m, block_k), x)
    held += 2 * max(vmem_bytes((block_k, block_n), w), vmem_bytes((block_n, block_k), w))
    held += 2 * vmem_bytes((block_m, block_n), out) + vmem_bytes((block_m, block_n), jnp.float32)
    unit = (unit_of(block_m), unit_of(block_n), min(block_k, UNIT))
    return TpuTileConfig(block_m, block_n, block_k, _vmem_limit(held + _unit_bytes(shape, unit)))


def tgmm_tiles(shape: GroupedGemmShape, block_m: int, block_n: int, block_k: int) -> TpuTileConfig:
    """The tiles of a `tgmm` nearest to these sizes that the kernel supports."""
    left, right, out = shape.dtypes
    block_m = _row_block(shape, block_m)
    block_n, block_k = _column_block(block_n, shape.n), _column_block(block_k, shape.k)
    held = 2 * vmem_bytes((block_m, block_k), left) + 2 * vmem_bytes((block_m, block_n), right)
    held += 2 * vmem_bytes((block_k, block_n), out) + vmem_bytes((block_k, block_n), jnp.float32)
    unit = (unit_of(block_k), unit_of(block_n), unit_of(block_m))
    return TpuTileConfig(block_m, block_n, block_k, _vmem_limit(held + _unit_bytes(shape, unit)))


def _unit_bytes(shape: GroupedGemmShape, unit: tuple[int, int, int]) -> int:
    """VMEM of a matmul of size (m, n, k): the result, and copies of split or turned operands."""
    rows, columns, depth = unit
    operands = vmem_bytes((rows, depth), jnp.float32) + vmem_bytes((depth, columns), jnp.float32)
    wide = jnp.float32 in shape.dtypes[:2]
    return vmem_bytes((rows, columns), jnp.float32) + operands * (3 if wide else 1)


def _row_block(shape: GroupedGemmShape, rows: int) -> int:
    """A multiple of 16 rows: such tiles need no change of layout in float32 or bfloat16."""
    return round_up(min(rows, max(shape.m, 1)), 16)


def _column_block(wanted: int, size: int) -> int:
    """A multiple of the lanes, which may reach past the end, or all of a short axis."""
    return size if wanted >= size and size <= UNIT else round_up(min(wanted, size), LANES)


def _best_depth(shape: GroupedGemmShape, block_m: int, block_n: int, device: Device) -> int:
    """The `block_k` of a `gmm`: all of k, or what fits."""
    choices = [gmm_tiles(shape, block_m, block_n, block_k) for block_k in (shape.k, *_SIZES)]
    return _best(shape, _gmm_traffic, choices, device).block_k


def _gmm_traffic(shape: GroupedGemmShape, tiles: TpuTileConfig) -> int:
    """Bytes read and written by a `gmm`, and those of the first blocks, which nothing hides."""
    x, w, out = (jnp.dtype(dtype).itemsize for dtype in shape.dtypes)
    steps = max_steps(shape.m, shape.weights, tiles.block_m)
    passes = -(-shape.n // tiles.block_n)
    matrix = shape.k * shape.n * w
    if tiles.block_k >= shape.k:
        read = passes * shape.m * shape.k * x + shape.weights * matrix
    else:
        read = passes * steps * tiles.block_m * shape.k * x + steps * matrix
    first = tiles.block_k * (tiles.block_m * x + tiles.block_n * w)
    return read + shape.m * shape.n * out + first


def _tgmm_traffic(shape: GroupedGemmShape, tiles: TpuTileConfig) -> int:
    """The same for a `tgmm`."""
    left, right, out = (jnp.dtype(dtype).itemsize for dtype in shape.dtypes)
    rows = max_steps(shape.m, shape.weights, tiles.block_m) * tiles.block_m
    read = rows * shape.k * left * -(-shape.n // tiles.block_n)
    read += rows * shape.n * right * -(-shape.k // tiles.block_k)
    first = tiles.block_m * (tiles.block_k * left + tiles.block_n * right)
    first += tiles.block_k * tiles.block_n * out
    return read + shape.weights * shape.k * shape.n * out + first
