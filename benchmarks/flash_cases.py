"""The calls that `flash_gpu.py` times, and how much there is to compute in them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.types.block_map import block_map

TILE = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: its shape, and what it asks for beyond that."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    cuts: tuple[int, ...] = ()  # where documents begin and end
    bias: bool = False
    queries: int | None = None  # where there are fewer than keys

    def arguments(self) -> dict[str, Any]:
        shape = (self.batch, self.queries or self.length, self.heads, self.dim)
        kv_shape = (self.batch, self.length, self.kv_heads, self.dim)
        draw = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        arguments = {"query": draw(0, shape), "key": draw(1, kv_shape), "value": draw(2, kv_shape)}
        if self.bias:
            arguments["bias"] = draw(3, (1, self.heads, self.length, self.length))
        if self.cuts:
            arguments["cum_seqlens_q"] = jnp.array(self.cuts, jnp.int32)
        return {**arguments, **self.options}


def _documents() -> tuple[int, ...]:
    inner = np.random.default_rng(0).choice(np.arange(1, 16384), 36, replace=False)
    return (0, *map(int, np.sort(inner)), 16384)


CAUSAL = {"causal": True}
CASES = (
    Case("causal", 1, 16384, 16, 16, 128, CAUSAL),
    Case("full", 1, 16384, 16, 16, 128),
    Case("causal_4k", 4, 4096, 16, 16, 128, CAUSAL),
    Case("full_4k", 4, 4096, 16, 16, 128),
    Case("causal_64", 4, 4096, 32, 8, 64, CAUSAL),
    Case("full_64", 4, 4096, 32, 8, 64),
    Case("causal_256", 2, 8192, 8, 8, 256, CAUSAL),
    Case("packed_8", 1, 16384, 16, 16, 128, CAUSAL, tuple(range(0, 16385, 2048))),
    Case("packed_37", 1, 16384, 16, 16, 128, CAUSAL, _documents()),
    Case("window", 1, 16384, 16, 16, 128, CAUSAL | {"sliding_window": (1023, 0)}),
    Case("soft_cap", 1, 16384, 16, 16, 128, CAUSAL | {"logits_soft_cap": 50.0}),
    Case("bias", 1, 4096, 16, 16, 128, bias=True),
    Case("decode", 8, 32768, 32, 8, 128, queries=1),
)


def pairs(inputs: Inputs) -> int:
    """How many (query, key) pairs of one head the mask allows, over the batch."""
    rule, queries, keys = inputs.mask, inputs.query.shape[1], inputs.key.shape[1]
    rows = min(queries, 1024)

    @jax.jit
    def some(start: Any) -> jax.Array:
        return rule.slice(start, rows, 0, keys).dense(rows, keys).sum()  # type: ignore[union-attr]

    return inputs.query.shape[0] * sum(int(some(i)) for i in range(0, queries, rows))


def tiles(inputs: Inputs) -> int:
    """How many tiles of one head hold a visible pair, over the batch."""
    queries, keys = inputs.query.shape[1], inputs.key.shape[1]
    state = block_map(inputs.mask, queries, keys, TILE, TILE).state  # type: ignore[arg-type]
    return int((state > 0).sum()) * inputs.query.shape[0] // state.shape[0]
