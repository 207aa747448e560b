"""A ring whose hops are TPU kernels, interpreted, computes what one device does on the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ejkernel import settings
from ejkernel.modules import flash_attention, ring_attention
from ejkernel.parallel import permute_sequence, restore_sequence
from ejkernel.types import MaskInfo

pytestmark = pytest.mark.tpu

LENGTH = 320  # shares of 80, less than a tile
RING = Mesh(np.array(jax.devices()[:4]), ("sp",))
IDS = jnp.asarray(np.repeat(np.arange(4), (100, 30, 150, 40))[None])

CALLS = {
    "causal_sinks": {"causal": True, "softmax_aux": jnp.ones((4, 2))},
    "segments_cap": {"mask_info": MaskInfo.from_segments(IDS), "logits_soft_cap": 2.0},
}


def with_gradients(function, arrays, dtype):
    """Output and gradients, along a direction that is the same for all."""

    def loss(arrays):
        out = function(*(x.astype(dtype) for x in arrays)).astype(jnp.float32)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return [out, *gradients]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_value_and_gradients_are_those_of_flash_attention(name, dtype):
    """In bfloat16, parts in float32 leave no more error than flash attention has in one piece."""
    draw = lambda i, n: jax.random.normal(jax.random.key(i), (1, LENGTH, n, 16))
    arrays = (draw(0, 4), draw(1, 2), draw(2, 2))
    flash = lambda *x: flash_attention(*x, **CALLS[name], platform="xla")
    ring = lambda *x: ring_attention(
        *x, **CALLS[name], axis_name="sp", mesh=RING, platform="pallas"
    )
    exact = with_gradients(flash, arrays, jnp.float32)
    with settings.override(interpret=True):
        actual = jax.jit(lambda x: with_gradients(ring, x, dtype))(arrays)
    rounded = with_gradients(flash, arrays, dtype)
    for got, one_piece, truth in zip(actual, rounded, exact, strict=True):
        error, unavoidable = (float(jnp.abs(x - truth).max()) for x in (got, one_piece))
        assert error <= 2 * unavoidable + 2e-5 * float(jnp.abs(truth).max())


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("placement", ["zigzag", "striped"])
def test_placement_and_dropout_count_positions(placement, method):
    draw = lambda i, n: jax.random.normal(jax.random.key(i), (1, LENGTH, n, 16))
    arrays, order = (draw(0, 4), draw(1, 2), draw(2, 2)), {"shards": 4, "placement": placement}
    call = {"causal": True, "mask_info": MaskInfo.from_segments(IDS)}
    call |= {"dropout_prob": 0.3, "dropout_seed": 5}

    def ring(*x):
        x = (permute_sequence(y, **order) for y in x)
        out = ring_attention(
            *x, **call, axis_name="sp", mesh=RING, platform="pallas",
            placement=placement, method=method,
        )  # fmt: skip
        return restore_sequence(out, **order)

    flash = lambda *x: flash_attention(*x, **call, platform="xla")
    exact = with_gradients(flash, arrays, jnp.float32)
    with settings.override(interpret=True):
        actual = jax.jit(lambda x: with_gradients(ring, x, jnp.float32))(arrays)
    for got, truth in zip(actual, exact, strict=True):
        np.testing.assert_allclose(got, truth, atol=3e-5 * float(jnp.abs(truth).max()))
