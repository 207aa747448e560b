"""Matmuls and register operations of a warpgroup: on the tensor cores, and interpreted."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.mosaic_gpu import inline_mlir
from ejkernel.kernels.common.mosaic_gpu.registers import broadcast_rows, column_index, row_layout
from ejkernel.kernels.common.mosaic_gpu.shared_memory import SharedMatrixRefs, transposed
from ejkernel.kernels.common.mosaic_gpu.versions import pl, plgpu
from ejkernel.kernels.common.refs import Index, Ref


class RegisterValue:
    """A value in the interpreter that stands for a reference to registers."""

    def __init__(self, value: jax.Array):
        self.value: jax.Array = value

    def __getitem__(self, index: object) -> jax.Array:
        return self.value

    def __setitem__(self, index: object, value: jax.Array) -> None:
        self.value = value


# Registers that a matmul adds its product to, or that a value is kept in.
Accumulator = Ref | RegisterValue
Accumulators = Sequence[Accumulator]
# `body(accumulators, values)` of `run`.
Body = Callable[[Accumulators, Accumulators], None]


class WgmmaEngine:
    """Warpgroup matmuls (WGMMA) on the tensor cores: asynchronous, completed in order."""

    def run(
        self, body: Body, accumulators: Sequence[jax.Array], values: Sequence[jax.Array] = ()
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Accumulators and values after `body(accumulator_refs, value_refs)` and its matmuls."""
        start = tuple(plgpu.ACC.init(x) for x in accumulators)
        return pl.run_state(lambda refs: body(*refs))((start, tuple(values)))

    def matmul_nt(
        self,
        accumulator: Accumulator,
        left: SharedMatrixRefs,
        i: Index,
        right: SharedMatrixRefs,
        j: Index,
    ) -> None:
        """Start `accumulator += left[i] @ right[j].T`."""
        for panel in range(left.shape.panels):
            plgpu.wgmma(accumulator, left.panel(i, panel), transposed(right.panel(j, panel)))

    def matmul_nn(
        self, accumulator: Accumulator, left: jax.Array | Ref, right: SharedMatrixRefs, j: Index
    ) -> None:
        """Start `accumulator += left @ right[j]`, one matmul for each panel of `right`.

        `left` may lie in registers or in shared memory.
        """
        for panel, (start, stop) in enumerate(right.panel_columns()):
            part: Any = accumulator
            if right.shape.panels > 1:
                part = part.at[:, start:stop]
            plgpu.wgmma(part, left, right.panel(j, panel))

    def read_accumulator(self, accumulator: Accumulator, pending: int) -> jax.Array:
        """The accumulator, once at most `pending` matmuls are incomplete."""
        # The compiler knows of no dependency between the wait and the registers it waits for.
        return lax.optimization_barrier(plgpu.wgmma_accumulator_load(accumulator, wait_n=pending))

    def wait(self) -> None:
        """Wait until every matmul is complete."""
        plgpu.wgmma_wait(0)

    def rescale_rows(self, x: jax.Array, alpha: jax.Array, unconditional: bool) -> jax.Array:
        """`x * alpha[:, None]`; unless `unconditional`, skipped by threads with no alpha but 1."""
        if unconditional:
            return x * broadcast_rows(alpha, x.shape)
        layout = plgpu.Layout.WGMMA
        kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

        @plgpu.inline_mgpu(arg_types=(layout, layout, row_layout()), return_type=kind)
        def scale(context: Any, x: Any, repeated: Any, alpha: Any) -> Any:
            # A branch of each thread on its own rows, which Pallas cannot express.
            return inline_mlir.multiply_unless_one(x, repeated, alpha)

        return scale(x, broadcast_rows(alpha, x.shape), alpha)

    def mask_columns(
        self, x: jax.Array, first: jax.Array | None, last: jax.Array | None
    ) -> jax.Array:
        """`x` with -inf before the column `first` of each row, and after `last`."""
        layout = plgpu.Layout.WGMMA
        kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
        bounds = [bound for bound in (first, last) if bound is not None]

        @plgpu.inline_mgpu(arg_types=(layout, *[row_layout()] * len(bounds)), return_type=kind)
        def between(context: Any, x: Any, *bounds: Any) -> Any:
            # Each thread has up to 32 columns of a row: a comparison takes four instructions for
            # each of them, a bit of one number little more than one.
            given = iter(bounds)
            both = (None if bound is None else next(given) for bound in (first, last))
            return inline_mlir.mask_columns(x, *both)

        return between(x, *bounds)


class InterpretedEngine(WgmmaEngine):
    """The same computation in Pallas' interpreter, where each matmul completes at once.

    The interpreter executes barriers and asynchronous copies, but not every form of a matmul.
    """

    def run(
        self, body: Body, accumulators: Sequence[jax.Array], values: Sequence[jax.Array] = ()
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        refs = tuple(map(RegisterValue, accumulators)), tuple(map(RegisterValue, values))
        body(*refs)
        sums, others = (tuple(x.value for x in part) for part in refs)
        return sums, others

    def matmul_nt(
        self,
        accumulator: Accumulator,
        left: SharedMatrixRefs,
        i: Index,
        right: SharedMatrixRefs,
        j: Index,
    ) -> None:
        for panel in range(left.shape.panels):
            a, b = left.panel(i, panel)[...], right.panel(j, panel)[...]
            self.add_product(accumulator, a, b.T)
        self.fence()

    def matmul_nn(
        self, accumulator: Accumulator, left: jax.Array | Ref, right: SharedMatrixRefs, j: Index
    ) -> None:
        panels = [right.panel(j, panel)[...] for panel in range(right.shape.panels)]
        self.add_product(accumulator, left[...], jnp.concatenate(panels, axis=1))
        self.fence()

    def add_product(self, accumulator: Accumulator, left: jax.Array, right: jax.Array) -> None:
        """`accumulator += left @ right` in float32."""
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        accumulator[...] += jnp.dot(left, right, precision=lax.Precision.HIGHEST)

    def fence(self) -> None:
        """Order a thread's own reads of shared memory before later copies; WGMMA needs none."""
        plgpu.commit_smem()

    def read_accumulator(self, accumulator: Accumulator, pending: int) -> jax.Array:
        return accumulator[...]

    def wait(self) -> None:
        pass

    def rescale_rows(self, x: jax.Array, alpha: jax.Array, unconditional: bool) -> jax.Array:
        return x * broadcast_rows(alpha, x.shape)

    def mask_columns(
        self, x: jax.Array, first: jax.Array | None, last: jax.Array | None
    ) -> jax.Array:
        column = column_index(x.shape)
        if first is not None:
            x = jnp.where(column >= broadcast_rows(first, x.shape), x, -jnp.inf)
        if last is not None:
            x = jnp.where(column <= broadcast_rows(last, x.shape), x, -jnp.inf)
        return x


WGMMA, INTERPRETED = WgmmaEngine(), InterpretedEngine()
