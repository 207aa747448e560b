"""Flash attention on Hopper GPUs, in Pallas: who can be served, and with which tiles."""

import jax
import jax.numpy as jnp

from ejkernel import settings
from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention import pallas_gpu_forward, pallas_gpu_walk
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_gpu_forward import ROWS, Tiles
from ejkernel.ops.config import FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device, device_of
from ejkernel.types.rules import Everything


def forward(inputs: Inputs, spec: Spec, params: FwdParams | None) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    tiles = chosen_tiles(inputs, params)
    outputs = pallas_gpu_forward.forward(inputs, spec, tiles, _interpreted(inputs))
    return outputs, outputs


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What keeps these kernels from taking the call, or None."""
    interpreted = settings.interpret() and device.platform != "gpu"
    if reason := gpu.why_missing(interpreted):
        return reason
    if device.compute_capability != (9, 0) and not interpreted:
        has = device.compute_capability and ".".join(map(str, device.compute_capability))
        return f"needs compute capability 9.0 (Hopper), and {device.kind} has {has or 'none'}"
    dtypes = {x.dtype for x in inputs[:3]}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return f"needs bfloat16 or float16 alone, got {', '.join(sorted(map(str, dtypes)))}"
    for name, dim in (("head", inputs.query.shape[3]), ("value", inputs.value.shape[3])):
        if dim % 16 or not 16 <= dim <= 256:
            return f"needs a {name} dim that is a multiple of 16 up to 256, got {dim}"
    for name, length in (("query", inputs.query.shape[1]), ("key", inputs.key.shape[1])):
        if length % 8 or length == 0:
            return f"needs a {name} length that is a multiple of 8, got {length}"
    if not spec.softmax_scale > 0:
        return f"needs a positive softmax_scale, got {spec.softmax_scale}"
    return pallas_gpu_walk.why_not(inputs.mask or Everything())


def heuristic(inputs: Inputs, spec: Spec, device: Device) -> FwdParams:
    """The tiles expected to be fastest."""
    return _params(_default(inputs))


def candidates(inputs: Inputs, spec: Spec, device: Device) -> list[FwdParams]:
    """All tiles worth timing."""
    head_dim, value_dim = inputs.query.shape[3], inputs.value.shape[3]
    sizes = [(2, 128), (2, 64), (3, 64)]
    tiles = (_fitting(consumers, block_k, head_dim, value_dim) for consumers, block_k in sizes)
    return [_params(x) for x in tiles if x and _in_registers(x, inputs)]


def chosen_tiles(inputs: Inputs, params: FwdParams | None) -> Tiles:
    """The tiles asked for, in sizes that the hardware has; the others by default."""
    default = _default(inputs)
    if params is None:
        return default
    head_dim, value_dim = inputs.query.shape[3], inputs.value.shape[3]
    consumers = min(3, -(-(params.q_blocksize or default.block_q) // ROWS))
    block_k = min(128, -(-(params.kv_blocksize or default.block_k) // 64) * 64)
    stages = min(4, max(2, params.num_stages or 4))
    return _fitting(consumers, block_k, head_dim, value_dim, stages) or default


def _default(inputs: Inputs) -> Tiles:
    head_dim, value_dim = inputs.query.shape[3], inputs.value.shape[3]
    consumers = 1 if inputs.query.shape[1] <= ROWS else 2
    for block_k in (128, 64):
        tiles = _fitting(consumers, block_k, head_dim, value_dim)
        if tiles and _in_registers(tiles, inputs):
            return tiles
    return Tiles(consumers, 64, 2)


def _fitting(
    consumers: int, block_k: int, head_dim: int, value_dim: int, stages: int = 4
) -> Tiles | None:
    """The tiles of this size with the most stages that shared memory holds, if it holds two."""
    sizes = (Tiles(consumers, block_k, count) for count in range(stages, 1, -1))
    fit = lambda tiles: tiles.shared_bytes(head_dim, value_dim) <= gpu.SHARED_BYTES
    return next(filter(fit, sizes), None)


def _in_registers(tiles: Tiles, inputs: Inputs) -> bool:
    """Whether a thread can hold its part of logits, weights and output."""
    own = inputs.value.shape[3] // 2 + tiles.block_k * 3 // 4
    if inputs.dropout is not None:  # the bits of every weight as well
        own += tiles.block_k // 2
    return own <= {1: 160, 2: 176, 3: 112}[tiles.consumers]


def _params(tiles: Tiles) -> FwdParams:
    return FwdParams(q_blocksize=tiles.block_q, kv_blocksize=tiles.block_k, num_stages=tiles.stages)


def _interpreted(inputs: Inputs) -> bool:
    return settings.interpret() and device_of(jax.tree.leaves(inputs)).platform != "gpu"


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=forward,
        features=frozenset(
            {
                "causal",
                "window",
                "positions",
                "segments",
                "token_types",
                "chunks",
                "lengths",
                "mask",
                "bias",
                "sinks",
                "dropout",
                "dropout_prob",
                "logits_soft_cap",
            }
        ),
        why_not=why_not,
        heuristic=heuristic,
        candidates=candidates,
    ),
)
