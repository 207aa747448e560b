"""The gradient of a bias in the backward kernel on TPU: that of the logits, summed as it is shared.

| the bias has | its gradient |
|---|---|
| a number for every logit | is written tile by tile |
| one for several batch rows or heads | is accumulated in HBM, tile by tile, sequentially |
| one for all queries | is accumulated in VMEM over a column of tiles |
| one for all keys | stays in VMEM for all columns, as the gradient of the queries does |

The last two are summed over heads and batch rows after the kernel.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.common.mosaic_tpu.blocks import BlockResult
from ejkernel.kernels.common.mosaic_tpu.vectors import LANES
from ejkernel.kernels.common.refs import Ref
from ejkernel.kernels.flash_attention.pallas_tpu.launch import FlashCall, FlashTileSize, HeadGroups
from ejkernel.kernels.flash_attention.pallas_tpu.schedule import Step


class BiasGradient:
    """Results, scratch memory and kernel code of the gradient; nothing without a bias."""

    call: FlashCall
    size: FlashTileSize
    step: Step
    result: Ref

    def __init__(self, call: FlashCall):
        self.call, self.size = call, call.size
        bias = call.inputs.bias
        self.results: list[BlockResult] = []
        self.scratch: list[pl.MemoryRef] = []
        self.kind: Literal["tile", "keys", "queries"] | None = None
        self.shared: bool = False
        if bias is None:
            return
        b, n, t, s = bias.shape
        self.kind = "queries" if s == 1 else "keys" if t == 1 else "tile"
        self.shared = self.kind == "tile" and (b, n) != (call.batch, call.q_heads)
        getattr(self, "_prepare_shared" if self.shared else f"_prepare_{self.kind}")(b, n)

    def _prepare_tile(self, b: int, n: int) -> None:
        block = (None, self.size.heads, self.size.keys, self.size.queries)
        spec = self.call.block_spec(block, lambda at: (at.batch, at.heads, at.keys, at.queries))
        shape = (b, n, self.call.kv_len, self.call.q_len)
        self.results = [BlockResult(shape, jnp.float32, spec, zeroed=True)]

    def _prepare_shared(self, b: int, n: int) -> None:
        keys, queries = self.size.keys, self.size.queries
        blocks = (-(-self.call.kv_len // keys) * keys, -(-self.call.q_len // queries) * queries)
        in_hbm = pl.BlockSpec(memory_space=pl.ANY)
        self.results = [BlockResult((b, n, *blocks), jnp.float32, in_hbm, zeroed=True)]
        self.heads: int = self.size.heads if n > 1 else 1
        self.scratch = [pltpu.VMEM((self.heads, keys, queries), jnp.float32)]

    def _prepare_keys(self, b: int, n: int) -> None:
        block = (None, self.size.heads, 1, self.size.keys)
        spec = self.call.block_spec(block, lambda at: (at.batch, at.heads, 0, at.keys))
        shape = (self.call.batch, self.call.q_heads, 1, self.call.kv_len)
        self.results = [BlockResult(shape, jnp.float32, spec)]
        self.scratch = [pltpu.VMEM((self.size.heads, self.size.keys, LANES), jnp.float32)]

    def _prepare_queries(self, b: int, n: int) -> None:
        queries = -(-self.call.q_len // self.size.queries) * self.size.queries
        shape = (self.call.batch, self.call.q_heads, 1, queries)
        in_hbm = pl.BlockSpec(memory_space=pl.ANY)
        self.results = [BlockResult(shape, jnp.float32, in_hbm)]
        self.scratch = [pltpu.VMEM((self.size.heads, 1, queries), jnp.float32)]

    def assembled(self, x: jax.Array) -> jax.Array:
        """[#b, #n, #t, #s] from the result of the kernel."""
        if self.kind == "keys":
            return x
        x = jnp.swapaxes(x, 2, 3)[:, :, : self.call.q_len]
        return x[..., : self.call.kv_len]

    def at(self, step: Step, result: Ref, scratch: Ref | None) -> "BiasGradient":
        """The gradient at a step of the kernel, with the refs of its result and accumulator."""
        self.step, self.result = step, result
        self.acc: Ref = result if scratch is None else scratch
        return self

    def begin(self) -> None:
        """Before the first tile of a column."""
        if self.kind == "keys":
            self.acc[...] = jnp.zeros_like(self.acc)

    def load(self) -> None:
        """Before a tile."""
        if self.shared:
            pltpu.sync_copy(self._place(), self.acc)

    def add(self, head: int, d_logits: jax.Array) -> None:
        """The tile [keys, queries] of a head."""
        if self.kind is None:
            return
        if self.shared:
            self.acc[head if self.heads > 1 else 0] += d_logits
        elif self.kind == "tile":
            self.result[head] = d_logits
        elif self.kind == "keys":
            starts = range(0, d_logits.shape[1], LANES)
            parts = [d_logits[:, start : start + LANES] for start in starts]
            self.acc[head] += functools.reduce(jnp.add, parts)
        else:
            start = pl.multiple_of(self.step.tile.queries * self.size.queries, LANES)
            rows = pl.ds(start, self.size.queries)
            self.acc[head, :, rows] += d_logits.sum(0, keepdims=True)

    def store(self) -> None:
        """After a tile."""
        if self.shared:
            pltpu.sync_copy(self.acc, self._place())

    def skip(self) -> None:
        """In place of a tile that is empty."""
        if self.kind == "tile" and not self.shared:
            self.result[...] = jnp.zeros_like(self.result)

    def end(self) -> None:
        """After the last tile of a column."""
        if self.kind == "keys":
            for head in range(self.size.heads):
                self.result[head] = self.acc[head].T.sum(0, keepdims=True)

    def begin_row(self) -> None:
        """Before the first tile of all columns."""
        if self.kind == "queries":
            self.acc[...] = jnp.zeros_like(self.acc)

    def end_row(self) -> None:
        """After the last tile of all columns."""
        if self.kind == "queries":
            tile = self.step.tile
            heads = pl.ds(tile.heads * self.size.heads, self.size.heads)
            pltpu.sync_copy(self.acc, self.result.at[tile.batch, heads])

    def _place(self) -> Ref:
        """The tile in HBM."""
        tile = self.step.tile
        b, n, *_ = self.results[0].shape
        first = tile.heads * self.heads if n > 1 else 0
        along = lambda block, size: pl.ds(pl.multiple_of(block * size, LANES), size)
        return self.result.at[
            tile.batch if b > 1 else 0,
            pl.ds(first, self.heads),
            along(tile.keys, self.size.keys),
            along(tile.queries, self.size.queries),
        ]


def of_queries(parts: list[jax.Array], bias: jax.Array) -> jax.Array:
    """The gradient from those of parts of the queries."""
    if bias.shape[2] == 1 and bias.shape[3] > 1:
        return functools.reduce(jnp.add, parts)
    return jnp.concatenate(parts, 2)


def of_heads(parts: list[jax.Array], heads: HeadGroups, bias: jax.Array) -> jax.Array:
    """The gradient from those of parts of the heads, summed over broadcast axes."""
    if parts[0].shape[1] == bias.shape[1] == 1 and heads.heads > 1:
        whole = functools.reduce(jnp.add, parts)
    else:
        whole = heads.joined(parts, 1)
    shared = [i for i, size in enumerate(bias.shape) if size == 1 < whole.shape[i]]
    return whole.sum(shared, keepdims=True) if shared else whole
