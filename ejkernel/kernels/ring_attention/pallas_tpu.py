"""Ring attention on TPUs: the hops of `ring`, each by the TPU kernels of flash attention.

The matrix unit takes keys and values in the dtype in which they are transferred. The results of a
hop are float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import pallas_tpu
from ejkernel.kernels.ring_attention import ring
from ejkernel.kernels.ring_attention.inputs import Inputs, Outputs, Spec
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
    if inputs.sinks is not None:
        inputs = inputs._replace(sinks=inputs.sinks.astype(jnp.float32))
    barrier = _TransferBarrier(incoming)
    part = pallas_tpu.run_backward(
        inputs, residuals, d_outputs, spec, params, device, jnp.float32, barrier
    )
    return part, barrier.incoming


def _why_not(of_hop: Pass, inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """Why flash attention does not support one hop."""
    hop, bias = ring.one_hop(inputs), inputs.bias
    if bias is not None:
        keys = min(bias.shape[3], inputs.key.shape[1])
        hop = hop._replace(bias=jax.ShapeDtypeStruct((*bias.shape[:3], keys), bias.dtype))
    return of_hop.refusal(hop, ring.hop_spec(spec), device)


def _pass(of_hop: Pass, run: Callable[..., tuple]) -> Pass:
    return Pass(
        run=run,
        features=_FEATURES,
        why_not=functools.partial(_why_not, of_hop),
        heuristic=functools.partial(ring.heuristic, of_hop),
    )


_FEATURES = frozenset(
    {
        "axis_name",
        "bias",
        "causal",
        "chunks",
        "lengths",
        "logits_soft_cap",
        "mask",
        "segments",
        "sinks",
        "token_types",
        "union",
        "window",
    }
)

IMPLEMENTATION = Implementation(
    forward=_pass(cast(Pass, _FLASH.forward), functools.partial(ring.forward, _attend)),
    backward=_pass(cast(Pass, _FLASH.backward), functools.partial(ring.backward, _differentiate)),
)
