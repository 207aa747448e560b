"""Tile sizes of the Hopper kernels: what fits into shared memory, what is expected to be fastest.

Both kernels take the operands in steps of 64 along the sum and give each consumer warpgroup 64 rows
of the result.
"""

import dataclasses

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Spec, rows_per_weight
from ejkernel.ops.platform import Device

WARPGROUP_ROWS = 64  # rows of a WGMMA
BLOCK_K = 64  # 16-bit numbers in 128 bytes, the widest swizzle of shared memory
SWIZZLE_BYTES = 128

# Shared memory that is left for barriers.
_BARRIER_BYTES = 2048
# Below so many rows per weight the kernel is bound by the bandwidth of the weights.
_FEW_ROWS = 48


@dataclasses.dataclass(frozen=True)
class HopperTileConfig:
    """How a kernel cuts its output into tiles, and its pipeline.

    Attributes:
        block_m: rows of a tile: 64 for each consumer warpgroup, or fewer for a single one.
        block_n: columns of a tile, 128 or 256.
        stages: stages of the ring buffer.
        raster_band: column tiles that are visited before the next row tile, so that the operands of
            a band stay in L2.
        out_buffers: pieces of the result, 128 bytes wide, that a warpgroup can be storing.
    """

    block_m: int
    block_n: int
    stages: int
    raster_band: int = 8
    out_buffers: int = 2

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return -(-self.block_m // WARPGROUP_ROWS)

    @property
    def shared_bytes(self) -> int:
        stage = 2 * BLOCK_K * (self.consumers * WARPGROUP_ROWS + self.block_n)
        out = self.consumers * self.out_buffers * WARPGROUP_ROWS * SWIZZLE_BYTES
        return self.stages * stage + out


def fit_tiles(
    block_m: int, block_n: int, stages: int = 8, raster_band: int = 8
) -> HopperTileConfig:
    """Tiles of this size with as many stages, then as many output buffers, as fit.

    >>> fit_tiles(128, 256)
    HopperTileConfig(block_m=128, block_n=256, stages=4, raster_band=8, out_buffers=2)
    >>> fit_tiles(128, 256, stages=3).out_buffers
    4
    """
    available = gpu.SHARED_MEMORY - _BARRIER_BYTES
    pieces = block_n // WARPGROUP_ROWS
    for count in range(stages, 1, -1):
        sizes = (
            HopperTileConfig(block_m, block_n, count, raster_band, out_buffers)
            for out_buffers in (pieces, 2)
        )
        if fit := [tiles for tiles in sizes if tiles.shared_bytes <= available]:
            return fit[0]
    return HopperTileConfig(block_m, block_n, 2, raster_band)


def gmm_tiles(inputs: Inputs, params: GroupedMatmulConfig | None) -> HopperTileConfig:
    """The tiles of a `gmm` nearest to the parameters; by default those expected to be fastest."""
    if params is None:
        params = to_params(_default_tiles(inputs))
    block_m = next(
        (size for size in (16, WARPGROUP_ROWS) if params.block_m <= size), 2 * WARPGROUP_ROWS
    )
    return fit_tiles(block_m, _block_n(params), max(2, params.num_stages))


def tgmm_tiles(inputs: Inputs, params: GroupedMatmulConfig | None) -> HopperTileConfig:
    """The same for a `tgmm`, whose tiles always have 128 rows."""
    block_n, stages = (256, 8) if params is None else (_block_n(params), max(2, params.num_stages))
    wide = -(-inputs.weights.shape[2] // block_n) > 8
    return fit_tiles(2 * WARPGROUP_ROWS, block_n, stages, raster_band=4 if wide else 8)


def _block_n(params: GroupedMatmulConfig) -> int:
    return 128 if params.block_n <= 128 else 256


def _default_tiles(inputs: Inputs) -> HopperTileConfig:
    """Tiles of few rows where weights have few rows; the kernel is then bandwidth bound.

    Otherwise three stages and buffers for a whole result, rather than four stages and half of them.
    """
    if (rows := rows_per_weight(inputs)) > _FEW_ROWS:
        return fit_tiles(2 * WARPGROUP_ROWS, 256, stages=3)
    return fit_tiles(16 if rows <= 8 else WARPGROUP_ROWS, 256)


def to_params(tiles: HopperTileConfig) -> GroupedMatmulConfig:
    """The configuration of tiles."""
    return GroupedMatmulConfig(
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=BLOCK_K,
        num_warps=4 * (tiles.consumers + 1),
        num_stages=tiles.stages,
        platform="pallas",
    )


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    """The tiles expected to be fastest."""
    return to_params(_default_tiles(inputs))


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device) -> GroupedMatmulConfig:
    """The same for the backward pass, whose tiles have at least 64 rows."""
    return to_params(fit_tiles(max(WARPGROUP_ROWS, _default_tiles(inputs).block_m), 256))


def candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    """Tiles worth timing; with many rows per weight, small ones took two to eight times as long."""
    few = [(16, 256), (16, 128), (64, 256)]
    is_few = rows_per_weight(inputs) <= _FEW_ROWS
    sizes = few if is_few else [(128, 256, 3), (128, 256), (128, 128)]
    return [to_params(fit_tiles(*size)) for size in sizes]


def candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    """The same for the backward pass."""
    small = [(64, 256)] if rows_per_weight(inputs) <= _FEW_ROWS else []
    sizes = [*small, (128, 256), (128, 256, 3), (128, 128)]
    return [to_params(fit_tiles(*size)) for size in sizes]
