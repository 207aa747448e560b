"""Backward on Hopper: kernels for keys and values, one for queries; all of them deterministic.

A computing warpgroup holds 64 keys (or queries) and walks the queries (or keys) that meet them.
Where registers hold the sums of keys and values of 64 keys, one kernel does both, else each has its
own. The gradients of a key head are summed over its query heads inside the kernel.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.sinks import per_sink, share_of_keys
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.backward_kernel import (
    OF_KEYS,
    OF_KEYS_AND_VALUES,
    OF_QUERIES,
    OF_VALUES,
    Kernel,
    Part,
    Tiles,
    starts_with_lse,
)
from ejkernel.kernels.flash_attention.pallas_sm90.bias_grad import ALONE, bias_gradient, together
from ejkernel.kernels.flash_attention.pallas_sm90.deal import Units
from ejkernel.kernels.flash_attention.pallas_sm90.logits import Operands
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import visibility, walk, walk_columns
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything


def backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    of_keys: tuple[Tiles, ...],
    of_queries: Tiles,
    device: Device,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none.

    Args:
        inputs: of the call.
        residuals: output and log-sum-exp of a forward pass.
        d_outputs: their gradients.
        spec: of the call.
        of_keys: tiles of the kernel of keys and values, or of one of values and one of keys.
        of_queries: tiles of the kernel of queries.
        device: of the call.
    """
    terms = _row_terms(inputs, residuals, d_outputs, spec)
    kernel = functools.partial(run, inputs, d_outputs.out, spec, terms, device)
    if len(of_keys) == 1:
        d_value, d_key = kernel(OF_KEYS_AND_VALUES, *of_keys)
    else:
        (d_value,), (d_key,) = map(kernel, (OF_VALUES, OF_KEYS), of_keys)
    of_sinks = None if inputs.sinks is None else "weights"
    if of_sinks and _many_registers(inputs, spec):
        (d_query,) = kernel(OF_QUERIES, of_queries)
        sums = kernel(Part(for_keys=False, summed=(), rows=of_sinks), ALONE)
    else:
        d_query, *sums = kernel(dataclasses.replace(OF_QUERIES, rows=of_sinks), of_queries)
    d_sinks = None
    if inputs.sinks is not None:
        # What weights and their gradients sum to, less what they began with.
        taken = sums[0][..., : terms.share.shape[2]] / (1.0 - spec.dropout_prob)
        taken = taken - jnp.where(terms.seen, terms.start * terms.share, 0.0)
        d_sinks = per_sink(-((1.0 - terms.share) * taken).sum((0, 2)), inputs.sinks)
    d_bias = None if inputs.bias is None else bias_gradient(kernel, inputs, spec)
    return Inputs(d_query, d_key, d_value, bias=d_bias, sinks=d_sinks, mask=None)


def _many_registers(inputs: Inputs, spec: Spec) -> bool:
    """Whether a kernel of queries has none for weights that differ from what it sums."""
    wide = inputs.query.shape[3] > 192
    return wide and inputs.dropout is not None and spec.logits_soft_cap is not None


class _Terms(NamedTuple):
    """What the logits of a row share, each [b, n, t].

    With p a weight, sinks in its denominator, and w the part that these leave to the keys (1
    without sinks), d_logits = p * (d_weights + d_lse / w - delta).
    """

    lse: jax.Array  # in base 2; negative and in units of products where these begin with it
    start: jax.Array  # d_lse / w - delta
    share: jax.Array  # w
    seen: jax.Array  # whether the row sees a key


def _row_terms(inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec) -> _Terms:
    lse, d_lse = residuals.lse, d_outputs.lse.astype(jnp.float32)
    products = residuals.out.astype(jnp.float32) * d_outputs.out.astype(jnp.float32)
    # Summed on its own: together with what follows, XLA reads it five times as slowly.
    delta = jnp.swapaxes(lax.optimization_barrier(products.sum(-1)), 1, 2)
    seen = lse > -jnp.inf
    share, exponent = jnp.ones_like(lse), lse * LOG2_E
    if inputs.sinks is not None:
        share = jnp.maximum(share_of_keys(lse, inputs.sinks), 1e-30)  # divided by
        exponent = exponent - jnp.log2(share)
        d_lse = jnp.where(seen, d_lse / share, 0.0)
    exponent = jnp.where(seen, exponent, jnp.inf)  # a row that sees nothing has weights of 0
    if starts_with_lse(spec):
        exponent = exponent * (-1.0 / (spec.softmax_scale * LOG2_E))
    return _Terms(exponent, d_lse - delta, share, seen)


def run(
    inputs: Inputs,
    d_out: jax.Array,
    spec: Spec,
    terms: _Terms,
    device: Device,
    part: Part,
    tiles: Tiles,
) -> list[jax.Array]:
    """The results of one kernel: its sums, then what else it was asked for."""
    interpreted = gpu.is_interpreted(device)
    b, t, n, _ = inputs.query.shape
    s, k = inputs.value.shape[1:3]
    for_keys, rule = part.for_keys, inputs.mask or Everything()
    block_q, block_k = (tiles.columns, tiles.rows) if for_keys else (tiles.rows, tiles.columns)
    q_size, kv_size = (-(-size // block) * block for size, block in ((t, block_q), (s, block_k)))
    held, read = (s, (inputs.query, d_out)) if for_keys else (t, (inputs.key, inputs.value))
    heads, group = (k, n // k) if for_keys else (n, 1)
    units = Units(
        batch=b,
        heads=heads,
        group=group,
        pairs=b * k,
        shared_bytes=sum(x.nbytes for x in read) // (b * k),
        workers=min(gpu.multiprocessors(device), b * heads * -(-held // tiles.rows)),
    )
    plan = (walk_columns if for_keys else walk)(rule, units, t, s, block_q, block_k)
    seen = visibility(rule, t, s, q_size, kv_size)
    order = plan.order
    if part.logits:
        order = together(plan.count, units, inputs.bias.shape)  # type: ignore[union-attr]
    turned = for_keys and not part.brought(tiles, inputs)
    operands = Operands.of(inputs, seen, q_size, kv_size, for_keys, turned)
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, q_size - t)), constant_values=fill)
    lse = pad(terms.lse, -jnp.inf if starts_with_lse(spec) else jnp.inf)
    arrays = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "d_out": d_out,
        # Gradients are without the factor of dropout until they are written.
        "terms": jnp.stack([lse, pad(terms.start * (1.0 - spec.dropout_prob), 0.0)], axis=2),
        "order": order,
        "count": plan.count.reshape(-1),
        "partial": plan.partial.reshape(-1),
        "index": plan.index.reshape(-1),
        **operands.arrays,
    }
    like = (inputs.key, inputs.value) if for_keys else (inputs.query,)
    out_type = [jax.ShapeDtypeStruct(like[i].shape, like[i].dtype) for i in part.summed]
    if part.rows:
        out_type.append(jax.ShapeDtypeStruct((b, n, kv_size if for_keys else q_size), jnp.float32))
    if part.logits:
        bias: jax.Array = inputs.bias  # type: ignore[assignment]
        dtype = bias.dtype if bias.shape[:2] == (b, n) else jnp.float32  # or added to
        out_type.append(jax.ShapeDtypeStruct((*bias.shape[:2], q_size, kv_size), dtype))
    work = Kernel(spec, part, tiles, operands, inputs, plan.index.shape, interpreted)

    def body(*refs: Any, **shared: Any) -> None:
        work.body(dict(zip(arrays, refs, strict=False)), refs[len(arrays) :], shared)

    launch = gpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=work.scratch(),
        blocks=order.shape[1],
        warpgroups=tiles.consumers + 1,
        interpreted=interpreted,
    )
    return list(launch(*arrays.values()))
