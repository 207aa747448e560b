"""Split-KV forward for few queries on many keys, as in decoding.

Query heads that share a key head become rows of one tile (packed GQA), which then reads each key
once. Where batch rows and key heads leave multiprocessors idle, the keys are split; the splits are
batch rows of the forward kernel, and their results are combined by their log-sum-exps.
"""

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.sinks import share_of_keys
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90 import forward as single_pass
from ejkernel.kernels.flash_attention.pallas_sm90.configs import ROWS, ForwardTileConfig
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

# A shorter split does not pay for its combination.
_FEWEST_KEYS = 512
_MOST_SPLITS = 64


def supports(inputs: Inputs) -> bool:
    """Whether the queries of a group fit one tile, and its heads share mask and dropout."""
    rule = inputs.mask or Everything()
    rows = inputs.query.shape[1] * _group(inputs)
    return rows <= ROWS and inputs.dropout is None and rule.heads == 1


def forward(inputs: Inputs, spec: Spec, tiles: ForwardTileConfig, device: Device) -> Outputs:
    """Output and log-sum-exp."""
    b, t, n, _ = inputs.query.shape
    k, v, group = inputs.key.shape[2], inputs.value.shape[3], _group(inputs)
    splits = _number_of_splits(inputs, gpu.multiprocessors(device))
    few = _split_keys(_packed_gqa(inputs), splits, queries=t)
    found = single_pass.forward(few, spec, tiles, device, repeated_queries=t)
    lse = found.lse[..., : group * t].reshape(b, splits, k * group, t)
    out = found.out[:, : group * t].reshape(b, splits, group, t, k, v)
    out = out.transpose(0, 1, 3, 4, 2, 5).reshape(b, splits, t, n, v)
    if splits == 1 and inputs.sinks is None:
        return Outputs(out[:, 0], lse[:, 0])
    total_lse = jax.nn.logsumexp(lse, axis=1)  # [b, n, t]
    weights = jnp.exp(lse - jnp.where(total_lse > -jnp.inf, total_lse, 0.0)[:, None])
    if inputs.sinks is not None:
        weights = weights * share_of_keys(total_lse, inputs.sinks)[:, None]
    combined = (out * jnp.swapaxes(weights, 2, 3)[..., None]).sum(1)
    return Outputs(combined.astype(inputs.query.dtype), total_lse)


def _group(inputs: Inputs) -> int:
    return inputs.query.shape[2] // inputs.key.shape[2]


def _packed_gqa(inputs: Inputs) -> Inputs:
    """Queries [b, group * t, k, h], padded to a multiple of 8, and a bias likewise; no sinks."""
    b, t, n, h = inputs.query.shape
    k, group = inputs.key.shape[2], _group(inputs)
    query = inputs.query.reshape(b, t, k, group, h).transpose(0, 3, 1, 2, 4)
    query = _padded_rows(query.reshape(b, group * t, k, h), 1)
    bias = inputs.bias
    if bias is not None and (bias.shape[1] > 1 or bias.shape[2] > 1):
        rows, s = bias.shape[0], bias.shape[3]
        bias = jnp.broadcast_to(bias, (rows, n, t, s)).reshape(rows, k, group * t, s)
        bias = _padded_rows(bias, 2)
    return inputs._replace(query=query, bias=bias, sinks=None)


def _padded_rows(x: jax.Array, axis: int) -> jax.Array:
    """Rows padded to a multiple of 8, so that they need no panels in shared memory."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % 8)
    return jnp.pad(x, padding)


def _number_of_splits(inputs: Inputs, multiprocessors: int) -> int:
    """The number of splits that keeps the most multiprocessors busy."""
    keys, items = inputs.key.shape[1], inputs.key.shape[0] * inputs.key.shape[2]
    best, highest = 1, 0.0
    for splits in (2**i for i in range(_MOST_SPLITS.bit_length())):
        if splits > 1 and (keys % (8 * splits) or keys // splits < _FEWEST_KEYS):
            break
        waves = -(-items * splits // multiprocessors)
        occupancy = items * splits / (waves * multiprocessors)
        if occupancy > highest + 0.05:  # each doubling costs something
            best, highest = splits, occupancy
    return best


def _split_keys(inputs: Inputs, splits: int, queries: int) -> Inputs:
    """Splits of the keys as batch rows, each with all queries and its part of mask and bias."""
    if splits == 1:
        return inputs
    b, s = inputs.key.shape[:2]
    size = s // splits
    split = lambda x: x.reshape(b * splits, size, *x.shape[2:])
    start = jnp.tile(jnp.arange(splits, dtype=jnp.int32) * size, b)
    bias = inputs.bias
    if bias is not None and bias.shape[3] > 1:
        rows, heads, t, _ = bias.shape
        bias = bias.reshape(rows, heads, t, splits, size).transpose(0, 3, 1, 2, 4)
        bias = jnp.broadcast_to(bias, (b, *bias.shape[1:])).reshape(b * splits, heads, t, size)
    elif bias is not None and bias.shape[0] > 1:
        bias = jnp.repeat(bias, splits, axis=0)
    rule = (inputs.mask or Everything()).repeat_rows(splits).slice(0, queries, start, size)
    return inputs._replace(
        query=jnp.repeat(inputs.query, splits, axis=0),
        key=split(inputs.key),
        value=split(inputs.value),
        bias=bias,
        mask=rule,
    )
