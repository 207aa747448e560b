"""Attention over pages on NVIDIA GPUs since Ampere, in Triton."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.triton import bridge as triton_bridge
from ejkernel.kernels.common.triton.bridge import LaunchConfig, launch
from ejkernel.kernels.ragged_page_attention_v3.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.triton.attend import attend
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import (
    MOST_ROWS,
    configurations,
    shape_of,
    static_sizes,
    values_of,
)
from ejkernel.kernels.ragged_page_attention_v3.triton.operands import plan
from ejkernel.kernels.ragged_page_attention_v3.triton.tile import combine
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_WIDEST = 256  # head dim
_COMBINE = (4, 1)  # warps and stages
_NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")


def run_forward(inputs: Inputs, spec: Spec, params: Any, device: Device) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    shape = shape_of(inputs, spec, params, device)
    mode, operands = plan(inputs, spec, shape, device)
    b, t, heads, _ = inputs.query.shape
    float32 = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    results = [
        jax.ShapeDtypeStruct((b, t, heads, mode.value_dim), inputs.query.dtype),
        float32(b, heads, t),
    ]
    pieces = (mode.programs, 2, mode.rows)
    temporary = [
        float32(*pieces, mode.value_width),
        float32(*pieces),
        float32(*pieces),
        jax.ShapeDtypeStruct((mode.programs, 8), jnp.int32),
    ]
    how = LaunchConfig(mode.programs, shape.warps, shape.stages)
    out, lse, parts, peaks, masses, cut = launch(
        attend, operands, [*results, *temporary], mode, how, device
    )
    out, lse = launch(
        combine,
        [
            *(cut, parts, peaks, masses),
            *(operands.info, operands.v_scale, operands.sinks, out, lse),
        ],
        results,
        mode,
        LaunchConfig(mode.programs * mode.combine_chunks + mode.combine_clear, *_COMBINE),
        device,
        aliases={7: 0, 8: 1},
    )
    outputs = Outputs(out, lse)
    return outputs, outputs


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why this device cannot run the kernels on this call."""
    query, cache = (np.dtype(x.dtype) for x in (inputs.query, inputs.key_pages))
    if (widest := max(inputs.query.shape[3], values_of(inputs).shape[-1])) > _WIDEST:
        return f"takes head dims up to {_WIDEST} and this one is {widest}"
    group = inputs.query.shape[2] // static_sizes(inputs, spec).kv_heads
    if group > MOST_ROWS:
        return f"takes up to {MOST_ROWS} query heads for a key head and here are {group}"
    return triton_bridge.why_not(device, query, *(() if cache.name in _NARROW else (cache,)))


_FEATURES = frozenset(
    {
        "k_scale",
        "kv_layout",
        "logits_soft_cap",
        "sinks",
        "sliding_window",
        "v_scale",
    }
)

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=lambda *call: configurations(*call)[0],
        candidates=configurations,
    ),
)
