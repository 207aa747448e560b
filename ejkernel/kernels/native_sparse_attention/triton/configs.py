"""Tile sizes and launch parameters of the Triton kernels.

Every entry compiles without register spills for the devices of its table, which tests/kernels
checks. The first entry of a list is the heuristic, all of them are candidates.
"""

from typing import NamedTuple

import numpy as np

from ejkernel.kernels.common.triton.bridge import padded_size
from ejkernel.kernels.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel.kernels.native_sparse_attention.inputs import Inputs, Spec
from ejkernel.ops.platform import Device

MAX_HEAD_DIM = 256
_MAX_TOKENS = 64  # of a tile
_MAX_WASTE = 4 / 3  # keys of the tiles that cover a block, to those of the block


class SelectedTileConfig(NamedTuple):
    """The tile of a program, and launch parameters."""

    tokens: int  # a power of two, as all sizes
    head_block: int  # query heads of a key head
    block_k: int
    warps: int
    stages: int


class _Tile(NamedTuple):
    """A tile by its rows: query heads of one key head, for some tokens."""

    rows: int
    block_k: int
    warps: int
    stages: int


# By the padded head dim, or value dim if that is larger.
_Table = dict[int, list[_Tile]]

_HOPPER: _Table = {
    64: [_Tile(64, 64, 4, 3), _Tile(64, 64, 4, 2), _Tile(32, 64, 4, 3), _Tile(16, 64, 4, 3)],
    128: [_Tile(64, 64, 4, 3), _Tile(64, 64, 4, 2), _Tile(32, 64, 4, 3), _Tile(16, 64, 4, 3)],
    256: [_Tile(64, 64, 8, 2), _Tile(32, 64, 4, 2), _Tile(16, 64, 4, 2)],
}
_AMPERE: _Table = {
    64: [_Tile(64, 64, 4, 3), _Tile(32, 64, 4, 3), _Tile(16, 64, 4, 3)],
    128: [_Tile(64, 64, 8, 2), _Tile(32, 64, 4, 2), _Tile(16, 64, 4, 3)],
    256: [_Tile(32, 32, 4, 2), _Tile(16, 32, 4, 2)],
}
# float32 in full precision has no tensor cores.
_EXACT: _Table = {
    64: [_Tile(16, 32, 4, 2)],
    128: [_Tile(16, 16, 4, 2)],
    256: [_Tile(16, 16, 4, 2)],
}

_HOPPER_BACKWARD: _Table = {
    64: [_Tile(64, 64, 4, 3), _Tile(64, 64, 4, 2), _Tile(32, 64, 4, 3)],
    128: [_Tile(64, 64, 4, 2), _Tile(32, 64, 4, 3), _Tile(32, 64, 4, 2)],
    256: [_Tile(32, 32, 8, 2), _Tile(16, 32, 8, 2)],
}
_AMPERE_BACKWARD: _Table = {
    64: [_Tile(64, 64, 8, 2), _Tile(32, 64, 4, 2)],
    128: [_Tile(32, 64, 4, 2), _Tile(32, 32, 4, 2)],
    256: [_Tile(32, 32, 8, 2), _Tile(16, 32, 8, 2)],
}


def forward_configs(inputs: Inputs, spec: Spec, device: Device) -> list[SelectedTileConfig]:
    """The tiles of the forward pass worth timing, the one expected to be fastest first."""
    return _configs(inputs, spec, device, _HOPPER, _AMPERE)


def backward_configs(inputs: Inputs, spec: Spec, device: Device) -> list[SelectedTileConfig]:
    """The same for the backward pass."""
    return _configs(inputs, spec, device, _HOPPER_BACKWARD, _AMPERE_BACKWARD)


def _configs(
    inputs: Inputs, spec: Spec, device: Device, hopper: _Table, ampere: _Table
) -> list[SelectedTileConfig]:
    capability = device.compute_capability or (9, 0)
    table = ampere
    if _is_exact(inputs):
        table = _EXACT
    elif capability in ((9, 0), (10, 0), (10, 3)):  # 227 KiB of shared memory in a block
        table = hopper
    found = [_fitted(tile, inputs, spec) for tile in table[_width(inputs)]]
    return list(dict.fromkeys(found))


def keys_config(config: SelectedTileConfig, inputs: Inputs) -> SelectedTileConfig:
    """The tiles of the kernel of dK and dV that go with those of the kernel of dQ.

    It keeps two accumulators. With tokens that have few heads the addresses of a tile take
    registers too.
    """
    group = inputs.query.shape[2] // inputs.key.shape[2]
    rows = config.tokens * config.head_block
    if _width(inputs) < 128 or (group >= 16 and rows % group == 0):
        return config
    warps = 8 if rows >= 64 or rows % group else config.warps
    return config._replace(warps=warps, stages=min(config.stages, 2))


def from_params(
    params: NativeSparseAttentionConfig, inputs: Inputs, spec: Spec
) -> SelectedTileConfig:
    """The tiles of a configuration, in sizes that Triton supports."""
    rows = padded_size(params.block_q * group_width(inputs))
    exact = _is_exact(inputs)
    most = 16 if exact and _width(inputs) > 64 else 64
    block_k = min(padded_size(params.block_k), 32 if exact else 128)
    tile = _Tile(min(rows, most), block_k, params.num_warps, params.num_stages)
    return _fitted(tile, inputs, spec)


def to_params(config: SelectedTileConfig, spec: Spec) -> NativeSparseAttentionConfig:
    """The configuration of tiles."""
    return NativeSparseAttentionConfig(
        block_q=config.tokens,
        block_k=config.block_k,
        block_size=spec.block_size,
        num_warps=config.warps,
        num_stages=config.stages,
        platform="triton",
    )


def _fitted(tile: _Tile, inputs: Inputs, spec: Spec) -> SelectedTileConfig:
    """A tile with as many tokens as make its rows, and a part of a block that divides it well."""
    head_block = min(group_width(inputs), tile.rows)
    # No more tokens than there are.
    tokens = min(tile.rows // head_block, 1 << (inputs.query.shape[1] - 1).bit_length())
    tokens = min(max(tokens, 16 // head_block, 1), _MAX_TOKENS)
    block_k = tile.block_k
    while block_k > 16 and -(-spec.block_size // block_k) * block_k > _MAX_WASTE * spec.block_size:
        block_k //= 2
    # A mask for the keys of the next block takes registers.
    masked = spec.block_size % block_k and tile.rows >= 64 and _width(inputs) >= 128
    return SelectedTileConfig(tokens, head_block, block_k, 8 if masked else tile.warps, tile.stages)


def group_width(inputs: Inputs) -> int:
    """Query heads of a key head, padded to a power of two."""
    group = inputs.query.shape[2] // inputs.key.shape[2]
    return 1 << (group - 1).bit_length()


def _is_exact(inputs: Inputs) -> bool:
    return np.dtype(inputs.query.dtype).itemsize == 4


def _width(inputs: Inputs) -> int:
    return padded_size(max(64, inputs.query.shape[3], inputs.value.shape[3]))
