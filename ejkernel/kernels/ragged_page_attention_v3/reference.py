"""The definition of attention over pages: every table laid out in full, every logit at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.paged import cache_axes
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Outputs, Spec


def forward(
    inputs: Inputs, spec: Spec, round: Callable[[jax.Array], jax.Array] = lambda x: x
) -> Outputs:
    """Attention and log-sum-exp.

    `round` is applied to the inputs, to the results of the two matmuls and to the weights: what a
    narrow dtype cannot avoid.
    """
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    prepare = lambda x: round(x.astype(dtype))
    query = prepare(inputs.query)
    key, value = (prepare(x) for x in _by_sequence(inputs, spec))  # [b, s, positions, k, h]
    if inputs.k_scale is not None:
        key = key * prepare(inputs.k_scale)[:, None]
    if inputs.v_scale is not None:
        value = value * prepare(inputs.v_scale)[:, None]

    visible, sequence = _visible(inputs, spec, key.shape[2])  # [b, t, positions], [b, t]
    groups = query.shape[2] // key.shape[3]
    of_row = jax.vmap(lambda x, index: jnp.repeat(x[index], groups, axis=2))
    used = visible[..., None, None]  # what no query may see may hold anything, also a NaN
    key = jnp.where(used, of_row(key, sequence), 0.0)  # [b, t, positions, n, h]
    value = jnp.where(used, of_row(value, sequence), 0.0)

    logits = spec.softmax_scale * round(jnp.einsum("btnh,btjnh->bntj", query, key))
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)

    # Rows that see nothing take a harmless way, so that their gradients are 0 and not NaN.
    visible = visible[:, None]
    some = visible.any(-1, keepdims=True)
    logits = jnp.where(visible, logits, jnp.where(some, -jnp.inf, 0.0))
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    weights = jnp.where(some, jnp.exp(logits - lse), 0.0)
    if inputs.sinks is not None:
        sinks = jax.nn.logsumexp(prepare(inputs.sinks), axis=-1)[:, None, None]  # [1 or n, 1, 1]
        weights = weights * jax.nn.sigmoid(lse - sinks)
    out = round(jnp.einsum("bntj,btjnv->btnv", round(weights), value))
    lse = jnp.where(some, lse, -jnp.inf)[..., 0]
    return Outputs(out.astype(spec.out_dtype(inputs.query.dtype)), lse)


def _by_sequence(inputs: Inputs, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Keys and values of every position of every table, [b, s, positions, k, h]."""
    combined = inputs.value_pages is None
    axes = cache_axes(spec.kv_layout, combined)
    caches = [inputs.key_pages] * 2 if combined else [inputs.key_pages, inputs.value_pages]
    found = []
    for part, cache in enumerate(caches):
        ordered = jnp.moveaxis(cache, [axes.index(x) for x in "pckh"], [0, 1, -2, -1])
        pages = ordered[:, :, part] if combined else ordered
        table = jnp.clip(inputs.page_indices, 0, pages.shape[0] - 1)
        b, s, j = table.shape
        found.append(pages[table].reshape(b, s, j * pages.shape[1], *pages.shape[2:]))
    return found[0], found[1]


def _visible(inputs: Inputs, spec: Spec, positions: int) -> tuple[jax.Array, jax.Array]:
    """Which positions of its sequence a query sees, and which sequence that is."""
    row = jnp.arange(inputs.query.shape[1])[:, None]
    start, length = (jnp.asarray(x)[:, None] for x in (inputs.query_starts, inputs.query_lens))
    member = (start <= row) & (row < start + length)  # [b, t, s]
    own = jnp.where(member, jnp.asarray(inputs.kv_lens)[:, None] - length + row - start, -1)
    own = own.max(-1, keepdims=True)  # the query's own position; -1 where it has no sequence
    sequence = jnp.argmax(member, axis=-1)

    table = jnp.asarray(inputs.page_indices)
    combined = inputs.value_pages is None
    axes = cache_axes(spec.kv_layout, combined)
    present = (table >= 0) & (table < inputs.key_pages.shape[axes.index("p")])
    present = jnp.repeat(present, positions // table.shape[-1], axis=-1)
    position = jnp.arange(positions)
    visible = (position <= own) & jax.vmap(lambda x, index: x[index])(present, sequence)
    if spec.sliding_window is not None:
        visible &= position > own - spec.sliding_window
    if inputs.traced_window is not None:
        visible &= position > own - inputs.traced_window[:, None, None]
    return visible, sequence
