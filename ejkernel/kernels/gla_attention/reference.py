"""The definition of gated linear attention: one token after the other."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec, sequences


def forward(
    inputs: Inputs, spec: Spec, round: Callable[[jax.Array], jax.Array] = lambda x: x
) -> Outputs:
    """Output of every token, state after every sequence.

    `round` is applied to the inputs and to the output: what a narrow dtype cannot avoid.
    """
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    prepare = lambda x: round(x.astype(dtype))
    query, key, value = map(prepare, inputs[:3])
    batch, tokens, heads, rows = key.shape
    columns = value.shape[-1]
    query = query.reshape(batch, tokens, heads, -1, rows) * spec.softmax_scale

    row_decays = jnp.zeros((batch, tokens, heads, rows), dtype)
    if inputs.gate is not None:
        row_decays += prepare(inputs.gate)
    if inputs.g_gamma is not None:
        row_decays += prepare(inputs.g_gamma)[:, None, :, None]
    column_decays = jnp.zeros_like(value) if inputs.gv is None else prepare(inputs.gv)

    count = sequences(inputs)
    states = jnp.zeros((batch, count, heads, rows, columns), dtype)
    if inputs.initial_state is not None:
        states += prepare(inputs.initial_state)
    belongs = _belongs(inputs, tokens, count)  # [b, s, m]

    def step(states: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array]:
        query, key, value, row_decay, column_decay, belongs = token
        decay = jnp.exp(row_decay[..., :, None] + column_decay[..., None, :])
        after = decay[:, None] * states + (key[..., :, None] * value[..., None, :])[:, None]
        chosen = belongs[..., None, None, None]
        states = jnp.where(chosen, after, states)
        state = jnp.where(chosen, after, 0.0).sum(1)
        return states, jnp.einsum("bkgh,bkhv->bkgv", query, state)

    arrays = (query, key, value, row_decays, column_decays, belongs)
    in_time = tuple(jnp.moveaxis(x, 1, 0) for x in arrays)
    states, out = jax.lax.scan(step, states, in_time, reverse=spec.reverse)
    out = round(jnp.moveaxis(out, 0, 1).reshape(batch, tokens, -1, columns))
    return Outputs(out.astype(inputs.query.dtype), states)


def _belongs(inputs: Inputs, tokens: int, count: int) -> jax.Array:
    """Whether a token is part of a sequence, [b, s, m]."""
    if inputs.cu_seqlens is None:
        return jnp.ones((inputs.key.shape[0], tokens, count), bool)
    token = jnp.arange(tokens)[:, None]
    starts, ends = inputs.cu_seqlens[:, None, :-1], inputs.cu_seqlens[:, None, 1:]
    return (starts <= token) & (token < ends)
