"""Ring attention: keys and values are passed around, queries stay (https://arxiv.org/abs/2310.01889).

There are as many hops as devices. In each hop a device attends from its queries to the keys that it
holds, and sends them to its neighbour at the same time. Results are combined by their log-sum-exp
in float32. In the backward pass the gradients of keys and values follow them around the ring: those
of earlier hops are transferred while a hop computes its own, and one more transfer brings them to
the device that owns the keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp

from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.ring_attention.inputs import Inputs, Outputs, Spec
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Pass
from ejkernel.ops.meshes import varying_axes
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Everything

# The arrays that a hop receives from its neighbour.
Incoming = tuple[jax.Array, ...]
# The attention of one hop and its gradients, in float32. Both take the arrays that are in transfer
# and return them from `wait_for_both`, so that the transfer overlaps the computation.
Attend = Callable[
    [flash.Inputs, flash.Spec, FwdParams, Device, Incoming], tuple[flash.Outputs, Incoming]
]
Differentiate = Callable[
    [flash.Inputs, Outputs, Outputs, flash.Spec, BwdParams, Device, Incoming],
    tuple[flash.Inputs, Incoming],
]
_Computed = TypeVar("_Computed")
_Carry = TypeVar("_Carry")
_Tree = TypeVar("_Tree")


def wait_for_both(computed: _Computed, incoming: Incoming) -> tuple[_Computed, Incoming]:
    """Both arguments, neither of which is used before both are available.

    Without this a compiler that does not know how long a kernel runs may start the transfer after
    the kernel, and overlap it with the little that remains of the hop.
    """
    return lax.optimization_barrier((computed, incoming))


class _Ring(NamedTuple):
    """The ring, and the place of this device in it."""

    inputs: Inputs
    spec: Spec
    size: int
    index: Index

    def source(self, hop: Index) -> Index:
        """The device whose keys are here in this hop."""
        return lax.rem(self.index - hop + self.size, self.size)

    def hop_inputs(self, hop: Index, key: jax.Array, value: jax.Array) -> flash.Inputs:
        """The attention of this device's queries to the keys of this hop."""
        t, s = self.inputs.query.shape[1], key.shape[1]
        bias, rule = self.inputs.bias, self.inputs.mask or Everything()
        if self.size > 1:
            source = self.source(hop)
            rule = rule.slice(self.index * t, t, source * s, s)
            if bias is not None and bias.shape[3] > 1:
                bias = lax.dynamic_slice_in_dim(bias, source * s, s, axis=3)
        return flash.Inputs(self.inputs.query, key, value, bias=bias, mask=rule)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the results of hops are combined."""
        return jnp.promote_types(self.inputs.query.dtype, jnp.float32)

    def pass_on(self, tree: _Tree) -> _Tree:
        """The arrays of the neighbour; it gets ours."""
        if self.size == 1:
            return tree
        to = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.spec.axis_name, to), tree)

    def over_hops(self, step: Callable[[Index, _Carry], _Carry], carry: _Carry) -> _Carry:
        if self.size == 1:
            return step(0, carry)
        hops = jnp.arange(self.size, dtype=jnp.int32)
        return lax.scan(lambda carry, hop: (step(hop, carry), None), carry, hops)[0]

    def varying(self, x: jax.Array) -> jax.Array:
        """A constant that a loop over hops may carry: varying over every mesh axis of the call."""
        leaves = (*jax.tree.leaves(self.inputs), jnp.asarray(self.index))
        missing = frozenset().union(*map(varying_axes, leaves)) - varying_axes(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _ring(inputs: Inputs, spec: Spec) -> _Ring:
    if spec.axis_name is None:
        return _Ring(inputs, spec, 1, 0)
    return _Ring(inputs, spec, lax.axis_size(spec.axis_name), lax.axis_index(spec.axis_name))


def forward(
    attend: Attend, inputs: Inputs, spec: Spec, params: FwdParams, device: Device
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    ring = _ring(inputs, spec)
    dtype = ring.dtype
    b, t, n, _ = inputs.query.shape

    def step(hop: Index, carry: tuple) -> tuple:
        out, lse, key, value = carry
        incoming = ring.pass_on((key, value))
        hop_inputs = ring.hop_inputs(hop, key, value)
        part, incoming = attend(hop_inputs, hop_spec(spec), params, device, incoming)
        out, lse = _combined(out, lse, part.out, part.lse)
        return out, lse, *incoming

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


def _combined(
    out: jax.Array, lse: jax.Array, more: jax.Array, more_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two partial results of a softmax as one; one that saw nothing has no weight."""
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
    params: BwdParams,
    device: Device,
) -> Inputs:
    """Gradients, shaped like the inputs."""
    ring = _ring(inputs, spec)
    dtype = ring.dtype
    like = lambda x: None if x is None else ring.varying(jnp.zeros(x.shape, dtype))
    add = lambda total, more: None if total is None else total + more

    def step(hop: Index, carry: tuple) -> tuple:
        d_query, d_bias, d_sinks, (key, value), gradients = carry
        incoming = ring.pass_on((key, value, *gradients))
        hop_inputs = ring.hop_inputs(hop, key, value)._replace(sinks=inputs.sinks)
        part, incoming = differentiate(
            hop_inputs, residuals, d_outputs, hop_spec(spec), params, device, incoming
        )
        *keys, d_key, d_value = incoming
        d_bias = _add_columns(d_bias, part.bias, ring.source(hop))
        gradients = (d_key + part.key, d_value + part.value)
        return d_query + part.query, d_bias, add(d_sinks, part.sinks), tuple(keys), gradients

    start = (
        like(inputs.query),
        like(inputs.bias),
        like(inputs.sinks),
        (ring.varying(inputs.key), ring.varying(inputs.value)),
        (like(inputs.key), like(inputs.value)),
    )
    d_query, d_bias, d_sinks, _, gradients = ring.over_hops(step, start)
    d_key, d_value = ring.pass_on(gradients)
    return Inputs(
        _like(d_query, inputs.query),
        _like(d_key, inputs.key),
        _like(d_value, inputs.value),
        bias=_like(d_bias, inputs.bias),
        sinks=_like(d_sinks, inputs.sinks),
        mask=None,
    )


def _like(gradient: jax.Array | None, x: jax.Array | None) -> Any:
    return None if gradient is None or x is None else gradient.astype(x.dtype)


def _add_columns(
    total: jax.Array | None, part: jax.Array | None, source: Index
) -> jax.Array | None:
    """The gradient of the bias with a hop's columns added."""
    if total is None or part is None:
        return None
    if total.shape == part.shape:
        return total + part
    start = source * part.shape[3]
    part = part + lax.dynamic_slice_in_dim(total, start, part.shape[3], axis=3)
    return lax.dynamic_update_slice_in_dim(total, part, start, axis=3)


def hop_spec(spec: Spec) -> flash.Spec:
    """The static arguments of the attention of a hop."""
    return flash.Spec(softmax_scale=spec.softmax_scale, logits_soft_cap=spec.logits_soft_cap)


def one_hop(inputs: Inputs) -> flash.Inputs:
    """The attention of a hop, for choosing its blocks; with the mask of the whole."""
    return flash.Inputs(*inputs[:3], mask=inputs.mask)


def heuristic(
    of_hop: Pass | None, inputs: Inputs, spec: Spec, device: Device
) -> FwdParams | BwdParams | None:
    """The parameters that flash attention would choose for one hop."""
    return None if of_hop is None else of_hop.heuristic(one_hop(inputs), hop_spec(spec), device)
