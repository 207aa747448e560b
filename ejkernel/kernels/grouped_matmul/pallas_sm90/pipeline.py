"""The pipeline of the Hopper kernels: ring buffer, shared memory, matmuls, epilogue.

The same bytes of shared memory have several views. A TMA copy sees rows of 128 bytes, which may
begin at any row of an array. The tensor cores see tiles of 8 such rows.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import Slice
from jax.typing import DTypeLike

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.grouped_matmul.pallas_sm90.configs import (
    SWIZZLE_BYTES,
    WARPGROUP_ROWS,
    HopperTileConfig,
)


def untiled_memory(dtype: DTypeLike, *shape: int) -> object:
    """Shared memory as copies see it: swizzled rows of 128 bytes."""
    return gpu.plgpu.SMEM(shape, dtype, transforms=(gpu.plgpu.SwizzleTransform(SWIZZLE_BYTES),))


def tiled_memory(dtype: DTypeLike, *shape: int) -> object:
    """Shared memory as the tensor cores see it: swizzled tiles of 8 rows of 128 bytes."""
    columns = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    tiling = gpu.plgpu.TilingTransform((8, columns))
    transforms = (tiling, gpu.plgpu.SwizzleTransform(SWIZZLE_BYTES))
    return gpu.plgpu.SMEM(shape, dtype, transforms=transforms)


class BufferViews(NamedTuple):
    """A buffer inside a kernel: as copies see it, as the tensor cores do, as plain numbers."""

    untiled: Ref
    tiled: Ref
    plain: Ref


class SharedBuffer:
    """Matrices in shared memory with up to three views; a missing one is the tiled view.

    The interpreter supports no memory with two views, and has the tiled one.
    """

    def __init__(
        self,
        tiled: object,
        *,
        untiled: object | None = None,
        plain: object | None = None,
        interpreted: bool,
    ):
        views = {"untiled": untiled, "tiled": tiled, "plain": plain}
        self.views: dict[str, object] = {
            name: view
            for name, view in views.items()
            if view is not None and (name == "tiled" or not interpreted)
        }

    def allocate(self) -> object:
        """The scratch memory to ask for."""
        views = list(self.views.values())
        return views[0] if len(views) == 1 else gpu.plgpu.RefUnion(*views)

    def bind(self, scratch: Ref | Iterable[Ref]) -> BufferViews:
        """The views inside a kernel, from what was allocated."""
        refs: Any = [scratch] if len(self.views) == 1 else list(scratch)  # pyright: ignore[reportArgumentType]
        bound = dict(zip(self.views, refs, strict=True))
        return BufferViews(*(bound.get(name, bound["tiled"]) for name in BufferViews._fields))


def allocate(
    buffers: Mapping[str, SharedBuffer], tiles: HopperTileConfig, copies: int, interpreted: bool
) -> dict[str, object]:
    """Scratch memory: buffers, and the barriers of a ring buffer with `copies` copies per stage."""
    scratch = {name: buffer.allocate() for name, buffer in buffers.items()}
    if interpreted:
        shape = (tiles.consumers, WARPGROUP_ROWS, tiles.block_n)
        scratch["acc_smem"] = gpu.plgpu.SMEM(shape, jnp.float32)
    scratch["full"] = gpu.barriers(tiles.stages, copies)
    scratch["empty"] = gpu.barriers(tiles.stages, tiles.consumers)
    return scratch


class MatmulEngine:
    """WGMMA on the tensor cores: asynchronous, completed in order."""

    waits_by_group = True  # whether copies can be waited for by groups

    def accumulate(
        self, columns: int, acc_smem: Ref | None, body: Callable[[Ref], object]
    ) -> jax.Array:
        """An accumulator [64, columns] that starts at 0, after `body(acc)` and its matmuls."""

        def run(acc: Ref) -> jax.Array:
            body(acc)
            return acc[...]

        return gpu.pl.run_scoped(run, gpu.plgpu.ACC((WARPGROUP_ROWS, columns), jnp.float32))

    def matmul(
        self, acc: Ref, left: Ref | jax.Array, right: Ref | jax.Array, columns: slice | None = None
    ) -> None:
        """Start `acc += left @ right`, or `acc[:, columns] += left @ right`."""
        gpu.plgpu.wgmma(acc if columns is None else acc.at[:, columns], left, right)

    def transposed(self, operand: Ref) -> Ref | jax.Array:
        """The transpose of an operand."""
        ref: Any = operand
        return ref.transpose((1, 0))

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` matmuls are incomplete."""
        gpu.plgpu.wgmma_wait(pending)


class InterpretedMatmulEngine(MatmulEngine):
    """The same in the interpreter: each matmul completes at once, the accumulator is in memory."""

    waits_by_group = False

    def accumulate(
        self, columns: int, acc_smem: Ref | None, body: Callable[[Ref], object]
    ) -> jax.Array:
        if acc_smem is None:
            raise ValueError("the interpreter needs memory for the accumulator.")
        acc_smem[...] = jnp.zeros(acc_smem.shape, jnp.float32)
        body(acc_smem)
        return acc_smem[...][:, :columns]

    def matmul(
        self, acc: Ref, left: Ref | jax.Array, right: Ref | jax.Array, columns: slice | None = None
    ) -> None:
        a, b = (x if isinstance(x, jax.Array) else x[...] for x in (left, right))
        product = jnp.dot(
            a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        columns = columns or slice(0, product.shape[1])
        acc[:, columns] = acc[:, columns] + product
        # A thread's own reads need a fence before the next copy; those of WGMMA do not.
        gpu.plgpu.commit_smem()

    def transposed(self, operand: Ref) -> Ref | jax.Array:
        return operand[...].T

    def wait(self, pending: int) -> None:
        pass


WGMMA, INTERPRETED = MatmulEngine(), InterpretedMatmulEngine()


class TmaCopy(NamedTuple):
    """A part of an array in global memory, and its destination in a stage of the ring buffer."""

    source: Ref
    destination: Callable[[jax.Array], Ref]


class RingBuffer(NamedTuple):
    """The stages that the producer warpgroup fills and the consumer warpgroups use.

    A step is one stage's worth of work; step `i` uses stage `i % stages`. Its copies arrive at the
    barrier `full`, its consumers at `empty`.
    """

    stages: int
    engine: MatmulEngine
    full: Ref
    empty: Ref

    def produce(self, step: Index, copies: Iterable[TmaCopy]) -> Index:
        """Start the copies of a step, once its stage is empty; gives the next step."""
        plgpu, stage = gpu.plgpu, lax.rem(step, self.stages)
        gpu.pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
        for source, destination in copies:
            plgpu.copy_gmem_to_smem(source, destination(stage), self.full.at[stage])
        return step + 1

    def consume(
        self,
        step: Index,
        count: Index,
        start_matmuls: Callable[[jax.Array, jax.Array], None],
        matmuls: int = 1,
    ) -> Index:
        """`start_matmuls(i, stage)` for `count` steps, whose stages are released when they end.

        `matmuls` is how many of them one call starts. Gives the next step.
        """
        plgpu = gpu.plgpu

        def one_step(i: jax.Array, step: jax.Array) -> jax.Array:
            stage = lax.rem(step, self.stages)
            plgpu.barrier_wait(self.full.at[stage])
            start_matmuls(i, stage)
            # Those of the step before are complete when no more than these are pending.
            self.engine.wait(matmuls)

            @gpu.pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(self.empty.at[lax.rem(step - 1, self.stages)])

            return step + 1

        step = lax.fori_loop(0, count, one_step, step)
        self.engine.wait(0)

        @gpu.pl.when(count > 0)
        def _():
            plgpu.barrier_arrive(self.empty.at[lax.rem(step - 1, self.stages)])

        return step

    def skip(self, step: Index, count: Index) -> Index:
        """Release `count` stages unused; gives the next step."""
        plgpu = gpu.plgpu

        def one_step(_: jax.Array, step: jax.Array) -> jax.Array:
            stage = lax.rem(step, self.stages)
            plgpu.barrier_wait(self.full.at[stage])
            plgpu.barrier_arrive(self.empty.at[stage])
            return step + 1

        return lax.fori_loop(0, count, one_step, step)


class Epilogue(NamedTuple):
    """How a warpgroup stores a result [64, columns], in pieces of 128 bytes of each row.

    Attributes:
        engine: what the kernel runs on.
        untiled: [buffers, 64, 128 bytes] in shared memory, as copies see it.
        tiled: the same, as the registers of an accumulator are written to it.
        buffers: how many pieces fit into it.
        dtype: of the stored result.
    """

    engine: MatmulEngine
    untiled: Ref
    tiled: Ref
    buffers: int
    dtype: DTypeLike

    def store(
        self,
        value: jax.Array,
        target: Callable[[Slice, Slice], Ref],
        rows: Index,
        max_rows: int = WARPGROUP_ROWS,
    ) -> None:
        """Start to store the first `rows` rows, 1 to `max_rows`, to `target(rows, columns)`."""
        plgpu, pl = gpu.plgpu, gpu.pl
        width = SWIZZLE_BYTES // jnp.dtype(self.dtype).itemsize
        pieces = value.shape[1] // width
        # All at once where they fit: every wait and every fence stops all threads.
        together = pieces if pieces <= self.buffers else 1
        for first_piece in range(0, pieces, together):
            # The pieces of the tile before were read long ago.
            pending = self.buffers - 1 if self.engine.waits_by_group and first_piece else 0
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
            some = range(first_piece, first_piece + together)
            for piece in some:
                part = value[:, piece * width : (piece + 1) * width]
                self.tiled.at[piece % self.buffers][...] = part.astype(self.dtype)
            plgpu.commit_smem()

            def copy(first: Index, count: int, some: range = some) -> None:
                for piece in some:
                    # Only a start that is not known at compile time may reach past the end.
                    columns = pl.ds(lax.axis_index("block") * 0 + piece * width, width)
                    source = self.untiled.at[piece % self.buffers]
                    if count < WARPGROUP_ROWS:
                        source = self.untiled.at[piece % self.buffers, pl.ds(first, count)]
                    destination = target(pl.ds(first, count), columns)
                    plgpu.copy_smem_to_gmem(source, destination, commit_group=False)

            pl.when(rows == max_rows)(lambda copy=copy: copy(0, max_rows))
            pl.when(rows < max_rows)(lambda copy=copy: _copy_rows(rows, max_rows, copy))
            plgpu.commit_smem_to_gmem_group()


def _copy_rows(rows: Index, max_rows: int, copy: Callable[[Index, int], None]) -> None:
    """`copy(first, count)` for `rows` rows in powers of two, each at most once."""
    count = max_rows // 2
    while count:
        wanted = lax.rem(lax.div(rows, count), 2) == 1
        first = lax.div(rows, 2 * count) * (2 * count)
        gpu.pl.when(wanted)(lambda first=first, count=count: copy(first, count))
        count //= 2
