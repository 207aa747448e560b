"""Ring attention on TPUs: the hops of `ring`, each by the TPU kernels of flash attention.

The matrix unit takes what travels as it comes; what a hop gives is float32.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import inputs as flash
from ejkernel.kernels.flash_attention import pallas_tpu
from ejkernel.kernels.ring_attention import ring
from ejkernel.kernels.ring_attention.inputs import Inputs, Outputs, Spec
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device

_FLASH = pallas_tpu.IMPLEMENTATION


class _Meeting:
    """Has what is on its way here by the time that the results of kernels are used."""

    def __init__(self, ahead: Any):
        self.ahead = ahead

    def __call__(self, results: Any) -> Any:
        results, self.ahead = ring.meet(results, self.ahead)
        return results


def _attend(
    inputs: flash.Inputs, spec: flash.Spec, params: Any, ahead: Any
) -> tuple[flash.Outputs, Any]:
    meeting = _Meeting(ahead)
    part, _ = pallas_tpu.run_forward(inputs, spec, params, jnp.float32, meeting)
    return part, meeting.ahead


def _differentiate(
    inputs: flash.Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: flash.Spec,
    params: Any,
    ahead: Any,
) -> tuple[flash.Inputs, Any]:
    if inputs.sinks is not None:
        inputs = inputs._replace(sinks=inputs.sinks.astype(jnp.float32))
    meeting = _Meeting(ahead)
    part = pallas_tpu.run_backward(inputs, residuals, d_outputs, spec, params, jnp.float32, meeting)
    return part, meeting.ahead


def _why_not(of_hop: Pass, inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What flash attention does not compute for one hop."""
    hop, bias = ring.one_hop(inputs), inputs.bias
    if bias is not None:
        keys = min(bias.shape[3], inputs.key.shape[1])
        hop = hop._replace(bias=jax.ShapeDtypeStruct((*bias.shape[:3], keys), bias.dtype))
    return of_hop.refusal(hop, ring.hop_spec(spec), device)


def _pass(of_hop: Pass, run: Any) -> Pass:
    return Pass(
        run=run,
        features=_FEATURES,
        why_not=functools.partial(_why_not, of_hop),
        heuristic=functools.partial(ring.params, of_hop),
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
