"""Attention over pages on NVIDIA GPUs since Ampere, in Triton."""

import numpy as np

from ejkernel.kernels.common.triton import bridge
from ejkernel.kernels.ragged_page_attention_v3.inputs import KERNEL_FEATURES, Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.triton.attention import attention
from ejkernel.kernels.ragged_page_attention_v3.triton.combine import combine
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import (
    MAX_ROWS,
    PagedGpuConfig,
    cache_sizes,
    configurations,
    tile_config,
    values_of,
)
from ejkernel.kernels.ragged_page_attention_v3.triton.operands import kernel_arguments
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_MAX_HEAD_DIM = 256
_EIGHT_BIT_CACHES = ("int8", "float8_e4m3fn", "float8_e5m2")


def run_forward(
    inputs: Inputs, spec: Spec, params: PagedGpuConfig, device: Device
) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    config = tile_config(inputs, spec, params, device)
    static, operands = kernel_arguments(inputs, spec, config, device)
    out, lse, partial = attention(static, operands, config, device)
    outputs = Outputs(*combine(out, lse, partial, static, operands, device))
    return outputs, outputs


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support this call on this device; None when they do."""
    query, cache = (np.dtype(x.dtype) for x in (inputs.query, inputs.key_pages))
    if (head_dim := max(inputs.query.shape[3], values_of(inputs).shape[-1])) > _MAX_HEAD_DIM:
        return f"takes head dims up to {_MAX_HEAD_DIM} and this one is {head_dim}"
    group = inputs.query.shape[2] // cache_sizes(inputs, spec).kv_heads
    if group > MAX_ROWS:
        return f"takes up to {MAX_ROWS} query heads for a key head and here are {group}"
    checked = (query,) if cache.name in _EIGHT_BIT_CACHES else (query, cache)
    return bridge.why_not(device, *checked)


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=KERNEL_FEATURES | {"float32_out"},
        why_not=why_not,
        heuristic=lambda *call: configurations(*call)[0],
        candidates=configurations,
    ),
)
