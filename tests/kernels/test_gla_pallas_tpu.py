"""The TPU kernels of gated linear attention, interpreted: several chunks, decays of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import settings
from ejkernel.kernels.common.mosaic_tpu.memory import core_of
from ejkernel.kernels.gla_attention import pallas_tpu
from ejkernel.kernels.gla_attention.inputs import Inputs, Spec
from ejkernel.kernels.gla_attention.pallas_tpu.chunk_recurrence import (
    split_bfloat16,
    sum_matmul,
)
from ejkernel.kernels.gla_attention.pallas_tpu.kernels import GlaStepSize
from ejkernel.modules import RecurrentAttentionConfig, recurrent_attention
from ejkernel.ops.platform import Device

pytestmark = pytest.mark.tpu

LENGTH, HEADS, WIDTH = 70, 2, 8  # two chunks of 64, the second not full


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def call(gate, gv=None, group=2):
    return {
        "query": draw(0, 1, LENGTH, group * HEADS, WIDTH),
        "key": draw(1, 1, LENGTH, HEADS, WIDTH),
        "value": draw(2, 1, LENGTH, HEADS, WIDTH),
        "gate": gate,
        "state": draw(3, 1, HEADS, WIDTH, WIDTH),
    } | ({} if gv is None else {"gv": gv})


def with_gradients(platform, arguments, cfg=None):
    def loss(arguments):
        out, state = recurrent_attention(**arguments, platform=platform, cfg=cfg)
        return (out * draw(4, *out.shape)).sum() + (state * draw(5, *state.shape)).sum(), out

    with settings.override(interpret=platform == "pallas"):
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)


@pytest.mark.parametrize("shape", [(1, LENGTH, HEADS, WIDTH), (1, LENGTH, HEADS)])
@pytest.mark.parametrize("strong", [-50.0, -1e4, -np.inf])
def test_strong_decays_among_mild_ones_leave_values_and_gradients_right(strong, shape):
    """No decay is divided by another, so that none is too small to be divided by."""
    mild = -jax.random.uniform(jax.random.key(6), shape)
    gate = jnp.where(jax.random.bernoulli(jax.random.key(7), 0.1, shape), strong, mild)
    (_, out), gradients = with_gradients("pallas", call(gate))
    (_, expected), exact = with_gradients("xla", call(gate))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    for name, gradient in gradients.items():
        size = float(jnp.abs(exact[name]).max())
        np.testing.assert_allclose(gradient, exact[name], rtol=0, atol=3e-5 * size, err_msg=name)


def test_chunks_of_any_size_give_the_same():
    gate, gv = (-jnp.abs(draw(seed, 1, LENGTH, HEADS, WIDTH)) for seed in (8, 9))
    arguments = call(gate, gv, group=1)
    (_, expected), exact = with_gradients("xla", arguments)
    for tokens in (16, 128):
        cfg = RecurrentAttentionConfig(block_q=tokens, block_k=1)
        (_, out), gradients = with_gradients("pallas", arguments, cfg)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
        for name, gradient in gradients.items():
            size = float(jnp.abs(exact[name]).max())
            np.testing.assert_allclose(gradient, exact[name], rtol=0, atol=3e-5 * size)


def test_parts_in_bfloat16_add_up_to_float32_without_a_rest():
    x = draw(10, 64, 16) * 10.0 ** draw(11, 64, 16)
    parts = split_bfloat16(x, exact=True)
    assert {part.dtype for part in parts} == {jnp.dtype(jnp.bfloat16)}
    total = sum(np.asarray(part, np.float64) for part in parts)
    np.testing.assert_array_equal(total, np.asarray(x, np.float64))
    one = jnp.eye(64, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(sum_matmul(one, x), x)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU7x"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_default_chunks_fit_by_the_model_of_vmem(kind, width):
    shape = lambda n, d: jax.ShapeDtypeStruct((1, 4096, n, d), jnp.float32)
    inputs = Inputs(shape(32, width), shape(4, width), shape(4, width), gate=shape(4, width))
    device = Device("tpu", kind, None, kind)
    for backward, heuristic in enumerate(
        (pallas_tpu.heuristic_forward, pallas_tpu.heuristic_backward)
    ):
        chosen = heuristic(inputs, Spec(softmax_scale=1.0), device)
        size = GlaStepSize(chosen.block_q, chosen.block_k)
        taken = pallas_tpu.vmem_of_step(inputs, size, bool(backward))
        assert taken <= 0.6 * core_of(device).vmem


def test_states_that_vmem_cannot_hold_are_refused_in_words():
    shape = jax.ShapeDtypeStruct((1, 64, 1, 4096), jnp.bfloat16)
    reason = pallas_tpu.why_not_forward(
        Inputs(shape, shape, shape), Spec(softmax_scale=1.0), Device("tpu", "TPU v4", None, "")
    )
    assert reason == "heads so large, or so many of a key head, do not fit into VMEM"
