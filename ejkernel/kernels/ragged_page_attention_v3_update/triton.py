"""Writes the new tokens into the KV cache, in place if it is donated; paged attention follows.

The write is a kernel of its own, which copies the new tokens only: a program of the attention
kernel reads keys that other programs would have to write.
"""

from ejkernel.kernels.ragged_page_attention_v3 import triton as paged_attention
from ejkernel.kernels.ragged_page_attention_v3.inputs import KERNEL_FEATURES
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import PagedGpuConfig
from ejkernel.kernels.ragged_page_attention_v3_update.inputs import (
    LAYOUTS,
    Inputs,
    Outputs,
    Spec,
    of_attention,
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


configurations = of_attention(paged_attention.configurations)

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=KERNEL_FEATURES,
        why_not=of_attention(paged_attention.why_not),
        heuristic=lambda *call: configurations(*call)[0],
        candidates=configurations,
    ),
)
