"""Ring attention on NVIDIA GPUs: the hops of `ring`, each by the Triton kernels of flash attention.

The tensor cores take keys and values in the dtype in which they are transferred. The results of a
hop are float32.
"""

import functools
from typing import cast

import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import triton
from ejkernel.kernels.ring_attention import methods, ring
from ejkernel.kernels.ring_attention.inputs import Outputs
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import Implementation, Pass, yields_to_xla
from ejkernel.ops.platform import Device


def _attend(
    inputs: flash.Inputs,
    spec: flash.Spec,
    params: FwdParams,
    device: Device,
    incoming: ring.Incoming,
) -> tuple[flash.Outputs, ring.Incoming]:
    part, _ = triton.run_forward(inputs, spec, params, device, jnp.float32)
    return ring.wait_for_both(part, incoming)


def _differentiate(
    inputs: flash.Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: flash.Spec,
    params: BwdParams,
    device: Device,
    incoming: ring.Incoming,
) -> tuple[flash.Inputs, ring.Incoming]:
    part = triton.run_backward(inputs, residuals, d_outputs, spec, params, device, jnp.float32)
    return ring.wait_for_both(part, incoming)


def _pass(of_flash: Pass | None, run: functools.partial) -> Pass:
    of_flash = cast(Pass, of_flash)
    return methods.pass_of(
        of_flash,
        run,
        features=methods.KERNEL_FEATURES,
        why_not=functools.partial(methods.why_not, of_flash),
        yields_to=yields_to_xla,
    )


IMPLEMENTATION = Implementation(
    forward=_pass(triton.IMPLEMENTATION.forward, functools.partial(methods.forward, _attend)),
    backward=_pass(
        triton.IMPLEMENTATION.backward, functools.partial(methods.backward, _differentiate)
    ),
)
