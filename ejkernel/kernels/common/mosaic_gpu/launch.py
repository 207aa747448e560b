"""How kernels are launched on Hopper: device checks, budgets, warpgroup roles, work lists."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import settings
from ejkernel.kernels.common.mosaic_gpu import versions
from ejkernel.kernels.common.mosaic_gpu.versions import pl, plgpu
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.ops.platform import HOPPER_MULTIPROCESSORS, HOPPER_SHARED_MEMORY, Device

# What one thread block of compute capability 9.0 may use.
SHARED_MEMORY = HOPPER_SHARED_MEMORY
# Parts of it that are reserved: for barriers; for reductions across threads, which the compiler
# does in shared memory; for both, with a margin.
BARRIER_RESERVE = 1024
REDUCTION_RESERVE = 2048
SHARED_MEMORY_RESERVE = 4096
# 32-bit registers of a multiprocessor, which the warpgroups of a thread block share.
REGISTER_FILE = 65536

WARPGROUP = 128  # threads


def is_interpreted(device: Device) -> bool:
    """Whether kernels run in the interpreter: it is requested, and there is no GPU."""
    return settings.interpret() and device.platform != "gpu"


def why_not_hopper(device: Device) -> str | None:
    """Why kernels for Hopper cannot run on this device, or None."""
    interpreted = is_interpreted(device)
    if reason := versions.why_missing(interpreted):
        return reason
    if device.compute_capability != (9, 0) and not interpreted:
        has = device.compute_capability and ".".join(map(str, device.compute_capability))
        return f"needs compute capability 9.0 (Hopper), and {device.kind} has {has or 'none'}"
    return None


def multiprocessors(device: Device) -> int:
    """How many thread blocks a persistent kernel starts."""
    return device.multiprocessors or HOPPER_MULTIPROCESSORS


def register_budget(consumers: int) -> tuple[int, int] | None:
    """Registers of a thread of a consumer warpgroup and of the producer's, so that all fit.

    A warpgroup that asks for more than the others have released waits for ever. With one consumer
    there is nothing to redistribute: a thread starts with as many as it can have.

    >>> register_budget(1), register_budget(2), register_budget(3)
    (None, (240, 24), (160, 32))
    """
    if consumers == 1:
        return None
    at_launch = REGISTER_FILE // (WARPGROUP * (consumers + 1)) // 8 * 8
    producer = {2: 24, 3: 32}[consumers]
    return (at_launch * (consumers + 1) - producer) // consumers // 8 * 8, producer


def set_register_budget(consumers: int, producer: bool) -> None:
    """Release the registers that the producer warpgroup does not need, or acquire them."""
    if budget := register_budget(consumers):
        action = "decrease" if producer else "increase"
        plgpu.set_max_registers(budget[producer], action=action)


def specialise_warpgroups(
    consumers: int, produce: Callable[[], None], consume: Callable[[jax.Array], None]
) -> None:
    """Warp specialisation: the last warpgroup runs `produce()`, the others `consume(warpgroup)`.

    Consumers end when their copies to global memory are complete.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == consumers)
    def _producer():
        set_register_budget(consumers, producer=True)
        produce()

    @pl.when(warpgroup < consumers)
    def _consumer():
        set_register_budget(consumers, producer=False)
        consume(warpgroup)
        plgpu.wait_smem_to_gmem(0)


def barriers(count: int, arrivals: int = 1) -> object:
    """Barriers that complete after so many arrivals of a warpgroup or of a copy."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def for_each_work_item(
    work_list: Ref, process: Callable[..., jax.Array], info: Ref | None = None
) -> None:
    """`step = process(wave, step, item, info)` for the work items of this thread block.

    A persistent kernel: `work_list` [waves, thread blocks] says which item each thread block
    processes in each wave, -1 for none. `info`, of the same shape, holds a number about each item;
    without it `process` gets none. Both are read a wave ahead, so that no item begins with a wait.
    `wave` counts the items that this thread block has processed.
    """
    waves, _ = work_list.shape
    block = lax.axis_index("block")
    arrays = (work_list,) if info is None else (work_list, info)

    def read(wave: Index) -> tuple[jax.Array, ...]:
        return tuple(array[jnp.minimum(wave, waves - 1), block] for array in arrays)

    def one_wave(
        wave: Index, carry: tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        (step, done), item = carry
        following = read(wave + 1)
        run = lambda state: (process(state[1], state[0], *item), state[1] + 1)
        return lax.cond(item[0] >= 0, run, lambda state: state, (step, done)), following

    lax.fori_loop(0, waves, one_wave, ((jnp.int32(0), jnp.int32(0)), read(jnp.int32(0))))
