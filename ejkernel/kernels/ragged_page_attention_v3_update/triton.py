"""Writes the new tokens into the KV cache, in place if it is donated; paged attention follows.

The write is a kernel of its own, which copies the new tokens only: a program of the attention
kernel reads keys that other programs would have to write.
"""

from ejkernel.kernels.ragged_page_attention_v3 import triton as paged_attention
from ejkernel.kernels.ragged_page_attention_v3.config import PagedConfig
from ejkernel.kernels.ragged_page_attention_v3.inputs import KERNEL_FEATURES
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import PagedGpuConfig
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import (
    LAYOUTS,
    Inputs,
    Outputs,
    Spec,
    attention_call,
    reading_inputs,
)
from ejkernel.kernels.ragged_page_attention_v3_update.triton_write import write_cache
from ejkernel.kernels.ragged_page_attention_v3_update.xla import Residuals
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def run_forward(
    inputs: Inputs, spec: Spec, params: PagedGpuConfig, device: Device
) -> tuple[Outputs, Residuals]:
    """Outputs, and the residuals among them."""
    pages = write_cache(inputs, spec, device)
    results, _ = paged_attention.run_forward(
        reading_inputs(inputs, spec, *pages), spec, params, device
    )
    _, outputs = LAYOUTS[spec.kv_layout]
    return outputs(*results, *pages), Residuals(*results)


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why the kernels do not support this call on this device; None when they do."""
    attention_inputs = attention_call(inputs, spec)
    return paged_attention.why_not(attention_inputs, spec, device)


def configurations(inputs: Inputs, spec: Spec, device: Device) -> list[PagedConfig]:
    """Candidates for a call, the heuristic's choice first."""
    attention_inputs = attention_call(inputs, spec)
    return paged_attention.configurations(attention_inputs, spec, device)


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=KERNEL_FEATURES,
        why_not=why_not,
        heuristic=lambda *call: configurations(*call)[0],
        candidates=configurations,
    ),
)
