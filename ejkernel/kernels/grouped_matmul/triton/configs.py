"""Tiles and launch parameters of the Triton kernels: what is guessed, what is worth timing.

Every shape here compiles without local memory for the devices it stands for; tests/kernels holds it
to that. The first of a list is the guess.
"""

from typing import NamedTuple

import numpy as np

from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Spec
from ejkernel.ops.platform import Device


class Shape(NamedTuple):
    """A tile of results, the step of its sum, and launch parameters."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# By how many rows a weight has on average, at most.
_Table = dict[int, list[Shape]]
_MANY = 1 << 62

_HOPPER: _Table = {
    16: [
        Shape(16, 128, 128, 4, 4),
        Shape(16, 128, 64, 4, 5),
        Shape(16, 64, 128, 4, 5),
        Shape(16, 256, 64, 8, 4),
        Shape(16, 128, 128, 8, 4),
    ],
    32: [Shape(32, 128, 128, 4, 4), Shape(32, 128, 64, 4, 5), Shape(16, 128, 128, 4, 4)],
    96: [Shape(64, 128, 64, 4, 4), Shape(64, 256, 64, 4, 4), Shape(32, 128, 128, 4, 4)],
    # Many tiles of 128 rows are half empty here, and still the fastest at 128 rows a weight.
    160: [Shape(128, 256, 64, 8, 4), Shape(64, 256, 64, 4, 4), Shape(128, 128, 64, 8, 4)],
    _MANY: [
        Shape(128, 256, 64, 8, 4),
        Shape(128, 256, 64, 8, 3),
        Shape(128, 128, 64, 4, 3),
        Shape(128, 128, 64, 8, 4),
        Shape(64, 256, 64, 4, 4),
    ],
}
_AMPERE: _Table = {
    16: [Shape(16, 128, 64, 4, 5), Shape(16, 64, 128, 4, 5)],
    32: [Shape(32, 128, 64, 4, 4)],
    96: [Shape(64, 128, 64, 4, 3), Shape(64, 128, 32, 4, 4)],
    _MANY: [Shape(128, 128, 64, 8, 3), Shape(128, 128, 32, 4, 4), Shape(128, 256, 32, 8, 3)],
}
_SMALL: _Table = {
    16: [Shape(16, 128, 64, 4, 4), Shape(16, 64, 64, 4, 5)],
    32: [Shape(32, 128, 64, 4, 3)],
    96: [Shape(64, 128, 32, 4, 4)],
    _MANY: [Shape(128, 128, 32, 4, 3), Shape(128, 128, 32, 8, 3)],
}
# Exact float32 has no tensor cores.
_EXACT: _Table = {
    16: [Shape(16, 64, 32, 4, 3)],
    _MANY: [Shape(64, 64, 16, 8, 3), Shape(32, 64, 32, 4, 2)],
}


def shapes(inputs: Inputs, spec: Spec, device: Device) -> list[Shape]:
    """Shapes for the products of a call, the guess first."""
    capability = device.compute_capability or (9, 0)
    table = _SMALL
    if is_exact(inputs):
        table = _EXACT
    elif capability in ((9, 0), (10, 0), (10, 3)):  # 227 KiB of shared memory in a block
        table = _HOPPER
    elif capability in ((8, 0), (8, 7)):  # 163 KiB; all others have 99 KiB
        table = _AMPERE
    sizes = inputs.inputs.shape
    rows = sizes[-2] * (sizes[0] if len(sizes) == 3 else 1) / max(1, inputs.weights.shape[0])
    return next(some for most, some in table.items() if rows <= most)


def fitted(shape: Shape, columns: int, k: int, exact: bool) -> Shape:
    """The shape in sizes that a tile can have, none larger than the matrix it lies in."""
    block_n = min(padded(shape.block_n), padded(columns))
    block_k = min(padded(shape.block_k), padded(k))
    if not exact:
        return shape._replace(block_m=padded(shape.block_m), block_n=block_n, block_k=block_k)
    # Without tensor cores a thread has whole rows and columns of the operands in its registers.
    block_m = min(padded(shape.block_m), 64)
    return shape._replace(block_m=block_m, block_n=min(block_n, 64), block_k=min(block_k, 32))


def of_sums(shape: Shape, m: int, n: int, exact: bool, gathers: bool) -> Shape:
    """The shape for sums over rows that goes with one for products: there `k` are rows."""
    if exact:
        return fitted(shape, n, 32, True)._replace(block_m=min(32, padded(m)), block_k=16)
    if gathers:
        # Every step computes addresses anew: two programs at a time hide that from each other.
        warps = 4 if shape.block_n > 128 else shape.warps
        stages = min(shape.stages, 3)
        shape = shape._replace(block_n=min(shape.block_n, 128), warps=warps, stages=stages)
    # Few rows of a weight are a short sum: then the tile of results is all there is to do.
    few = shape.block_m < 64
    block_m, block_k = (64, 16) if few else (shape.block_m, min(shape.block_k, 64))
    shape = shape._replace(block_m=min(padded(block_m), padded(m)), block_k=padded(block_k))
    return shape._replace(block_n=min(padded(shape.block_n), padded(n)))


def padded(size: int) -> int:
    """The next size that a tile can have."""
    return max(16, 1 << (size - 1).bit_length())


def is_exact(inputs: Inputs) -> bool:
    return np.dtype(inputs.inputs.dtype).itemsize == 4


def config(shape: Shape) -> GroupedMatmulConfig:
    """A shape as a configuration has it."""
    return GroupedMatmulConfig(
        block_m=shape.block_m,
        block_n=shape.block_n,
        block_k=shape.block_k,
        num_warps=shape.warps,
        num_stages=shape.stages,
        platform="triton",
    )
