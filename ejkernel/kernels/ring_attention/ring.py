"""Ring attention: keys and values are passed around, queries stay (https://arxiv.org/abs/2310.01889).

There are at most as many hops as devices: those that the mask needs. In each hop a device attends
from its queries to the keys that it holds, and sends them on at the same time. A device that sees
none of these keys computes nothing. Results are combined by their log-sum-exp in float32. In the
backward pass the gradients of keys and values follow them around the ring: those of earlier hops
are transferred while a hop computes its own, and one more transfer brings them to the device that
owns the keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.common.sinks import per_query, share_of_keys
from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.ring_attention.inputs import Hop, Inputs, Outputs, Spec
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.meshes import vary_as
from ejkernel.ops.platform import Device
from ejkernel.types.placement import ShardPositions, placed_rule
from ejkernel.types.rules import Everything, Rule

# The arrays that a hop receives from another device.
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

_UNROLLED = 4  # hops; more of them are a loop, so that the program does not grow with the ring


def wait_for_both(computed: _Computed, incoming: Incoming) -> tuple[_Computed, Incoming]:
    """Both arguments, neither of which is used before both are available.

    Without this a compiler that does not know how long a kernel runs may start the transfer after
    the kernel, and overlap it with the little that remains of the hop.
    """
    return lax.optimization_barrier((computed, incoming)) if incoming else (computed, incoming)


class Ring(NamedTuple):
    """The ring, and the place of this device in it."""

    inputs: Inputs
    spec: Spec
    size: int
    index: Index
    branches: bool = False

    @classmethod
    def of(cls, inputs: Inputs, spec: Spec, branches: bool = False) -> "Ring":
        """The ring of a call; `branches`: each hop is computed in a branch of its own."""
        if spec.axis_name is None:
            return cls(inputs, spec, 1, 0)
        name = spec.axis_name
        return cls(inputs, spec, lax.axis_size(name), lax.axis_index(name), branches)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the results of hops are combined."""
        return jnp.promote_types(self.inputs.query.dtype, jnp.float32)

    @property
    def sinks(self) -> jax.Array | None:
        """The sinks, in the dtype in which their gradients are added."""
        sinks = self.inputs.sinks
        return None if sinks is None else sinks.astype(self.dtype)

    @property
    def rule(self) -> Rule:
        """The mask of the whole sequences."""
        return self.inputs.mask or Everything()

    @property
    def queries(self) -> ShardPositions:
        """Positions of the queries of this device."""
        length = self.inputs.query.shape[1]
        return ShardPositions.of(self.index, self.size, self.spec.placement, length)

    def keys(self, hop: Index) -> ShardPositions:
        """Positions of the keys held in a hop."""
        source = (self.index - hop + self.size) % self.size if self.size > 1 else 0
        length = self.inputs.key.shape[1]
        return ShardPositions.of(source, self.size, self.spec.placement, length)

    def hop_inputs(self, hop: Index, key: jax.Array, value: jax.Array) -> flash.Inputs:
        """The attention of this device's queries to the keys of this hop."""
        query, _, _, bias, _, _, dropout = self.inputs
        rule = self.rule
        if self.size > 1:
            queries, keys = self.queries, self.keys(hop)
            rule = placed_rule(rule, queries, keys)
            if bias is not None and bias.shape[3] > 1:
                bias = keys.take(bias, 3)
            if dropout is not None:
                dropout = dropout._replace(rows=queries.affine(), columns=keys.affine())
        return flash.Inputs(query, key, value, bias=bias, mask=rule, dropout=dropout)

    def needed(self, hop: Hop, rule: Rule) -> jax.Array | None:
        """Whether this device sees keys of a hop, whose rule this is; None if all devices do.

        With `branches` that is no constant even then.
        """
        if self.size == 1:
            return None
        if hop.everyone or isinstance(rule, Everything):
            return jnp.asarray(self.index) >= 0 if self.branches else None
        pieces = len(self.queries.starts)
        lengths = self.inputs.query.shape[1], self.inputs.key.shape[1]
        some, _ = rule.blocks(*lengths, *(x // pieces for x in lengths))
        return some.any()

    def send(self, tree: _Tree, distance: int) -> _Tree:
        """Send to rank + `distance`; receive from rank - `distance`."""
        to = [(i, (i + distance) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.spec.axis_name, to), tree)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops to make; the first attends to the device's own keys."""
        if self.size == 1:
            return (Hop(0, True),)
        return self.spec.hops or tuple(Hop(i, False) for i in range(self.size))

    def over_hops(
        self, step: Callable[[Hop, _Carry, int | None, int | None], _Carry], carry: _Carry
    ) -> tuple[_Carry, int]:
        """`carry = step(hop, carry, before, after)` for every hop, and how far the last one is.

        `before` and `after` are the distances to the hops on either side, None where there is none.
        """
        hops = self.hops
        last = hops[-1].distance
        gaps = [None, *np.diff([hop.distance for hop in hops]).tolist(), None]
        if len(hops) <= _UNROLLED or len(set(gaps[1:-1])) > 1:
            for hop, before, after in zip(hops, gaps[:-1], gaps[1:], strict=True):
                carry = step(hop, carry, before, after)
            return carry, last
        gap, middle = gaps[1], hops[1:-1]
        everyone = all(hop.everyone for hop in middle)
        body = lambda carry, at: (step(Hop(at, everyone), carry, gap, gap), None)
        carry = self.varying(step(hops[0], carry, None, gap))
        at = np.array([hop.distance for hop in middle], np.int32)
        carry, _ = lax.scan(body, carry, jnp.asarray(at))
        return step(hops[-1], carry, gap, None), last

    def varying(self, tree: _Tree) -> _Tree:
        """What a loop over hops may carry: varying over every mesh axis of the call."""
        operands = self.inputs, jnp.asarray(self.index)
        return jax.tree.map(lambda x: vary_as(x, *operands), tree)

    def if_needed(
        self, needed: jax.Array, compute: Callable[[], _Tree], otherwise: Callable[[], _Tree]
    ) -> _Tree:
        """One of two results, of which only one is computed."""
        return lax.cond(needed, lambda: self.varying(compute()), lambda: self.varying(otherwise()))


def forward(
    attend: Attend,
    inputs: Inputs,
    spec: Spec,
    params: FwdParams,
    device: Device,
    branches: bool = False,
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    ring = Ring.of(inputs, spec, branches)
    b, t, n, _ = inputs.query.shape

    def nothing() -> Outputs:
        out = jnp.zeros((b, t, n, inputs.value.shape[3]), ring.dtype)
        return Outputs(out, jnp.full((b, n, t), -jnp.inf, ring.dtype))

    def step(hop: Hop, carry: tuple, before: int | None, after: int | None) -> tuple:
        total, keys = carry
        incoming = () if after is None else ring.send(keys, after)
        hop_inputs = ring.hop_inputs(hop.distance, *keys)
        run = lambda incoming: attend(hop_inputs, hop_spec(spec), params, device, incoming)
        add = lambda part: part if total is None else _combined(total, part)
        needed = ring.needed(hop, hop_inputs.mask or Everything())
        if needed is None:
            part, incoming = run(incoming)
            return add(part), incoming
        otherwise = nothing if total is None else lambda: total
        total = ring.if_needed(needed, lambda: add(run(())[0]), otherwise)
        return wait_for_both(total, incoming)

    start: tuple[Any, Any] = (None, (inputs.key, inputs.value))
    (total, _), _ = ring.over_hops(step, start)
    outputs = with_sinks(total, inputs)
    return outputs, outputs


def with_sinks(total: Outputs, inputs: Inputs) -> Outputs:
    """The results of all keys with the sinks in the denominator, in the dtype of the call."""
    out, lse = total
    if inputs.sinks is not None:
        out = out * per_query(share_of_keys(lse, inputs.sinks))
    return Outputs(out.astype(inputs.query.dtype), lse)


def _combined(total: Outputs, part: Outputs) -> Outputs:
    """Two partial results of a softmax as one; one that saw nothing has no weight."""
    lse = jnp.logaddexp(total.lse, part.lse)
    finite = jnp.where(lse > -jnp.inf, lse, 0.0)  # exp(-inf - 0) is 0, not NaN
    old, new = (per_query(jnp.exp(x.lse - finite)) for x in (total, part))
    return Outputs(total.out * old + part.out * new, lse)


class _Sums(NamedTuple):
    """The gradients that stay on this device."""

    query: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None


def backward(
    differentiate: Differentiate,
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: BwdParams,
    device: Device,
    branches: bool = False,
) -> Inputs:
    """Gradients, shaped like the inputs."""
    ring = Ring.of(inputs, spec, branches)

    def zeros(x: Any) -> Any:
        return None if x is None else ring.varying(jnp.zeros(x.shape, ring.dtype))

    def step(hop: Hop, carry: tuple, before: int | None, after: int | None) -> tuple:
        sums, keys, gradients = carry
        incoming = () if after is None else ring.send(keys, after)
        if before is not None:
            incoming = (*incoming, *ring.send(gradients, before))
        hop_inputs = ring.hop_inputs(hop.distance, *keys)._replace(sinks=ring.sinks)
        run = lambda incoming: differentiate(
            hop_inputs, residuals, d_outputs, hop_spec(spec), params, device, incoming
        )

        def add(part: flash.Inputs) -> _Sums:
            bias = sums.bias
            if bias is not None and part.bias is not None:
                same = bias.shape == part.bias.shape
                bias = bias + part.bias if same else ring.keys(hop.distance).add(bias, part.bias, 3)
            sinks = sums.sinks
            if sinks is not None and part.sinks is not None:
                sinks = sinks + part.sinks
            return _Sums(sums.query + part.query, bias, sinks)

        needed = ring.needed(hop, hop_inputs.mask or Everything())
        if needed is None:
            part, incoming = run(incoming)
            sums, here = add(part), (part.key, part.value)
        else:

            def compute() -> tuple:
                part, _ = run(())
                return add(part), (part.key, part.value)

            otherwise = lambda: (sums, tuple(map(zeros, keys)))
            computed = ring.if_needed(needed, compute, otherwise)
            (sums, here), incoming = wait_for_both(computed, incoming)
        if before is not None:
            here = jax.tree.map(jnp.add, incoming[-2:], here)
        return sums, incoming[:2] if after is not None else (), here

    sums = _Sums(zeros(inputs.query), zeros(inputs.bias), zeros(inputs.sinks))
    carry: tuple[Any, Any, Any] = (sums, (inputs.key, inputs.value), ())
    (sums, _, gradients), last = ring.over_hops(step, carry)
    d_key, d_value = ring.send(gradients, -last) if last else gradients
    return like(flash.Inputs(sums.query, d_key, d_value, sums.bias, sums.sinks, None), inputs)


def like(gradients: flash.Inputs, inputs: Inputs) -> Inputs:
    """Gradients in the dtypes of the inputs."""
    cast = lambda d, x: None if d is None or x is None else d.astype(x.dtype)
    return Inputs(*map(cast, gradients[:5], inputs[:5]), mask=None)  # pyright: ignore[reportArgumentType]


def hop_spec(spec: Spec) -> flash.Spec:
    """The static arguments of the attention of a hop."""
    return flash.Spec(
        softmax_scale=spec.softmax_scale,
        logits_soft_cap=spec.logits_soft_cap,
        dropout_prob=spec.dropout_prob,
    )
