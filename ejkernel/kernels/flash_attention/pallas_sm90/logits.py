"""From products of queries and keys to logits and weights, in the registers of a warpgroup."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import dropout
from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.pallas_sm90.schedule import Visibility

ROWS = 64  # of a tile: what a warpgroup multiplies at once
# Shared memory for the operands of the forward pass.
SHARED_BYTES = gpu.SHARED_MEMORY - gpu.SHARED_MEMORY_RESERVE


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut: computing warpgroups, keys of a tile, tiles that are kept in flight."""

    consumers: int
    block_k: int
    stages: int

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory for queries, keys, values, and results where they lie apart."""
        held = self.block_q * head_dim * self.rooms(head_dim, value_dim)
        if head_dim != value_dim:
            held += self.block_q * value_dim
        return 2 * (held + self.stages * self.block_k * (head_dim + value_dim))

    def rooms(self, head_dim: int, value_dim: int) -> int:
        """How many units' queries there is room for: two, so that the next come early, or one.

        Results lie where the queries of their warpgroup lay, if dims are equal: otherwise they
        would reach into those of another, and have memory of their own.
        """
        rows = self.block_q + self.stages * self.block_k
        fits = 2 * rows * (head_dim + value_dim) <= SHARED_BYTES
        return 2 if fits and head_dim == value_dim else 1


@dataclasses.dataclass(frozen=True)
class Condition:
    """A `Visibility` inside a kernel: what its arrays' names begin with, and how many there are."""

    prefix: str
    pairs: int
    unions: tuple[tuple["Condition", ...], ...]


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays behind mask, bias and dropout, by the names under which a kernel gets them."""

    arrays: dict[str, jax.Array]
    condition: Condition | None

    @property
    def masked(self) -> bool:
        return self.condition is not None

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        seen: Visibility | None,
        q_size: int,
        kv_size: int,
        transposed: bool = False,
        bias_turned: bool = False,
    ) -> "Operands":
        """What tiles need; where keys are their rows, what pairs have stands transposed too.

        Of the bias that is said apart: it may be turned later.
        """
        arrays = {}
        turned = lambda x: jnp.swapaxes(x, 2, 3) if transposed else x

        def named(seen: Visibility, prefix: str) -> Condition:
            here = {"lower": seen.lower, "upper": seen.upper}
            here["dense"] = None if seen.dense is None else turned(seen.dense)
            for i, (query, key) in enumerate(seen.pairs):
                here |= {f"query_number_{i}": query, f"key_number_{i}": key}
            arrays.update({prefix + name: x for name, x in here.items() if x is not None})
            unions = tuple(
                tuple(named(one, f"{prefix}{i}_{j}_") for j, one in enumerate(either))
                for i, either in enumerate(seen.unions)
            )
            return Condition(prefix, len(seen.pairs), unions)

        condition = None if seen is None else named(seen, "")
        if inputs.bias is not None:
            bias = _whole_blocks(inputs.bias, q_size, kv_size)
            arrays["bias"] = jnp.swapaxes(bias, 2, 3) if bias_turned else bias
        if inputs.dropout is not None:
            seed, batch, head = (jnp.asarray(x).reshape(-1) for x in inputs.dropout)
            arrays |= {"seed": seed, "batch_index": batch, "head_index": head}
        return cls(arrays, condition)


def _whole_blocks(bias: jax.Array, q_size: int, kv_size: int) -> jax.Array:
    t, s = bias.shape[2:]
    padding = [(0, 0), (0, 0), (0, 0 if t == 1 else q_size - t), (0, 0 if s == 1 else kv_size - s)]
    return jnp.pad(bias, padding) if any(b for _, b in padding) else bias


def broadcast(ref: Any, row: Any, head: Any) -> tuple[Any, Any]:
    """Batch row and head in an array whose axes of size 1 serve all."""
    return row if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0


class Logits(NamedTuple):
    """Logits, the factor that makes them those of base 2, and their slope where they are capped."""

    value: jax.Array
    factor: float
    slope: jax.Array | None


class Tile:
    """The pairs of some queries with some keys of one batch row and head.

    Queries are rows and keys columns, or transposed the other way round. What belongs to rows stays
    the same from tile to tile and is read once; `at` says where the columns of a tile begin.
    """

    def __init__(
        self,
        spec: Spec,
        operands: Operands,
        refs: dict[str, Any],
        row: Any,
        head: Any,
        first_row: Any,
        columns: int,
        transposed: bool = False,
        engine: gpu.WgmmaEngine | None = None,
    ):
        self.spec, self.operands, self.refs = spec, operands, refs
        self.row, self.head, self.first_row = row, head, first_row
        self.shape, self.transposed, self.engine = (ROWS, columns), transposed, engine
        self.needs_place = operands.masked or "bias" in refs or "seed" in refs
        kinds = ("key_number",) if transposed else ("query_number", "lower", "upper")
        names = [name for name in operands.arrays if any(kind in name for kind in kinds)]
        self._of_rows = {name: self._rows(refs[name]) for name in names}

    def logits(
        self,
        products: jax.Array,
        at: Any,
        with_mask: bool,
        with_bias: bool = True,
        bias: jax.Array | None = None,
    ) -> Logits:
        """Logits from products of queries and keys; without bias if that is in the products.

        A `bias` that is given stands for the one in global memory.
        """
        factor = self.spec.softmax_scale * LOG2_E
        logits, slope = products, None
        if with_bias and bias is None and "bias" in self.refs:
            bias = self.bias(at)
        if bias is not None or self.spec.logits_soft_cap is not None:
            cap, factor = self.spec.logits_soft_cap, LOG2_E
            shrink = 1.0 if cap is None else 1.0 / cap
            logits = logits * (self.spec.softmax_scale * shrink)
            if bias is not None:
                logits = logits + bias.astype(jnp.float32) * shrink
            if cap is not None:
                logits, factor = jnp.tanh(logits), cap * LOG2_E
                slope = 1.0 - logits * logits
        if with_mask:
            logits = self._hidden(logits, at)
        return Logits(logits, factor, slope)

    def _hidden(self, logits: jax.Array, at: Any) -> jax.Array:
        """Logits, and -inf where the mask hides a pair; between bounds of rows by the engine."""
        if self.engine is None or self.operands.condition is None:
            return jnp.where(self.visible(at), logits, -jnp.inf)
        condition, refs = self.operands.condition, self.refs
        names = [condition.prefix + kind for kind in ("lower", "upper")]
        bounds = [self._of_rows[name] - at if name in refs else None for name in names]
        if any(bound is not None for bound in bounds):
            logits = self.engine.mask_columns(logits, *bounds)
        if parts := self._parts(condition, at, bounds=False):
            logits = jnp.where(functools.reduce(jnp.logical_and, parts), logits, -jnp.inf)
        return logits

    def kept(self, at: Any) -> jax.Array:
        """Which weights dropout keeps."""
        row = gpu.broadcast_rows(gpu.row_index(ROWS) + self.first_row, self.shape)
        column = gpu.column_index(self.shape) + at
        query, key = (column, row) if self.transposed else (row, column)
        return dropout.keep(
            self.spec.dropout_prob,
            self.refs["seed"][0],
            self.refs["batch_index"][self.row],
            self.refs["head_index"][self.head],
            query,
            key,
        )

    @property
    def drops(self) -> bool:
        return "seed" in self.refs

    def visible(self, at: Any) -> jax.Array:
        """Which pairs of a partial tile the mask allows."""
        return self._satisfied(self.operands.condition, at)

    def _satisfied(self, condition: Condition | None, at: Any) -> jax.Array:
        if condition is None:
            raise ValueError("flash_attention: a call without a mask has no partial tiles.")
        return functools.reduce(jnp.logical_and, self._parts(condition, at))

    def _parts(self, condition: Condition, at: Any, bounds: bool = True) -> list[jax.Array]:
        """What a condition asks of pairs, one after the other; bounds of keys if they count."""
        parts = []
        for kind, compare in (("lower", jnp.greater_equal), ("upper", jnp.less_equal)):
            name = condition.prefix + kind
            if name not in self.refs or not bounds:
                continue
            if self.transposed:
                key = gpu.broadcast_rows(gpu.row_index(ROWS) + self.first_row, self.shape)
                bound = gpu.broadcast_columns(self._columns(self.refs[name], at), self.shape)
            else:
                key = gpu.column_index(self.shape)
                bound = gpu.broadcast_rows(self._of_rows[name] - at, self.shape)
            parts.append(compare(key, bound))
        for i in range(condition.pairs):
            mine, other = ("key", "query") if self.transposed else ("query", "key")
            number = self._of_rows[f"{condition.prefix}{mine}_number_{i}"]
            others = self._columns(self.refs[f"{condition.prefix}{other}_number_{i}"], at)
            others = gpu.broadcast_columns(others, self.shape)
            parts.append(gpu.broadcast_rows(number, self.shape) == others)
        if (name := condition.prefix + "dense") in self.refs:
            ref = self.refs[name]
            row, head = self.broadcast(ref)
            rows, columns = gpu.pl.ds(self.first_row, ROWS), gpu.pl.ds(at, self.shape[1])
            part = gpu.load(ref.at[row, head, rows, columns], gpu.plgpu.Layout.WGMMA)
            parts.append(part.astype(jnp.int32) != 0)
        for either in condition.unions:
            found = (self._satisfied(one, at) for one in either)
            parts.append(functools.reduce(jnp.logical_or, found))
        return parts

    def bias(self, at: Any) -> jax.Array:
        """The bias of a tile, float32."""
        ref = self.refs["bias"]
        row, head = self.broadcast(ref)
        rows, columns = gpu.pl.ds(self.first_row, ROWS), gpu.pl.ds(at, self.shape[1])
        t, s = ref.shape[2:]
        if t > 1 and s > 1:
            part = gpu.load(ref.at[row, head, rows, columns], gpu.plgpu.Layout.WGMMA)
            return part.astype(jnp.float32)
        if t > 1:
            part = gpu.load(ref.at[row, head, rows, 0], gpu.row_layout())
            return gpu.broadcast_rows(part.astype(jnp.float32), self.shape)
        if s > 1:
            part = gpu.load(ref.at[row, head, 0, columns], gpu.column_layout())
            return gpu.broadcast_columns(part.astype(jnp.float32), self.shape)
        return lax.broadcast_in_dim(ref[row, head, 0, 0].astype(jnp.float32), self.shape, ())

    def broadcast(self, ref: Any) -> tuple[Any, Any]:
        """Its batch row and head in an array."""
        return broadcast(ref, self.row, self.head)

    def _rows(self, ref: Any) -> jax.Array:
        """A number for each row of the tile, from [b' or 1, length]."""
        row = self.row if ref.shape[0] > 1 else 0
        return gpu.load(ref.at[row, gpu.pl.ds(self.first_row, ROWS)], gpu.row_layout())

    def _columns(self, ref: Any, at: Any) -> jax.Array:
        """A number for each column of the tile, from [b' or 1, length]."""
        row = self.row if ref.shape[0] > 1 else 0
        return gpu.load(ref.at[row, gpu.pl.ds(at, self.shape[1])], gpu.column_layout())
