"""The two forms without hops: keys gathered once, and heads exchanged for the sequence.

`all_gather`: a device gathers all keys and values, and attends from its queries to them. Their
gradients are summed over the devices and scattered to their owners. `all_to_all`: a device
exchanges its share of all heads for its heads of all tokens
(https://arxiv.org/abs/2309.14509), and exchanges the result back.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.ring_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.ring_attention.ring import (
    Attend,
    Differentiate,
    Ring,
    hop_spec,
    like,
    with_sinks,
)
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.platform import Device
from ejkernel.types.placement import Share, place, placed_rule, restore
from ejkernel.types.rules import And, Dense, Or, Rule


class _Gathered:
    """The queries of this device and all keys, in the order of their positions."""

    def __init__(self, ring: Ring):
        self.ring = ring
        self.axis: str = ring.spec.axis_name or ""

    def inputs(self) -> flash.Inputs:
        query, key, value, bias, _, _, dropout = self.ring.inputs
        key, value = map(self._whole, (key, value))
        rule = placed_rule(self.ring.rule, self.ring.queries, Share((0,), key.shape[1]))
        if dropout is not None:
            dropout = dropout._replace(rows=self.ring.queries.affine())
        return flash.Inputs(query, key, value, bias=bias, mask=rule, dropout=dropout)

    def of_rows(self, x: Outputs) -> Outputs:
        return x

    def gradients(self, found: flash.Inputs) -> flash.Inputs:
        return found._replace(key=self._scattered(found.key), value=self._scattered(found.value))

    def _whole(self, x: jax.Array) -> jax.Array:
        x = lax.all_gather(x, self.axis, axis=1, tiled=True)
        return restore(x, self.ring.size, self.ring.spec.placement, 1)

    def _scattered(self, x: jax.Array) -> jax.Array:
        x = place(x, self.ring.size, self.ring.spec.placement, 1)
        return lax.psum_scatter(x, self.axis, scatter_dimension=1, tiled=True)


class _Exchanged:
    """All tokens, in the order of their positions, and the heads of this device."""

    def __init__(self, ring: Ring):
        self.ring = ring
        self.axis: str = ring.spec.axis_name or ""

    def inputs(self) -> flash.Inputs:
        query, key, value, bias, _, _, dropout = self.ring.inputs
        query, key, value = (self._to_heads(x, 2, 1) for x in (query, key, value))
        if dropout is not None:
            dropout = dropout._replace(head_index=self._own(dropout.head_index, 0))
        rule = _heads_of(self.ring.rule, self._own)
        return flash.Inputs(query, key, value, self._bias(bias), mask=rule, dropout=dropout)

    def of_rows(self, x: Outputs) -> Outputs:
        """Results of this device's tokens as results of its heads."""
        return Outputs(self._to_heads(x.out, 2, 1), self._to_heads(x.lse, 1, 2))

    def of_heads(self, x: Outputs) -> Outputs:
        """Results of this device's heads as results of its tokens."""
        return Outputs(self._to_tokens(x.out, 2, 1), self._to_tokens(x.lse, 1, 2))

    def gradients(self, found: flash.Inputs) -> flash.Inputs:
        # No device adds to another's, so that rounding before the exchange halves what is sent.
        given = self.ring.inputs
        rounded = (d.astype(x.dtype) for d, x in zip(found[:3], given[:3], strict=True))
        query, key, value = (self._to_tokens(x, 2, 1) for x in rounded)
        return flash.Inputs(
            query,
            key,
            value,
            bias=self._bias_gradient(found.bias),
            sinks=self._among_all(found.sinks, self.ring.inputs.sinks, 0),
        )

    def _to_heads(self, x: jax.Array, heads: int, tokens: int) -> jax.Array:
        x = lax.all_to_all(x, self.axis, heads, tokens, tiled=True)
        return restore(x, self.ring.size, self.ring.spec.placement, tokens)

    def _to_tokens(self, x: jax.Array, heads: int, tokens: int) -> jax.Array:
        x = place(x, self.ring.size, self.ring.spec.placement, tokens)
        return lax.all_to_all(x, self.axis, tokens, heads, tiled=True)

    def _own(self, x: jax.Array, axis: int) -> jax.Array:
        """The heads of this device, from an axis of all."""
        if x.shape[axis] == 1:
            return x
        count = x.shape[axis] // self.ring.size
        return lax.dynamic_slice_in_dim(x, self.ring.index * count, count, axis)

    def sinks(self) -> jax.Array | None:
        """The sinks of this device's heads."""
        sinks = self.ring.sinks
        return None if sinks is None else self._own(sinks, 0)

    def _among_all(self, part: Any, whole: Any, axis: int) -> Any:
        """The gradient of an array that all devices have: what this one adds to it."""
        if part is None or whole is None or whole.shape[axis] == 1:
            return part
        shape = (*part.shape[:axis], whole.shape[axis], *part.shape[axis + 1 :])
        start = self.ring.index * part.shape[axis]
        return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), part, start, axis)

    def _bias(self, bias: jax.Array | None) -> jax.Array | None:
        if bias is None or bias.shape[2] == 1:
            return None if bias is None else self._own(bias, 1)
        if bias.shape[1] > 1:
            return self._to_heads(bias, 1, 2)
        whole: jax.Array = lax.all_gather(bias, self.axis, axis=2, tiled=True)
        return restore(whole, self.ring.size, self.ring.spec.placement, 2)

    def _bias_gradient(self, found: jax.Array | None) -> jax.Array | None:
        bias = self.ring.inputs.bias
        if found is None or bias is None or bias.shape[2] == 1:
            return self._among_all(found, bias, 1)
        if bias.shape[1] > 1:
            return self._to_tokens(found.astype(bias.dtype), 1, 2)
        found = place(found, self.ring.size, self.ring.spec.placement, 2)
        return lax.psum_scatter(found, self.axis, scatter_dimension=2, tiled=True)


def _heads_of(rule: Rule, own: Any) -> Rule:
    """The rule of some of the heads."""
    if isinstance(rule, And | Or):
        return type(rule)(tuple(_heads_of(part, own) for part in rule.rules))
    if isinstance(rule, Dense):
        return Dense(own(rule.mask, rule.mask.ndim - 3))
    return rule


def forward(
    attend: Attend, inputs: Inputs, spec: Spec, params: FwdParams, device: Device
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals; `spec.method` says how."""
    ring = Ring.of(inputs, spec)
    if spec.method == "all_gather":
        part, _ = attend(_Gathered(ring).inputs(), hop_spec(spec), params, device, ())
        outputs = with_sinks(part, inputs)
        return outputs, outputs
    exchanged = _Exchanged(ring)
    part, _ = attend(exchanged.inputs(), hop_spec(spec), params, device, ())
    part = with_sinks(part, inputs._replace(sinks=exchanged.sinks()))
    outputs = exchanged.of_heads(part)
    return outputs, outputs


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
    ring = Ring.of(inputs, spec)
    if spec.method == "all_gather":
        form: _Gathered | _Exchanged = _Gathered(ring)
        sinks = ring.sinks
    else:
        form = _Exchanged(ring)
        sinks = form.sinks()
    part, _ = differentiate(
        form.inputs()._replace(sinks=sinks),
        form.of_rows(residuals),
        form.of_rows(d_outputs),
        hop_spec(spec),
        params,
        device,
        (),
    )
    return like(form.gradients(part), inputs)
