"""Flash attention on Hopper GPUs, in Pallas: who can be served, and with which tiles."""

import dataclasses
import functools

import jax.numpy as jnp

from ejkernel import settings
from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90 import backward as pallas_gpu_backward
from ejkernel.kernels.flash_attention.pallas_sm90 import backward_fused as pallas_gpu_joint
from ejkernel.kernels.flash_attention.pallas_sm90 import forward as pallas_gpu_forward
from ejkernel.kernels.flash_attention.pallas_sm90 import schedule as pallas_gpu_walk
from ejkernel.kernels.flash_attention.pallas_sm90 import split_kv as pallas_gpu_short
from ejkernel.kernels.flash_attention.pallas_sm90.backward_kernel import (
    OF_KEYS,
    OF_KEYS_AND_VALUES,
    OF_QUERIES,
    OF_VALUES,
    Part,
    dims_of,
)
from ejkernel.kernels.flash_attention.pallas_sm90.backward_kernel import Tiles as BackwardTiles
from ejkernel.kernels.flash_attention.pallas_sm90.logits import ROWS, SHARED_BYTES, Tiles
from ejkernel.kernels.flash_attention.pallas_sm90.split_kv import is_short
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device, Platform
from ejkernel.types.rules import Band, Chunks, Everything, KeyLength, QueryLength, Segments

_BOUNDS = Everything | Band | Chunks | KeyLength | QueryLength
_NARROW = 512  # a window of so many keys


def run_forward(
    inputs: Inputs, spec: Spec, params: FwdParams | None, device: Device
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    tiles = chosen_tiles(inputs, params)
    run = pallas_gpu_short.forward if is_short(inputs) else pallas_gpu_forward.forward
    outputs = run(inputs, spec, tiles, device)
    return outputs, outputs


def run_backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: BwdParams | None,
    device: Device,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    if params is not None and params.deterministic is False and _joint(inputs, spec):
        run = pallas_gpu_joint.backward
        return run(inputs, residuals, d_outputs, spec, device)
    tiles = chosen_backward_tiles(inputs, spec, params)
    return pallas_gpu_backward.backward(inputs, residuals, d_outputs, spec, *tiles, device)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What keeps these kernels from taking the call, or None."""
    if reason := gpu.why_not_hopper(device):
        return reason
    dtypes = {x.dtype for x in inputs[:3]}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return f"needs bfloat16 or float16 alone, got {', '.join(sorted(map(str, dtypes)))}"
    for name, dim in (("head", inputs.query.shape[3]), ("value", inputs.value.shape[3])):
        if dim % 8 or not 8 <= dim <= 256:
            return f"needs a {name} dim that is a multiple of 8 up to 256, got {dim}"
    if 0 in (inputs.query.shape[1], inputs.key.shape[1]):
        return "needs at least one query and one key"
    if inputs.key.shape[1] > pallas_gpu_walk.MOST_KEYS:
        return f"needs at most {pallas_gpu_walk.MOST_KEYS} keys, got {inputs.key.shape[1]}"
    if not spec.softmax_scale > 0:
        return f"needs a positive softmax_scale, got {spec.softmax_scale}"
    return pallas_gpu_walk.why_not(inputs.mask or Everything())


def heuristic(inputs: Inputs, spec: Spec, device: Device) -> FwdParams:
    """The tiles expected to be fastest."""
    return _params(chosen_tiles(inputs, None))


def candidates(inputs: Inputs, spec: Spec, device: Device) -> list[FwdParams]:
    """All tiles worth timing: of 64 keys at once none, where there is room for 128."""
    head_dim, value_dim = dims_of(inputs)
    if inputs.query.shape[1] <= ROWS:
        sizes = [(1, 128), (1, 64)]
    else:
        sizes = [(2, 128), (3, 128)] if value_dim <= 64 else [(2, 128)]
    tiles = (_fitting(consumers, block_k, head_dim, value_dim) for consumers, block_k in sizes)
    return [_params(x) for x in tiles if x and _in_registers(x, inputs)]


def chosen_tiles(inputs: Inputs, params: FwdParams | None) -> Tiles:
    """The tiles asked for, in sizes that the hardware has; the others by default."""
    default = _default(inputs)
    if params is None:
        return default
    head_dim, value_dim = dims_of(inputs)
    consumers = min(3, -(-(params.q_blocksize or default.block_q) // ROWS))
    block_k = min(128, -(-(params.kv_blocksize or default.block_k) // 64) * 64)
    stages = min(4, max(2, params.num_stages or 4))
    return _fitting(consumers, block_k, head_dim, value_dim, stages) or default


def _default(inputs: Inputs) -> Tiles:
    sizes = [(2, 128), (2, 64), (1, 128), (1, 64)]
    if inputs.query.shape[1] <= ROWS:
        sizes = sizes[2:]
    elif dims_of(inputs)[1] <= 64 and not _narrow(inputs):  # three overlap better than two
        sizes = [(3, 128), *sizes]
    for consumers, block_k in sizes:
        tiles = _fitting(consumers, block_k, *dims_of(inputs))
        if tiles and _in_registers(tiles, inputs):
            return tiles
    return Tiles(1, 64, 2)


def _narrow(inputs: Inputs) -> bool:
    """Whether queries see so few keys that the tile of many of them is mostly hidden."""
    parts = (inputs.mask or Everything()).parts()
    bands = [x for x in parts if isinstance(x, Band)]
    lows = [x.low for x in bands if isinstance(x.low, int)]
    highs = [x.high for x in bands if isinstance(x.high, int)]
    widths = [x.size for x in parts if isinstance(x, Chunks) and isinstance(x.size, int)]
    widths += [min(highs) - max(lows) + 1] if lows and highs else []
    return any(width < _NARROW for width in widths)


def _between_keys(inputs: Inputs) -> bool:
    """Whether what a query sees lies between two keys: nothing else is compared."""
    parts = (inputs.mask or Everything()).parts()
    return all(
        isinstance(x, _BOUNDS) or (isinstance(x, Segments) and x.documents is not None)
        for x in parts
    )


def _fitting(
    consumers: int, block_k: int, head_dim: int, value_dim: int, stages: int = 4
) -> Tiles | None:
    """The tiles of this size with the most stages that shared memory holds, if it holds two."""
    sizes = (Tiles(consumers, block_k, count) for count in range(stages, 1, -1))
    fit = lambda tiles: tiles.shared_bytes(head_dim, value_dim) <= SHARED_BYTES
    return next(filter(fit, sizes), None)


def _in_registers(tiles: Tiles, inputs: Inputs) -> bool:
    """Whether a thread can hold its part of logits, weights and output."""
    dims = dims_of(inputs)
    own = dims[1] // 2 + tiles.block_k * 3 // 4
    if inputs.dropout is not None:  # the bits of every weight as well
        own += tiles.block_k // 2
    if inputs.bias is not None:
        own += 8
    if not pallas_gpu_forward.whole_tiles(inputs):  # where each strip is
        value = gpu.SharedMatrices(inputs.value.dtype, 1, ROWS, dims[1], False)
        own += max(16, 3 * value.panels)
    of_three = 128 if _between_keys(inputs) and dims[0] <= 96 else 104
    room = {1: 192, 2: 176, 3: of_three}[tiles.consumers]
    if max(dims) > 192 and tiles.block_k == 64:  # there are none for where the queries are
        room += 32
    return own <= room


def _params(tiles: Tiles) -> FwdParams:
    return FwdParams(q_blocksize=tiles.block_q, kv_blocksize=tiles.block_k, num_stages=tiles.stages)


# Numbers that a thread of two computing warpgroups has room for, beside indices and addresses.
_ROOM = 192


def _extra(inputs: Inputs, spec: Spec) -> int:
    """Numbers that weights take beyond the exponentials."""
    return 64 if inputs.dropout is not None else 0 if spec.logits_soft_cap is None else 32


def chosen_backward_tiles(
    inputs: Inputs, spec: Spec, params: BwdParams | None
) -> tuple[tuple[BackwardTiles, ...], BackwardTiles]:
    """Tiles of the kernel of keys and values, or of either, and of that of queries.

    `q_blocksize` is how many queries the former take at once, `kv_blocksize` how many keys the
    latter; all hold 128 rows.
    """
    params = params or BwdParams()
    q_blocksize, kv_blocksize = params.q_blocksize or 64, params.kv_blocksize or 64
    head, value = (dim // 2 for dim in dims_of(inputs))
    choose = functools.partial(_backward_tiles, inputs, spec, params.num_stages)
    capped_and_dropped = inputs.dropout is not None and spec.logits_soft_cap is not None
    if head + value + (80 if capped_and_dropped else 64) <= _ROOM:
        of_keys = (choose(OF_KEYS_AND_VALUES, head + value, q_blocksize, 1.5),)
    else:
        of_keys = (
            choose(OF_VALUES, value, q_blocksize, 0.75),
            choose(OF_KEYS, head, q_blocksize, 1.25),
        )
    return of_keys, choose(OF_QUERIES, head, kv_blocksize, 1.25)


def _backward_tiles(
    inputs: Inputs,
    spec: Spec,
    stages: int | None,
    part: Part,
    sums: int,
    columns: int,
    with_overlap: float,
) -> BackwardTiles:
    """The columns asked for if there is room, with overlap if there is room for that too."""
    sums, stages = sums + _extra(inputs, spec), min(4, max(2, stages or 4))
    wide = BackwardTiles(2, 128, stages, False)
    summing = inputs.sinks is not None and not part.for_keys  # each row's share, which takes more
    if columns > 64 and sums + 128 < _ROOM and not summing and part.stages(wide, dims_of(inputs)):
        return wide
    tiles = BackwardTiles(2, 64, stages, True)
    # What products and sums both read is given back a tile later.
    found = part.stages(tiles, dims_of(inputs))
    early = part == OF_VALUES or (found is not None and found[0] > 2)
    return dataclasses.replace(tiles, overlap=early and sums + 64 * with_overlap <= _ROOM)


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device) -> BwdParams:
    """The tiles expected to be fastest."""
    return _backward_params(inputs, spec, BwdParams())


def candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[BwdParams]:
    """All tiles worth timing."""
    sizes = [BwdParams(q_blocksize=q, kv_blocksize=k) for q in (64, 128) for k in (64, 128)]
    return list(dict.fromkeys(_backward_params(inputs, spec, params) for params in sizes))


def _backward_params(inputs: Inputs, spec: Spec, params: BwdParams) -> BwdParams:
    of_keys, of_queries = chosen_backward_tiles(inputs, spec, params)
    return BwdParams(
        q_blocksize=max(tiles.columns for tiles in of_keys),
        kv_blocksize=of_queries.columns,
        num_stages=of_queries.stages,
    )


def nondeterministic_backward(inputs: Inputs, spec: Spec, device: Device) -> BwdParams | None:
    """One kernel in place of two or three, where it can serve."""
    return BwdParams(deterministic=False) if _joint(inputs, spec) else None


def _joint(inputs: Inputs, spec: Spec) -> bool:
    """Whether one kernel can serve, and may: its bits differ from run to run."""
    return not settings.deterministic() and pallas_gpu_joint.why_not(inputs, spec) is None


def backward_yields_to(inputs: Inputs, spec: Spec, device: Device) -> frozenset[Platform]:
    """CuDNN computes five products for a tile; so does our one kernel, but two compute seven.

    That decides between 64 and 128 columns: narrower heads are bound by the exponentials, wider
    ones by what it does with them. Of packed documents it computes more, and a bias slows it down.
    """
    if _joint(inputs, spec) or inputs.bias is not None:
        return frozenset()
    between = 128 < sum(dims_of(inputs)) <= 256
    packed = "segments" in (inputs.mask or Everything()).features()
    return frozenset({Platform.CUDA}) if between and not packed else frozenset()


_FEATURES = frozenset(
    {
        "causal",
        "window",
        "positions",
        "segments",
        "token_types",
        "chunks",
        "lengths",
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
        heuristic=heuristic,
        candidates=candidates,
    ),
    backward=Pass(
        run=run_backward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=heuristic_backward,
        candidates=candidates_backward,
        nondeterministic=nondeterministic_backward,
        yields_to=backward_yields_to,
    ),
)
