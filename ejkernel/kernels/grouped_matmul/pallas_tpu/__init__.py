"""Grouped matmul on TPUs, in Pallas: what it takes, and blocks that fit into VMEM.

Forward, a step multiplies `block_m` rows by `block_n` columns of a weight, `block_k` deep: as deep
as the weight where that fits, since a block is then read once however many tiles its group has. For
the gradients of the rows a step gives `block_k` columns, for that of a weight `block_k` by
`block_n`.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.mosaic_tpu.memory import MEBIBYTE, core_of, vmem_bytes
from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.kernels.grouped_matmul.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.grouped_matmul.layout import sorted_backward, sorted_forward
from ejkernel.kernels.grouped_matmul.pallas_tpu.kernels import (
    UNIT,
    Blocks,
    rows_times_rows,
    times_weights,
    unit_of,
)
from ejkernel.kernels.grouped_matmul.row_tiles import most_steps
from ejkernel.ops.implementation import Implementation, Pass
from ejkernel.ops.platform import Device, device_of

LANES = 128
_ROWS = (512, 256, 128)
_SIZES = (4096, 2048, 1024, 512, 256, 128)
_MOST = 0.9  # of a memory, that a kernel may have
_SHARE = 0.7  # of what it has, for what is counted here; the compiler needs some for itself


class Problem(NamedTuple):
    """A product of sorted rows and weights: sizes, and the dtypes of both and of the result."""

    rows: int
    weights: int
    depth: int
    columns: int
    dtypes: tuple[Any, Any, Any]


def run_forward(
    inputs: Inputs, spec: Spec, params: GroupedMatmulConfig | None
) -> tuple[Outputs, tuple[()]]:
    """The product of each row and its weight; the backward pass needs nothing of it."""
    params = params or heuristic_forward(inputs, spec, _device(inputs))
    problem = _forward_problem(inputs, spec)
    blocks = _blocks(problem, params.block_m, params.block_n, params.block_k)
    return sorted_forward(inputs, spec, functools.partial(times_weights, blocks=blocks)), ()


def run_backward(
    inputs: Inputs, _: tuple[()], d_outputs: Outputs, spec: Spec, params: GroupedMatmulConfig | None
) -> Inputs:
    """Gradients: the rows times the transposed weights, and for each weight a sum over its rows."""
    device = _device(inputs)
    params = params or heuristic_backward(inputs, spec, device)
    of_rows, of_weights = _backward_problems(inputs, spec)
    deep = _depth(of_rows, params.block_m, params.block_k, device)
    sizes = (params.block_n, params.block_k)
    return sorted_backward(
        inputs,
        d_outputs,
        spec,
        functools.partial(
            times_weights, blocks=_blocks(of_rows, params.block_m, params.block_k, deep)
        ),
        functools.partial(
            rows_times_rows,
            blocks=_sum_blocks(
                of_weights, params.block_m, *(sizes[::-1] if spec.transpose_rhs else sizes)
            ),
        ),
    )


def heuristic_forward(inputs: Inputs, spec: Spec, device: Device | None) -> GroupedMatmulConfig:
    """Of the blocks that fit those that move the fewest bytes."""
    problem = _forward_problem(inputs, spec)
    best = _best(problem, _moved, [_blocks(problem, *x) for x in _choices(problem)], device)
    return GroupedMatmulConfig(
        block_m=best.rows, block_n=best.columns, block_k=best.depth, platform="pallas"
    )


def heuristic_backward(inputs: Inputs, spec: Spec, device: Device | None) -> GroupedMatmulConfig:
    """The same for the gradient of the weights, in blocks that the other gradient can have too."""
    of_rows, of_weights = _backward_problems(inputs, spec)
    choices = [
        _sum_blocks(of_weights, rows, columns, depth)
        for rows, columns, depth in _choices(of_weights, split=True)
    ]
    choices = [
        x
        for x in choices
        if _fits(
            _blocks(of_rows, x.rows, x.columns if spec.transpose_rhs else x.depth, UNIT), device
        )
    ]
    best = _best(of_weights, _moved_by_sums, choices, device)
    sizes = (best.depth, best.columns)
    block_k, block_n = sizes[::-1] if spec.transpose_rhs else sizes
    return GroupedMatmulConfig(
        block_m=best.rows, block_n=block_n, block_k=block_k, platform="pallas"
    )


def _device(inputs: Inputs) -> Device:
    return device_of(jax.tree.leaves(inputs))


def _count(inputs: Inputs) -> int:
    """All rows of the calls that were joined."""
    leads = [inputs.inputs.shape[:-2]]
    leads += [x.shape[:-1] for x in (inputs.group_ids, inputs.group_sizes) if x is not None]
    lead = jnp.broadcast_shapes(*leads)
    return inputs.inputs.shape[-2] * (lead[0] if lead else 1)


def _forward_problem(inputs: Inputs, spec: Spec) -> Problem:
    weights, (one, other) = inputs.weights.shape[0], inputs.weights.shape[1:]
    depth, columns = (other, one) if spec.transpose_rhs else (one, other)
    dtypes = (inputs.inputs.dtype, inputs.weights.dtype, spec.output_dtype(inputs))
    return Problem(_count(inputs), weights, depth, columns, dtypes)


def _backward_problems(inputs: Inputs, spec: Spec) -> tuple[Problem, Problem]:
    """The gradient of the rows, and that of the weights, whose `depth` is the left one's."""
    rows, weights, k, n, (x, w, out) = _forward_problem(inputs, spec)
    of_rows = Problem(rows, weights, n, k, (out, w, x))
    if spec.transpose_rhs:
        return of_rows, Problem(rows, weights, n, k, (out, x, w))
    return of_rows, Problem(rows, weights, k, n, (x, out, w))


def _choices(problem: Problem, split: bool = False) -> list[tuple[int, int, int]]:
    """Rows, columns and depth of the blocks worth a look, the largest first."""
    average = problem.rows // problem.weights
    rows = [x for x in _ROWS if x <= average] or [_ROWS[-1]]
    depths = _SIZES if split else (problem.depth, *_SIZES)
    return list(itertools.product(rows, _SIZES, depths))


def _best(problem: Problem, moved: Any, choices: list[Blocks], device: Device | None) -> Blocks:
    """The first of the best that fit, or the smallest."""
    smallest = min(choices, key=lambda x: x.vmem)
    fitting = [x for x in choices if _fits(x, device)] or [smallest]
    return min(fitting, key=lambda x: moved(problem, x))


def _fits(blocks: Blocks, device: Device | None) -> bool:
    return blocks.vmem <= _MOST * core_of(device).vmem


def _limit(estimate: int) -> int:
    """What to ask the compiler for: it needs some for itself."""
    return max(12 * MEBIBYTE, int(estimate / _SHARE))


def _blocks(problem: Problem, rows: int, columns: int, depth: int) -> Blocks:
    """Blocks that the kernel can have, the nearest to what is wanted, for rows times weights."""
    x, w, out = problem.dtypes
    rows = _row_block(problem, rows)
    columns = _lanes(columns, problem.columns)
    depth = problem.depth if depth >= problem.depth else _up(depth, LANES)
    held = 2 * vmem_bytes((rows, depth), x)
    held += 2 * max(vmem_bytes((depth, columns), w), vmem_bytes((columns, depth), w))
    held += 2 * vmem_bytes((rows, columns), out) + vmem_bytes((rows, columns), jnp.float32)
    unit = (unit_of(rows), unit_of(columns), min(depth, UNIT))
    return Blocks(rows, columns, depth, _limit(held + _unit_bytes(problem, unit)))


def _sum_blocks(problem: Problem, rows: int, columns: int, depth: int) -> Blocks:
    """The same for the products of rows with rows."""
    left, right, out = problem.dtypes
    rows = _row_block(problem, rows)
    columns, depth = _lanes(columns, problem.columns), _lanes(depth, problem.depth)
    held = 2 * vmem_bytes((rows, depth), left) + 2 * vmem_bytes((rows, columns), right)
    held += 2 * vmem_bytes((depth, columns), out) + vmem_bytes((depth, columns), jnp.float32)
    unit = (unit_of(depth), unit_of(columns), unit_of(rows))
    return Blocks(rows, columns, depth, _limit(held + _unit_bytes(problem, unit)))


def _unit_bytes(problem: Problem, unit: tuple[int, int, int]) -> int:
    """What the product of a unit takes: the result, and copies of the operands, split or turned."""
    rows, columns, depth = unit
    operands = vmem_bytes((rows, depth), jnp.float32) + vmem_bytes((depth, columns), jnp.float32)
    wide = jnp.float32 in problem.dtypes[:2]
    return vmem_bytes((rows, columns), jnp.float32) + operands * (3 if wide else 1)


def _row_block(problem: Problem, rows: int) -> int:
    """Tiles of 16 rows lie as they are in memory in either dtype."""
    return _up(min(rows, max(problem.rows, 1)), 16)


def _lanes(wanted: int, size: int) -> int:
    """A multiple of the lanes, which may stick out over the end, or all of a little."""
    return size if wanted >= size and size <= UNIT else _up(min(wanted, size), LANES)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _depth(problem: Problem, rows: int, columns: int, device: Device | None) -> int:
    """How much of the sum a step takes: all of it, or what fits."""
    choices = [_blocks(problem, rows, columns, depth) for depth in (problem.depth, *_SIZES)]
    return _best(problem, _moved, choices, device).depth


def _moved(problem: Problem, blocks: Blocks) -> int:
    """Bytes that go in and out, and those of the first blocks, which nothing hides."""
    x, w, out = (jnp.dtype(dtype).itemsize for dtype in problem.dtypes)
    steps = most_steps(problem.rows, problem.weights, blocks.rows)
    passes = -(-problem.columns // blocks.columns)
    matrix = problem.depth * problem.columns * w
    if blocks.depth >= problem.depth:
        read = passes * problem.rows * problem.depth * x + problem.weights * matrix
    else:
        read = passes * steps * blocks.rows * problem.depth * x + steps * matrix
    first = blocks.depth * (blocks.rows * x + blocks.columns * w)
    return read + problem.rows * problem.columns * out + first


def _moved_by_sums(problem: Problem, blocks: Blocks) -> int:
    left, right, out = (jnp.dtype(dtype).itemsize for dtype in problem.dtypes)
    rows = most_steps(problem.rows, problem.weights, blocks.rows) * blocks.rows
    read = rows * problem.depth * left * -(-problem.columns // blocks.columns)
    read += rows * problem.columns * right * -(-problem.depth // blocks.depth)
    first = blocks.rows * (blocks.depth * left + blocks.columns * right)
    first += blocks.depth * blocks.columns * out
    return read + problem.weights * problem.depth * problem.columns * out + first


def why_not(inputs: Inputs, spec: Spec, device: Device) -> str | None:
    """What the kernels do not compute."""
    dtypes = {str(inputs.inputs.dtype), str(inputs.weights.dtype), str(spec.output_dtype(inputs))}
    if not dtypes <= {"float32", "bfloat16"}:
        return f"needs float32 or bfloat16 alone, got {', '.join(sorted(dtypes))}"
    tile = heuristic_backward(inputs, spec, device).block_m
    weights = inputs.weights.shape[0]
    listed = 4 * (3 * most_steps(_count(inputs), weights, tile) + 2 * weights)
    if listed > _SHARE * core_of(device).smem:
        return "has no room in scalar memory for a list of so many tiles and groups"
    return None


def _candidates_forward(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    problem = _forward_problem(inputs, spec)
    found = (
        _blocks(problem, rows, columns, depth)
        for rows in _ROWS
        for columns in (2048, 1024, 512)
        for depth in (problem.depth, 2048, 512)
    )
    return [
        GroupedMatmulConfig(block_m=x.rows, block_n=x.columns, block_k=x.depth, platform="pallas")
        for x in dict.fromkeys(found)
        if _fits(x, device)
    ]


def _candidates_backward(inputs: Inputs, spec: Spec, device: Device) -> list[GroupedMatmulConfig]:
    of_rows, of_weights = _backward_problems(inputs, spec)
    sizes = itertools.product(_ROWS, (1024, 512), (1024, 512))
    k, n = of_rows.columns, of_rows.depth
    found = (
        GroupedMatmulConfig(
            block_m=_row_block(of_rows, rows),
            block_n=_lanes(block_n, n),
            block_k=_lanes(block_k, k),
            platform="pallas",
        )
        for rows, block_n, block_k in sizes
    )
    fits = lambda x: _fits(_sum_blocks(of_weights, x.block_m, x.block_n, x.block_k), device)
    return [x for x in dict.fromkeys(found) if fits(x)]


_FEATURES = frozenset(
    {
        "existing_out",
        "group_ids",
        "group_sizes",
        "groups",
        "preferred_element_type",
        "transpose_rhs",
    }
)

IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=heuristic_forward,
        candidates=_candidates_forward,
    ),
    backward=Pass(
        run=run_backward,
        features=_FEATURES,
        why_not=why_not,
        heuristic=heuristic_backward,
        candidates=_candidates_backward,
    ),
)
