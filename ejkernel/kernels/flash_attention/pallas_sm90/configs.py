"""Tile sizes of flash attention on Hopper: shared memory and register budgets, heuristics.

The register numbers here are 32-bit registers of one thread that hold tiles, besides those that the
compiler needs for indices and addresses. They were found by compiling: more of them spill.
"""

import dataclasses
import functools
import itertools
from typing import Literal

from ejkernel.kernels.common import mosaic_gpu as gpu
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.platform import Device
from ejkernel.types.rules import Band, Chunks, Everything, KeyLength, QueryLength, Segments

ROWS = 64  # rows of a tile that one consumer warpgroup computes, the M of WGMMA
# Shared memory of the forward kernel's tiles.
FORWARD_SHARED_BYTES = gpu.SHARED_MEMORY - gpu.SHARED_MEMORY_RESERVE
# Shared memory of a kernel that reduces nothing across threads.
SHARED_BYTES = gpu.SHARED_MEMORY - gpu.BARRIER_RESERVE

_INTERVALS = Everything | Band | Chunks | KeyLength | QueryLength
_NARROW_WINDOW = 512  # keys
# Registers for tiles of a thread where there are two consumer warpgroups.
_BACKWARD_REGISTERS = 192
# Measured on an H200 at equal occupancy: rows per second by consumer warpgroups, relative to two.
_FORWARD_RATES = {1: 0.8, 2: 1.0, 3: 1.2}
_RIVAL = 1.05  # times the expected time of the heuristic's tiles
# From so many query heads per key head on, the separate backward kernels may beat the fused one,
# which adds the gradients of all of them to memory.
_LARGE_GROUP = 8


def padded_dims(inputs: Inputs) -> tuple[int, int]:
    """Head and value dim, padded to a multiple of the K of WGMMA."""
    head_dim, value_dim = (-(-x.shape[3] // 16) * 16 for x in (inputs.query, inputs.value))
    return head_dim, value_dim


def has_whole_tiles(inputs: Inputs) -> bool:
    """Whether lengths and dims are multiples of the tiles of WGMMA operands."""
    lengths = inputs.query.shape[1], inputs.key.shape[1]
    dims = inputs.query.shape[3], inputs.value.shape[3]
    return not any(x % 8 for x in lengths) and not any(x % 16 for x in dims)


@dataclasses.dataclass(frozen=True)
class ForwardTileConfig:
    """Tiles of the forward kernel.

    Attributes:
        consumers: consumer warpgroups, with 64 queries each.
        block_k: keys of a tile.
        stages: tiles of keys and values in the ring buffer.
    """

    consumers: int
    block_k: int
    stages: int

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory for queries, keys, values, and outputs that have buffers of their own."""
        resident = self.block_q * head_dim * self.query_buffers(head_dim, value_dim)
        if head_dim != value_dim:
            resident += self.block_q * value_dim
        return 2 * (resident + self.stages * self.block_k * (head_dim + value_dim))

    def query_buffers(self, head_dim: int, value_dim: int) -> int:
        """How many work items' queries fit: two, to load the next ones early, or one.

        A warpgroup's output is written to the buffer of its queries if dims are equal. Otherwise it
        would reach into the queries of another warpgroup, and has a buffer of its own.
        """
        rows = self.block_q + self.stages * self.block_k
        fits = 2 * rows * (head_dim + value_dim) <= FORWARD_SHARED_BYTES
        return 2 if fits and head_dim == value_dim else 1


def forward_tiles(inputs: Inputs, params: FwdParams | None) -> ForwardTileConfig:
    """The requested tiles, in sizes that the hardware has; the others by default."""
    default = _default_forward_tiles(inputs)
    if params is None:
        return default
    head_dim, value_dim = padded_dims(inputs)
    consumers = min(3, -(-(params.q_blocksize or default.block_q) // ROWS))
    block_k = min(128, -(-(params.kv_blocksize or default.block_k) // 64) * 64)
    stages = min(4, max(2, params.num_stages or 4))
    return _with_most_stages(consumers, block_k, head_dim, value_dim, stages) or default


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device) -> FwdParams:
    """The tiles expected to be fastest."""
    return _forward_params(forward_tiles(inputs, None))


def candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[FwdParams]:
    """All tiles worth timing: none of 64 keys, where tiles of 128 fit."""
    head_dim, value_dim = padded_dims(inputs)
    if inputs.query.shape[1] <= ROWS:
        sizes = [(1, 128), (1, 64)]
    else:
        sizes = [(2, 128), (3, 128)] if value_dim <= 64 else [(2, 128)]
    tiles = (
        _with_most_stages(consumers, block_k, head_dim, value_dim) for consumers, block_k in sizes
    )
    return [_forward_params(x) for x in tiles if x and _fits_registers(x, inputs)]


def first_call_candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[FwdParams]:
    """Tiles that may be faster than the heuristic's, by the waves of work items.

    A thread block processes so many work items one after the other; larger tiles are processed at a
    higher rate, but leave more of the last wave idle.
    """
    batch, q_len, heads, _ = inputs.query.shape

    def expected(tiles: ForwardTileConfig) -> float:
        items = batch * heads * -(-q_len // tiles.block_q)
        waves = -(-items // gpu.multiprocessors(device))
        return waves * tiles.block_q / _FORWARD_RATES[tiles.consumers]

    limit = _RIVAL * expected(forward_tiles(inputs, None))
    candidates = candidates_forward(inputs, spec, device)
    expectations = {params: expected(forward_tiles(inputs, params)) for params in candidates}
    near = [params for params in candidates if expectations[params] <= limit]
    return sorted(near, key=expectations.__getitem__)


def _default_forward_tiles(inputs: Inputs) -> ForwardTileConfig:
    sizes = [(2, 128), (2, 64), (1, 128), (1, 64)]
    if inputs.query.shape[1] <= ROWS:
        sizes = sizes[2:]
    elif padded_dims(inputs)[1] <= 64 and not _has_narrow_window(inputs):
        sizes = [(3, 128), *sizes]  # three warpgroups overlap better than two
    for consumers, block_k in sizes:
        tiles = _with_most_stages(consumers, block_k, *padded_dims(inputs))
        if tiles and _fits_registers(tiles, inputs):
            return tiles
    return ForwardTileConfig(1, 64, 2)


def _has_narrow_window(inputs: Inputs) -> bool:
    """Whether queries see so few keys that most of a tile with many queries is masked."""
    parts = (inputs.mask or Everything()).parts()
    bands = [x for x in parts if isinstance(x, Band)]
    lows = [x.low for x in bands if isinstance(x.low, int)]
    highs = [x.high for x in bands if isinstance(x.high, int)]
    widths = [x.size for x in parts if isinstance(x, Chunks) and isinstance(x.size, int)]
    widths += [min(highs) - max(lows) + 1] if lows and highs else []
    return any(width < _NARROW_WINDOW for width in widths)


def _is_interval_mask(inputs: Inputs) -> bool:
    """Whether each query sees a range of keys, so that the kernel compares bounds alone."""
    parts = (inputs.mask or Everything()).parts()
    return all(
        isinstance(x, _INTERVALS) or (isinstance(x, Segments) and x.documents is not None)
        for x in parts
    )


def _with_most_stages(
    consumers: int, block_k: int, head_dim: int, value_dim: int, stages: int = 4
) -> ForwardTileConfig | None:
    """Tiles of this size with the most stages that fit shared memory; None if two do not fit."""
    sizes = (ForwardTileConfig(consumers, block_k, count) for count in range(stages, 1, -1))
    fits = lambda tiles: tiles.shared_bytes(head_dim, value_dim) <= FORWARD_SHARED_BYTES
    return next(filter(fits, sizes), None)


def _fits_registers(tiles: ForwardTileConfig, inputs: Inputs) -> bool:
    """Whether the registers of a thread hold its part of logits, weights and accumulator."""
    dims = padded_dims(inputs)
    needed = dims[1] // 2 + tiles.block_k * 3 // 4
    if inputs.dropout is not None:  # the random bits of every weight
        needed += tiles.block_k // 2
    if inputs.bias is not None:
        needed += 8
    if not has_whole_tiles(inputs):  # the address of each panel
        value = gpu.SharedMatrices(inputs.value.dtype, 1, ROWS, dims[1], False)
        needed += max(16, 3 * value.panels)
    with_three = 128 if _is_interval_mask(inputs) and dims[0] <= 96 else 104
    available = {1: 192, 2: 176, 3: with_three}[tiles.consumers]
    if max(dims) > 192 and tiles.block_k == 64:  # the addresses of the queries are recomputed
        available += 32
    return needed <= available


def _forward_params(tiles: ForwardTileConfig) -> FwdParams:
    return FwdParams(q_blocksize=tiles.block_q, kv_blocksize=tiles.block_k, num_stages=tiles.stages)


@dataclasses.dataclass(frozen=True)
class BackwardTileConfig:
    """Tiles of a backward kernel.

    Attributes:
        consumers: consumer warpgroups, with 64 resident rows each.
        block_streamed: rows of a tile of the matrices that are streamed.
        stages: the most tiles in a ring buffer; there are as many as shared memory holds.
        overlap: whether the accumulating matmuls of a tile run during the next tile's first
            matmuls, which takes more registers.
    """

    consumers: int
    block_streamed: int
    stages: int
    overlap: bool

    @property
    def block_resident(self) -> int:
        return ROWS * self.consumers


# Tiles of a kernel that has no accumulators.
WITHOUT_ACCUMULATORS = BackwardTileConfig(consumers=2, block_streamed=64, stages=4, overlap=False)

# The two matrices of either side: queries and keys; outputs (their gradients) and values.
QK, VO = 0, 1


@dataclasses.dataclass(frozen=True)
class GradientKernelSpec:
    """What one backward kernel computes.

    A consumer warpgroup keeps 64 keys with their values (or queries with the gradients of their
    outputs) in shared memory, the resident side; tiles of the other side are streamed. The matmul
    of the matrices QK gives logits, that of VO the gradients of weights.

    Attributes:
        keys_resident: whether keys are resident, and the tiles are transposed.
        accumulated: the gradients that are accumulated, in order: VO that of values, from weights;
            QK that of keys or queries, from the gradients of logits.
        writes_d_logits: whether the gradients of logits are a result themselves, tile by tile.
        row_sums: what is summed over each resident row, for each query head: gradients of
            logits, or weights times their gradients.
    """

    keys_resident: bool
    accumulated: tuple[int, ...]
    writes_d_logits: bool = False
    row_sums: Literal["d_logits", "weights"] | None = None

    @property
    def matmuls(self) -> tuple[int, ...]:
        """The matmuls of resident with streamed matrices: the gradient of values takes one."""
        return (QK,) if self.accumulated == (VO,) else (QK, VO)

    def result_buffers(self, dims: tuple[int, int]) -> dict[int, int]:
        """The resident matrix in whose memory each result is staged: its own, or one as wide."""
        available = lambda i: i in self.matmuls or dims[QK] != dims[VO]
        return {i: i if available(i) else QK for i in self.accumulated}

    def resident_matrices(self, dims: tuple[int, int]) -> list[int]:
        """The matrices that have resident memory."""
        return sorted({*self.matmuls, *self.result_buffers(dims).values()})

    def stages(self, tiles: BackwardTileConfig, dims: tuple[int, int]) -> tuple[int, int] | None:
        """Stages of the ring buffers of QK and VO; None if too few fit shared memory.

        A matrix that is also an operand of an accumulating matmul is read for longer. It has two
        stages at least, and more where there is a choice.
        """
        fits = lambda stages: self.free_shared_bytes(tiles, dims, stages) >= 0
        least = [2 if i in self.accumulated else 1 for i in range(2)]
        first, second = (range(low, max(tiles.stages, low) + 1) for low in least)
        both = itertools.product(first, second)
        fitting = [x for x in both if abs(x[0] - x[1]) <= 1 and fits(x)]
        preferred = self.accumulated[-1] if self.accumulated else QK
        return max(fitting, key=lambda x: (min(x), x[preferred], sum(x)), default=None)

    def free_shared_bytes(
        self, tiles: BackwardTileConfig, dims: tuple[int, int], stages: tuple[int, int]
    ) -> int:
        """Shared memory that is left next to ring buffers of so many stages."""
        resident = 2 * tiles.block_resident * sum(dims[i] for i in self.resident_matrices(dims))
        stats = 2 * 4 * tiles.block_streamed * stages[QK] if self.keys_resident else 0
        rings = sum(2 * tiles.block_streamed * dim * n for dim, n in zip(dims, stages, strict=True))
        reserve = gpu.REDUCTION_RESERVE if self.row_sums else 0
        return SHARED_BYTES - reserve - resident - stats - rings


DK_DV = GradientKernelSpec(True, (VO, QK))
DV = GradientKernelSpec(True, (VO,))
DK = GradientKernelSpec(True, (QK,))
DQ = GradientKernelSpec(False, (QK,))


def backward_tiles(
    inputs: Inputs, spec: Spec, params: BwdParams | None
) -> tuple[tuple[BackwardTileConfig, ...], BackwardTileConfig]:
    """Tiles of the dK/dV kernel, or of a dV and a dK kernel; and of the dQ kernel.

    `q_blocksize` is the number of queries in a tile of the former, `kv_blocksize` of keys in one of
    the latter; all keep 128 rows resident.
    """
    params = params or BwdParams()
    q_blocksize, kv_blocksize = params.q_blocksize or 64, params.kv_blocksize or 64
    head, value = (dim // 2 for dim in padded_dims(inputs))
    choose = functools.partial(_backward_tiles, inputs, spec, params.num_stages)
    capped_and_dropped = inputs.dropout is not None and spec.logits_soft_cap is not None
    if head + value + (80 if capped_and_dropped else 64) <= _BACKWARD_REGISTERS:
        of_keys = (choose(DK_DV, head + value, q_blocksize, 1.5),)
    else:
        of_keys = (choose(DV, value, q_blocksize, 0.75), choose(DK, head, q_blocksize, 1.25))
    return of_keys, choose(DQ, head, kv_blocksize, 1.25)


def _backward_tiles(
    inputs: Inputs,
    spec: Spec,
    stages: int | None,
    kernel: GradientKernelSpec,
    accumulators: int,
    block_streamed: int,
    overlap_tiles: float,
) -> BackwardTileConfig:
    """The requested block if registers suffice, with overlap if they suffice for that too.

    Args:
        inputs: of the call.
        spec: of the call.
        stages: requested.
        kernel: which gradients.
        accumulators: registers of the accumulators.
        block_streamed: requested.
        overlap_tiles: tiles of 64 rows in registers with overlap.
    """
    needed, stages = accumulators + _weight_registers(inputs, spec), min(4, max(2, stages or 4))
    wide = BackwardTileConfig(2, 128, stages, False)
    sums_rows = inputs.sinks is not None and not kernel.keys_resident  # which takes more
    fits = needed + 128 < _BACKWARD_REGISTERS and not sums_rows
    if block_streamed > 64 and fits and kernel.stages(wide, padded_dims(inputs)):
        return wide
    tiles = BackwardTileConfig(2, 64, stages, True)
    # With overlap, a stage that both kinds of matmul read is released a tile later.
    found = kernel.stages(tiles, padded_dims(inputs))
    enough_stages = kernel == DV or (found is not None and found[QK] > 2)
    overlap = enough_stages and needed + 64 * overlap_tiles <= _BACKWARD_REGISTERS
    return dataclasses.replace(tiles, overlap=overlap)


def _weight_registers(inputs: Inputs, spec: Spec) -> int:
    """Registers that weights take beyond the exponentials."""
    return 64 if inputs.dropout is not None else 0 if spec.logits_soft_cap is None else 32


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device) -> BwdParams:
    """The tiles expected to be fastest."""
    return _backward_params(inputs, spec, BwdParams())


def candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[BwdParams]:
    """All tiles worth timing."""
    sizes = [BwdParams(q_blocksize=q, kv_blocksize=k) for q in (64, 128) for k in (64, 128)]
    return list(dict.fromkeys(_backward_params(inputs, spec, params) for params in sizes))


def first_call_candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[BwdParams]:
    """Tiles that may be faster than the fused kernel, or than the heuristic's tiles."""
    if inputs.query.shape[2] >= _LARGE_GROUP * inputs.key.shape[2]:
        return [heuristic_backward(inputs, spec, device)]
    return []


def _backward_params(inputs: Inputs, spec: Spec, params: BwdParams) -> BwdParams:
    of_keys, of_queries = backward_tiles(inputs, spec, params)
    return BwdParams(
        q_blocksize=max(tiles.block_streamed for tiles in of_keys),
        kv_blocksize=of_queries.block_streamed,
        num_stages=of_queries.stages,
    )
