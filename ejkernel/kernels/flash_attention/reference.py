"""The definition of flash attention: every logit at once, nothing clever."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import dropout
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.types.rules import Everything


def forward(
    inputs: Inputs, spec: Spec, round: Callable[[jax.Array], jax.Array] = lambda x: x
) -> Outputs:
    """Attention and log-sum-exp.

    `round` is applied to the inputs, to the results of the two matmuls and to the weights: what a
    narrow dtype cannot avoid.
    """
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    prepare = lambda x: round(x.astype(dtype))
    query, key, value = map(prepare, inputs[:3])
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))

    logits = spec.softmax_scale * round(jnp.einsum("btnh,bsnh->bnts", query, key))
    if inputs.bias is not None:
        logits = logits + prepare(inputs.bias)
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    rule = inputs.mask or Everything()
    visible = rule.dense(query.shape[1], key.shape[1]) & (logits > -jnp.inf)  # [b, n, t, s]

    # Rows that see nothing take a harmless way, so that their gradients are 0 and not NaN.
    some = visible.any(-1, keepdims=True)
    logits = jnp.where(visible, logits, jnp.where(some, -jnp.inf, 0.0))
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    weights = jnp.where(some, jnp.exp(logits - lse), 0.0)
    if inputs.sinks is not None:
        sinks = jax.nn.logsumexp(prepare(inputs.sinks), axis=-1)[:, None, None]  # [1 or n, 1, 1]
        weights = weights * jax.nn.sigmoid(lse - sinks)
    weights = round(weights)
    if inputs.dropout is not None:
        weights = jnp.where(_kept(inputs, spec), weights / (1 - spec.dropout_prob), 0.0)
    out = round(jnp.einsum("bnts,bsnv->btnv", weights, value))
    lse = jnp.where(some, lse, -jnp.inf)[..., 0]
    return Outputs(out.astype(inputs.query.dtype), lse)


def _kept(inputs: Inputs, spec: Spec) -> jax.Array:
    """Which weights survive dropout, [b, n, t, s]."""
    seed, batch, head = inputs.dropout[:3]  # type: ignore[misc]
    row, column = jnp.arange(inputs.query.shape[1]), jnp.arange(inputs.key.shape[1])
    batch, head = jnp.asarray(batch)[:, None, None, None], jnp.asarray(head)[:, None, None]
    return dropout.keep(spec.dropout_prob, seed, batch, head, row[:, None], column)
