"""From products of queries and keys to logits and weights, in the registers of a warpgroup."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import dropout
from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_gpu_walk import Visibility

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays behind mask, bias and dropout, by the names under which a kernel gets them.

    Axes of size 1 serve every index; `sizes` keeps the shapes of those that are passed flat.
    """

    arrays: dict[str, jax.Array]
    pairs: int
    masked: bool

    @classmethod
    def of(cls, inputs: Inputs, seen: Visibility | None, q_size: int, kv_size: int) -> "Operands":
        arrays = {}
        if seen is not None:
            named = {"lower": seen.lower, "upper": seen.upper, "dense": seen.dense}
            for i, (query, key) in enumerate(seen.pairs):
                named |= {f"query_number_{i}": query, f"key_number_{i}": key}
            arrays |= {name: x for name, x in named.items() if x is not None}
        if inputs.bias is not None:
            arrays["bias"] = _whole_blocks(inputs.bias, q_size, kv_size)
        if inputs.dropout is not None:
            seed, batch, head = (jnp.asarray(x).reshape(-1) for x in inputs.dropout)
            arrays |= {"seed": seed, "batch_index": batch, "head_index": head}
        return cls(arrays, len(seen.pairs) if seen is not None else 0, seen is not None)


def _whole_blocks(bias: jax.Array, q_size: int, kv_size: int) -> jax.Array:
    t, s = bias.shape[2:]
    padding = [(0, 0), (0, 0), (0, 0 if t == 1 else q_size - t), (0, 0 if s == 1 else kv_size - s)]
    return jnp.pad(bias, padding) if any(b for _, b in padding) else bias


class Tile:
    """64 queries of a batch row and head against a block of keys."""

    def __init__(self, spec: Spec, operands: Operands, refs: dict, row, head, first_row, block_k):
        self.spec, self.operands, self.refs = spec, operands, refs
        self.row, self.head, self.first_row, self.block_k = row, head, first_row, block_k
        self.shape = (64, block_k)
        self.needs_place = operands.masked or "bias" in refs or "seed" in refs
        # What a row needs is read once for all its tiles.
        names = ("lower", "upper", *(f"query_number_{i}" for i in range(operands.pairs)))
        self.of_rows = {name: self._rows(refs[name]) for name in names if name in refs}

    def logits(self, products: jax.Array, block: Any, with_mask: bool) -> tuple[jax.Array, float]:
        """Logits, and the factor that makes them those of base 2."""
        factor = self.spec.softmax_scale * LOG2_E
        logits = products
        if "bias" in self.refs or self.spec.logits_soft_cap is not None:
            logits = logits * self.spec.softmax_scale
            if "bias" in self.refs:
                logits = logits + self._bias(block)
            factor = LOG2_E
            if (cap := self.spec.logits_soft_cap) is not None:
                logits = jnp.tanh(logits * (1.0 / cap))
                factor = cap * LOG2_E
        if with_mask:
            logits = jnp.where(self._visible(block), logits, -jnp.inf)
        return logits, factor

    def dropped(self, weights: jax.Array, block: Any) -> jax.Array:
        """The weights that dropout keeps, 0 for the others."""
        if "seed" not in self.refs:
            return weights
        row = gpu.along_rows(gpu.row_index(64) + self.first_row, self.shape)
        column = gpu.column_index(self.shape) + block * self.block_k
        kept = dropout.keep(
            self.spec.dropout_prob,
            self.refs["seed"][0],
            self.refs["batch_index"][self.row],
            self.refs["head_index"][self.head],
            row,
            column,
        )
        return jnp.where(kept, weights, 0.0)

    def _visible(self, block: Any) -> jax.Array:
        first = block * self.block_k
        columns = gpu.pl.ds(first, self.block_k)
        parts = []
        if "lower" in self.refs or "upper" in self.refs:
            column = gpu.column_index(self.shape)
            of_rows = lambda name: gpu.along_rows(self.of_rows[name] - first, self.shape)
            if "lower" in self.refs:
                parts.append(column >= of_rows("lower"))
            if "upper" in self.refs:
                parts.append(column <= of_rows("upper"))
        for i in range(self.operands.pairs):
            ref = self.refs[f"key_number_{i}"]
            row = self.row if ref.shape[0] > 1 else 0
            number = gpu.load(ref.at[row, columns], gpu.columns_layout())
            queries = gpu.along_rows(self.of_rows[f"query_number_{i}"], self.shape)
            parts.append(queries == gpu.along_columns(number, self.shape))
        if "dense" in self.refs:
            ref = self.refs["dense"]
            row, head = self._broadcast(ref)
            rows = gpu.pl.ds(self.first_row, 64)
            mask = gpu.load(ref.at[row, head, rows, columns], gpu.plgpu.Layout.WGMMA)
            parts.append(mask.astype(jnp.int32) != 0)
        visible = parts[0]
        for part in parts[1:]:
            visible = visible & part
        return visible

    def _bias(self, block: Any) -> jax.Array:
        ref = self.refs["bias"]
        row, head = self._broadcast(ref)
        rows, columns = (
            gpu.pl.ds(self.first_row, 64),
            gpu.pl.ds(block * self.block_k, self.block_k),
        )
        t, s = ref.shape[2:]
        if t > 1 and s > 1:
            return gpu.load(ref.at[row, head, rows, columns], gpu.plgpu.Layout.WGMMA).astype(
                jnp.float32
            )
        if t > 1:
            part = gpu.load(ref.at[row, head, rows, 0], gpu.rows_layout())
            return gpu.along_rows(part.astype(jnp.float32), self.shape)
        if s > 1:
            part = gpu.load(ref.at[row, head, 0, columns], gpu.columns_layout())
            return gpu.along_columns(part.astype(jnp.float32), self.shape)
        return lax.broadcast_in_dim(ref[row, head, 0, 0].astype(jnp.float32), self.shape, ())

    def _broadcast(self, ref: Any) -> tuple[Any, Any]:
        return self.row if ref.shape[0] > 1 else 0, self.head if ref.shape[1] > 1 else 0

    def _rows(self, ref: Any) -> jax.Array:
        """A number for each of the 64 rows, from [b' or 1, t]."""
        row = self.row if ref.shape[0] > 1 else 0
        return gpu.load(ref.at[row, gpu.pl.ds(self.first_row, 64)], gpu.rows_layout())
