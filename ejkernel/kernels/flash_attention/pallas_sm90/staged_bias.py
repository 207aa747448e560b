"""A bias that is brought to shared memory, for each warpgroup, before its tile needs it."""

import dataclasses
from typing import Any

import jax
from jax import lax

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.pallas_sm90.logits import ROWS, broadcast

# More tiles on their way gain nothing: one is read as soon as the one before is done.
_MOST_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Brought:
    """Memory for the bias of `slots` tiles of 64 rows, for each of the computing warpgroups.

    Without slots nothing is brought. Where tiles stand transposed, the bias comes as it lies and is
    turned on its way to registers.
    """

    dtype: Any
    consumers: int
    columns: int
    slots: int
    transposed: bool

    @classmethod
    def of(cls, bias: Any, consumers: int, columns: int, room: int, transposed: bool) -> "Brought":
        """As much as the room in bytes allows.

        Nothing where there is no bias, and where it is not of 16 bits, or the same for all queries
        or keys: then each thread reads its part from global memory.
        """
        slots = min(_MOST_SLOTS, room // (2 * consumers * ROWS * columns))
        if bias is None or 1 in bias.shape[2:] or bias.dtype.itemsize != 2:
            slots = 0
        return cls(None if bias is None else bias.dtype, consumers, columns, slots, transposed)

    def __bool__(self) -> bool:
        return self.slots > 0

    def others(self, refs: dict[str, Any]) -> dict[str, Any]:
        """What is left in global memory for a tile to read."""
        return {name: ref for name, ref in refs.items() if name != "bias" or not self}

    @property
    def matrices(self) -> gpu.SharedMatrices:
        shape = (self.columns, ROWS) if self.transposed else (ROWS, self.columns)
        return gpu.SharedMatrices(self.dtype, self.consumers * self.slots, *shape, True)

    def scratch(self, interpreted: bool) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        if not self:
            return {}
        barriers = gpu.barriers(self.consumers * self.slots)
        biases = self.matrices.allocate(interpreted)
        return {"biases": biases, "bias_here": barriers, "bias_free": barriers}

    def slot(self, warpgroup: Any, step: Any) -> Any:
        return warpgroup * self.slots + lax.rem(step, self.slots)

    def copy(
        self, shared: Any, refs: Any, step: Any, row: Any, head: Any, first_row: Any, at: Any
    ) -> None:
        """Bring the bias of a tile to each warpgroup that has read the one in its place."""
        if not self:
            return
        ref = refs["bias"]
        row, head = broadcast(ref, row, head)
        columns = gpu.pl.ds(at, self.columns)
        for warpgroup in range(self.consumers):
            slot = self.slot(warpgroup, step)
            free, here = shared.bias_free.at[slot], shared.bias_here.at[slot]
            gpu.pl.when(step >= self.slots)(lambda free=free: gpu.plgpu.barrier_wait(free))
            rows = gpu.pl.ds(first_row + warpgroup * ROWS, ROWS)
            place = (columns, rows) if self.transposed else (rows, columns)
            source = ref.at[(row, head, *place)]
            gpu.plgpu.copy_gmem_to_smem(source, shared.biases.at[slot], here)

    def take(self, shared: Any, engine: Any, warpgroup: Any, step: Any) -> jax.Array | None:
        """The bias of a warpgroup's next tile; what comes after it may take its place."""
        if not self:
            return None
        slot = self.slot(warpgroup, step)
        gpu.plgpu.barrier_wait(shared.bias_here.at[slot])
        found = self._registers(shared.biases.at[slot], engine is gpu.INTERPRETED)
        # A thread's own reads are ordered before a later copy by a fence alone, not by a barrier.
        gpu.plgpu.commit_smem()
        gpu.plgpu.barrier_arrive(shared.bias_free.at[slot])
        return found

    def _registers(self, ref: Any, emulated: bool) -> jax.Array:
        """A matrix from shared memory; between two threads of a quad, numbers change places."""
        if emulated:
            return ref[...].T if self.transposed else ref[...]
        layouts = gpu.plgpu.Layout
        if not self.transposed:
            return gpu.load(ref, layouts.WGMMA)
        turned = gpu.load(ref.transpose((1, 0)), layouts.WGMMA_TRANSPOSED)
        return gpu.plgpu.layout_cast(turned, layouts.WGMMA)
