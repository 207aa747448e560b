"""Writes the new tokens into the cache, in place if it was donated, and attends over it in Triton.

The write is a kernel of its own, which moves the new tokens and nothing else: a program of the
attention reads keys that others would have to write.
"""

from typing import Any

from ejkernel.kernels.ragged_page_attention_v3 import triton as attention
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import (
    LAYOUTS,
    Inputs,
    Outputs,
    Spec,
    reading_inputs,
)
from ejkernel.kernels.ragged_page_attention_v3_update.triton_write import written
from ejkernel.kernels.ragged_page_attention_v3_update.xla import Residuals
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def forward(inputs: Inputs, spec: Spec, params: Any, device: Device) -> tuple[Outputs, Residuals]:
    """Outputs, and the residuals among them."""
    pages = written(inputs, spec, device)
    results, _ = attention.run_forward(reading_inputs(inputs, spec, *pages), spec, params, device)
    _, outputs = LAYOUTS[spec.kv_layout]
    return outputs(*results, *pages), Residuals(*results)


def _reading(inputs: Inputs, spec: Spec) -> Any:
    return reading_inputs(inputs, spec, inputs.key_pages, inputs.value_pages)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why this device cannot run the kernels on this call."""
    return attention.why_not(_reading(inputs, spec), spec, device)


def configurations(inputs: Inputs, spec: Spec, device: Device) -> list[Any]:
    """What is worth timing for a call, the guess first."""
    return attention.configurations(_reading(inputs, spec), spec, device)


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
        run=forward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=lambda *call: configurations(*call)[0],
        candidates=configurations,
    ),
)
