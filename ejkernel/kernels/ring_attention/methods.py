"""The forms of ring attention behind one function: which one a call takes, and its shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.ring_attention import exchange, ring
from ejkernel.kernels.ring_attention.cost import Sizes, cheapest
from ejkernel.kernels.ring_attention.inputs import Inputs, Outputs, Spec
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Pass
from ejkernel.ops.meshes import bound_axis_size
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Band, Everything

# What the kernels of a hop support, and what is done around them.
KERNEL_FEATURES = frozenset(
    {
        "axis_name",
        "bias",
        "causal",
        "chunks",
        "dropout",
        "dropout_prob",
        "hops",
        "lengths",
        "logits_soft_cap",
        "mask",
        "method",
        "placement",
        "segments",
        "sinks",
        "token_types",
        "union",
        "window",
    }
)


def chosen(inputs: Inputs, spec: Spec, device: Device) -> Spec:
    """The call with its method: the given one, or the cheapest.

    Raises:
        ValueError: heads do not divide for an exchange of heads.
    """
    size = 1 if spec.axis_name is None else bound_axis_size(spec.axis_name) or 1
    if size == 1:
        return dataclasses.replace(spec, method="ring")
    heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
    if spec.method == "all_to_all" and (heads % size or kv_heads % size):
        raise ValueError(
            f"ring_attention: method='all_to_all' needs heads and kv_heads that are multiples of "
            f"the {size} devices of {spec.axis_name!r}, a device has {heads} and {kv_heads}."
        )
    if spec.method == "auto":
        return dataclasses.replace(spec, method=cheapest(_sizes(inputs, spec, size), device))
    return spec


def _sizes(inputs: Inputs, spec: Spec, size: int) -> Sizes:
    """The call as the cost model sees it."""
    batch, queries, heads, head_dim = inputs.query.shape
    _, keys, kv_heads, value_dim = inputs.value.shape
    rules = (inputs.mask or Everything()).parts()
    causal = any(isinstance(x, Band) and x.high is not None for x in rules)
    return Sizes(
        shards=size,
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim + value_dim,
        itemsize=inputs.query.dtype.itemsize,
        hops=len(spec.hops) if spec.hops else size,
        causal=causal,
        balanced=spec.placement != "contiguous",
    )


def forward(
    attend: ring.Attend,
    inputs: Inputs,
    spec: Spec,
    params: FwdParams,
    device: Device,
    branches: bool = False,
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals; `branches`: see `Ring.of`."""
    spec = chosen(inputs, spec, device)
    if spec.method == "ring":
        return ring.forward(attend, inputs, spec, params, device, branches)
    return exchange.forward(attend, inputs, spec, params, device)


def backward(
    differentiate: ring.Differentiate,
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: BwdParams,
    device: Device,
    branches: bool = False,
) -> Inputs:
    """Gradients, shaped like the inputs; `branches`: see `Ring.of`."""
    spec = chosen(inputs, spec, device)
    if spec.axis_name is not None:
        # Keep XLA from holding received keys until the backward pass.
        (key, value), d_outputs = lax.optimization_barrier((inputs[1:3], d_outputs))
        inputs = inputs._replace(key=key, value=value)
    given = (differentiate, inputs, residuals, d_outputs, spec, params, device)
    return ring.backward(*given, branches) if spec.method == "ring" else exchange.backward(*given)


def one_call(inputs: Inputs, spec: Spec, device: Device) -> flash.Inputs:
    """The shapes of one call of flash attention, with the mask of the whole."""
    spec = chosen(inputs, spec, device)
    size = 1 if spec.axis_name is None else bound_axis_size(spec.axis_name) or 1

    def shape(x: Any, tokens: int, heads: int) -> Any:
        sizes = (x.shape[0], x.shape[1] * tokens, x.shape[2] // heads, x.shape[3])
        return jax.ShapeDtypeStruct(sizes, x.dtype)

    of_query, of_key = {
        "ring": ((1, 1), (1, 1)),
        "all_gather": ((1, 1), (size, 1)),
        "all_to_all": ((size, size), (size, size)),
    }[spec.method]
    query = shape(inputs.query, *of_query)
    key, value = (shape(x, *of_key) for x in (inputs.key, inputs.value))
    bias: Any = inputs.bias
    if bias is not None:
        wanted = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        sizes = (1 if x == 1 else full for x, full in zip(bias.shape, wanted, strict=True))
        bias = jax.ShapeDtypeStruct(tuple(sizes), bias.dtype)
    return flash.Inputs(query, key, value, bias=bias, mask=inputs.mask, dropout=inputs.dropout)


def heuristic(
    of_call: Pass | None, inputs: Inputs, spec: Spec, device: Device
) -> FwdParams | BwdParams | None:
    """The parameters that flash attention would choose for one call."""
    if of_call is None:
        return None
    return of_call.heuristic(one_call(inputs, spec, device), ring.hop_spec(spec), device)


def why_not(of_call: Pass, inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why flash attention does not support one call."""
    return of_call.refusal(one_call(inputs, spec, device), ring.hop_spec(spec), device)


def pass_of(of_call: Pass | None, run: Callable[..., Any], **options: Any) -> Pass:
    """Build a ring pass from a flash-attention pass."""
    return Pass(run=run, heuristic=functools.partial(heuristic, of_call), **options)
