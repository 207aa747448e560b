"""How tokens and columns are divided among the programs of the Triton kernels.

All are bandwidth bound: a program needs many bytes in flight, and the GPU several programs on each
multiprocessor. A row of a tile is at least a cache line of 128 bytes.
"""

from typing import NamedTuple

import jax
import numpy as np

from ejkernel.kernels.common.triton.bridge import grid_multiprocessors, padded_size
from ejkernel.kernels.mean_pooling.config import MeanPoolingConfig
from ejkernel.kernels.mean_pooling.inputs import Inputs, Spec
from ejkernel.ops.platform import Device

_WARPS = 4
_BYTES_OF_A_THREAD = 128  # that it loads at once
_LEAST_BYTES, _MOST_BYTES = 128, 1024  # of a row of a tile
# Minimum programs per SM; split sequences need more for balance.
_WHOLE_SEQUENCES, _PARTS = 3, 8
_FORWARD_TOKENS, _BACKWARD_TOKENS = (512, 256, 128, 64, 32), (64, 32, 16)


class TritonTileConfig(NamedTuple):
    """The tokens and columns of a program, the tokens that it processes at once, its warps."""

    tokens: int
    columns: int
    rows: int
    warps: int


def from_params(params: MeanPoolingConfig, x: jax.Array) -> TritonTileConfig:
    """The tiles of a configuration in sizes that Triton supports, none larger than its axis."""
    tokens = min(padded_size(params.block_tokens), padded_size(x.shape[-2]))
    columns = min(padded_size(params.block_dim), padded_size(x.shape[-1]))
    at_once = 32 * params.num_warps * _BYTES_OF_A_THREAD // np.dtype(x.dtype).itemsize
    rows = min(max(at_once // columns, 1), tokens)
    return TritonTileConfig(tokens, columns, rows, params.num_warps)


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device) -> MeanPoolingConfig:
    """Whole sequences in narrow columns where that fills the GPU, else parts of them."""
    return candidates_forward(inputs, spec, device)[0]


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device) -> MeanPoolingConfig:
    """Wide columns of few tokens."""
    return candidates_backward(inputs, spec, device)[0]


def candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[MeanPoolingConfig]:
    """The tiles worth timing, the one expected to be fastest first."""
    in_parts = _in_parts(inputs, device, _FORWARD_TOKENS)
    others = [max(in_parts // 2, _FORWARD_TOKENS[-1]), in_parts * 2]
    parts = [_params(inputs, tokens, _MOST_BYTES) for tokens in (in_parts, *others)]
    if inputs.cu_seqlens is not None:
        return parts
    rows, tokens = inputs.x.shape[:2]
    whole = [_params(inputs, padded_size(tokens), size) for size in (512, 256, _LEAST_BYTES)]
    most = _WHOLE_SEQUENCES * grid_multiprocessors(device)
    filling = [params for params in whole if rows * _column_blocks(inputs, params) >= most]
    return [*filling[:1], *parts, *filling[1:]]


def candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[MeanPoolingConfig]:
    """The tiles worth timing, the one expected to be fastest first."""
    tokens = _in_parts(inputs, device, _BACKWARD_TOKENS)
    sizes = ((tokens, _MOST_BYTES), (tokens, _MOST_BYTES // 2), (tokens * 2, _MOST_BYTES))
    return [_params(inputs, *size) for size in sizes]


def _in_parts(inputs: Inputs, device: Device, choices: tuple[int, ...]) -> int:
    """The most tokens of a program with which the programs still fill the GPU."""
    *_, tokens, _ = inputs.x.shape
    rows = inputs.x.size // (tokens * inputs.x.shape[-1])
    blocks = rows * _column_blocks(inputs, _params(inputs, 1, _MOST_BYTES))
    needed = _PARTS * grid_multiprocessors(device)
    fits = (size for size in choices if blocks * -(-tokens // size) >= needed)
    return next(fits, choices[-1])


def _column_blocks(inputs: Inputs, params: MeanPoolingConfig) -> int:
    return -(-inputs.x.shape[-1] // params.block_dim)


def _params(inputs: Inputs, tokens: int, row_bytes: int) -> MeanPoolingConfig:
    columns = _columns(inputs.x.shape[-1], np.dtype(inputs.x.dtype).itemsize, row_bytes)
    return MeanPoolingConfig(
        block_tokens=tokens, block_dim=columns, num_warps=_WARPS, platform="triton"
    )


def _columns(columns: int, itemsize: int, row_bytes: int) -> int:
    """The columns of a program: as many as these bytes hold, or fewer that divide them evenly."""
    most, least = (
        min(size // itemsize, padded_size(columns)) for size in (row_bytes, _LEAST_BYTES)
    )
    sizes = [most >> i for i in range(most.bit_length()) if most >> i >= least]
    return next((size for size in sizes if columns % size == 0), most)
