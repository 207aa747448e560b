"""Native sparse attention on NVIDIA GPUs since Ampere, in Triton.

The selected branch has kernels of its own: `lists` finds the blocks of each tile of tokens and the
tokens of each block, `forward` and `backward` visit them. The other branches are calls of flash
attention.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import triton as flash_triton
from ejkernel.kernels.native_sparse_attention import geometry
from ejkernel.kernels.native_sparse_attention.branches import (
    dense_branches,
    gated,
    gated_sum,
    gates_of,
)
from ejkernel.kernels.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel.kernels.native_sparse_attention.inputs import (
    Branch,
    Inputs,
    Outputs,
    Residuals,
    Spec,
)
from ejkernel.kernels.native_sparse_attention.triton.backward import (
    keys_and_values_backward,
    queries_backward,
    row_terms,
)
from ejkernel.kernels.native_sparse_attention.triton.configs import (
    MAX_HEAD_DIM,
    SelectedTileConfig,
    backward_configs,
    forward_configs,
    from_params,
    keys_config,
    to_params,
)
from ejkernel.kernels.native_sparse_attention.triton.forward import forward
from ejkernel.kernels.native_sparse_attention.triton.lists import key_lists, tile_lists
from ejkernel.kernels.native_sparse_attention.triton.operands import key_blocks, static_arguments
from ejkernel.ops.implementation import Implementation, Pass, yields_to_xla
from ejkernel.ops.platform import Device

_FEATURES = frozenset({"g_cmp", "g_slc", "g_swa", "cu_seqlens", "sliding_window", "traced_window"})


def run_forward(
    inputs: Inputs, spec: Spec, params: NativeSparseAttentionConfig, device: Device
) -> tuple[Outputs, Residuals]:
    """The gated sum of the branches, and the branches."""
    config = from_params(params, inputs, spec)
    static = static_arguments(inputs, spec, config)
    lists = tile_lists(inputs, key_blocks(inputs, spec), static, device)
    selected = forward(inputs, lists, static, config, device)

    at = geometry.tokens(inputs.query.shape[1], inputs.cu_seqlens)
    cleaned = geometry.clean(inputs, at)
    others: list[Branch | None] = []
    run = functools.partial(_flash_forward, device=device)
    for dense in dense_branches(cleaned, at, spec):
        if dense is None:
            others.append(None)
            continue
        dense = dense._replace(inputs=_after(dense.inputs, [selected, *others]))
        others.append(dense.forward(spec, run))
    residuals = Residuals(selected, *others)
    return gated_sum(cleaned, residuals), residuals


def run_backward(
    inputs: Inputs,
    residuals: Residuals,
    d_outputs: Outputs,
    spec: Spec,
    params: NativeSparseAttentionConfig,
    device: Device,
) -> Inputs:
    """Gradients, shaped like the inputs."""
    at = geometry.tokens(inputs.query.shape[1], inputs.cu_seqlens)
    cleaned = geometry.clean(inputs, at)
    d_out = d_outputs.out.astype(jnp.float32)
    if inputs.cu_seqlens is not None:
        d_out = geometry.zero_outside(d_out, at)
    dense = dense_branches(cleaned, at, spec)
    # Gradients of several branches are summed before they are rounded.
    alone = all(x is None for x in dense)
    dtype = inputs.query.dtype if alone else jnp.float32
    flash_backward = functools.partial(_flash_backward, device=device)

    d_gates, totals = [], []
    for gate, branch, call in zip(gates_of(cleaned), residuals, (None, *dense), strict=True):
        if branch is None:
            d_gates.append(None if gate is None else jnp.zeros_like(gate))
            continue
        d_gates.append(None if gate is None else (d_out * branch.out).sum(-1))
        d_branch = gated(gate, d_out).astype(inputs.query.dtype)
        if call is None:
            totals = _selected_backward(cleaned, branch, d_branch, spec, params, dtype, device)
        else:
            call = call._replace(inputs=_after(call.inputs, totals))
            pulled = call.backward(branch, d_branch, spec, flash_backward)
            totals = [x + d.astype(dtype) for x, d in zip(totals, pulled, strict=True)]

    g_slc, g_cmp, g_swa = d_gates
    gradients = (*totals, None, g_cmp, g_slc, g_swa, None, None, None)
    return Inputs(
        *(None if d is None else d.astype(x.dtype) for d, x in zip(gradients, inputs, strict=True))  # pyright: ignore
    )


def _selected_backward(
    inputs: Inputs,
    branch: Branch,
    d_out: jax.Array,
    spec: Spec,
    params: NativeSparseAttentionConfig,
    dtype: DTypeLike,
    device: Device,
) -> list[jax.Array]:
    """Gradients of query, key and value."""
    config = from_params(params, inputs, spec)
    static, blocks = static_arguments(inputs, spec, config), key_blocks(inputs, spec)
    terms = row_terms(branch, d_out)
    lists = tile_lists(inputs, blocks, static, device)
    d_query = queries_backward(inputs, d_out, terms, lists, static, config, dtype, device)
    terms = terms._replace(lse=bridge.interpreted_after(terms.lse, d_query))
    inverse = key_lists(inputs, blocks, static)
    d_key, d_value = keys_and_values_backward(
        inputs, d_out, terms, inverse, blocks, static, keys_config(config, inputs), dtype, device
    )
    return [d_query, d_key, d_value]


def _flash_forward(inputs: flash.Inputs, spec: flash.Spec, device: Device) -> flash.Outputs:
    return flash_triton.run_forward(inputs, spec, None, device)[0]


def _flash_backward(
    inputs: flash.Inputs,
    outputs: flash.Outputs,
    d_outputs: flash.Outputs,
    spec: flash.Spec,
    device: Device,
) -> flash.Inputs:
    return flash_triton.run_backward(inputs, outputs, d_outputs, spec, None, device)


def _after(inputs: flash.Inputs, earlier: object) -> flash.Inputs:
    """The inputs of a kernel that the interpreter runs after others."""
    last = jax.tree.leaves(earlier)[-1]
    return inputs._replace(query=bridge.interpreted_after(inputs.query, last))


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support a call, or None."""
    dtypes = {np.dtype(x.dtype) for x in inputs[:3]}
    if len(dtypes) > 1:
        return "takes query, key and value of one dtype"
    if (head_dim := max(inputs.query.shape[3], inputs.value.shape[3])) > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM} and this one is {head_dim}"
    return bridge.why_not(device, *dtypes)


def _pass(run: Callable[..., Any], configs: Callable[..., list[SelectedTileConfig]]) -> Pass:
    choices = lambda inputs, spec, device: [
        to_params(config, spec) for config in configs(inputs, spec, device)
    ]
    return Pass(
        run=run,
        features=_FEATURES,
        why_not=why_not,
        heuristic=lambda *call: choices(*call)[0],
        candidates=choices,
        yields_to=yields_to_xla,
    )


IMPLEMENTATION = Implementation(
    forward=_pass(run_forward, forward_configs), backward=_pass(run_backward, backward_configs)
)
