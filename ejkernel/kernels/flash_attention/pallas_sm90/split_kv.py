"""Few queries on many keys, as in decoding: rows of a group in one tile, keys split among workers.

Query heads that share a key head become rows of one tile, which then reads each key once. Where
batch rows and key heads leave multiprocessors without work, the keys are cut into parts that stand
in the batch, and their results are put together by their log-sum-exps.
"""

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.sinks import share_of_keys
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90 import forward as pallas_gpu_forward
from ejkernel.kernels.flash_attention.pallas_sm90.logits import ROWS
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

# A part of the keys shorter than this does not pay for being put together.
_FEWEST_KEYS = 512
_MOST_PARTS = 64


def is_short(inputs: Inputs) -> bool:
    """Whether the queries of a group fit into one tile, and differ in nothing but their numbers."""
    rule = inputs.mask or Everything()
    rows = inputs.query.shape[1] * _group(inputs)
    return rows <= ROWS and inputs.dropout is None and rule.heads == 1


def packed(inputs: Inputs) -> Inputs:
    """Queries [b, group * t, k, h], filled up to a multiple of 8, and a bias likewise; no sinks."""
    b, t, n, h = inputs.query.shape
    k, group = inputs.key.shape[2], _group(inputs)
    query = inputs.query.reshape(b, t, k, group, h).transpose(0, 3, 1, 2, 4)
    query = _filled(query.reshape(b, group * t, k, h), 1)
    bias = inputs.bias
    if bias is not None and (bias.shape[1] > 1 or bias.shape[2] > 1):
        rows, s = bias.shape[0], bias.shape[3]
        bias = jnp.broadcast_to(bias, (rows, n, t, s)).reshape(rows, k, group * t, s)
        bias = _filled(bias, 2)
    return inputs._replace(query=query, bias=bias, sinks=None)


def forward(inputs: Inputs, spec: Spec, tiles: pallas_gpu_forward.Tiles, device: Device) -> Outputs:
    """Output and log-sum-exp."""
    b, t, n, _ = inputs.query.shape
    k, v, group = inputs.key.shape[2], inputs.value.shape[3], _group(inputs)
    parts = _parts(inputs, gpu.multiprocessors(device))
    few = _split(packed(inputs), parts, queries=t)
    found = pallas_gpu_forward.forward(few, spec, tiles, device, queries=t)
    lse = found.lse[..., : group * t].reshape(b, parts, k * group, t)
    out = found.out[:, : group * t].reshape(b, parts, group, t, k, v)
    out = out.transpose(0, 1, 3, 4, 2, 5).reshape(b, parts, t, n, v)
    if parts == 1 and inputs.sinks is None:
        return Outputs(out[:, 0], lse[:, 0])
    whole = jax.nn.logsumexp(lse, axis=1)  # [b, n, t]
    shares = jnp.exp(lse - jnp.where(whole > -jnp.inf, whole, 0.0)[:, None])
    if inputs.sinks is not None:
        shares = shares * share_of_keys(whole, inputs.sinks)[:, None]
    total = (out * jnp.swapaxes(shares, 2, 3)[..., None]).sum(1)
    return Outputs(total.astype(inputs.query.dtype), whole)


def _group(inputs: Inputs) -> int:
    return inputs.query.shape[2] // inputs.key.shape[2]


def _filled(x: jax.Array, axis: int) -> jax.Array:
    """With rows up to a multiple of 8, so that copies of them need no strips."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % 8)
    return jnp.pad(x, padding)


def _parts(inputs: Inputs, multiprocessors: int) -> int:
    """Into how many parts to cut the keys: those that keep the most multiprocessors at work."""
    keys, units = inputs.key.shape[1], inputs.key.shape[0] * inputs.key.shape[2]
    best, busiest = 1, 0.0
    for parts in (2**i for i in range(_MOST_PARTS.bit_length())):
        if parts > 1 and (keys % (8 * parts) or keys // parts < _FEWEST_KEYS):
            break
        laps = -(-units * parts // multiprocessors)
        busy = units * parts / (laps * multiprocessors)
        if busy > busiest + 0.05:  # each doubling costs something
            best, busiest = parts, busy
    return best


def _split(inputs: Inputs, parts: int, queries: int) -> Inputs:
    """Parts of the keys as batch rows, each with all the queries and its part of mask and bias."""
    if parts == 1:
        return inputs
    b, s = inputs.key.shape[:2]
    size = s // parts
    cut = lambda x: x.reshape(b * parts, size, *x.shape[2:])
    start = jnp.tile(jnp.arange(parts, dtype=jnp.int32) * size, b)
    bias = inputs.bias
    if bias is not None and bias.shape[3] > 1:
        rows, heads, t, _ = bias.shape
        bias = bias.reshape(rows, heads, t, parts, size).transpose(0, 3, 1, 2, 4)
        bias = jnp.broadcast_to(bias, (b, *bias.shape[1:])).reshape(b * parts, heads, t, size)
    elif bias is not None and bias.shape[0] > 1:
        bias = jnp.repeat(bias, parts, axis=0)
    rule = (inputs.mask or Everything()).repeat_rows(parts).slice(0, queries, start, size)
    return inputs._replace(
        query=jnp.repeat(inputs.query, parts, axis=0),
        key=cut(inputs.key),
        value=cut(inputs.value),
        bias=bias,
        mask=rule,
    )
