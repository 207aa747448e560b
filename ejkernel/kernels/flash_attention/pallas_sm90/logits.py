"""From the matmul of queries and keys to logits: scale, bias, soft cap, mask, dropout bits.

All of it happens in the registers of a consumer warpgroup. A bias of every pair is staged through
shared memory by the producer warpgroup.
"""

import dataclasses
import functools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.flash_attention import dropout
from ejkernel.kernels.flash_attention.inputs import Spec
from ejkernel.kernels.flash_attention.pallas_sm90.configs import ROWS
from ejkernel.kernels.flash_attention.pallas_sm90.mask_operands import MaskCondition, TileOperands

# More stages gain nothing: a bias is read as soon as the tile before is done.
_BIAS_STAGES = 2


class Logits(NamedTuple):
    """Logits of a tile.

    Attributes:
        value: logits in some unit.
        log2_scale: `value * log2_scale` are logits to base 2.
        cap_gradient: the derivative of the soft cap, or None.
    """

    value: jax.Array
    log2_scale: float
    cap_gradient: jax.Array | None


class LogitTile:
    """The logits of 64 rows with the columns of a tile, for one batch row and head.

    Rows are queries and columns keys, or transposed the other way round. Values of rows are read
    once for all tiles; `at` is the first column of a tile.
    """

    spec: Spec
    operands: TileOperands
    refs: dict[str, Ref]
    batch: Index
    head: Index
    first_row: Index
    shape: tuple[int, int]
    transposed: bool
    engine: gpu.WgmmaEngine | None

    def __init__(
        self,
        spec: Spec,
        operands: TileOperands,
        refs: dict[str, Ref],
        batch: Index,
        head: Index,
        first_row: Index,
        columns: int,
        transposed: bool = False,
        engine: gpu.WgmmaEngine | None = None,
    ):
        self.spec, self.operands, self.refs = spec, operands, refs
        self.batch, self.head, self.first_row = batch, head, first_row
        self.shape, self.transposed, self.engine = (ROWS, columns), transposed, engine
        self.needs_position: bool = operands.masked or "bias" in refs or "seed" in refs
        kinds = ("key_id",) if transposed else ("query_id", "lower", "upper")
        names = [name for name in operands.arrays if any(kind in name for kind in kinds)]
        self._row_values = {name: self._load_rows(refs[name]) for name in names}

    @property
    def has_dropout(self) -> bool:
        return "seed" in self.refs

    def logits(
        self,
        products: jax.Array,
        at: Index,
        with_mask: bool,
        with_bias: bool = True,
        bias: jax.Array | None = None,
    ) -> Logits:
        """Logits from products of queries and keys.

        Args:
            products: the accumulator of the matmul.
            at: the first column of the tile.
            with_mask: whether to mask it.
            with_bias: False if the products include the bias.
            bias: the staged bias; without it, the bias is read from global memory.
        """
        log2_scale = self.spec.softmax_scale * LOG2_E
        logits, cap_gradient = products, None
        if with_bias and bias is None and "bias" in self.refs:
            bias = self.bias(at)
        if bias is not None or self.spec.logits_soft_cap is not None:
            cap, log2_scale = self.spec.logits_soft_cap, LOG2_E
            inverse_cap = 1.0 if cap is None else 1.0 / cap
            logits = logits * (self.spec.softmax_scale * inverse_cap)
            if bias is not None:
                logits = logits + bias.astype(jnp.float32) * inverse_cap
            if cap is not None:
                logits, log2_scale = jnp.tanh(logits), cap * LOG2_E
                cap_gradient = 1.0 - logits * logits
        if with_mask:
            logits = self._masked(logits, at)
        return Logits(logits, log2_scale, cap_gradient)

    def _masked(self, logits: jax.Array, at: Index) -> jax.Array:
        """Logits with -inf where the mask hides a pair; the engine compares bounds of rows."""
        if self.engine is None or self.operands.condition is None:
            return jnp.where(self.visible(at), logits, -jnp.inf)
        condition, refs = self.operands.condition, self.refs
        names = [condition.prefix + kind for kind in ("lower", "upper")]
        bounds = [self._row_values[name] - at if name in refs else None for name in names]
        if any(bound is not None for bound in bounds):
            logits = self.engine.mask_columns(logits, *bounds)
        if parts := self._conditions(condition, at, bounds=False):
            logits = jnp.where(functools.reduce(jnp.logical_and, parts), logits, -jnp.inf)
        return logits

    def dropout_mask(self, at: Index) -> jax.Array:
        """Which weights dropout keeps."""
        row = gpu.broadcast_rows(gpu.row_index(ROWS) + self.first_row, self.shape)
        column = gpu.column_index(self.shape) + at
        query, key = (column, row) if self.transposed else (row, column)
        return dropout.keep(
            self.spec.dropout_prob,
            self.refs["seed"][0],
            self.refs["batch_index"][self.batch],
            self.refs["head_index"][self.head],
            query,
            key,
        )

    def visible(self, at: Index) -> jax.Array:
        """Which pairs of a partial tile the mask allows."""
        return self._satisfied(self.operands.condition, at)

    def _satisfied(self, condition: MaskCondition | None, at: Index) -> jax.Array:
        if condition is None:
            raise ValueError("flash_attention: a call without a mask has no partial tiles.")
        return functools.reduce(jnp.logical_and, self._conditions(condition, at))

    def _conditions(
        self, condition: MaskCondition, at: Index, bounds: bool = True
    ) -> list[jax.Array]:
        """The parts of a condition, evaluated one after the other; `bounds` with its bounds."""
        parts = []
        for kind, compare in (("lower", jnp.greater_equal), ("upper", jnp.less_equal)):
            name = condition.prefix + kind
            if name not in self.refs or not bounds:
                continue
            if self.transposed:
                key = gpu.broadcast_rows(gpu.row_index(ROWS) + self.first_row, self.shape)
                bound = gpu.broadcast_columns(self._load_columns(self.refs[name], at), self.shape)
            else:
                key = gpu.column_index(self.shape)
                bound = gpu.broadcast_rows(self._row_values[name] - at, self.shape)
            parts.append(compare(key, bound))
        for i in range(condition.id_pairs):
            rows, columns = ("key", "query") if self.transposed else ("query", "key")
            row_ids = self._row_values[f"{condition.prefix}{rows}_id_{i}"]
            column_ids = self._load_columns(self.refs[f"{condition.prefix}{columns}_id_{i}"], at)
            column_ids = gpu.broadcast_columns(column_ids, self.shape)
            parts.append(gpu.broadcast_rows(row_ids, self.shape) == column_ids)
        if (name := condition.prefix + "dense") in self.refs:
            part = self._load_tile(self.refs[name], at)
            parts.append(part.astype(jnp.int32) != 0)
        for union in condition.unions:
            found = (self._satisfied(one, at) for one in union)
            parts.append(functools.reduce(jnp.logical_or, found))
        return parts

    def bias(self, at: Index) -> jax.Array:
        """The bias of a tile from global memory, float32."""
        ref = self.refs["bias"]
        t, s = ref.shape[2:]
        if t > 1 and s > 1:
            return self._load_tile(ref, at).astype(jnp.float32)
        batch, head = broadcast_index(ref, self.batch, self.head)
        rows, columns = gpu.pl.ds(self.first_row, ROWS), gpu.pl.ds(at, self.shape[1])
        if t > 1:
            part = gpu.load(ref.at[batch, head, rows, 0], gpu.row_layout())
            return gpu.broadcast_rows(part.astype(jnp.float32), self.shape)
        if s > 1:
            part = gpu.load(ref.at[batch, head, 0, columns], gpu.column_layout())
            return gpu.broadcast_columns(part.astype(jnp.float32), self.shape)
        return gpu.broadcast_scalar(ref[batch, head, 0, 0].astype(jnp.float32), self.shape)

    def _load_tile(self, ref: Ref, at: Index) -> jax.Array:
        """The elements of the tile, from [#b, #n, rows, columns]."""
        batch, head = broadcast_index(ref, self.batch, self.head)
        rows, columns = gpu.pl.ds(self.first_row, ROWS), gpu.pl.ds(at, self.shape[1])
        return gpu.load(ref.at[batch, head, rows, columns], gpu.plgpu.Layout.WGMMA)

    def _load_rows(self, ref: Ref) -> jax.Array:
        """A number for each row of the tile, from [#b, rows]."""
        batch = self.batch if ref.shape[0] > 1 else 0
        return gpu.load(ref.at[batch, gpu.pl.ds(self.first_row, ROWS)], gpu.row_layout())

    def _load_columns(self, ref: Ref, at: Index) -> jax.Array:
        """A number for each column of the tile, from [#b, columns]."""
        batch = self.batch if ref.shape[0] > 1 else 0
        return gpu.load(ref.at[batch, gpu.pl.ds(at, self.shape[1])], gpu.column_layout())


def broadcast_index(ref: Ref, batch: Index, head: Index) -> tuple[Index, Index]:
    """Batch row and head in an array [#b, #n, ...] whose axes may have size 1."""
    return batch if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0


@dataclasses.dataclass(frozen=True)
class StagedBias:
    """Ring buffers of bias tiles in shared memory, one of `stages` for each consumer warpgroup.

    Without stages the bias is not staged: consumers read it from global memory. For transposed
    tiles, the bias is copied as it is and transposed on its way to registers.
    """

    dtype: DTypeLike | None
    consumers: int
    columns: int
    stages: int
    transposed: bool

    @classmethod
    def fitting(
        cls,
        bias: jax.Array | jax.ShapeDtypeStruct | None,
        consumers: int,
        columns: int,
        shared_bytes: int,
        transposed: bool,
    ) -> "StagedBias":
        """As many stages as fit the shared memory that is left.

        None for no bias, for one that is not of 16 bits, and for one that is the same for all
        queries or keys.
        """
        stages = min(_BIAS_STAGES, shared_bytes // (2 * consumers * ROWS * columns))
        if bias is None or 1 in bias.shape[2:] or bias.dtype.itemsize != 2:
            stages = 0
        return cls(None if bias is None else bias.dtype, consumers, columns, stages, transposed)

    def __bool__(self) -> bool:
        return self.stages > 0

    def refs_of_tile(self, refs: dict[str, Ref]) -> dict[str, Ref]:
        """The arrays that a `LogitTile` reads from global memory."""
        return {name: ref for name, ref in refs.items() if name != "bias" or not self}

    @property
    def matrices(self) -> gpu.SharedMatrices:
        shape = (self.columns, ROWS) if self.transposed else (ROWS, self.columns)
        count = self.consumers * self.stages
        return gpu.SharedMatrices(self.dtype or jnp.bfloat16, count, *shape, True)

    def scratch(self, interpreted: bool) -> dict[str, object]:
        """Shared memory and barriers, by name."""
        if not self:
            return {}
        barriers = gpu.barriers(self.consumers * self.stages)
        biases = self.matrices.allocate(interpreted)
        return {"biases": biases, "bias_full": barriers, "bias_empty": barriers}

    def _buffer(self, warpgroup: Index, step: Index) -> Index:
        return warpgroup * self.stages + lax.rem(step, self.stages)

    def produce(
        self,
        shared: types.SimpleNamespace,
        refs: dict[str, Ref],
        step: jax.Array,
        batch: Index,
        head: Index,
        first_row: Index,
        at: Index,
    ) -> None:
        """Copy the bias of a tile for each consumer warpgroup, once its stage is empty."""
        if not self:
            return
        ref = refs["bias"]
        batch, head = broadcast_index(ref, batch, head)
        columns = gpu.pl.ds(at, self.columns)
        for warpgroup in range(self.consumers):
            buffer = self._buffer(warpgroup, step)
            empty, full = shared.bias_empty.at[buffer], shared.bias_full.at[buffer]
            gpu.pl.when(step >= self.stages)(lambda empty=empty: gpu.plgpu.barrier_wait(empty))
            rows = gpu.pl.ds(first_row + warpgroup * ROWS, ROWS)
            place = (columns, rows) if self.transposed else (rows, columns)
            source = ref.at[(batch, head, *place)]
            gpu.plgpu.copy_gmem_to_smem(source, shared.biases.at[buffer], full)

    def consume(
        self,
        shared: types.SimpleNamespace,
        engine: gpu.WgmmaEngine,
        warpgroup: jax.Array,
        step: jax.Array,
    ) -> jax.Array | None:
        """The bias of a warpgroup's next tile, in registers; its stage is empty afterwards."""
        if not self:
            return None
        buffer = self._buffer(warpgroup, step)
        gpu.plgpu.barrier_wait(shared.bias_full.at[buffer])
        found = self._to_registers(shared.biases.at[buffer], engine is gpu.INTERPRETED)
        # A thread's own reads are ordered before a later copy by a fence alone, not by a barrier.
        gpu.plgpu.commit_smem()
        gpu.plgpu.barrier_arrive(shared.bias_empty.at[buffer])
        return found

    def _to_registers(self, ref: Ref, interpreted: bool) -> jax.Array:
        """A matrix from shared memory; a transposed one is shuffled between threads of a quad."""
        if interpreted:
            return ref[...].T if self.transposed else ref[...]
        layouts = gpu.plgpu.Layout
        if not self.transposed:
            return gpu.load(ref, layouts.WGMMA)
        transposed = gpu.load(gpu.transposed(ref), layouts.WGMMA_TRANSPOSED)
        return gpu.plgpu.layout_cast(transposed, layouts.WGMMA)
