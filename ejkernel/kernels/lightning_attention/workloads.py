"""Named calls: every way to say how fast a head forgets."""

import jax.numpy as jnp

from ejkernel.kernels.gla_attention.workloads import attention, ends, log_decays
from ejkernel.kernels.lightning_attention.config import LightningAttentionConfig
from ejkernel.ops.workload import Workload, normal, value

WORKLOADS = (
    Workload("plain", attention(heads=6, kv_heads=3)).core(),
    Workload("layer", attention(length=63) | {"layer_idx": 3, "num_layers": 8}),
    Workload("decay", attention() | {"decay": value(lambda: jnp.array([0.5, 1.0]))}),
    Workload(
        "decay_state",
        attention(value_dim=12)
        | {
            "decay": value(lambda: jnp.array([[0.9, 0.3], [0.99, 1.0]])),
            "initial_state": normal(2, 2, 8, 12),
        },
    ),
    Workload("gamma", attention(length=127) | {"g_gamma": log_decays(2), "reverse": True}),
    Workload(
        "packed",
        attention(batch=1, length=45)
        | {
            "decay": 0.8,
            "cu_seqlens": ends(0, 7, 7, 30, 43),
            "initial_state": normal(4, 2, 8, 8),
        },
    ),
)

CONFIGS = (LightningAttentionConfig(block_q=8, block_k=1),)
