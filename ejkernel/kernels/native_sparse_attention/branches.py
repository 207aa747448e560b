"""What all platforms share: the gated sum, and the branches that are calls of flash attention.

Those are the compressed branch, over means, and the window branch, over the newest keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.native_sparse_attention import geometry
from ejkernel.kernels.native_sparse_attention.geometry import Pools, Tokens
from ejkernel.kernels.native_sparse_attention.inputs import Branch, Inputs, Outputs, Residuals, Spec
from ejkernel.types.rules import Band, Rule

# Passes of flash attention: (inputs, spec) -> outputs, and (inputs, outputs, gradients of them,
# spec) -> gradients.
FlashForward = Callable[[flash.Inputs, flash.Spec], flash.Outputs]
FlashBackward = Callable[[flash.Inputs, flash.Outputs, flash.Outputs, flash.Spec], flash.Inputs]


class Dense(NamedTuple):
    """A branch as a call of flash attention."""

    inputs: flash.Inputs
    pools: Pools | None  # of the compressed branch

    def forward(self, spec: Spec, run: FlashForward) -> Branch:
        """Output and log-sum-exp."""
        return Branch(*run(self.inputs, _flash(spec)))

    def backward(
        self, branch: Branch, d_out: jax.Array, spec: Spec, run: FlashBackward
    ) -> tuple[jax.Array, ...]:
        """Gradients of query, key and value."""
        d_outputs = flash.Outputs(d_out, jnp.zeros_like(branch.lse))
        d_query, d_key, d_value, *_ = run(
            self.inputs, flash.Outputs(*branch), d_outputs, _flash(spec)
        )
        if self.pools is None:
            return d_query, d_key, d_value
        return d_query, *(_spread(d, self.pools, spec) for d in (d_key, d_value))


def dense_branches(inputs: Inputs, at: Tokens, spec: Spec) -> tuple[Dense | None, Dense | None]:
    """The compressed and the window branch; None where the call does not have one."""
    compressed = windowed = None
    if inputs.g_cmp is not None:
        compressed = _compressed(inputs, at, spec)
    window = spec.sliding_window if inputs.traced_window is None else inputs.traced_window
    if window is not None:
        windowed = _windowed(inputs, at, window)
    return compressed, windowed


def gates_of(inputs: Inputs) -> tuple[jax.Array | None, ...]:
    """The gates in the order of the branches."""
    return inputs.g_slc, inputs.g_cmp, inputs.g_swa


def gated(gate: jax.Array | None, x: jax.Array) -> jax.Array:
    """[b, t, n, v] times its gate."""
    return x if gate is None else gate.astype(x.dtype)[..., None] * x


def gated_sum(inputs: Inputs, branches: Residuals) -> Outputs:
    """The result of a call."""
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    parts = [
        gated(gate, branch.out.astype(dtype))
        for gate, branch in zip(gates_of(inputs), branches, strict=True)
        if branch is not None
    ]
    return Outputs(sum(parts[1:], parts[0]).astype(inputs.query.dtype))


def _windowed(inputs: Inputs, at: Tokens, window: int | jax.Array) -> Dense:
    """The `window` newest keys of each token, its own included."""
    rule: Rule = Band(1 - window, 0)
    if inputs.query_start is not None:
        rule = rule.slice(inputs.query_start, inputs.query.shape[1], 0, inputs.key.shape[1])
    if inputs.cu_seqlens is not None:
        rule = rule & Band(0, None, at.start[None])
    return Dense(flash.Inputs(*inputs[:3], mask=rule), None)


def _compressed(inputs: Inputs, at: Tokens, spec: Spec) -> Dense | None:
    """The means of the blocks that are complete; None when no block can be."""
    length = inputs.key.shape[1]
    if length < spec.block_size:
        return None
    if inputs.query_start is not None:
        at = geometry.tokens(length, inputs.cu_seqlens)
    pools = geometry.pools(length, inputs.cu_seqlens, spec.block_size, at)
    first, seen = geometry.of_queries((pools.first, pools.seen), inputs)
    rule: Rule = Band(None, -1, (first + seen)[None])
    if inputs.cu_seqlens is not None:
        rule = rule & Band(0, None, first[None])
    key, value = (geometry.pooled(x, pools, spec) for x in (inputs.key, inputs.value))
    return Dense(flash.Inputs(inputs.query, key, value, mask=rule), pools)


def _spread(d_mean: jax.Array, pools: Pools, spec: Spec) -> jax.Array:
    """The gradient of the means, on the tokens that they are of."""
    inside = (pools.own >= 0)[:, None, None]
    return jnp.where(inside, d_mean[:, jnp.maximum(pools.own, 0)] / spec.block_size, 0.0)


def _flash(spec: Spec) -> flash.Spec:
    return flash.Spec(softmax_scale=spec.softmax_scale)
