"""Tile sizes of the TPU kernels of flash attention, and the VMEM that they take.

Tiles are multiples of 128 queries and keys. The fields of the parameters that are read:

| field | meaning |
|---|---|
| `q_blocksize`, `kv_blocksize` | queries and keys of a tile |
| `blocksize_heads` | query heads of a key head that a step computes |
| `mxu_width` | width of the matrix unit: a tile is computed in parts of this size |
| `resident_queries` | backward: queries whose gradient stays in VMEM |
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax.numpy as jnp

from ejkernel.kernels.common.integers import largest_divisor, round_up
from ejkernel.kernels.common.mosaic_tpu.memory import VMEM_SHARE, core_of, vmem_bytes
from ejkernel.kernels.common.mosaic_tpu.vectors import LANES
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_tpu.launch import FlashTileSize
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Band, Everything, Rule

# From the best tile to the smallest one.
_FORWARD = (
    FlashTileSize(1024, 1024, 1),
    FlashTileSize(512, 1024, 2),
    FlashTileSize(512, 512, 2),
    FlashTileSize(256, 512, 2),
    FlashTileSize(256, 256, 2),
    FlashTileSize(128, 256, 2),
    FlashTileSize(128, 128, 2),
)
_BACKWARD = ((512, 512), (256, 512), (256, 256), (128, 256), (128, 128))
_GOOD_RESIDENT = 1024  # queries whose gradient should fit, or a smaller tile is better


class FlashTileConfig(NamedTuple):
    """How a pass is cut.

    Attributes:
        size: the tile.
        mxu_width: width of the matrix unit.
        resident_queries: backward: queries whose gradient stays in VMEM.
    """

    size: FlashTileSize
    mxu_width: int
    resident_queries: int = 0


def forward_config(
    inputs: Inputs, spec: Spec, params: FwdParams | None, device: Device
) -> FlashTileConfig:
    """The tiles of a forward pass with these parameters."""
    defaults = heuristic_forward(inputs, spec, None)
    chosen = params or defaults
    size = FlashTileSize(
        _round_to_tile(chosen.q_blocksize or defaults.q_blocksize),
        _round_to_tile(chosen.kv_blocksize or defaults.kv_blocksize),
        _heads(inputs, chosen.blocksize_heads or 1),
    )
    return FlashTileConfig(size, _round_to_tile(chosen.mxu_width or core_of(device).mxu))


def backward_config(
    inputs: Inputs, spec: Spec, params: BwdParams | None, device: Device
) -> FlashTileConfig:
    """The tiles of a backward pass with these parameters."""
    defaults = heuristic_backward(inputs, spec, None)
    chosen = params or defaults
    size = FlashTileSize(
        _round_to_tile(chosen.q_blocksize or defaults.q_blocksize),
        _round_to_tile(chosen.kv_blocksize or defaults.kv_blocksize),
        _heads(inputs, chosen.blocksize_heads or defaults.blocksize_heads or 1),
    )
    resident = chosen.resident_queries or defaults.resident_queries or 0
    width = _round_to_tile(chosen.mxu_width or core_of(device).mxu)
    return FlashTileConfig(size, width, round_up(resident, size.queries))


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device | None) -> FwdParams:
    """The largest of the good tiles that fits."""
    # The largest tile would be mostly masked by a window or a short document.
    sizes = _FORWARD if _covers_most(inputs.mask) else _FORWARD[1:]
    size = sizes[-1]
    for one in sizes:
        size = _clipped(inputs, one._replace(heads=_heads(inputs, one.heads)))
        if forward_bytes(inputs, size) <= VMEM_SHARE * core_of(device).vmem:
            break
    return _fwd_params(size, device)


def _covers_most(rule: Rule | None) -> bool:
    """Whether a query may see all keys, or all up to one: most visited tiles are full."""
    if isinstance(rule, Band):
        return rule.low is None
    return rule is None or isinstance(rule, Everything)


def _fwd_params(size: FlashTileSize, device: Device | None) -> FwdParams:
    return FwdParams(
        q_blocksize=size.queries,
        kv_blocksize=size.keys,
        blocksize_heads=size.heads,
        mxu_width=core_of(device).mxu,
    )


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device | None) -> BwdParams:
    """The largest of the good tiles that fits, and as many resident queries as fit with it."""
    budget, q_len = VMEM_SHARE * core_of(device).vmem, inputs.query.shape[1]
    size, resident = FlashTileSize(LANES, LANES, 1), LANES
    for heads, (queries, keys) in itertools.product((4, 2, 1), _BACKWARD):
        size = _clipped(inputs, FlashTileSize(queries, keys, _heads(inputs, heads)))
        left = int(budget - backward_bytes(inputs, size))
        resident = left // resident_bytes(inputs, size, size.queries) * size.queries
        if resident >= min(_GOOD_RESIDENT, round_up(q_len, size.queries)):
            break
    return BwdParams(
        q_blocksize=size.queries,
        kv_blocksize=size.keys,
        blocksize_heads=size.heads,
        resident_queries=min(max(resident, size.queries), round_up(q_len, size.queries)),
        mxu_width=core_of(device).mxu,
    )


def candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[FwdParams]:
    """Tiles worth timing."""
    sizes = (
        _clipped(inputs, FlashTileSize(queries, keys, _heads(inputs, heads)))
        for queries, keys in ((256, 512), (512, 512), (512, 1024), (1024, 512), (1024, 1024))
        for heads in (1, 2, 4)
    )
    return [
        _fwd_params(x, device)
        for x in dict.fromkeys(sizes)
        if forward_bytes(inputs, x) <= VMEM_SHARE * core_of(device).vmem
    ]


def candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[BwdParams]:
    """Tiles worth timing."""
    first = heuristic_backward(inputs, spec, device)
    sizes = (_clipped(inputs, FlashTileSize(queries, keys, 1)) for queries, keys in _BACKWARD)
    return [
        dataclasses.replace(first, q_blocksize=x.queries, kv_blocksize=x.keys)
        for x in dict.fromkeys(sizes)
        if x.queries <= (first.q_blocksize or 0)
    ]


def _round_to_tile(number: int | None) -> int:
    """The next multiple of the lanes."""
    return max(LANES, round_up(number or 0, LANES))


def _clipped(inputs: Inputs, size: FlashTileSize) -> FlashTileSize:
    """No tile larger than the call."""
    return size._replace(
        queries=min(size.queries, _round_to_tile(inputs.query.shape[1])),
        keys=min(size.keys, _round_to_tile(inputs.key.shape[1])),
    )


def _heads(inputs: Inputs, most: int) -> int:
    """Query heads of one key head to compute at once."""
    group = inputs.query.shape[2] // inputs.key.shape[2]
    return largest_divisor(group, most)


def _operand_bytes(inputs: Inputs, size: FlashTileSize) -> int:
    """Blocks of query, key, value, mask and bias, each double-buffered."""
    dtype, width, columns = inputs.query.dtype, inputs.query.shape[3], inputs.value.shape[3]
    blocks = [
        vmem_bytes((size.heads, size.queries, width), dtype),
        vmem_bytes((size.keys, width), dtype),
        max(vmem_bytes((size.keys, columns), dtype), vmem_bytes((columns, size.keys), dtype)),
        2 * vmem_bytes((size.keys, 1), jnp.int32),
    ]
    if inputs.bias is not None:
        blocks.append(vmem_bytes((size.heads, size.queries, size.keys), inputs.bias.dtype))
    if inputs.mask is not None and "mask" in inputs.mask.features():
        blocks.append(vmem_bytes((size.queries, size.keys), jnp.int8))
    return 2 * sum(blocks)


def forward_bytes(inputs: Inputs, size: FlashTileSize) -> int:
    """VMEM of the forward kernel."""
    columns, rows = inputs.value.shape[3], (size.heads, size.queries)
    results = 2 * vmem_bytes((*rows, columns), inputs.query.dtype)
    accumulators = vmem_bytes((size.heads, columns + 16, size.queries), jnp.float32)
    tiles = 4 * size.heads * vmem_bytes((size.queries, size.keys), jnp.float32)
    return _operand_bytes(inputs, size) + results + accumulators + tiles


def backward_bytes(inputs: Inputs, size: FlashTileSize) -> int:
    """VMEM of the backward kernel, without its resident queries."""
    width, columns = inputs.query.shape[3], inputs.value.shape[3]
    d_out = 2 * vmem_bytes((size.heads, size.queries, columns), inputs.query.dtype)
    results = 3 * vmem_bytes((size.keys, width), jnp.float32)
    results += 3 * vmem_bytes((size.keys, columns), jnp.float32)
    if inputs.bias is not None:
        results += 2 * vmem_bytes((size.heads, size.keys, size.queries), jnp.float32)
    tiles = 6 * min(size.heads, 4) * vmem_bytes((size.keys, size.queries), jnp.float32)
    return _operand_bytes(inputs, size) + d_out + results + tiles


def resident_bytes(inputs: Inputs, size: FlashTileSize, resident: int) -> int:
    """VMEM of the gradient of `resident` queries, and of what their sinks and bias need."""
    total = vmem_bytes((size.heads, inputs.query.shape[3], resident), jnp.float32)
    for one in (inputs.sinks, inputs.bias):
        if one is not None:
            total += vmem_bytes((size.heads, 1, resident), jnp.float32)
    return total


def schedule_fits(inputs: Inputs, params: BwdParams, device: Device) -> bool:
    """Whether the list of tiles fits into scalar memory."""
    queries, keys = params.q_blocksize or LANES, params.kv_blocksize or LANES
    rule = inputs.mask or Everything()
    rows = -(-inputs.query.shape[1] // queries) * (rule.batch_size or 1) * rule.heads
    return 8 * rows * -(-inputs.key.shape[1] // keys) <= VMEM_SHARE * core_of(device).smem
