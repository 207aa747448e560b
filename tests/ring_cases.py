"""Calls of ring attention over eight devices, and what they are compared with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ejkernel.modules import RingAttentionConfig
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.types import MaskInfo

if len(jax.devices()) < 8:
    pytest.skip("a ring of eight devices is needed", allow_module_level=True)

LENGTH = 64


def arrays(batch=2, heads=4, kv_heads=2, seed=0):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(seed + i), shape)
    return (
        draw(1, batch, LENGTH, heads, 8),
        draw(2, batch, LENGTH, kv_heads, 8),
        draw(3, batch, LENGTH, kv_heads, 12),
    )


def mesh_of(*shape, names=("sp",)):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


RING = mesh_of(8)
SMALL = RingAttentionConfig(
    fwd_params=FwdParams(q_blocksize=4, kv_blocksize=4),
    bwd_params=BwdParams(q_blocksize=4, kv_blocksize=4),
)
IDS = jnp.stack([jnp.repeat(jnp.arange(4), 16), jnp.where(jnp.arange(64) < 50, 0, -1)])

CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "causal_offset": {"causal": True, "causal_offset": jnp.array([5, -9])},
    "window": {"causal": True, "sliding_window": (13, 0)},
    "sinks": {"causal": True, "softmax_aux": jnp.ones((4, 2))},
    "soft_cap": {"logits_soft_cap": 2.0},
    "bias": {"bias": jax.random.normal(jax.random.key(7), (4, LENGTH, LENGTH))},
    "bias_row": {"bias": jax.random.normal(jax.random.key(7), (2, 1, LENGTH, 1))},
    "mask": {
        "attention_mask": jax.random.bernoulli(jax.random.key(8), 0.6, (2, 4, LENGTH, LENGTH))
    },
    "segments": {"mask_info": MaskInfo.from_segments(IDS), "causal": True},
    "chained": {"mask_info": MaskInfo.from_segments(IDS).apply_causal(3).apply_sliding_window(9)},
}


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


def value_and_gradients(function, q, k, v, extra):
    floats = {n: x for n, x in extra.items() if n in ("bias", "softmax_aux")}
    rest = {n: x for n, x in extra.items() if n not in floats}

    def loss(q, k, v, floats):
        out = function(q, k, v, **floats, **rest)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(
        q, k, v, floats
    )
    return out, gradients
