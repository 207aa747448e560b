"""Flash attention anywhere XLA runs: blocks in loops, memory linear in the sequence length."""

from typing import Any

from ejkernel.kernels.flash_attention import xla_backward, xla_forward
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device


def forward(inputs: Inputs, spec: Spec, params: Any) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    outputs = xla_forward.forward(inputs, spec, params.q_blocksize, params.kv_blocksize)
    return outputs, outputs


def backward(
    inputs: Inputs, residuals: Outputs, d_outputs: Outputs, spec: Spec, params: Any
) -> Inputs:
    """Gradients, shaped like the inputs."""
    return xla_backward.backward(
        inputs, residuals, d_outputs, spec, params.q_blocksize, params.kv_blocksize
    )


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device) -> FwdParams:
    """Blocks of the forward pass."""
    return FwdParams(q_blocksize=256, kv_blocksize=512)


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device) -> BwdParams:
    """Blocks of the backward pass."""
    return BwdParams(q_blocksize=256, kv_blocksize=256)


IMPLEMENTATION = Implementation(
    forward=Pass(run=forward, heuristic=heuristic_forward),
    backward=Pass(run=backward, heuristic=heuristic_backward),
)
