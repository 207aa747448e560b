"""Native sparse attention anywhere XLA runs: memory linear in the sequence length."""

from collections.abc import Sequence

import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import xla as flash_xla
from ejkernel.kernels.native_sparse_attention import geometry, xla_selected
from ejkernel.kernels.native_sparse_attention.branches import (
    dense_branches,
    gated,
    gated_sum,
    gates_of,
)
from ejkernel.kernels.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel.kernels.native_sparse_attention.inputs import (
    Inputs,
    Outputs,
    Residuals,
    Spec,
)
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.ops.platform import Device

_ROWS_OF_A_TILE = 512


def run_forward(
    inputs: Inputs, spec: Spec, params: NativeSparseAttentionConfig
) -> tuple[Outputs, Residuals]:
    """The gated sum of the branches, and the branches."""
    at = geometry.tokens_of_queries(inputs)
    inputs = geometry.clean(inputs, at)
    compressed, windowed = dense_branches(inputs, at, spec)
    branches = Residuals(
        xla_selected.forward(inputs, at, spec, params.block_q),
        compressed and compressed.forward(spec, _flash_forward),
        windowed and windowed.forward(spec, _flash_forward),
    )
    return gated_sum(inputs, branches), branches


def run_backward(
    inputs: Inputs,
    residuals: Residuals,
    d_outputs: Outputs,
    spec: Spec,
    params: NativeSparseAttentionConfig,
) -> Inputs:
    """Gradients, shaped like the inputs."""
    given = inputs
    at = geometry.tokens_of_queries(inputs)
    inputs = geometry.clean(inputs, at)
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    d_out = d_outputs.out.astype(dtype)
    if inputs.cu_seqlens is not None:
        d_out = geometry.zero_outside(d_out, at)
    compressed, windowed = dense_branches(inputs, at, spec)
    gates = gates_of(inputs)

    d_gates, d_arrays = [], []
    for gate, branch, dense in zip(gates, residuals, (None, compressed, windowed), strict=True):
        if branch is None:
            d_gates.append(None if gate is None else jnp.zeros_like(gate))
            continue
        d_gates.append(None if gate is None else (d_out * branch.out.astype(dtype)).sum(-1))
        d_branch = gated(gate, d_out).astype(inputs.query.dtype)
        if dense is None:
            pulled = xla_selected.backward(inputs, at, branch, d_branch, spec, params.block_q)
        else:
            pulled = dense.backward(branch, d_branch, spec, _flash_backward)
        d_arrays.append([d.astype(dtype) for d in pulled])

    g_slc, g_cmp, g_swa = d_gates
    totals = (sum(parts) for parts in zip(*d_arrays, strict=True))
    gradients = (*totals, None, g_cmp, g_slc, g_swa, None, None, None)
    return given._make(
        None if d is None else d.astype(x.dtype)  # pyright: ignore
        for d, x in zip(gradients, given, strict=True)
    )


def _flash_forward(inputs: flash.Inputs, spec: flash.Spec) -> flash.Outputs:
    return flash_xla.run_forward(inputs, spec, None)[0]


def _flash_backward(
    inputs: flash.Inputs, outputs: flash.Outputs, d_outputs: flash.Outputs, spec: flash.Spec
) -> flash.Inputs:
    return flash_xla.run_backward(inputs, outputs, d_outputs, spec, None)


def heuristic(inputs: Inputs, spec: Spec, device: Device) -> NativeSparseAttentionConfig:
    """Tiles of some hundred rows: few enough for the cache, enough for a matmul."""
    group = inputs.query.shape[2] // inputs.key.shape[2]
    return NativeSparseAttentionConfig(
        block_q=max(16, _ROWS_OF_A_TILE // group), block_size=spec.block_size
    )


def candidates(inputs: Inputs, spec: Spec, device: Device) -> Sequence[NativeSparseAttentionConfig]:
    """Half and twice the rows."""
    rows = heuristic(inputs, spec, device).block_q
    return [
        NativeSparseAttentionConfig(block_q=size, block_size=spec.block_size)
        for size in (rows // 2, rows * 2)
    ]


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward, features=ALL_FEATURES, heuristic=heuristic, candidates=candidates
    ),
    backward=Pass(
        run=run_backward, features=ALL_FEATURES, heuristic=heuristic, candidates=candidates
    ),
)
