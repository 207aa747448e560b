"""Named calls: the conformance suite, the tuner and the benchmark all read this list."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.ops.workload import Draw, Workload, normal, value


def attention(
    batch: int = 2,
    length: int = 40,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
) -> dict[str, Draw]:
    """Query, key and value."""
    return {
        "query": normal(batch, length, heads, head_dim),
        "key": normal(batch, length, kv_heads, head_dim),
        "value": normal(batch, length, kv_heads, value_dim or head_dim),
    }


def log_decays(*shape: int, strength: float = 0.3) -> Draw:
    """Logarithms of decays, none above 0."""

    def draw(key: jax.Array, dtype: DTypeLike) -> jax.Array:
        return (-strength * jnp.abs(jax.random.normal(key, shape, jnp.float32))).astype(dtype)

    return Draw(draw)


def uneven(*shape: int) -> Draw:
    """Log decays, most of them mild; some leave next to nothing of the state: -50 is e-22."""

    def draw(key: jax.Array, dtype: DTypeLike) -> jax.Array:
        strong = jax.random.bernoulli(key, 0.2, shape)
        mild = -jax.random.uniform(key, shape, jnp.float32)
        return jnp.where(strong, -50.0, mild).astype(dtype)

    return Draw(draw)


def ends(*numbers: int) -> Draw:
    """Where packed sequences begin and end."""
    return value(lambda: jnp.array(numbers))


_GATE, _SHARED = {"gate": log_decays(2, 40, 2, 8)}, {"gate": log_decays(2, 40, 2)}
_PACKED = attention(batch=1, length=45) | {"cu_seqlens": ends(0, 7, 7, 30, 43)}

WORKLOADS = (
    Workload("plain", attention()),
    Workload("gate", attention() | _GATE).core(),
    Workload("shared_gate", attention() | _SHARED),
    Workload("gamma", attention() | {"g_gamma": log_decays(2)}),
    Workload("gate_and_gamma", attention() | _GATE | {"g_gamma": log_decays(2, 2)}),
    Workload("strong", attention() | {"gate": value(lambda: jnp.full((2, 40, 2, 8), -50.0))}),
    Workload("strong_shared", attention() | {"gate": value(lambda: jnp.full((2, 40, 2), -50.0))}),
    Workload("uneven", attention() | {"gate": uneven(2, 40, 2, 8)}),
    Workload("uneven_shared", attention() | {"gate": uneven(2, 40, 2)}),
    Workload("scale", attention() | _GATE | {"softmax_scale": 0.7}),
    Workload("one_token", attention(length=1) | {"gate": log_decays(2, 1, 2, 8)}),
    Workload(
        "decode",
        attention(length=1, value_dim=12)
        | {"gate": log_decays(2, 1, 2), "initial_state": normal(2, 2, 8, 12)},
    ),
    Workload(
        "odd_length",
        attention(length=63, kv_heads=4, head_dim=40, value_dim=60)
        | {"gate": log_decays(2, 63, 4, 40), "g_gamma": log_decays(4)},
    ),
    Workload(
        "one_head_for_all",
        attention(batch=1, length=127, kv_heads=1, head_dim=80, value_dim=96)
        | {"gate": log_decays(1, 127, 1)},
    ),
    Workload(
        "wide", attention(batch=1, length=20, heads=1, kv_heads=1, head_dim=192) | {"g_gamma": -0.2}
    ),
    Workload("state", attention() | _GATE | {"initial_state": normal(2, 2, 8, 8)}),
    Workload(
        "reverse",
        attention(length=37, value_dim=12)
        | {
            "gate": log_decays(2, 37, 2, 8),
            "g_gamma": log_decays(2),
            "initial_state": normal(2, 2, 8, 12),
            "reverse": True,
        },
    ).core(),
    Workload("packed", _PACKED | {"gate": log_decays(1, 45, 2, 8)}),
    Workload(
        "packed_state",
        _PACKED
        | {
            "gate": log_decays(1, 45, 2),
            "g_gamma": log_decays(2),
            "initial_state": normal(4, 2, 8, 8),
        },
    ).core(),
    Workload(
        "packed_reverse",
        _PACKED
        | {"gate": log_decays(1, 45, 2, 8), "initial_state": normal(4, 2, 8, 8), "reverse": True},
    ),
    Workload(
        "tokens_alone",
        {name: normal(9, 2, 8) for name in ("query", "key", "value")}
        | {"gate": log_decays(9, 2), "cu_seqlens": ends(0, 3, 9)},
    ),
)

# Chunks small enough that the workloads above have several, some of them not full.
CONFIGS = (GLAttentionConfig(block_q=8, block_k=1),)
