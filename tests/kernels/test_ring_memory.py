"""A ring holds little more than flash attention of one device's share: memory that XLA plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import quick

from ejkernel.modules import flash_attention, ring_attention
from ejkernel.types.placement import PLACEMENTS

if len(jax.devices()) < 8:
    pytest.skip("eight devices are needed", allow_module_level=True)

SHARE, HEADS, HEAD_DIM = 16384, 32, 128
RING = Mesh(np.array(jax.devices()[:8]), ("sp",))
# By KV heads: how many times the memory of flash attention a ring may take.
LIMITS = {32: 1.8, 4: 1.5}
CASES = [(heads, placement) for heads in LIMITS for placement in PLACEMENTS]


def memory(run, length, kv_heads, sharding=None):
    """Bytes of temporary arrays of one device, forward and backward; nothing is run."""
    shape = lambda heads: jax.ShapeDtypeStruct(
        (1, length, heads, HEAD_DIM), jnp.bfloat16, sharding=sharding
    )
    loss = lambda x: run(*x, causal=True).astype(jnp.float32).sum()
    arrays = (shape(HEADS), shape(kv_heads), shape(kv_heads))
    return jax.jit(jax.grad(loss)).lower(arrays).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("case", quick(CASES, (4, "zigzag")), ids=str)
def test_a_ring_of_eight_takes_little_more_memory_than_a_share(case):
    """131,072 tokens on eight devices against 16,384 on one."""
    kv_heads, placement = case

    def ring(*x, **options):
        return ring_attention(
            *x, axis_name="sp", mesh=RING, method="ring", placement=placement, **options
        )

    split = memory(ring, 8 * SHARE, kv_heads, NamedSharding(RING, P(None, "sp")))
    alone = memory(flash_attention, SHARE, kv_heads)
    assert alone < split <= LIMITS[kv_heads] * alone
