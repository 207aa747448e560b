"""Blocks and launch parameters of the Triton kernels: what is guessed, what is worth timing.

Every shape here compiles without local memory for the devices it stands for; tests/kernels holds it
to that. The first of a list is the guess.
"""

from typing import NamedTuple

import numpy as np

from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.triton.operands import padded
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.platform import Device
from ejkernel.types.rules import And, Blocks, Dense, Everything, Or, Rule


class Shape(NamedTuple):
    """Blocks and launch parameters of one kernel."""

    block_q: int
    block_k: int
    warps: int
    stages: int


class Pair(NamedTuple):
    """Blocks of the two kernels of a backward pass: of keys and values, and of queries."""

    keys: tuple[int, int]
    queries: tuple[int, int]
    warps: int
    stages: int
    even: bool = False  # only where blocks cut both lengths evenly: guards would cost registers


# By the width of the head, or of the value if that is wider.
_Forward = dict[int, list[Shape]]
_Backward = dict[int, list[Pair]]

_HOPPER: _Forward = {
    64: [
        Shape(128, 128, 8, 2),
        Shape(128, 64, 8, 3),
        Shape(128, 64, 4, 3),
        Shape(128, 128, 8, 3),
        Shape(64, 64, 4, 3),
    ],
    128: [
        Shape(128, 128, 8, 2),
        Shape(128, 64, 8, 3),
        Shape(128, 128, 8, 3),
        Shape(64, 64, 4, 3),
        Shape(64, 64, 4, 2),
        Shape(64, 128, 4, 2),
    ],
    256: [Shape(128, 64, 8, 2), Shape(64, 64, 8, 2), Shape(128, 32, 8, 2)],
}
_BLACKWELL: _Forward = {
    64: [Shape(128, 64, 8, 3), Shape(128, 64, 4, 3), Shape(64, 64, 4, 3)],
    128: [Shape(128, 64, 8, 3), Shape(128, 64, 8, 2), Shape(64, 64, 4, 3)],
    256: [Shape(64, 64, 8, 2), Shape(128, 32, 8, 2)],
}
_AMPERE: _Forward = {
    64: [Shape(128, 64, 4, 3), Shape(128, 64, 8, 3), Shape(64, 64, 4, 3)],
    128: [Shape(128, 64, 8, 3), Shape(64, 64, 4, 3), Shape(64, 64, 4, 2)],
    256: [Shape(64, 64, 8, 2), Shape(32, 32, 4, 2)],
}
_SMALL: _Forward = {
    64: [Shape(128, 64, 8, 3), Shape(64, 64, 4, 3)],
    128: [Shape(64, 64, 4, 2), Shape(128, 64, 8, 2), Shape(64, 32, 4, 2)],
    256: [Shape(32, 32, 4, 2)],
}
# With a tile of bias, table or random bits beside the logits.
_HEAVY: _Forward = {
    64: [Shape(128, 64, 8, 2), Shape(64, 64, 4, 2)],
    128: [Shape(128, 32, 8, 2), Shape(64, 32, 4, 2)],
    256: [Shape(32, 32, 4, 2), Shape(32, 32, 8, 2)],
}
# Exact float32 has no tensor cores.
_EXACT: _Forward = {
    64: [Shape(32, 32, 4, 2), Shape(32, 32, 8, 2)],
    128: [Shape(32, 16, 8, 2), Shape(16, 32, 8, 2)],
    256: [Shape(16, 16, 8, 2)],
}

_HOPPER_BACKWARD: _Backward = {
    64: [
        Pair((64, 128), (128, 64), 8, 2),
        Pair((64, 64), (64, 64), 4, 2),
        Pair((32, 128), (128, 128), 8, 2),
    ],
    128: [
        Pair((64, 128), (128, 64), 8, 2, even=True),
        Pair((64, 64), (128, 64), 8, 2),
        Pair((32, 128), (128, 64), 8, 2),
        Pair((32, 64), (64, 64), 4, 2),
    ],
    256: [Pair((16, 64), (64, 64), 8, 2), Pair((64, 32), (64, 32), 8, 2)],
}
_BLACKWELL_BACKWARD: _Backward = {
    64: [Pair((64, 128), (128, 64), 8, 2), Pair((64, 64), (64, 64), 4, 2)],
    128: [Pair((64, 64), (128, 64), 8, 2), Pair((32, 64), (64, 64), 4, 2)],
    256: [Pair((64, 32), (64, 32), 8, 2), Pair((32, 32), (64, 32), 8, 2)],
}
_AMPERE_BACKWARD: _Backward = {
    64: [
        Pair((64, 128), (128, 64), 8, 2, even=True),
        Pair((64, 64), (64, 64), 4, 2),
        Pair((32, 128), (128, 64), 8, 2),
    ],
    128: [Pair((64, 64), (64, 64), 8, 2), Pair((32, 64), (64, 64), 4, 2)],
    256: [Pair((16, 64), (64, 64), 8, 2), Pair((32, 32), (64, 32), 8, 2)],
}
_SMALL_BACKWARD: _Backward = {
    64: [Pair((64, 64), (64, 64), 4, 2), Pair((32, 128), (128, 64), 8, 2)],
    128: [Pair((64, 64), (64, 64), 8, 2), Pair((32, 64), (64, 64), 4, 2)],
    256: [Pair((32, 32), (32, 32), 8, 2)],
}
# With a soft cap or sinks.
_CAPPED_BACKWARD: _Backward = {
    64: [Pair((32, 128), (128, 64), 8, 2), Pair((32, 64), (64, 64), 4, 2)],
    128: [Pair((32, 128), (128, 64), 8, 2), Pair((32, 64), (64, 64), 8, 2)],
    256: [Pair((64, 32), (64, 32), 8, 2)],
}
_HEAVY_BACKWARD: _Backward = {
    64: [Pair((32, 64), (64, 32), 4, 2), Pair((32, 64), (64, 64), 8, 2)],
    128: [Pair((32, 64), (128, 32), 8, 2)],
    256: [Pair((32, 32), (32, 32), 8, 2)],
}
_HEAVY_AMPERE_BACKWARD: _Backward = _HEAVY_BACKWARD | {64: [Pair((32, 32), (64, 32), 4, 2)]}
_EXACT_BACKWARD: _Backward = {
    64: [Pair((32, 32), (32, 32), 8, 2), Pair((16, 32), (32, 16), 4, 2)],
    128: [Pair((16, 32), (32, 16), 8, 2)],
    256: [Pair((16, 16), (16, 16), 4, 2)],
}


def forward_shapes(inputs: Inputs, spec: Spec, device: Device) -> list[Shape]:
    """Shapes for the forward pass of a call, the guess first."""
    large, ampere, blackwell = _kind(device)
    table = _SMALL
    if _is_exact(inputs):
        table = _EXACT
    elif _is_heavy(inputs):
        table = _HEAVY
    elif large:
        table = _BLACKWELL if blackwell else _HOPPER
    elif ampere:
        table = _AMPERE
    rows, keys = inputs.query.shape[1], inputs.key.shape[1]
    fitted = (_fitted(shape, rows, keys) for shape in table[_width(inputs)])
    return list(dict.fromkeys(fitted))


def backward_pairs(inputs: Inputs, spec: Spec, device: Device) -> list[Pair]:
    """Shapes for the backward pass of a call, the guess first."""
    large, ampere, blackwell = _kind(device)
    table = _SMALL_BACKWARD
    heavy = _HEAVY_BACKWARD if large else _HEAVY_AMPERE_BACKWARD
    if _is_exact(inputs):
        table = _EXACT_BACKWARD
    elif _is_heavy(inputs):
        table = heavy
    elif inputs.sinks is not None or spec.logits_soft_cap is not None:
        table = _CAPPED_BACKWARD if large and not blackwell else heavy
    elif large:
        table = _BLACKWELL_BACKWARD if blackwell else _HOPPER_BACKWARD
    elif ampere:
        table = _AMPERE_BACKWARD
    lengths = inputs.query.shape[1], inputs.key.shape[1]
    return [
        pair
        for pair in table[_width(inputs)]
        if not (pair.even and any(n % b for n, b in zip(lengths, pair.keys, strict=True)))
    ]


def forward_params(shape: Shape) -> FwdParams:
    """A shape as a configuration has it."""
    return FwdParams(
        q_blocksize=shape.block_q,
        kv_blocksize=shape.block_k,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def backward_params(pair: Pair) -> BwdParams:
    """A pair as a configuration has it: `blocksize_m`, `blocksize_n` belong to the queries."""
    return BwdParams(
        q_blocksize=pair.keys[0],
        kv_blocksize=pair.keys[1],
        blocksize_m=pair.queries[0],
        blocksize_n=pair.queries[1],
        num_warps=pair.warps,
        num_stages=pair.stages,
    )


def _fitted(shape: Shape, rows: int, keys: int) -> Shape:
    """No more rows in a block than a short call has, and no more warps than such a block feeds."""
    block_q, block_k = min(shape.block_q, padded(rows)), min(shape.block_k, padded(keys))
    if block_q == shape.block_q or block_q > 64:
        return Shape(block_q, block_k, shape.warps, shape.stages)
    return Shape(block_q, block_k, 4, 2)


def _kind(device: Device) -> tuple[bool, bool, bool]:
    """227 KiB of shared memory in a block; 163 KiB; Blackwell. All others have 99 KiB."""
    capability = device.compute_capability or (9, 0)
    blackwell = capability in ((10, 0), (10, 3))
    return capability == (9, 0) or blackwell, capability in ((8, 0), (8, 7)), blackwell


def _width(inputs: Inputs) -> int:
    return max(64, padded(max(inputs.query.shape[3], inputs.value.shape[3])))


def _is_exact(inputs: Inputs) -> bool:
    return np.dtype(inputs.query.dtype).itemsize == 4


def _is_heavy(inputs: Inputs) -> bool:
    tile = inputs.bias is not None and min(inputs.bias.shape[2:]) > 1
    return tile or inputs.dropout is not None or _has_table(inputs.mask or Everything())


def _has_table(rule: Rule) -> bool:
    if isinstance(rule, And | Or):
        return any(map(_has_table, rule.rules))
    return isinstance(rule, Dense | Blocks)
