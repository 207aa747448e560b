"""Ring attention on TPUs: the hops of `ring`, each by the TPU kernels of flash attention.

The matrix unit takes keys and values in the dtype in which they are transferred. The results of a
hop are float32.
"""

import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import pallas_tpu
from ejkernel.kernels.ring_attention import methods, ring
from ejkernel.kernels.ring_attention.inputs import Outputs
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_FLASH = pallas_tpu.IMPLEMENTATION


class _TransferBarrier:
    """Holds back the results of each kernel until the arrays in transfer have arrived."""

    def __init__(self, incoming: ring.Incoming):
        self.incoming = incoming

    def __call__(self, results: Sequence[jax.Array]) -> Sequence[jax.Array]:
        results, self.incoming = ring.wait_for_both(results, self.incoming)
        return results


def _attend(
    inputs: flash.Inputs,
    spec: flash.Spec,
    params: FwdParams,
    device: Device,
    incoming: ring.Incoming,
) -> tuple[flash.Outputs, ring.Incoming]:
    barrier = _TransferBarrier(incoming)
    part, _ = pallas_tpu.run_forward(inputs, spec, params, device, jnp.float32, barrier)
    return part, barrier.incoming


def _differentiate(
    inputs: flash.Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: flash.Spec,
    params: BwdParams,
    device: Device,
    incoming: ring.Incoming,
) -> tuple[flash.Inputs, ring.Incoming]:
    barrier = _TransferBarrier(incoming)
    part = pallas_tpu.run_backward(
        inputs, residuals, d_outputs, spec, params, device, jnp.float32, barrier
    )
    return part, barrier.incoming


_OF_FORWARD, _OF_BACKWARD = cast(Pass, _FLASH.forward), cast(Pass, _FLASH.backward)

IMPLEMENTATION = Implementation(
    forward=methods.pass_of(
        _OF_FORWARD,
        functools.partial(methods.forward, _attend),
        features=methods.KERNEL_FEATURES,
        why_not=functools.partial(methods.why_not, _OF_FORWARD),
    ),
    backward=methods.pass_of(
        _OF_BACKWARD,
        functools.partial(methods.backward, _differentiate),
        features=methods.KERNEL_FEATURES,
        why_not=functools.partial(methods.why_not, _OF_BACKWARD),
    ),
)
