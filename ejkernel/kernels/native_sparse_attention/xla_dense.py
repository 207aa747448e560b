"""The compressed and the window branch: flash attention over means, and over the newest keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import xla as flash_xla
from ejkernel.kernels.native_sparse_attention import geometry
from ejkernel.kernels.native_sparse_attention.geometry import Pools, Tokens
from ejkernel.kernels.native_sparse_attention.inputs import Branch, Inputs, Spec
from ejkernel.types.rules import Band, Rule


class Dense(NamedTuple):
    """A branch as a call of flash attention."""

    inputs: flash.Inputs
    pools: Pools | None  # of the compressed branch

    def forward(self, spec: Spec) -> Branch:
        """Output and log-sum-exp."""
        outputs, _ = flash_xla.run_forward(self.inputs, _flash(spec), None)
        return Branch(*outputs)

    def backward(self, branch: Branch, d_out: jax.Array, spec: Spec) -> tuple[jax.Array, ...]:
        """Gradients of query, key and value."""
        d_outputs = flash.Outputs(d_out, jnp.zeros_like(branch.lse))
        d_query, d_key, d_value, *_ = flash_xla.run_backward(
            self.inputs, flash.Outputs(*branch), d_outputs, _flash(spec), None
        )
        if self.pools is None:
            return d_query, d_key, d_value
        return d_query, *(_spread(d, self.pools, spec) for d in (d_key, d_value))


def windowed(inputs: Inputs, at: Tokens, window: int | jax.Array) -> Dense:
    """The `window` newest keys of each token, its own included."""
    rule: Rule = Band(1 - window, 0)
    if inputs.cu_seqlens is not None:
        rule = rule & Band(0, None, at.start[None])
    return Dense(flash.Inputs(*inputs[:3], mask=rule), None)


def compressed(inputs: Inputs, at: Tokens, spec: Spec) -> Dense | None:
    """The means of the blocks that are complete; None when no block can be."""
    length = inputs.query.shape[1]
    if length < spec.block_size:
        return None
    pools = geometry.pools(length, inputs.cu_seqlens, spec.block_size, at)
    rule: Rule = Band(None, -1, (pools.first + pools.seen)[None])
    if inputs.cu_seqlens is not None:
        rule = rule & Band(0, None, pools.first[None])
    key, value = (geometry.pooled(x, pools, spec) for x in (inputs.key, inputs.value))
    return Dense(flash.Inputs(inputs.query, key, value, mask=rule), pools)


def _spread(d_mean: jax.Array, pools: Pools, spec: Spec) -> jax.Array:
    """The gradient of the means, on the tokens that they are of."""
    inside = (pools.own >= 0)[:, None, None]
    return jnp.where(inside, d_mean[:, jnp.maximum(pools.own, 0)] / spec.block_size, 0.0)


def _flash(spec: Spec) -> flash.Spec:
    return flash.Spec(softmax_scale=spec.softmax_scale)
