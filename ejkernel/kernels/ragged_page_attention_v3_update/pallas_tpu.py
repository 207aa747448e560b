"""Ragged attention that writes the cache, on TPUs: one kernel writes in place, others attend."""

from typing import Any

from ejkernel.kernels.common.mosaic_tpu.memory import core_of
from ejkernel.kernels.ragged_page_attention_v3 import pallas_tpu as attention
from ejkernel.kernels.ragged_page_attention_v3.pallas_tpu.cache import cache_of
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import (
    LAYOUTS,
    Inputs,
    Outputs,
    Spec,
    reading_inputs,
)
from ejkernel.kernels.ragged_page_attention_v3_update.pallas_tpu_write import (
    has_room,
    most_places,
    written,
)
from ejkernel.kernels.ragged_page_attention_v3_update.xla import Residuals
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def forward(inputs: Inputs, spec: Spec, params: Any) -> tuple[Outputs, Residuals]:
    """Outputs, and the residuals among them."""
    pages = written(inputs, spec)
    results, _ = attention.run_forward(reading_inputs(inputs, spec, *pages), spec, params)
    _, outputs = LAYOUTS[spec.kv_layout]
    return outputs(*results, *pages), Residuals(*results)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What the kernels do not compute."""
    call = _reading(inputs, spec)
    if reason := attention.why_not(call, spec, device):
        return reason
    if 16 * most_places(inputs, cache_of(call, spec).slots) > core_of(device).smem // 2:
        return "has no room in scalar memory for a list of so many pages to write"
    if not has_room(inputs, spec, device):
        return "has no room in VMEM to mend a page"
    return None


def heuristic(inputs: Inputs, spec: Spec, device: Device | None) -> Any:
    """Everything is left open: the attention knows the device."""
    return spec.config()


def candidates(inputs: Inputs, spec: Spec, device: Device) -> list[Any]:
    """Those of the attention."""
    return attention.candidates(_reading(inputs, spec), spec, device)


def _reading(inputs: Inputs, spec: Spec) -> Any:
    return reading_inputs(inputs, spec, inputs.key_pages, inputs.value_pages)


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
        run=forward, features=_FEATURES, why_not=why_not, heuristic=heuristic, candidates=candidates
    ),
)
