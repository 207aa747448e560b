"""Matrices in shared memory, as asynchronous copies write and the tensor cores read them."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike

from ejkernel.kernels.common.mosaic_gpu.versions import pl, plgpu
from ejkernel.kernels.common.refs import Index, Ref


def swizzle_bytes(dim: int) -> int | None:
    """The widest swizzle that rows of `dim` 16-bit numbers can have; None if there is none."""
    return next((size for size in (128, 64, 32) if dim * 2 % size == 0), None)


def tiled_memory(dtype: DTypeLike, *shape: int, width: int | None = None) -> object:
    """Shared memory for matrices [..., rows, dim], tiled and swizzled for WGMMA.

    Both operands of a matmul need the same swizzle; by default it is the widest that fits.
    """
    size = swizzle_bytes(width or shape[-1])
    transforms = (plgpu.TilingTransform((8, (size or 0) // 2)), plgpu.SwizzleTransform(size))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def transposed(ref: Ref) -> Ref:
    """The transpose of a matrix in shared memory, without a copy."""
    view: Any = ref
    return view.transpose((1, 0))


class SharedMatrices:
    """Shared memory for `count` matrices [rows, dim].

    A TMA copy tiles the matrix as WGMMA reads it, if the array in global memory consists of whole
    tiles of 8 rows (`whole_tiles`). Otherwise the matrix is split into `panels` of a few columns,
    whose layout is the same tiled and untiled; elements outside the array arrive as 0 and are not
    written back. Each panel is a copy, and a matmul, of its own.
    """

    dtype: DTypeLike
    count: int
    rows: int
    dim: int

    def __init__(self, dtype: DTypeLike, count: int, rows: int, dim: int, whole_tiles: bool):
        self.dtype, self.count, self.rows, self.dim = dtype, count, rows, dim
        self.whole_tiles = whole_tiles
        fewest = -(-dim // 16) * 16
        widths = (size for size in (64, 32, 16) if -(-dim // size) * size == fewest)
        self.width: int = dim if whole_tiles else next(widths)
        self.panels: int = -(-dim // self.width)
        self.columns: int = self.width * self.panels  # with the padding of the last panel

    def views(self, interpreted: bool) -> list[object]:
        """The memory as WGMMA sees it; before it, as copies see it, where that differs."""
        if self.whole_tiles:
            return [tiled_memory(self.dtype, self.count, self.rows, self.dim)]
        shape = (self.count, self.panels, self.rows, self.width)
        tiled = tiled_memory(self.dtype, *shape)
        swizzled = plgpu.SwizzleTransform(swizzle_bytes(self.width))
        untiled = plgpu.SMEM(shape, self.dtype, transforms=(swizzled,))
        return [tiled] if interpreted else [untiled, tiled]

    def allocate(self, interpreted: bool) -> object:
        """The scratch memory to ask for."""
        views = self.views(interpreted)
        return views[0] if len(views) == 1 else plgpu.RefUnion(*views)

    def bind(self, scratch: Ref | Iterable[Ref], interpreted: bool) -> "SharedMatrixRefs":
        """The matrices inside a kernel, from what was allocated: one view, or two."""
        refs: Any = [scratch] if len(self.views(interpreted)) == 1 else list(scratch)  # pyright: ignore[reportArgumentType]
        return SharedMatrixRefs(self, refs[0], refs[-1])


class SharedMatrixRefs:
    """Matrices inside a kernel: `copied` as copies see them, `tiled` as WGMMA does."""

    shape: SharedMatrices
    copied: Ref
    tiled: Ref

    def __init__(self, shape: SharedMatrices, copied: Ref, tiled: Ref):
        self.shape, self.copied, self.tiled = shape, copied, tiled

    def panel_columns(self) -> list[tuple[int, int]]:
        """The first column of each panel, and the one after its last."""
        width = self.shape.width
        return [(i * width, (i + 1) * width) for i in range(self.shape.panels)]

    def panel(self, index: Index, panel: int) -> Ref:
        """A panel of matrix `index`, as an operand of WGMMA."""
        return self.tiled.at[index] if self.shape.whole_tiles else self.tiled.at[index, panel]

    def load(
        self, array: Ref, row: Index, first: Index, head: Index, index: Index, full: Ref
    ) -> None:
        """Start the copy of array[row, first : first + rows, head] to matrix `index`.

        Each panel arrives at the barrier `full`.
        """
        for panel, columns in self._array_columns():
            rows = pl.ds(first, self.shape.rows)
            source = array.at[row, rows, head, columns]
            plgpu.copy_gmem_to_smem(source, self._copied_panel(index, panel), full)

    def write(self, index: Index, value: jax.Array) -> None:
        """Write matrix `index` from registers."""
        for panel, (start, stop) in enumerate(self.panel_columns()):
            self.panel(index, panel)[...] = value[:, start:stop] if self.shape.panels > 1 else value

    def store(self, array: Ref, row: Index, first: Index, head: Index, index: Index) -> None:
        """Start the copy of matrix `index` to array[row, first : first + rows, head]."""
        for panel, columns in self._array_columns():
            rows = pl.ds(first, self.shape.rows)
            target = array.at[row, rows, head, columns]
            plgpu.copy_smem_to_gmem(self._copied_panel(index, panel), target)

    def _copied_panel(self, index: Index, panel: int) -> Ref:
        return self.copied.at[index] if self.shape.whole_tiles else self.copied.at[index, panel]

    def _array_columns(self) -> Iterator[tuple[int, object]]:
        """Each panel, and its columns in global memory."""
        if self.shape.whole_tiles:
            yield 0, slice(None)
            return
        # Only a start that is not known at compile time may reach past the end of the array.
        zero = lax.axis_index("block") * 0
        for panel, (start, _) in enumerate(self.panel_columns()):
            yield panel, pl.ds(zero + start, self.shape.width)
