"""Flash attention on TPUs, in Pallas: what it takes, and tiles that fit into VMEM.

Tiles are multiples of 128 queries and keys. Forward, `blocksize_heads` query heads of a key head
are worked on at once, in squares of `blocksize_m`, the width of the matrix unit; backward
`blocksize_n` of them, and `blocksize_m` queries, whose gradient stays in VMEM, for a matrix unit
that is `blocksize_k` wide.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.mosaic_tpu.memory import MEBIBYTE, core_of, vmem_bytes
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_tpu import backward as pallas_tpu_backward
from ejkernel.kernels.flash_attention.pallas_tpu import forward as pallas_tpu_forward
from ejkernel.kernels.flash_attention.pallas_tpu.call import LANES, Call, Settle, TileSize
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device, device_of
from ejkernel.types.rules import Band, Everything, Rule

# From the best that a tile can be to the least: halved in turn until it fits.
_FORWARD = (
    TileSize(1024, 1024, 1),
    TileSize(512, 1024, 2),
    TileSize(512, 512, 2),
    TileSize(256, 512, 2),
    TileSize(256, 256, 2),
    TileSize(128, 256, 2),
    TileSize(128, 128, 2),
)
_BACKWARD = ((512, 512), (256, 512), (256, 256), (128, 256), (128, 128))
_GOOD_PART = 1024  # queries whose gradient should fit, or a smaller tile is better
_SHARE = 0.6  # of VMEM; the compiler needs some for itself


def run_forward(
    inputs: Inputs,
    spec: Spec,
    params: FwdParams | None,
    dtype: Any = None,
    settle: Settle | None = None,
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals; in `dtype`, or in that of the query.

    `settle` is given the results of every kernel, and what it gives back is used.
    """
    defaults = heuristic_forward(inputs, spec, None)
    chosen = params or defaults
    size = TileSize(
        _tile(chosen.q_blocksize or defaults.q_blocksize),
        _tile(chosen.kv_blocksize or defaults.kv_blocksize),
        _heads(inputs, chosen.blocksize_heads or 1),
    )
    vmem = _limit(_forward_bytes(inputs, size))
    call = Call(inputs, spec, size, vmem=vmem, settle=settle)
    side = chosen.blocksize_m or _side(inputs)
    outputs = pallas_tpu_forward.forward(call, dtype or inputs.query.dtype, _tile(side))
    return outputs, outputs


def run_backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: BwdParams | None,
    dtype: Any = None,
    settle: Settle | None = None,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none. In `dtype`, or in theirs."""
    defaults = heuristic_backward(inputs, spec, None)
    chosen = params or defaults
    size = TileSize(
        _tile(chosen.q_blocksize or defaults.q_blocksize),
        _tile(chosen.kv_blocksize or defaults.kv_blocksize),
        _heads(inputs, chosen.blocksize_n or defaults.blocksize_n or 1),
    )
    part = _up(chosen.blocksize_m or defaults.blocksize_m or 0, size.queries)
    vmem = _limit(_backward_bytes(inputs, size) + _kept_bytes(inputs, size, part))
    side = _tile(chosen.blocksize_k or _side(inputs))
    gradients = pallas_tpu_backward.backward(
        inputs, residuals, d_outputs, spec, size, part=part, side=side, vmem=vmem, settle=settle
    )
    given = inputs._replace(mask=None, dropout=None)
    return jax.tree.map(lambda d, x: d.astype(dtype or x.dtype), gradients, given)


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device | None) -> FwdParams:
    """The largest of the good tiles that fits."""
    # Of the largest a window or a short document would leave much unused.
    sizes = _FORWARD if _covers_most(inputs.mask) else _FORWARD[1:]
    size = sizes[-1]
    for one in sizes:
        size = _clipped(inputs, one._replace(heads=_heads(inputs, one.heads)))
        if _forward_bytes(inputs, size) <= _SHARE * core_of(device).vmem:
            break
    return _fwd_params(size, device)


def _covers_most(rule: Rule | None) -> bool:
    """Whether a query may see all keys, or all up to one: the tiles that it visits are full."""
    if isinstance(rule, Band):
        return rule.low is None
    return rule is None or isinstance(rule, Everything)


def _fwd_params(size: TileSize, device: Device | None) -> FwdParams:
    return FwdParams(
        q_blocksize=size.queries,
        kv_blocksize=size.keys,
        blocksize_heads=size.heads,
        blocksize_m=core_of(device).matrix,
    )


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device | None) -> BwdParams:
    """The largest of the good tiles that fits, and as many queries as their gradient fits."""
    budget, q_len = _SHARE * core_of(device).vmem, inputs.query.shape[1]
    size, part = TileSize(LANES, LANES, 1), LANES
    for heads, (queries, keys) in itertools.product((4, 2, 1), _BACKWARD):
        size = _clipped(inputs, TileSize(queries, keys, _heads(inputs, heads)))
        left = int(budget - _backward_bytes(inputs, size))
        part = left // _kept_bytes(inputs, size, size.queries) * size.queries
        if part >= min(_GOOD_PART, _up(q_len, size.queries)):
            break
    return BwdParams(
        q_blocksize=size.queries,
        kv_blocksize=size.keys,
        blocksize_m=min(max(part, size.queries), _up(q_len, size.queries)),
        blocksize_k=core_of(device).matrix,
        blocksize_n=size.heads,
    )


def _side(inputs: Inputs) -> int:
    """The width of the matrix unit of the device that a call is for."""
    return core_of(device_of(jax.tree.leaves(inputs))).matrix


def _limit(estimate: int) -> int:
    """What to ask the compiler for: it needs some for itself."""
    return max(16 * MEBIBYTE, int(estimate / _SHARE * 0.9))


def _clipped(inputs: Inputs, size: TileSize) -> TileSize:
    """No tile larger than the call."""
    return size._replace(
        queries=min(size.queries, _tile(inputs.query.shape[1])),
        keys=min(size.keys, _tile(inputs.key.shape[1])),
    )


def _tile(number: int | None) -> int:
    """The next multiple of the lanes, of which every tile is one."""
    return max(LANES, _up(number or 0, LANES))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _heads(inputs: Inputs, most: int) -> int:
    """Query heads of one key head to work on at once."""
    group = inputs.query.shape[2] // inputs.key.shape[2]
    return next(n for n in range(min(group, most), 0, -1) if group % n == 0)


def _operand_bytes(inputs: Inputs, size: TileSize) -> int:
    """Blocks of query, key, value and of what masks and biases them, each held twice."""
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


def _forward_bytes(inputs: Inputs, size: TileSize) -> int:
    columns, rows = inputs.value.shape[3], (size.heads, size.queries)
    results = 2 * vmem_bytes((*rows, columns), inputs.query.dtype)
    kept = vmem_bytes((size.heads, columns + 16, size.queries), jnp.float32)
    tiles = 4 * size.heads * vmem_bytes((size.queries, size.keys), jnp.float32)
    return _operand_bytes(inputs, size) + results + kept + tiles


def _backward_bytes(inputs: Inputs, size: TileSize) -> int:
    """All but the gradient of the queries, which stays in VMEM too."""
    width, columns = inputs.query.shape[3], inputs.value.shape[3]
    d_out = 2 * vmem_bytes((size.heads, size.queries, columns), inputs.query.dtype)
    results = 3 * vmem_bytes((size.keys, width), jnp.float32)
    results += 3 * vmem_bytes((size.keys, columns), jnp.float32)
    if inputs.bias is not None:
        results += 2 * vmem_bytes((size.heads, size.keys, size.queries), jnp.float32)
    tiles = 6 * min(size.heads, 4) * vmem_bytes((size.keys, size.queries), jnp.float32)
    return _operand_bytes(inputs, size) + d_out + results + tiles


def _kept_bytes(inputs: Inputs, size: TileSize, part: int) -> int:
    """The gradient of so many queries, what their sinks take, and their bias may."""
    kept = vmem_bytes((size.heads, inputs.query.shape[3], part), jnp.float32)
    for one in (inputs.sinks, inputs.bias):
        if one is not None:
            kept += vmem_bytes((size.heads, 1, part), jnp.float32)
    return kept


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What the kernels do not compute."""
    dtypes = {str(x.dtype) for x in inputs[:3]}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}:
        return f"needs float32 or bfloat16 alone, got {', '.join(sorted(dtypes))}"
    tile = heuristic_backward(inputs, spec, device)
    listed = _list_bytes(inputs, tile.q_blocksize or LANES, tile.kv_blocksize or LANES)
    if listed > _SHARE * core_of(device).smem:
        return "has no room in scalar memory for a list of so many tiles"
    return None


def _list_bytes(inputs: Inputs, queries: int, keys: int) -> int:
    """What the list of tiles takes at most."""
    rule = inputs.mask or Everything()
    rows = -(-inputs.query.shape[1] // queries) * (rule.batch_size or 1) * rule.heads
    return 8 * rows * -(-inputs.key.shape[1] // keys)


def _candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[FwdParams]:
    sizes = (
        _clipped(inputs, TileSize(queries, keys, _heads(inputs, heads)))
        for queries, keys in ((256, 512), (512, 512), (512, 1024), (1024, 512), (1024, 1024))
        for heads in (1, 2, 4)
    )
    return [
        _fwd_params(x, device)
        for x in dict.fromkeys(sizes)
        if _forward_bytes(inputs, x) <= _SHARE * core_of(device).vmem
    ]


def _candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[BwdParams]:
    first = heuristic_backward(inputs, spec, device)
    sizes = (_clipped(inputs, TileSize(queries, keys, 1)) for queries, keys in _BACKWARD)
    return [
        dataclasses.replace(first, q_blocksize=x.queries, kv_blocksize=x.keys)
        for x in dict.fromkeys(sizes)
        if x.queries <= (first.q_blocksize or 0)
    ]


_FEATURES = frozenset(
    {
        "causal",
        "window",
        "positions",
        "segments",
        "token_types",
        "chunks",
        "lengths",
        "blocks",
        "mask",
        "union",
        "bias",
        "sinks",
        "dropout",
        "dropout_prob",
        "logits_soft_cap",
    }
)

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=heuristic_forward,
        candidates=_candidates_forward,
    ),
    backward=Pass(
        run=run_backward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=heuristic_backward,
        candidates=_candidates_backward,
    ),
)
