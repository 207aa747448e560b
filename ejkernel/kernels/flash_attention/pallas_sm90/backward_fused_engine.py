"""Matmuls and additions that only the joint backward pass needs, on the card and emulated."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import mosaic_gpu as gpu


def shared_numbers(*shape: int) -> Any:
    """Shared memory for a float32 tile [rows, columns] on its way to global memory."""
    transforms = (gpu.plgpu.TilingTransform((8, 32)), gpu.plgpu.SwizzleTransform(128))
    return gpu.plgpu.SMEM(shape, jnp.float32, transforms=transforms)


def _columns(matrices: gpu.SharedMatrixRefs, index: Any, start: int, width: int) -> Any:
    """Some columns of matrix `index`, which lie in one strip."""
    strip, first = divmod(start, matrices.shape.width)
    whole = matrices.panel(index, strip)
    if (first, width) == (0, matrices.shape.width):
        return whole
    return whole.at[:, first : first + width]


class Hardware(gpu.WgmmaEngine):
    """With both sides of a product in shared memory."""

    def plain(self, accumulator: Any, left: Any, right: gpu.SharedMatrixRefs, j: Any) -> None:
        """Begin `accumulator += left @ right[j]`."""
        self.matmul_nn(accumulator, left, right, j)

    def across(
        self,
        accumulator: Any,
        left: Any,
        right: gpu.SharedMatrixRefs,
        j: Any,
        start: int,
        width: int,
    ) -> None:
        """Begin `accumulator += left.T @ right[j][:, start : start + width]`."""
        gpu.plgpu.wgmma(accumulator, left.transpose((1, 0)), _columns(right, j, start, width))

    def add_through(self, room: Any, target: Any, value: jax.Array, unfinished: int) -> None:
        """Begin to add a tile to global memory, when `room` in shared memory is free for it.

        It is once no more than `unfinished` of this warpgroup's copies still read theirs.
        """
        gpu.plgpu.wait_smem_to_gmem(unfinished, wait_read_only=True)
        room[...] = value
        gpu.plgpu.commit_smem()
        gpu.plgpu.copy_smem_to_gmem(room, target, reduction_op="add")


class Emulation(gpu.InterpretedEngine, Hardware):
    """The same in the interpreter, where one block of threads does everything."""

    def plain(self, accumulator: Any, left: Any, right: gpu.SharedMatrixRefs, j: Any) -> None:
        self.matmul_nn(accumulator, left[...], right, j)

    def across(
        self,
        accumulator: Any,
        left: Any,
        right: gpu.SharedMatrixRefs,
        j: Any,
        start: int,
        width: int,
    ) -> None:
        a, b = (x[...] for x in (left, _columns(right, j, start, width)))
        self.add_product(accumulator, a.T, b)
        self.fence()

    def add_through(self, room: Any, target: Any, value: jax.Array, unfinished: int) -> None:
        target[...] = target[...] + value


HARDWARE, EMULATION = Hardware(), Emulation()
