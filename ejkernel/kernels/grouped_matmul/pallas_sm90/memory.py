"""Shared memory of the grouped matmul kernels: what copies write, matmuls read, results pass.

The same bytes are seen in two ways. A copy thinks of rows of 128 bytes, which may begin at any row
of an array; the tensor cores think of tiles of 8 such rows.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.grouped_matmul.pallas_sm90.plan import ROWS, Tiles


def interleaved(dtype: Any, *shape: int) -> Any:
    """Memory as copies see it: rows of 128 bytes."""
    return gpu.plgpu.SMEM(shape, dtype, transforms=(gpu.plgpu.SwizzleTransform(128),))


def tiled(dtype: Any, *shape: int) -> Any:
    """Memory as the tensor cores see it: tiles of 8 rows of 128 bytes."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (gpu.plgpu.TilingTransform((8, columns)), gpu.plgpu.SwizzleTransform(128))
    return gpu.plgpu.SMEM(shape, dtype, transforms=transforms)


class Memory:
    """Matrices in shared memory, as copies see them and as the tensor cores do.

    `views` gives both where they differ; the interpreter knows no memory with two views, and sees
    it as the tensor cores do.
    """

    def __init__(self, copied: Any, cut: Any, *others: Any, interpreted: bool = False):
        self._views = [cut] if interpreted else [x for x in (copied, cut, *others) if x is not None]

    def allocate(self) -> Any:
        return self._views[0] if len(self._views) == 1 else gpu.plgpu.RefUnion(*self._views)

    def bind(self, ref: Any) -> list[Any]:
        """As copies see it, as the tensor cores do, and the others, inside a kernel."""
        refs = [ref] if len(self._views) == 1 else list(ref)
        return refs if len(refs) > 1 else [refs[0], refs[0]]


def store(
    engine: "Engine",
    room: Any,
    cut: Any,
    buffers: int,
    value: Any,
    dtype: Any,
    target: Callable[[Any, Any], Any],
    rows: Any,
    most: int = ROWS,
) -> None:
    """Begin to write the first `rows` of a result [64, columns], 128 bytes of each at a time.

    Args:
        engine: what runs it.
        room: [buffers, 64, 128 bytes], as copies see it.
        cut: the same, as the tensor cores do.
        buffers: how many pieces fit into it.
        value: the result, in registers.
        dtype: what to store it as.
        target: (rows, columns) slices to a part of the array.
        rows: how many, 1 to `most`.
        most: the most rows that there can be.
    """
    plgpu, pl = gpu.plgpu, gpu.pl
    width = 128 // jnp.dtype(dtype).itemsize
    pieces = value.shape[1] // width
    # All at once where there is room: every wait and every fence stops all threads.
    together = pieces if pieces <= buffers else 1
    for first_piece in range(0, pieces, together):
        # Those of the tile before have long been read.
        left = buffers - 1 if engine.groups and first_piece else 0
        plgpu.wait_smem_to_gmem(left, wait_read_only=True)
        some = range(first_piece, first_piece + together)
        for piece in some:
            part = value[:, piece * width : (piece + 1) * width]
            cut.at[piece % buffers][...] = part.astype(dtype)
        plgpu.commit_smem()

        def copy(first, count, some=some):
            for piece in some:
                # A start that is not known before it runs may reach past the end.
                columns = pl.ds(lax.axis_index("block") * 0 + piece * width, width)
                source = room.at[piece % buffers]
                if count < ROWS:
                    source = room.at[piece % buffers, pl.ds(first, count)]
                place = target(pl.ds(first, count), columns)
                plgpu.copy_smem_to_gmem(source, place, commit_group=False)

        pl.when(rows == most)(lambda copy=copy: copy(0, most))
        pl.when(rows < most)(lambda copy=copy: _row_pieces(rows, most, copy))
        plgpu.commit_smem_to_gmem_group()


def _row_pieces(rows: Any, most: int, copy: Callable[[Any, int], None]) -> None:
    """`copy(first, count)` for `rows` rows in pieces of powers of two, each at most once."""
    count = most // 2
    while count:
        wanted = lax.rem(lax.div(rows, count), 2) == 1
        first = lax.div(rows, 2 * count) * (2 * count)
        gpu.pl.when(wanted)(lambda first=first, count=count: copy(first, count))
        count //= 2


class Copy(NamedTuple):
    """What a step takes from global memory, and where it goes in a slot."""

    source: Any
    place: Callable[[Any], Any]


def barriers(tiles: Tiles, copies: int) -> dict[str, Any]:
    """For every slot: that its copies are here, that it is free."""
    return {
        "here": gpu.barriers(tiles.stages, copies),
        "free": gpu.barriers(tiles.stages, tiles.consumers),
    }


class Pipe:
    """A ring of steps that one warpgroup fills and others empty."""

    def __init__(self, stages: int, engine: "Engine", here: Any, free: Any):
        self.stages, self.engine, self.here, self.free = stages, engine, here, free

    def fill(self, step: Any, copies: Iterable["Copy"]) -> Any:
        """Begin to copy each source into its place in a slot, once the slot is free."""
        plgpu, slot = gpu.plgpu, lax.rem(step, self.stages)
        gpu.pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, place in copies:
            plgpu.copy_gmem_to_smem(source, place(slot), self.here.at[slot])
        return step + 1

    def empty(
        self, step: Any, count: Any, use: Callable[[Any, Any], None], matmuls: int = 1
    ) -> Any:
        """`use(i, slot)` begins matmuls with each of `count` slots, freed when they are done."""
        plgpu = gpu.plgpu

        def one(i, step):
            slot = lax.rem(step, self.stages)
            plgpu.barrier_wait(self.here.at[slot])
            use(i, slot)
            # Those of the step before are done when no more than these are under way.
            self.engine.wait(matmuls)

            @gpu.pl.when(i > 0)
            def _():
                plgpu.barrier_arrive(self.free.at[lax.rem(step - 1, self.stages)])

            return step + 1

        step = lax.fori_loop(0, count, one, step)
        self.engine.wait(0)

        @gpu.pl.when(count > 0)
        def _():
            plgpu.barrier_arrive(self.free.at[lax.rem(step - 1, self.stages)])

        return step

    def skip(self, step: Any, count: Any) -> Any:
        """Free `count` slots unused."""
        plgpu = gpu.plgpu

        def one(_, step):
            slot = lax.rem(step, self.stages)
            plgpu.barrier_wait(self.here.at[slot])
            plgpu.barrier_arrive(self.free.at[slot])
            return step + 1

        return lax.fori_loop(0, count, one, step)


class Engine:
    """Matmuls on the tensor cores, asynchronous and in order."""

    groups = True  # whether copies can be waited for by groups

    def accumulate(self, columns: int, held: Any, body: Callable[[Any], None]) -> Any:
        """What `body(sums)` adds to sums [64, columns] of 0, all its matmuls done."""

        def run(sums):
            body(sums)
            return sums[...]

        return gpu.pl.run_scoped(run, gpu.plgpu.ACC((ROWS, columns), jnp.float32))

    def multiply(self, sums: Any, left: Any, right: Any, columns: slice | None = None) -> None:
        """Begin `sums += left @ right`, or a part of its columns."""
        gpu.plgpu.wgmma(sums if columns is None else sums.at[:, columns], left, right)

    def transposed(self, ref: Any) -> Any:
        return ref.transpose((1, 0))

    def wait(self, unfinished: int) -> None:
        """Until no more than so many matmuls are under way."""
        gpu.plgpu.wgmma_wait(unfinished)


class Emulation(Engine):
    """The same in the interpreter, where sums are held in memory and matmuls are done at once."""

    groups = False

    def accumulate(self, columns: int, held: Any, body: Callable[[Any], None]) -> Any:
        held[...] = jnp.zeros(held.shape, jnp.float32)
        body(held)
        return held[...][:, :columns]

    def multiply(self, sums: Any, left: Any, right: Any, columns: slice | None = None) -> None:
        one, other = (x if isinstance(x, jax.Array) else x[...] for x in (left, right))
        product = jnp.dot(
            one.astype(jnp.float32), other.astype(jnp.float32), precision=lax.Precision.HIGHEST
        )
        columns = columns or slice(0, product.shape[1])
        sums[:, columns] = sums[:, columns] + product
        # A thread's own reads need a fence before the next copy; those of matmuls do not.
        gpu.plgpu.commit_smem()

    def transposed(self, ref: Any) -> Any:
        return ref[...].T

    def wait(self, unfinished: int) -> None:
        pass


HARDWARE, EMULATION = Engine(), Emulation()
