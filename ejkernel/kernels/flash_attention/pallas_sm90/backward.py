"""Deterministic backward pass on Hopper: separate dK/dV and dQ kernels.

Where registers hold the accumulators of 64 keys and of their values, one kernel computes both, else
each has its own. Gradients of sinks and of a bias come from the same kind of kernel.
"""

import dataclasses
import functools

import jax.numpy as jnp

from ejkernel.kernels.common.sinks import per_sink, share_of_sinks
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.bias_grad import bias_gradient
from ejkernel.kernels.flash_attention.pallas_sm90.configs import (
    DK,
    DK_DV,
    DQ,
    DV,
    WITHOUT_ACCUMULATORS,
    BackwardTileConfig,
    GradientKernelSpec,
)
from ejkernel.kernels.flash_attention.pallas_sm90.gradient_kernel import run_kernel
from ejkernel.kernels.flash_attention.pallas_sm90.row_stats import row_stats
from ejkernel.ops.platform import Device


def backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    of_keys: tuple[BackwardTileConfig, ...],
    of_queries: BackwardTileConfig,
    device: Device,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none.

    Args:
        inputs: of the call.
        residuals: output and log-sum-exp of a forward pass.
        d_outputs: their gradients.
        spec: of the call.
        of_keys: tiles of the dK/dV kernel, or of the dV and the dK kernel.
        of_queries: tiles of the dQ kernel.
        device: of the call.
    """
    stats = row_stats(inputs, residuals, d_outputs, spec)
    run = functools.partial(run_kernel, inputs, d_outputs.out, spec, stats, device)
    if len(of_keys) == 1:
        d_value, d_key = run(DK_DV, *of_keys)
    else:
        (d_value,), (d_key,) = map(run, (DV, DK), of_keys)
    sink_sums = None if inputs.sinks is None else "weights"
    if sink_sums and _is_short_of_registers(inputs, spec):
        (d_query,) = run(DQ, of_queries)
        sums = run(GradientKernelSpec(False, (), row_sums=sink_sums), WITHOUT_ACCUMULATORS)
    else:
        d_query, *sums = run(dataclasses.replace(DQ, row_sums=sink_sums), of_queries)
    d_sinks = None
    if inputs.sinks is not None:
        # The sums of weights times their gradients, less what the accumulators were initialised to.
        taken = sums[0][..., : stats.key_share.shape[2]] / (1.0 - spec.dropout_prob)
        taken = taken - jnp.where(stats.sees_a_key, stats.offset * stats.key_share, 0.0)
        taken = taken * share_of_sinks(residuals.lse, inputs.sinks)
        d_sinks = per_sink(-taken.sum((0, 2)), inputs.sinks)
    d_bias = None if inputs.bias is None else bias_gradient(run, inputs, spec)
    return Inputs(d_query, d_key, d_value, bias=d_bias, sinks=d_sinks, mask=None)


def _is_short_of_registers(inputs: Inputs, spec: Spec) -> bool:
    """Whether a dQ kernel has no registers for weights that differ from what it accumulates."""
    wide = inputs.query.shape[3] > 192
    return wide and inputs.dropout is not None and spec.logits_soft_cap is not None
