"""Tile sizes and launch parameters of the Triton kernels.

Every entry compiles without register spills for the devices of its table, which tests/kernels
checks. The first entry of a list is the heuristic, all of them are candidates.
"""

from typing import NamedTuple

import numpy as np

from ejkernel.kernels.common.triton.bridge import padded_size
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Spec, rows_per_weight
from ejkernel.ops.platform import Device


class TritonTileConfig(NamedTuple):
    """The tile of a program, the step of its sum, and launch parameters."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# By the largest average number of rows per weight.
_Table = dict[int, list[TritonTileConfig]]
_MANY = 1 << 62

_HOPPER: _Table = {
    16: [
        TritonTileConfig(16, 128, 128, 4, 4),
        TritonTileConfig(16, 128, 64, 4, 5),
        TritonTileConfig(16, 64, 128, 4, 5),
        TritonTileConfig(16, 256, 64, 8, 4),
        TritonTileConfig(16, 128, 128, 8, 4),
    ],
    32: [
        TritonTileConfig(32, 128, 128, 4, 4),
        TritonTileConfig(32, 128, 64, 4, 5),
        TritonTileConfig(16, 128, 128, 4, 4),
    ],
    96: [
        TritonTileConfig(64, 128, 64, 4, 4),
        TritonTileConfig(64, 256, 64, 4, 4),
        TritonTileConfig(32, 128, 128, 4, 4),
    ],
    # Many tiles of 128 rows are half empty here, and still the fastest at 128 rows a weight.
    160: [
        TritonTileConfig(128, 256, 64, 8, 4),
        TritonTileConfig(64, 256, 64, 4, 4),
        TritonTileConfig(128, 128, 64, 8, 4),
    ],
    _MANY: [
        TritonTileConfig(128, 256, 64, 8, 4),
        TritonTileConfig(128, 256, 64, 8, 3),
        TritonTileConfig(128, 128, 64, 4, 3),
        TritonTileConfig(128, 128, 64, 8, 4),
        TritonTileConfig(64, 256, 64, 4, 4),
    ],
}
_AMPERE: _Table = {
    16: [TritonTileConfig(16, 128, 64, 4, 5), TritonTileConfig(16, 64, 128, 4, 5)],
    32: [TritonTileConfig(32, 128, 64, 4, 4)],
    96: [TritonTileConfig(64, 128, 64, 4, 3), TritonTileConfig(64, 128, 32, 4, 4)],
    _MANY: [
        TritonTileConfig(128, 128, 64, 8, 3),
        TritonTileConfig(128, 128, 32, 4, 4),
        TritonTileConfig(128, 256, 32, 8, 3),
    ],
}
_SMALL: _Table = {
    16: [TritonTileConfig(16, 128, 64, 4, 4), TritonTileConfig(16, 64, 64, 4, 5)],
    32: [TritonTileConfig(32, 128, 64, 4, 3)],
    96: [TritonTileConfig(64, 128, 32, 4, 4)],
    _MANY: [TritonTileConfig(128, 128, 32, 4, 3), TritonTileConfig(128, 128, 32, 8, 3)],
}
# float32 in full precision has no tensor cores.
_EXACT: _Table = {
    16: [TritonTileConfig(16, 64, 32, 4, 3)],
    _MANY: [TritonTileConfig(64, 64, 16, 8, 3), TritonTileConfig(32, 64, 32, 4, 2)],
}


def tile_configs(inputs: Inputs, spec: Spec, device: Device) -> list[TritonTileConfig]:
    """The tiles worth timing, the one expected to be fastest first."""
    capability = device.compute_capability or (9, 0)
    table = _SMALL
    if _is_exact(inputs):
        table = _EXACT
    elif capability in ((9, 0), (10, 0), (10, 3)):  # 227 KiB of shared memory in a block
        table = _HOPPER
    elif capability in ((8, 0), (8, 7)):  # 163 KiB; all others have 99 KiB
        table = _AMPERE
    rows = rows_per_weight(inputs)
    return next(some for most, some in table.items() if rows <= most)


def gmm_tiles(tiles: TritonTileConfig, n: int, k: int, exact: bool) -> TritonTileConfig:
    """The tiles of a `gmm` in sizes that Triton supports, none larger than its axis."""
    block_m = padded_size(tiles.block_m)
    block_n = min(padded_size(tiles.block_n), padded_size(n))
    block_k = min(padded_size(tiles.block_k), padded_size(k))
    if not exact:
        return tiles._replace(block_m=block_m, block_n=block_n, block_k=block_k)
    # Without tensor cores a thread has whole rows and columns of the operands in its registers.
    return tiles._replace(
        block_m=min(block_m, 64), block_n=min(block_n, 64), block_k=min(block_k, 32)
    )


def tgmm_tiles(
    tiles: TritonTileConfig, m: int, n: int, exact: bool, gathers: bool
) -> TritonTileConfig:
    """The tiles of a `tgmm` that go with those of a `gmm`; its `k` are rows."""
    if exact:
        return gmm_tiles(tiles, n, 32, True)._replace(block_m=min(32, padded_size(m)), block_k=16)
    if gathers:
        # Every step computes addresses anew. Two programs on a multiprocessor hide that.
        warps = 4 if tiles.block_n > 128 else tiles.warps
        stages = min(tiles.stages, 3)
        tiles = tiles._replace(block_n=min(tiles.block_n, 128), warps=warps, stages=stages)
    # Few rows per weight make a short sum: most of the time goes into storing the result.
    few = tiles.block_m < 64
    block_m, block_k = (64, 16) if few else (tiles.block_m, min(tiles.block_k, 64))
    block_m = min(padded_size(block_m), padded_size(m))
    block_n = min(padded_size(tiles.block_n), padded_size(n))
    return tiles._replace(block_m=block_m, block_n=block_n, block_k=padded_size(block_k))


def _is_exact(inputs: Inputs) -> bool:
    return np.dtype(inputs.inputs.dtype).itemsize == 4


def from_params(params: GroupedMatmulConfig) -> TritonTileConfig:
    """The tiles that a configuration asks for."""
    return TritonTileConfig(
        params.block_m, params.block_n, params.block_k, params.num_warps, params.num_stages
    )


def to_params(tiles: TritonTileConfig) -> GroupedMatmulConfig:
    """The configuration of tiles."""
    return GroupedMatmulConfig(
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        platform="triton",
    )


def heuristic(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    """The tiles expected to be fastest."""
    return to_params(tile_configs(inputs, spec, device)[0])


def candidates(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    """All tiles worth timing."""
    return [to_params(tiles) for tiles in tile_configs(inputs, spec, device)]
