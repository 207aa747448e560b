"""The two methods without hops: keys gathered once, and heads exchanged for the sequence.

`all_gather`: a device gathers all keys and values, and attends from its queries to them. Their
gradients are summed over the devices and scattered to their owners. `all_to_all`: a device
exchanges its share of all heads for its heads of all tokens
(https://arxiv.org/abs/2309.14509), and exchanges the result back.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.refs import Index
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
from ejkernel.types.placement import Placement, ShardPositions, place, placed_rule, restore
from ejkernel.types.rules import And, Dense, Everything, Or, Rule


class _SplitSequence(NamedTuple):
    """A mesh axis that splits sequences; whole sequences are in the order of their positions."""

    axis_name: str
    size: int
    placement: Placement

    @classmethod
    def of(cls, ring: Ring) -> "_SplitSequence":
        return cls(ring.spec.axis_name or "", ring.size, ring.spec.placement)

    def gather(self, x: jax.Array, tokens: int) -> jax.Array:
        """Axis `tokens` of all devices."""
        x = lax.all_gather(x, self.axis_name, axis=tokens, tiled=True)
        return restore(x, self.size, self.placement, tokens)

    def scatter(self, x: jax.Array, tokens: int) -> jax.Array:
        """The sum over the devices of what they have for all tokens, each its share."""
        x = place(x, self.size, self.placement, tokens)
        return lax.psum_scatter(x, self.axis_name, scatter_dimension=tokens, tiled=True)

    def to_heads(self, x: jax.Array, heads: int, tokens: int) -> jax.Array:
        """This device's heads of all tokens, from all heads of its tokens."""
        x = lax.all_to_all(x, self.axis_name, heads, tokens, tiled=True)
        return restore(x, self.size, self.placement, tokens)

    def to_tokens(self, x: jax.Array, heads: int, tokens: int) -> jax.Array:
        """The inverse of `to_heads`."""
        x = place(x, self.size, self.placement, tokens)
        return lax.all_to_all(x, self.axis_name, tokens, heads, tiled=True)


class _Gathered(NamedTuple):
    """The queries of this device and all keys."""

    given: Inputs
    queries: ShardPositions
    sequence: _SplitSequence

    def inputs(self) -> flash.Inputs:
        query, key, value, bias, _, mask, dropout = self.given
        key, value = (self.sequence.gather(x, 1) for x in (key, value))
        keys = ShardPositions((0,), key.shape[1])
        rule = placed_rule(mask or Everything(), self.queries, keys)
        if dropout is not None:
            dropout = dropout._replace(rows=self.queries.affine())
        return flash.Inputs(query, key, value, bias=bias, mask=rule, dropout=dropout)

    def of_rows(self, x: Outputs) -> Outputs:
        return x

    def gradients(self, found: flash.Inputs) -> flash.Inputs:
        key, value = (self.sequence.scatter(x, 1) for x in (found.key, found.value))
        return found._replace(key=key, value=value)


class _Exchanged(NamedTuple):
    """All tokens and the heads of this device, which is number `index`."""

    given: Inputs
    index: Index
    sequence: _SplitSequence

    def inputs(self) -> flash.Inputs:
        query, key, value, bias, _, mask, dropout = self.given
        query, key, value = (self.sequence.to_heads(x, 2, 1) for x in (query, key, value))
        if dropout is not None:
            dropout = dropout._replace(head_index=self.own(dropout.head_index, 0))
        rule = _heads_of(mask or Everything(), self.own)
        return flash.Inputs(query, key, value, self._bias(bias), mask=rule, dropout=dropout)

    def of_rows(self, x: Outputs) -> Outputs:
        """Results of this device's tokens as results of its heads."""
        return Outputs(self.sequence.to_heads(x.out, 2, 1), self.sequence.to_heads(x.lse, 1, 2))

    def of_heads(self, x: Outputs) -> Outputs:
        """Results of this device's heads as results of its tokens."""
        return Outputs(self.sequence.to_tokens(x.out, 2, 1), self.sequence.to_tokens(x.lse, 1, 2))

    def gradients(self, found: flash.Inputs) -> flash.Inputs:
        # `all_to_all` sums nothing, so rounding first halves the traffic.
        rounded = (d.astype(x.dtype) for d, x in zip(found[:3], self.given[:3], strict=True))
        query, key, value = (self.sequence.to_tokens(x, 2, 1) for x in rounded)
        return flash.Inputs(
            query,
            key,
            value,
            bias=self._bias_gradient(found.bias),
            sinks=self._among_all(found.sinks, self.given.sinks, 0),
        )

    def own(self, x: jax.Array, axis: int) -> jax.Array:
        """The heads of this device, from an axis of all."""
        if x.shape[axis] == 1:
            return x
        count = x.shape[axis] // self.sequence.size
        return lax.dynamic_slice_in_dim(x, self.index * count, count, axis)

    def _among_all(self, part: Any, whole: Any, axis: int) -> Any:
        """The gradient of an array that all devices have: what this one adds to it."""
        if part is None or whole is None or whole.shape[axis] == 1:
            return part
        shape = (*part.shape[:axis], whole.shape[axis], *part.shape[axis + 1 :])
        start = self.index * part.shape[axis]
        return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), part, start, axis)

    def _bias(self, bias: jax.Array | None) -> jax.Array | None:
        if bias is None or bias.shape[2] == 1:
            return None if bias is None else self.own(bias, 1)
        if bias.shape[1] > 1:
            return self.sequence.to_heads(bias, 1, 2)
        return self.sequence.gather(bias, 2)

    def _bias_gradient(self, found: jax.Array | None) -> jax.Array | None:
        bias = self.given.bias
        if found is None or bias is None or bias.shape[2] == 1:
            return self._among_all(found, bias, 1)
        if bias.shape[1] > 1:
            return self.sequence.to_tokens(found.astype(bias.dtype), 1, 2)
        return self.sequence.scatter(found, 2)


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
        gathered = _Gathered(inputs, ring.queries, _SplitSequence.of(ring))
        part, _ = attend(gathered.inputs(), hop_spec(spec), params, device, ())
        outputs = with_sinks(part, inputs)
        return outputs, outputs
    exchanged = _Exchanged(inputs, ring.index, _SplitSequence.of(ring))
    part, _ = attend(exchanged.inputs(), hop_spec(spec), params, device, ())
    sinks = None if ring.sinks is None else exchanged.own(ring.sinks, 0)
    part = with_sinks(part, inputs._replace(sinks=sinks))
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
    sequence, sinks = _SplitSequence.of(ring), ring.sinks
    if spec.method == "all_gather":
        layout: _Gathered | _Exchanged = _Gathered(inputs, ring.queries, sequence)
    else:
        layout = _Exchanged(inputs, ring.index, sequence)
        sinks = None if sinks is None else layout.own(sinks, 0)
    part, _ = differentiate(
        layout.inputs()._replace(sinks=sinks),
        layout.of_rows(residuals),
        layout.of_rows(d_outputs),
        hop_spec(spec),
        params,
        device,
        (),
    )
    return like(layout.gradients(part), inputs)
