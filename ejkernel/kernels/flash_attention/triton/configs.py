"""Tile shapes, warps and stages of the Triton kernels: the heuristic and the tuner's candidates.

Every config compiles without register spills for the devices of its table; tests/kernels checks
that. The first of a list is the heuristic's choice.
"""

from typing import NamedTuple

import numpy as np

from ejkernel.kernels.common.triton.bridge import padded_size
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.platform import Device
from ejkernel.types.rules import And, Blocks, Dense, Everything, Or, Rule


class TritonTileConfig(NamedTuple):
    """Tile shape and compiler options of one kernel."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class TritonBackwardConfig(NamedTuple):
    """Tile shapes (block_q, block_k) and compiler options of the two backward kernels."""

    dkdv_tile: tuple[int, int]
    dq_tile: tuple[int, int]
    num_warps: int
    num_stages: int
    # Only where both lengths are multiples of `dkdv_tile`: guards would cost registers.
    even_only: bool = False


# Keyed by the padded head dim, or value dim if that is larger.
_Forward = dict[int, list[TritonTileConfig]]
_Backward = dict[int, list[TritonBackwardConfig]]

_HOPPER: _Forward = {
    64: [
        TritonTileConfig(128, 128, 8, 2),
        TritonTileConfig(128, 64, 8, 3),
        TritonTileConfig(128, 64, 4, 3),
        TritonTileConfig(128, 128, 8, 3),
        TritonTileConfig(64, 64, 4, 3),
    ],
    128: [
        TritonTileConfig(128, 128, 8, 2),
        TritonTileConfig(128, 64, 8, 3),
        TritonTileConfig(128, 128, 8, 3),
        TritonTileConfig(64, 64, 4, 3),
        TritonTileConfig(64, 64, 4, 2),
        TritonTileConfig(64, 128, 4, 2),
    ],
    256: [
        TritonTileConfig(128, 64, 8, 2),
        TritonTileConfig(64, 64, 8, 2),
        TritonTileConfig(128, 32, 8, 2),
    ],
}
_BLACKWELL: _Forward = {
    64: [
        TritonTileConfig(128, 64, 8, 3),
        TritonTileConfig(128, 64, 4, 3),
        TritonTileConfig(64, 64, 4, 3),
    ],
    128: [
        TritonTileConfig(128, 64, 8, 3),
        TritonTileConfig(128, 64, 8, 2),
        TritonTileConfig(64, 64, 4, 3),
    ],
    256: [TritonTileConfig(64, 64, 8, 2), TritonTileConfig(128, 32, 8, 2)],
}
_AMPERE: _Forward = {
    64: [
        TritonTileConfig(128, 64, 4, 3),
        TritonTileConfig(128, 64, 8, 3),
        TritonTileConfig(64, 64, 4, 3),
    ],
    128: [
        TritonTileConfig(128, 64, 8, 3),
        TritonTileConfig(64, 64, 4, 3),
        TritonTileConfig(64, 64, 4, 2),
    ],
    256: [TritonTileConfig(64, 64, 8, 2), TritonTileConfig(32, 32, 4, 2)],
}
_SMALL: _Forward = {
    64: [TritonTileConfig(128, 64, 8, 3), TritonTileConfig(64, 64, 4, 3)],
    128: [
        TritonTileConfig(64, 64, 4, 2),
        TritonTileConfig(128, 64, 8, 2),
        TritonTileConfig(64, 32, 4, 2),
    ],
    256: [TritonTileConfig(32, 32, 4, 2)],
}
# With a tile of bias, dense mask or dropout bits next to the logits.
_EXTRA_TILE: _Forward = {
    64: [TritonTileConfig(128, 64, 8, 2), TritonTileConfig(64, 64, 4, 2)],
    128: [TritonTileConfig(128, 32, 8, 2), TritonTileConfig(64, 32, 4, 2)],
    256: [TritonTileConfig(32, 32, 4, 2), TritonTileConfig(32, 32, 8, 2)],
}
# float32 in full precision does not use tensor cores.
_FLOAT32: _Forward = {
    64: [TritonTileConfig(32, 32, 4, 2), TritonTileConfig(32, 32, 8, 2)],
    128: [TritonTileConfig(32, 16, 8, 2), TritonTileConfig(16, 32, 8, 2)],
    256: [TritonTileConfig(16, 16, 8, 2)],
}

_HOPPER_BACKWARD: _Backward = {
    64: [
        TritonBackwardConfig((64, 128), (128, 64), 8, 2),
        TritonBackwardConfig((64, 64), (64, 64), 4, 2),
        TritonBackwardConfig((32, 128), (128, 128), 8, 2),
    ],
    128: [
        TritonBackwardConfig((64, 128), (128, 64), 8, 2, even_only=True),
        TritonBackwardConfig((64, 64), (128, 64), 8, 2),
        TritonBackwardConfig((32, 128), (128, 64), 8, 2),
        TritonBackwardConfig((32, 64), (64, 64), 4, 2),
    ],
    256: [
        TritonBackwardConfig((16, 64), (64, 64), 8, 2),
        TritonBackwardConfig((64, 32), (64, 32), 8, 2),
    ],
}
_BLACKWELL_BACKWARD: _Backward = {
    64: [
        TritonBackwardConfig((64, 128), (128, 64), 8, 2),
        TritonBackwardConfig((64, 64), (64, 64), 4, 2),
    ],
    128: [
        TritonBackwardConfig((64, 64), (128, 64), 8, 2),
        TritonBackwardConfig((32, 64), (64, 64), 4, 2),
    ],
    256: [
        TritonBackwardConfig((64, 32), (64, 32), 8, 2),
        TritonBackwardConfig((32, 32), (64, 32), 8, 2),
    ],
}
_AMPERE_BACKWARD: _Backward = {
    64: [
        TritonBackwardConfig((64, 128), (128, 64), 8, 2, even_only=True),
        TritonBackwardConfig((64, 64), (64, 64), 4, 2),
        TritonBackwardConfig((32, 128), (128, 64), 8, 2),
    ],
    128: [
        TritonBackwardConfig((64, 64), (64, 64), 8, 2),
        TritonBackwardConfig((32, 64), (64, 64), 4, 2),
    ],
    256: [
        TritonBackwardConfig((16, 64), (64, 64), 8, 2),
        TritonBackwardConfig((32, 32), (64, 32), 8, 2),
    ],
}
_SMALL_BACKWARD: _Backward = {
    64: _AMPERE_BACKWARD[64][1:],
    128: _AMPERE_BACKWARD[128],
    256: [TritonBackwardConfig((32, 32), (32, 32), 8, 2)],
}
# With a soft cap or sinks.
_CAPPED_BACKWARD: _Backward = {
    64: [
        TritonBackwardConfig((32, 128), (128, 64), 8, 2),
        TritonBackwardConfig((32, 64), (64, 64), 4, 2),
    ],
    128: [
        TritonBackwardConfig((32, 128), (128, 64), 8, 2),
        TritonBackwardConfig((32, 64), (64, 64), 8, 2),
    ],
    256: [TritonBackwardConfig((64, 32), (64, 32), 8, 2)],
}
_EXTRA_TILE_BACKWARD: _Backward = {
    64: [
        TritonBackwardConfig((32, 64), (64, 32), 4, 2),
        TritonBackwardConfig((32, 64), (64, 64), 8, 2),
    ],
    128: [TritonBackwardConfig((32, 64), (128, 32), 8, 2)],
    256: [TritonBackwardConfig((32, 32), (32, 32), 8, 2)],
}
_EXTRA_TILE_AMPERE_BACKWARD: _Backward = _EXTRA_TILE_BACKWARD | {
    64: [TritonBackwardConfig((32, 32), (64, 32), 4, 2)]
}
_FLOAT32_BACKWARD: _Backward = {
    64: [
        TritonBackwardConfig((32, 32), (32, 32), 8, 2),
        TritonBackwardConfig((16, 32), (32, 16), 4, 2),
    ],
    128: [TritonBackwardConfig((16, 32), (32, 16), 8, 2)],
    256: [TritonBackwardConfig((16, 16), (16, 16), 4, 2)],
}


def forward_configs(inputs: Inputs, spec: Spec, device: Device) -> list[TritonTileConfig]:
    """Candidates for the forward pass of a call, the heuristic's choice first."""
    memory = _memory_class(device)
    table = _SMALL
    if _is_float32(inputs):
        table = _FLOAT32
    elif _has_extra_tile(inputs):
        table = _EXTRA_TILE
    elif memory.large:
        table = _BLACKWELL if memory.blackwell else _HOPPER
    elif memory.ampere:
        table = _AMPERE
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    fitted = (_fitted(config, q_len, kv_len) for config in table[_width(inputs)])
    return list(dict.fromkeys(fitted))


def backward_configs(inputs: Inputs, spec: Spec, device: Device) -> list[TritonBackwardConfig]:
    """Candidates for the backward pass of a call, the heuristic's choice first."""
    memory = _memory_class(device)
    table = _SMALL_BACKWARD
    extra_tile = _EXTRA_TILE_BACKWARD if memory.large else _EXTRA_TILE_AMPERE_BACKWARD
    if _is_float32(inputs):
        table = _FLOAT32_BACKWARD
    elif _has_extra_tile(inputs):
        table = extra_tile
    elif inputs.sinks is not None or spec.logits_soft_cap is not None:
        table = _CAPPED_BACKWARD if memory.large and not memory.blackwell else extra_tile
    elif memory.large:
        table = _BLACKWELL_BACKWARD if memory.blackwell else _HOPPER_BACKWARD
    elif memory.ampere:
        table = _AMPERE_BACKWARD
    lengths = inputs.query.shape[1], inputs.key.shape[1]
    even = lambda tile: not any(n % block for n, block in zip(lengths, tile, strict=True))
    configs = table[_width(inputs)]
    return [config for config in configs if not config.even_only or even(config.dkdv_tile)]


def forward_params(config: TritonTileConfig) -> FwdParams:
    """A config in the fields of the op's public configuration."""
    return FwdParams(
        q_blocksize=config.block_q,
        kv_blocksize=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def backward_params(config: TritonBackwardConfig) -> BwdParams:
    """The same for the backward pass; `blocksize_m` and `blocksize_n` are the tile of dQ."""
    return BwdParams(
        q_blocksize=config.dkdv_tile[0],
        kv_blocksize=config.dkdv_tile[1],
        blocksize_m=config.dq_tile[0],
        blocksize_n=config.dq_tile[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def forward_config(
    inputs: Inputs, spec: Spec, params: FwdParams, device: Device
) -> TritonTileConfig:
    """The config of a call: what `params` gives, padded to a tile; the rest by the heuristic."""
    default = forward_configs(inputs, spec, device)[0]
    return TritonTileConfig(
        padded_size(params.q_blocksize or default.block_q),
        padded_size(params.kv_blocksize or default.block_k),
        params.num_warps or default.num_warps,
        params.num_stages or default.num_stages,
    )


def backward_kernel_configs(
    inputs: Inputs, spec: Spec, params: BwdParams, device: Device
) -> tuple[TritonTileConfig, TritonTileConfig]:
    """The same for the kernel of dK and dV, and for that of dQ."""
    default = backward_configs(inputs, spec, device)[0]
    options = params.num_warps or default.num_warps, params.num_stages or default.num_stages
    given = (params.q_blocksize, params.kv_blocksize), (params.blocksize_m, params.blocksize_n)
    dkdv, dq = (
        TritonTileConfig(padded_size(block_q or tile[0]), padded_size(block_k or tile[1]), *options)
        for (block_q, block_k), tile in zip(
            given, (default.dkdv_tile, default.dq_tile), strict=True
        )
    )
    return dkdv, dq


def _fitted(config: TritonTileConfig, q_len: int, kv_len: int) -> TritonTileConfig:
    """Blocks no longer than the sequences; few warps for a block that was shortened to 64 rows."""
    block_q = min(config.block_q, padded_size(q_len))
    block_k = min(config.block_k, padded_size(kv_len))
    if block_q == config.block_q or block_q > 64:
        return TritonTileConfig(block_q, block_k, config.num_warps, config.num_stages)
    return TritonTileConfig(block_q, block_k, 4, 2)


class _MemoryClass(NamedTuple):
    """Shared memory of a block by device family; 99 KiB where nothing is set."""

    large: bool  # 227 KiB: Hopper and Blackwell
    ampere: bool  # 163 KiB
    blackwell: bool


def _memory_class(device: Device) -> _MemoryClass:
    capability = device.compute_capability or (9, 0)
    blackwell = capability in ((10, 0), (10, 3))
    return _MemoryClass(
        capability == (9, 0) or blackwell, capability in ((8, 0), (8, 7)), blackwell
    )


def _width(inputs: Inputs) -> int:
    return max(64, padded_size(max(inputs.query.shape[3], inputs.value.shape[3])))


def _is_float32(inputs: Inputs) -> bool:
    return np.dtype(inputs.query.dtype).itemsize == 4


def _has_extra_tile(inputs: Inputs) -> bool:
    tile = inputs.bias is not None and min(inputs.bias.shape[2:]) > 1
    return tile or inputs.dropout is not None or _has_dense_mask(inputs.mask or Everything())


def _has_dense_mask(rule: Rule) -> bool:
    if isinstance(rule, And | Or):
        return any(map(_has_dense_mask, rule.rules))
    return isinstance(rule, Dense | Blocks)
