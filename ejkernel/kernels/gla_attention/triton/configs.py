"""Tiles, segments and launch parameters of the Triton kernels."""

from typing import NamedTuple

import numpy as np

from ejkernel.kernels.common.triton.bridge import LaunchConfig, grid_multiprocessors, padded_size
from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.kernels.gla_attention.inputs import Inputs, Spec, sequences
from ejkernel.ops.platform import Device

MAX_WIDTH = 256  # rows of a state: a program has all of them in its registers
_MAX_CHUNK = 128
_LEAST_CHUNKS = 8  # of a segment: its first state costs as much as one or two of them


class LinearTiles(NamedTuple):
    """Tokens of a chunk, the tile of a state, and launch parameters."""

    chunk: int
    block_rows: int
    block_columns: int
    warps: int
    stages: int

    @property
    def launch(self) -> LaunchConfig:
        """The launch parameters, for a number of programs that is set later."""
        return LaunchConfig(0, self.warps, self.stages)


def tiles_of(inputs: Inputs, params: GLAttentionConfig) -> LinearTiles:
    """The tiles that a configuration asks for, in sizes that Triton supports."""
    average = -(-inputs.key.shape[1] // sequences(inputs))
    chunk = min(padded_size(params.block_q), _MAX_CHUNK, padded_size(average))
    return LinearTiles(
        chunk,
        min(padded_size(params.block_rows), MAX_WIDTH),
        min(padded_size(params.block_d), MAX_WIDTH),
        params.num_warps,
        params.num_stages,
    )


def state_tile(inputs: Inputs) -> tuple[int, int]:
    """Rows and columns of the tile of a state in the kernels that do not take those of `tiles`."""
    return (32, 32) if np.dtype(inputs.query.dtype).itemsize == 4 else (64, 64)


def segment_tokens(inputs: Inputs, tiles: LinearTiles, device: Device) -> int:
    """Tokens of a segment: all, if there are enough heads and sequences to occupy the device."""
    batch, tokens, heads, _ = inputs.key.shape
    columns = -(-inputs.value.shape[-1] // tiles.block_columns)
    programs = batch * sequences(inputs) * heads * columns
    segments = -(-2 * grid_multiprocessors(device) // programs)
    size = max(-(-tokens // (segments * tiles.chunk)), _LEAST_CHUNKS) * tiles.chunk
    return tokens if segments == 1 else min(size, tokens)


def tile_configs(inputs: Inputs, backward: bool, device: Device) -> list[LinearTiles]:
    """The tiles worth timing, the one expected to be fastest first.

    All compile without register spills, which tests/kernels checks.
    """
    gate, wide = inputs.gate, inputs.key.shape[-1] > 128
    channel = gate is not None and gate.shape[-1] > 1
    if np.dtype(inputs.query.dtype).itemsize == 4:  # without tensor cores
        return [LinearTiles(16, 16, 16, 8, 1)]
    # Float16, which is widened, tables of gates of a head, and gates in float32 need the registers
    # of a longer chunk.
    widened = inputs.query.dtype == np.float16
    many_registers = gate is not None and (not channel or gate.dtype == np.float32)
    if many_registers or widened or (device.compute_capability or (9, 0)) != (9, 0):
        chunk = 16 if wide or (widened and channel) else 32
        if backward and gate is None:
            return [LinearTiles(chunk, 64, 64, 4, 2), LinearTiles(chunk, 32, 32, 4, 2)]
        narrow = [LinearTiles(chunk, 16, 32, 4, 2), LinearTiles(chunk, 16, 16, 4, 2)]
        return narrow[1:] if (gate is not None or widened) and not channel else narrow
    if backward:
        rows = 32 if channel else 64
        return [LinearTiles(64, rows, 64, 4, 2), LinearTiles(64, rows, 64, 4, 1)]
    if wide:
        return [LinearTiles(64, 32, 32, 4, 2), LinearTiles(64, 32, 16, 4, 2)]
    return [
        LinearTiles(64, 32, 64, 4, 2),
        LinearTiles(64, 32, 64, 4, 3),
        LinearTiles(64, 32, 32, 4, 2),
        LinearTiles(64, 32, 32, 4, 3),
    ]


def to_params(tiles: LinearTiles) -> GLAttentionConfig:
    """The configuration of tiles."""
    return GLAttentionConfig(
        block_q=tiles.chunk,
        block_rows=tiles.block_rows,
        block_d=tiles.block_columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        platform="triton",
    )


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device) -> GLAttentionConfig:
    """The tiles expected to be fastest."""
    return to_params(tile_configs(inputs, False, device)[0])


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device) -> GLAttentionConfig:
    """The tiles expected to be fastest."""
    return to_params(tile_configs(inputs, True, device)[0])


def candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[GLAttentionConfig]:
    """All tiles worth timing."""
    return [to_params(tiles) for tiles in tile_configs(inputs, False, device)]


def candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[GLAttentionConfig]:
    """All tiles worth timing."""
    return [to_params(tiles) for tiles in tile_configs(inputs, True, device)]
