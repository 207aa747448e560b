"""Flash attention on Hopper GPUs, in Pallas Mosaic GPU: dispatch, and what is supported.

| file | holds |
|---|---|
| `configs` | tile sizes, shared memory and register budgets, heuristics, candidates |
| `schedule` | work lists: tiles of each row block, balanced over thread blocks |
| `mask_operands` | the arrays of mask, bias and dropout |
| `logits` | mask, bias, soft cap and dropout of a tile in registers; staging of a bias |
| `forward` | the forward kernel |
| `split_kv` | the same for few queries: packed GQA, splits of the keys |
| `backward` | the deterministic backward pass: dK/dV and dQ kernels |
| `gradient_kernel` | such a kernel |
| `backward_fused` | one kernel for all gradients, nondeterministic |
| `row_stats` | what both backward passes know of each query |
| `bias_grad` | the gradient of a bias |
"""

import jax.numpy as jnp

from ejkernel import settings
from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.inputs import KERNEL_FEATURES, Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90 import (
    backward,
    backward_fused,
    configs,
    forward,
    mask_operands,
    schedule,
    split_kv,
)
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device, Platform
from ejkernel.types.rules import Everything


def run_forward(
    inputs: Inputs, spec: Spec, params: FwdParams | None, device: Device
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    tiles = configs.forward_tiles(inputs, params)
    run = split_kv.forward if split_kv.supports(inputs) else forward.forward
    outputs = run(inputs, spec, tiles, device)
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
    if params is not None and params.deterministic is False and _may_fuse(inputs, spec):
        return backward_fused.backward(inputs, residuals, d_outputs, spec, device)
    tiles = configs.backward_tiles(inputs, spec, params)
    return backward.backward(inputs, residuals, d_outputs, spec, *tiles, device)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why these kernels do not support the call, or None."""
    if reason := gpu.why_not_hopper(device):
        return reason
    dtypes = {x.dtype for x in inputs[:3]}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return f"needs bfloat16 or float16 alone, got {', '.join(sorted(map(str, dtypes)))}"
    for name, dim in (("head", inputs.query.shape[3]), ("value", inputs.value.shape[3])):
        if dim % 8 or not 8 <= dim <= 256:
            return f"needs a {name} dim that is a multiple of 8 up to 256, got {dim}"
    if 0 in (inputs.query.shape[1], inputs.key.shape[1]):
        return "needs at least one query and one key"
    if inputs.key.shape[1] > schedule.MOST_KEYS:
        return f"needs at most {schedule.MOST_KEYS} keys, got {inputs.key.shape[1]}"
    if not spec.softmax_scale > 0:
        return f"needs a positive softmax_scale, got {spec.softmax_scale}"
    if inputs.dropout is not None and inputs.dropout.of_shares:
        return "drops weights by index, not by the positions of a shard of a sequence"
    return mask_operands.why_not(inputs.mask or Everything())


def nondeterministic_backward(inputs: Inputs, spec: Spec, device: Device) -> BwdParams | None:
    """One kernel in place of two or three, where it supports the call."""
    return BwdParams(deterministic=False) if _may_fuse(inputs, spec) else None


def _may_fuse(inputs: Inputs, spec: Spec) -> bool:
    """Whether the fused backward supports the call, and is allowed: it is nondeterministic."""
    return not settings.deterministic() and backward_fused.why_not(inputs, spec) is None


def backward_yields_to(inputs: Inputs, spec: Spec, device: Device) -> frozenset[Platform]:
    """CuDNN computes five matmuls a tile; so does our fused kernel, but two kernels compute seven.

    That decides between 64 and 128 columns: narrower heads are bound by the exponentials, wider
    ones by what it does with them. Of packed documents it computes more, and a bias slows it down.
    """
    if _may_fuse(inputs, spec) or inputs.bias is not None:
        return frozenset()
    between = 128 < sum(configs.padded_dims(inputs)) <= 256
    packed = "segments" in (inputs.mask or Everything()).features()
    return frozenset({Platform.CUDA}) if between and not packed else frozenset()


# The kernels look up no table of blocks.
_FEATURES = KERNEL_FEATURES - {"blocks"}

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=configs.heuristic_forward,
        candidates=configs.candidates_forward,
        first_call_candidates=configs.first_call_candidates_forward,
    ),
    backward=Pass(
        run=run_backward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=configs.heuristic_backward,
        candidates=configs.candidates_backward,
        first_call_candidates=configs.first_call_candidates_backward,
        nondeterministic=nondeterministic_backward,
        yields_to=backward_yields_to,
    ),
)
