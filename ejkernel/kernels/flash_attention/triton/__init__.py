"""Flash attention on NVIDIA GPUs since Ampere, in Triton."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.sinks import per_sink, share_of_keys
from ejkernel.kernels.common.triton import bridge as triton_bridge
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.triton import backward as triton_gpu_backward
from ejkernel.kernels.flash_attention.triton import bias_grad as triton_gpu_bias
from ejkernel.kernels.flash_attention.triton import forward as triton_gpu_forward
from ejkernel.kernels.flash_attention.triton.configs import (
    Shape,
    backward_pairs,
    backward_params,
    forward_params,
    forward_shapes,
)
from ejkernel.kernels.flash_attention.triton.operands import padded, plan
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_LOG2_E = 1.4426950408889634
_WIDEST = 256  # head dim


def run_forward(
    inputs: Inputs, spec: Spec, params: FwdParams | None, device: Device
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    shape = forward_shape(inputs, spec, params or FwdParams(), device)
    outputs = triton_gpu_forward.forward(inputs, spec, *shape, device)
    return outputs, outputs


def run_backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: BwdParams | None,
    device: Device,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    by_keys, by_queries = backward_shapes(inputs, spec, params or BwdParams(), device)
    terms = row_terms(inputs, residuals, d_outputs)
    d_out = d_outputs.out.astype(inputs.query.dtype)
    columns = plan(inputs, spec, by_keys.block_q, by_keys.block_k, columns=True)
    rows = plan(inputs, spec, by_queries.block_q, by_queries.block_k)
    d_key, d_value = triton_gpu_backward.keys_and_values(
        inputs, d_out, terms, columns, *by_keys[2:], device
    )
    terms[0] = triton_bridge.interpreted_after(terms[0], d_key)
    d_query, taken = triton_gpu_backward.queries(
        inputs, d_out, terms, rows, *by_queries[2:], device
    )
    d_bias = d_sinks = None
    if inputs.bias is not None:
        terms[0] = triton_bridge.interpreted_after(terms[0], d_query)
        d_bias = triton_gpu_bias.bias_gradient(inputs, d_out, terms, rows, *by_queries[2:], device)
    if inputs.sinks is not None:
        d_sinks = per_sink(-(taken * (1.0 - terms[2])).sum((0, 2)), inputs.sinks)
    return Inputs(d_query, d_key, d_value, bias=d_bias, sinks=d_sinks, mask=None)


def row_terms(inputs: Inputs, residuals: Outputs, d_outputs: Outputs) -> list[jax.Array]:
    """What the logits of a row share: lse in base 2, delta and, with sinks, w, each [b, n, t].

    With w the share of a row's weights that the sinks leave to the keys (1 without sinks),
    d_logits = exp(logits - lse) * (w * d_weights - delta).
    """
    lse, d_lse = residuals.lse, d_outputs.lse
    products = residuals.out.astype(jnp.float32) * d_outputs.out.astype(jnp.float32)
    delta = jnp.swapaxes(products.sum(-1), 1, 2)
    seen = lse > -jnp.inf
    # For a row that sees nothing exp2(logits - inf) is 0, whatever the logits.
    safe_lse = jnp.where(seen, lse * _LOG2_E, jnp.inf)
    if inputs.sinks is None:
        return [safe_lse, delta - d_lse, jnp.zeros((16,), jnp.float32)]
    share = share_of_keys(lse, inputs.sinks)
    return [safe_lse, share * delta - d_lse, share]


def forward_shape(inputs: Inputs, spec: Spec, params: FwdParams, device: Device) -> Shape:
    """What was asked for, in sizes that a tile can have; the rest as guessed."""
    guess = forward_shapes(inputs, spec, device)[0]
    return Shape(
        padded(params.q_blocksize or guess.block_q),
        padded(params.kv_blocksize or guess.block_k),
        params.num_warps or guess.warps,
        params.num_stages or guess.stages,
    )


def backward_shapes(
    inputs: Inputs, spec: Spec, params: BwdParams, device: Device
) -> tuple[Shape, Shape]:
    """The same for the kernels of keys and values, and of queries."""
    guess = backward_pairs(inputs, spec, device)[0]
    launch = (params.num_warps or guess.warps, params.num_stages or guess.stages)
    asked = (params.q_blocksize, params.kv_blocksize), (params.blocksize_m, params.blocksize_n)
    by_keys, by_queries = (
        Shape(padded(given[0] or own[0]), padded(given[1] or own[1]), *launch)
        for given, own in zip(asked, (guess.keys, guess.queries), strict=True)
    )
    return by_keys, by_queries


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why this device cannot run the kernels on this call."""
    dtypes = {np.dtype(x.dtype) for x in inputs[:3]}
    if len(dtypes) > 1:
        return "takes query, key and value of one dtype"
    if (widest := max(inputs.query.shape[3], inputs.value.shape[3])) > _WIDEST:
        return f"takes head dims up to {_WIDEST} and this one is {widest}"
    return triton_bridge.why_not(device, *dtypes)


_FEATURES = frozenset(
    {
        "causal",
        "window",
        "positions",
        "segments",
        "token_types",
        "chunks",
        "lengths",
        "blocks",
        "mask",
        "union",
        "bias",
        "sinks",
        "dropout",
        "dropout_prob",
        "logits_soft_cap",
    }
)

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=lambda *call: forward_params(forward_shapes(*call)[0]),
        candidates=lambda *call: [forward_params(shape) for shape in forward_shapes(*call)],
    ),
    backward=Pass(
        run=run_backward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=lambda *call: backward_params(backward_pairs(*call)[0]),
        candidates=lambda *call: [backward_params(pair) for pair in backward_pairs(*call)],
    ),
)
