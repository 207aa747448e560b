"""The definition of native sparse attention: every logit at once, nothing clever."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel.kernels.native_sparse_attention.inputs import Inputs, Outputs, Spec

Round = Callable[[jax.Array], jax.Array]


def forward(inputs: Inputs, spec: Spec, round: Round = lambda x: x) -> Outputs:
    """The gated sum of the branches.

    `round` is applied to the inputs, to means, to the results of matmuls and to the weights: what
    a narrow dtype cannot avoid.
    """
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    prepare = lambda x: round(x.astype(dtype))
    query, key, value = map(prepare, inputs[:3])
    index = jnp.arange(query.shape[1])
    bounds = inputs.cu_seqlens
    if bounds is None:
        bounds = jnp.array([0, query.shape[1]])
    sequence = jnp.searchsorted(bounds, index, side="right") - 1
    position = index - bounds[sequence]
    block = position // spec.block_size
    # A token sees what stands in its sequence up to itself.
    past = (sequence[:, None] == sequence) & (index <= index[:, None]) & (index < bounds[-1])
    attend = lambda key, value, visible: _attend(query, key, value, visible, spec, round)

    chosen = (inputs.block_indices[..., None] == block).any(-2)  # [b, t, k, s]
    out = _gated(inputs.g_slc, attend(key, value, jnp.moveaxis(chosen, 2, 1) & past), prepare)
    if inputs.g_cmp is not None:
        # The mean of a block stands at the block's last token.
        ends = (position + 1) % spec.block_size == 0
        members = past & (block[:, None] == block)  # [t, s]
        mean = lambda x: round(
            jnp.einsum("ts,bskd->btkd", members.astype(dtype), x) / spec.block_size
        )
        out += _gated(inputs.g_cmp, attend(mean(key), mean(value), past & ends), prepare)
    window = spec.sliding_window
    if inputs.traced_window is not None:
        window = inputs.traced_window[:, None, None, None]
    if window is not None:
        near = index > index[:, None] - window
        out += _gated(inputs.g_swa, attend(key, value, past & near), prepare)
    return Outputs(out.astype(inputs.query.dtype))


def _gated(gate: jax.Array | None, out: jax.Array, prepare: Round) -> jax.Array:
    return out if gate is None else prepare(gate)[..., None] * out


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    spec: Spec,
    round: Round,
) -> jax.Array:
    """Softmax attention over the visible keys, 0 where there are none; visible [(b, k,) t, s]."""
    b, t, n, h = query.shape
    query = query.reshape(b, t, key.shape[2], -1, h)
    logits = spec.softmax_scale * round(jnp.einsum("btkgh,bskh->bkgts", query, key))
    visible = visible[..., None, :, :]  # [(b, k,) 1, t, s]
    some = visible.any(-1, keepdims=True)
    logits = jnp.where(visible, logits, jnp.where(some, -jnp.inf, 0.0))
    weights = round(jnp.where(some, jax.nn.softmax(logits, axis=-1), 0.0))
    out = round(jnp.einsum("bkgts,bskv->btkgv", weights, value))
    return out.reshape(b, t, n, -1)
