"""The definition: put the new tokens into the cache, then attend over it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.paged import cache_axes, stored
from ejkernel.kernels.ragged_page_attention_v3 import reference as reading
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import (
    LAYOUTS,
    Inputs,
    Outputs,
    Spec,
    reading_inputs,
)


def forward(
    inputs: Inputs, spec: Spec, round: Callable[[jax.Array], jax.Array] = lambda x: x
) -> Outputs:
    """Attention, log-sum-exp and the cache with the new tokens."""
    pages = []
    for tokens, scale, cache in (
        (inputs.key, inputs.k_scale, inputs.key_pages),
        (inputs.value, inputs.v_scale, inputs.value_pages),
    ):
        scale = None if scale is None else round(scale)
        new = stored(round(tokens), scale, cache.dtype)  # [b, t, k, h]
        if jnp.issubdtype(cache.dtype, jnp.floating):
            new, cache = round(new), round(cache)
        pages.append(_written(inputs, spec, new, cache))
    results = reading.forward(reading_inputs(inputs, spec, *pages), spec, round)
    _, outputs = LAYOUTS[spec.kv_layout]
    return outputs(*results, *pages)


def _written(inputs: Inputs, spec: Spec, new: jax.Array, cache: jax.Array) -> jax.Array:
    """The cache with the token of every row that belongs to a sequence, and has a page."""
    axes = cache_axes(spec.kv_layout)
    order = [axes.index(letter) for letter in "pckh"]
    pages = jnp.moveaxis(cache, order, [0, 1, 2, 3])
    count, size = pages.shape[:2]

    row = jnp.arange(new.shape[1])[:, None]
    start, length = (jnp.asarray(x)[:, None] for x in (inputs.query_starts, inputs.query_lens))
    member = (start <= row) & (row < start + length)  # [b, t, s]
    position = jnp.asarray(inputs.kv_lens)[:, None] - length + row - start
    position = jnp.where(member, position, 0).sum(-1)  # [b, t]
    table = jnp.asarray(inputs.page_indices)
    page = jax.vmap(lambda t, s, j: t[s, j])(table, member.argmax(-1), position // size)
    there = member.any(-1) & (position >= 0) & (page >= 0)
    pages = pages.at[jnp.where(there, page, count), position % size].set(new, mode="drop")
    return jnp.moveaxis(pages, [0, 1, 2, 3], order)
