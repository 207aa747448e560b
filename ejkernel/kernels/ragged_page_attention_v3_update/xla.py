"""Writes the new tokens into the cache, in place if it was donated, then attends over it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels.common.paged import cache_axes, read_tokens, stored, write_tokens
from ejkernel.kernels.ragged_page_attention_v3 import inputs as reading
from ejkernel.kernels.ragged_page_attention_v3 import xla as attention
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import (
    LAYOUTS,
    Inputs,
    Outputs,
    Spec,
    reading_inputs,
)
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.ops.platform import Device


class Residuals(NamedTuple):
    """What the backward pass needs besides the inputs; it writes the cache again itself."""

    out: Float[Array, "b t n v"]
    lse: Float[Array, "b n t"]


class _TokenSlots(NamedTuple):
    """Page and slot of each new token, [tokens]; a page out of range for one that is not stored."""

    page: jax.Array
    slot: jax.Array


def run_forward(inputs: Inputs, spec: Spec, params: PagedConfig) -> tuple[Outputs, Residuals]:
    """Outputs, and the residuals among them."""
    pages = updated_cache(inputs, spec)
    results, _ = attention.run_forward(reading_inputs(inputs, spec, *pages), spec, params)
    _, outputs = LAYOUTS[spec.kv_layout]
    return outputs(*results, *pages), Residuals(*results)


def run_backward(
    inputs: Inputs,
    residuals: Residuals,
    d_outputs: Outputs,
    spec: Spec,
    params: PagedConfig,
) -> Inputs:
    """Gradients, shaped like the inputs; what goes through an integer cache has none."""
    call = reading_inputs(inputs, spec, *updated_cache(inputs, spec))
    saved, along = reading.Outputs(*residuals), reading.Outputs(d_outputs.out, d_outputs.lse)
    gradients = attention.run_backward(call, saved, along, spec, params)
    d_inputs = inputs._replace(
        **{name: getattr(gradients, name) for name in gradients._fields}, key=None, value=None
    )
    if not jnp.issubdtype(inputs.key_pages.dtype, jnp.inexact):
        return d_inputs
    place, axes = _token_slots(inputs, spec), cache_axes(spec.kv_layout)
    pages = inputs.key_pages.shape[axes.index("p")]
    for tokens, cache, scale in (
        ("key", "key_pages", "k_scale"),
        ("value", "value_pages", "v_scale"),
    ):
        given = getattr(inputs, scale)
        new = _flat(getattr(inputs, tokens))
        # A token that is not stored may hold anything; its 0 times a NaN must not reach the scale.
        new = jnp.where((place.page < pages)[:, None, None], new, 0)
        d_cache = getattr(gradients, cache) + getattr(d_outputs, cache)
        _, pull_back = jax.vjp(
            lambda x, s, cache=cache: stored(x, s, getattr(inputs, cache).dtype),
            new,
            given,
        )
        d_new = read_tokens(d_cache, *place, axes)
        d_tokens, d_scale = pull_back(d_new)
        # The token that was in the slot before has no part in the result.
        d_cache = write_tokens(d_cache, *place, jnp.zeros_like(d_new), axes)
        changes = {tokens: d_tokens.reshape(getattr(inputs, tokens).shape), cache: d_cache}
        if given is not None:
            changes[scale] = getattr(d_inputs, scale) + d_scale
        d_inputs = d_inputs._replace(**changes)
    return d_inputs


def updated_cache(inputs: Inputs, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """The cache with the new tokens where they belong."""
    place, axes = _token_slots(inputs, spec), cache_axes(spec.kv_layout)
    write = lambda cache, new, scale: write_tokens(
        cache, *place, stored(_flat(new), scale, cache.dtype), axes
    )
    return (
        write(inputs.key_pages, inputs.key, inputs.k_scale),
        write(inputs.value_pages, inputs.value, inputs.v_scale),
    )


def _token_slots(inputs: Inputs, spec: Spec) -> _TokenSlots:
    """The page and slot of every token."""
    axes = cache_axes(spec.kv_layout)
    pages, size = (inputs.key_pages.shape[axes.index(letter)] for letter in "pc")
    starts, lens, kv_lens, table = (
        jnp.asarray(x)
        for x in (inputs.query_starts, inputs.query_lens, inputs.kv_lens, inputs.page_indices)
    )
    row = jnp.arange(inputs.query.shape[1], dtype=jnp.int32)

    def places(starts: jax.Array, lens: jax.Array, kv_lens: jax.Array, table: jax.Array) -> tuple:
        # The first sequence that ends after the token; empty ones end where they begin.
        sequence = jnp.searchsorted(starts + lens, row, side="right")
        sequence = jnp.minimum(sequence, starts.shape[0] - 1).astype(jnp.int32)
        number = row - starts[sequence]
        position = kv_lens[sequence] - lens[sequence] + number
        valid = (number >= 0) & (number < lens[sequence]) & (position >= 0)
        valid &= position < table.shape[-1] * size
        page = table[sequence, jnp.clip(position // size, 0, table.shape[-1] - 1)]
        valid &= (page >= 0) & (page < pages)
        return jnp.where(valid, page, pages), jnp.where(valid, position % size, 0)

    page, slot = jax.vmap(places)(starts, lens, kv_lens, table)
    return _TokenSlots(page.reshape(-1), slot.reshape(-1))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _heuristic(inputs: Inputs, spec: Spec, device: Device) -> PagedConfig:
    return spec.config()


IMPLEMENTATION = Implementation(
    forward=Pass(run=run_forward, features=ALL_FEATURES, heuristic=_heuristic),
    backward=Pass(run=run_backward, features=ALL_FEATURES, heuristic=_heuristic),
)
