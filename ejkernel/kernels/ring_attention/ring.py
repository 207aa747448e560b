"""Ring attention: keys travel, queries stay (https://arxiv.org/abs/2310.01889).

In each of as many hops as there are devices, a device attends from its queries to the keys that are
with it, while it already sends them on. Parts are merged by their log-sum-exp in float32. In the
backward pass the gradients of keys and values travel behind them: what earlier hops found is on its
way while a hop finds its own part, and is home after one transfer more.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.ring_attention.inputs import Inputs, Outputs, Spec
from ejkernel.ops.implementation import Pass
from ejkernel.ops.meshes import varying_axes
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

# Attention of one hop and its gradients, all in float32: from the inputs, the spec of flash
# attention and parameters; gradients from residuals and d_outputs of all hops besides.
# Both take what is on its way here and give it back come: `meet` has it there by the time that what
# was computed is used.
Attend = Callable[[flash.Inputs, flash.Spec, Any, Any], tuple[flash.Outputs, Any]]
Differentiate = Callable[
    [flash.Inputs, Outputs, Outputs, flash.Spec, Any, Any], tuple[flash.Inputs, Any]
]


def meet(computed: Any, ahead: Any) -> tuple[Any, Any]:
    """The two as they are, none of them used before both are there.

    A compiler that does not know how long a kernel runs may else send behind it, and hide the
    transfer behind the little that remains of the hop.
    """
    return lax.optimization_barrier((computed, ahead))


class _Ring(NamedTuple):
    """Who we are in the ring, and what a hop's attention is given."""

    inputs: Inputs
    spec: Spec
    size: int
    here: Any  # our place in the ring

    def source(self, hop: Any) -> Any:
        """Whose keys are here in this hop."""
        return lax.rem(self.here - hop + self.size, self.size)

    def hop_inputs(self, hop: Any, key: jax.Array, value: jax.Array) -> flash.Inputs:
        """The attention of our queries to the keys that are here."""
        t, s = self.inputs.query.shape[1], key.shape[1]
        bias, rule = self.inputs.bias, self.inputs.mask or Everything()
        if self.size > 1:
            source = self.source(hop)
            rule = rule.slice(self.here * t, t, source * s, s)
            if bias is not None and bias.shape[3] > 1:
                bias = lax.dynamic_slice_in_dim(bias, source * s, s, axis=3)
        return flash.Inputs(self.inputs.query, key, value, bias=bias, mask=rule)

    @property
    def dtype(self) -> Any:
        """In which parts are merged, whatever travels."""
        return jnp.promote_types(self.inputs.query.dtype, jnp.float32)

    def pass_on(self, tree: Any) -> Any:
        """What our neighbour had."""
        if self.size == 1:
            return tree
        to = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.spec.axis_name, to), tree)

    def over_hops(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        if self.size == 1:
            return step(0, carry)
        hops = jnp.arange(self.size, dtype=jnp.int32)
        return lax.scan(lambda carry, hop: (step(hop, carry), None), carry, hops)[0]

    def varying(self, x: jax.Array) -> jax.Array:
        """A constant that a loop over hops may carry: different on every device it runs on."""
        leaves = (*jax.tree.leaves(self.inputs), jnp.asarray(self.here))
        missing = frozenset().union(*map(varying_axes, leaves)) - varying_axes(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _ring(inputs: Inputs, spec: Spec) -> _Ring:
    if spec.axis_name is None:
        return _Ring(inputs, spec, 1, 0)
    return _Ring(inputs, spec, lax.axis_size(spec.axis_name), lax.axis_index(spec.axis_name))


def forward(attend: Attend, inputs: Inputs, spec: Spec, params: Any) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    ring = _ring(inputs, spec)
    dtype = ring.dtype
    b, t, n, _ = inputs.query.shape

    def step(hop: Any, carry: tuple) -> tuple:
        out, lse, key, value = carry
        ahead = ring.pass_on((key, value))
        part, ahead = attend(ring.hop_inputs(hop, key, value), hop_spec(spec), params, ahead)
        out, lse = _merged(out, lse, part.out, part.lse)
        return out, lse, *ahead

    start = (
        ring.varying(jnp.zeros((b, t, n, inputs.value.shape[3]), dtype)),
        ring.varying(jnp.full((b, n, t), -jnp.inf, dtype)),
        ring.varying(inputs.key),
        ring.varying(inputs.value),
    )
    out, lse, _, _ = ring.over_hops(step, start)
    if inputs.sinks is not None:
        sinks = logsumexp(inputs.sinks.astype(dtype), axis=-1)[:, None]  # [1 or n, 1]
        out = out * _per_row(jax.nn.sigmoid(lse - sinks))
    outputs = Outputs(out.astype(inputs.query.dtype), lse)
    return outputs, outputs


def _merged(out: jax.Array, lse: jax.Array, more: jax.Array, more_lse: jax.Array) -> tuple:
    """Two parts of a softmax as one; a part that saw nothing has no weight."""
    total = jnp.logaddexp(lse, more_lse)
    whole = jnp.where(total > -jnp.inf, total, 0.0)  # exp(-inf - 0) is 0, not NaN
    old, new = (_per_row(jnp.exp(x - whole)) for x in (lse, more_lse))
    return out * old + more * new, total


def _per_row(x: jax.Array) -> jax.Array:
    """[b, n, t] -> [b, t, n, 1]."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def backward(
    differentiate: Differentiate,
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: Any,
) -> Inputs:
    """Gradients, shaped like the inputs."""
    ring = _ring(inputs, spec)
    dtype = ring.dtype
    like = lambda x: None if x is None else ring.varying(jnp.zeros(x.shape, dtype))
    add = lambda total, more: None if total is None else total + more

    def step(hop: Any, carry: tuple) -> tuple:
        d_query, d_bias, d_sinks, (key, value), found = carry
        ahead = ring.pass_on((key, value, *found))
        hop_inputs = ring.hop_inputs(hop, key, value)._replace(sinks=inputs.sinks)
        part, ahead = differentiate(hop_inputs, residuals, d_outputs, hop_spec(spec), params, ahead)
        *keys, d_key, d_value = ahead
        d_bias = _add_columns(d_bias, part.bias, ring.source(hop))
        found = (d_key + part.key, d_value + part.value)
        return d_query + part.query, d_bias, add(d_sinks, part.sinks), tuple(keys), found

    start = (
        like(inputs.query),
        like(inputs.bias),
        like(inputs.sinks),
        (ring.varying(inputs.key), ring.varying(inputs.value)),
        (like(inputs.key), like(inputs.value)),
    )
    d_query, d_bias, d_sinks, _, found = ring.over_hops(step, start)
    d_key, d_value = ring.pass_on(found)
    return Inputs(
        _like(d_query, inputs.query),
        _like(d_key, inputs.key),
        _like(d_value, inputs.value),
        bias=_like(d_bias, inputs.bias),
        sinks=_like(d_sinks, inputs.sinks),
        mask=None,
    )


def _like(gradient: Any, x: Any) -> Any:
    return None if gradient is None else gradient.astype(x.dtype)


def _add_columns(total: jax.Array | None, part: Any, source: Any) -> jax.Array | None:
    """The gradient of the bias with a hop's columns added."""
    if total is None or total.shape == part.shape:
        return None if total is None else total + part
    start = source * part.shape[3]
    part = part + lax.dynamic_slice_in_dim(total, start, part.shape[3], axis=3)
    return lax.dynamic_update_slice_in_dim(total, part, start, axis=3)


def hop_spec(spec: Spec) -> flash.Spec:
    """What is static about the attention of a hop."""
    return flash.Spec(softmax_scale=spec.softmax_scale, logits_soft_cap=spec.logits_soft_cap)


def one_hop(inputs: Inputs) -> flash.Inputs:
    """What a hop's attention looks like, for choosing its blocks; masked as the whole."""
    return flash.Inputs(*inputs[:3], mask=inputs.mask)


def params(of_hop: Pass | None, inputs: Inputs, spec: Spec, device: Device) -> Any:
    """What flash attention would choose for one hop."""
    return None if of_hop is None else of_hop.heuristic(one_hop(inputs), hop_spec(spec), device)
