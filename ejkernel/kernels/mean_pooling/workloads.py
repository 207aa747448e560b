"""Named calls: the conformance suite, the tuner and the benchmark all read this list."""

import jax.numpy as jnp

from ejkernel.kernels.mean_pooling.config import MeanPoolingConfig
from ejkernel.ops.workload import Draw, Workload, boolean, normal, value


def _packed(*cumulative: int) -> Draw:
    return value(lambda: jnp.array(cumulative, jnp.int32))


def _lengths(length: int, *valid: int) -> Draw:
    """A padding mask of ints, as tokenizers give it."""
    return value(lambda: (jnp.arange(length) < jnp.array(valid)[:, None]).astype(jnp.int32))


WORKLOADS = (
    Workload("plain", {"x": normal(2, 63, 40)}),
    Workload("one_token", {"x": normal(2, 1, 60)}),
    Workload(
        "mask", {"x": normal(4, 127, 16), "attention_mask": boolean(4, 127, chance=0.7)}
    ).core(),
    Workload("padding", {"x": normal(4, 48, 96), "attention_mask": _lengths(48, 48, 17, 0, 1)}),
    Workload("packed", {"x": normal(63, 80), "cu_seqlens": _packed(0, 17, 17, 40, 63)}).core(),
    Workload("packed_one", {"x": normal(1, 1, 192), "cu_seqlens": _packed(0, 1)}),
    Workload("packed_past_the_end", {"x": normal(127, 24), "cu_seqlens": _packed(0, 1, 100)}),
    Workload(
        "bert_base",
        {"x": normal(64, 512, 768), "attention_mask": boolean(64, 512, chance=0.8)},
        frozenset({"tune"}),
    ),
)

# Blocks small enough that the workloads above have several, whole and cut.
CONFIGS = (MeanPoolingConfig(block_size=16),)
