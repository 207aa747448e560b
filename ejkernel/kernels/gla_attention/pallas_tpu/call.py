"""How the TPU kernels of gated linear attention see a call.

    tokens   [b, n or k, p, d]     blocks of some key heads, or of their query heads, and a chunk
    lines    [b, k, c, 1, chunk]   a number for each token, along the lanes
    states   [b, m, k, v, h]       one for each sequence of a row

The grid is (batch rows, blocks of key heads, chunks). The chunks of a row run one after the other
while the state stays in VMEM; each holds tokens of one sequence only. Calls that run from the last
token to the first come turned round.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import settings
from ejkernel.kernels.gla_attention.inputs import Inputs, Spec, sequences
from ejkernel.kernels.gla_attention.pallas_tpu import recurrence as tpu_recurrence
from ejkernel.kernels.gla_attention.pallas_tpu.recurrence import Columnwise, Still, Tables, Uniform
from ejkernel.kernels.gla_attention.pallas_tpu.recurrence_step import Chunk
from ejkernel.kernels.gla_attention.recurrence_grid import Grid
from ejkernel.ops.meshes import result_shape


class Size(NamedTuple):
    """What a step works on."""

    chunk: int
    heads: int  # key heads


def columnwise(inputs: Inputs) -> bool:
    """Whether some decays are columns' own, which costs a matmul for each doubling of a chunk."""
    return inputs.gv is not None or (inputs.gate is not None and inputs.gate.shape[-1] > 1)


def together(inputs: Inputs, heads: int) -> int:
    """How many of a step's key heads the compiler may interleave; with more, registers spill."""
    return math.gcd(heads, 2 if columnwise(inputs) else 4)


class Operand(NamedTuple):
    """An array that a kernel reads, and the block of it that a step gets."""

    array: jax.Array
    spec: pl.BlockSpec


class Result(NamedTuple):
    """An array that a kernel writes, and the block that a step does."""

    shape: tuple[int, ...]
    dtype: Any
    spec: pl.BlockSpec


class Call:
    """One call of a kernel that may use `vmem` bytes.

    `backwards`: from the last chunk in time to the first.
    """

    def __init__(
        self, inputs: Inputs, spec: Spec, size: Size, *, vmem: int, backwards: bool = False
    ):
        self.inputs, self.spec, self.size, self.vmem = inputs, spec, size, vmem
        self.backwards = backwards
        self.batch, self.tokens, self.heads, self.width = inputs.key.shape
        self.columns = inputs.value.shape[3]
        self.group = inputs.query.shape[2] // self.heads
        self.sequences = sequences(inputs)
        shape = (self.batch, self.tokens, self.heads)
        self.grid = Grid(shape, size.chunk, 1, spec.reverse, inputs.cu_seqlens)
        self.chunks = self.grid.chunks
        self.dtype = inputs.query.dtype
        self.decays = self._decays()
        self.uniform = self.decays is not None and self.decays.shape[3] == 1

    # Arrays as the kernels take them, and back

    def lay_out(self, x: jax.Array) -> jax.Array:
        """[b, s, n, d] -> [b, n, p, d], in the order of time."""
        x = jnp.swapaxes(self.grid.lay_out(x), 1, 2)
        return jnp.flip(x, 2) if self.spec.reverse else x

    def collect(self, x: jax.Array) -> jax.Array:
        """[b, n, p, d] -> [b, s, n, d]."""
        x = jnp.flip(x, 2) if self.spec.reverse else x
        return self.grid.collect(jnp.swapaxes(x, 1, 2))

    def _decays(self) -> jax.Array | None:
        """[b, p, k, h or 1]: all decays of the rows of the state, 0 where there is no token."""
        gate, gamma = self.inputs.gate, self.inputs.g_gamma
        gate = None if gate is None else self.grid.lay_out(gate)
        if gamma is None:
            return gate
        if self.grid.packing is not None:
            used = self.grid.packing.used
        else:
            used = (jnp.arange(self.chunks * self.size.chunk, dtype=jnp.int32) < self.tokens)[None]
        gamma = gamma.astype(jnp.float32)[:, None, :, None]
        gamma = jnp.where(used[:, :, None, None], gamma, 0.0)
        return gamma if gate is None else gate.astype(jnp.float32) + gamma

    def sequence(self) -> jax.Array | None:
        """[b * c]: the sequence of every chunk, in the order of time; None: there is one."""
        if self.grid.packing is None:
            return None
        order = self.grid.packing.sequence
        return (jnp.flip(order, 1) if self.spec.reverse else order).reshape(-1)

    # Operands and results

    def of_tokens(self, x: jax.Array) -> Operand:
        """[b, s, n or k, d]"""
        x = self.lay_out(x)
        return Operand(x, self.spec_of_tokens(x.shape))

    def of_decays(self) -> Operand:
        """Those of the rows."""
        x = jnp.swapaxes(cast(jax.Array, self.decays), 1, 2)
        x = jnp.flip(x, 2) if self.spec.reverse else x
        if not self.uniform:
            return Operand(x, self.spec_of_tokens(x.shape))
        x = x.reshape(self.batch, self.heads, self.chunks, 1, self.size.chunk)
        return Operand(x, self.spec_of_chunks(x.shape))

    def of_states(self, x: jax.Array) -> Operand:
        """[b, m, k, h, v]"""
        x = jnp.swapaxes(x, 3, 4)
        return Operand(x, self.spec_of_states(x.shape))

    def of_table(self, x: Any) -> Operand:
        return Operand(jnp.asarray(x), pl.BlockSpec(x.shape, lambda *_: (0, 0)))

    def result_like(self, x: Operand, dtype: Any) -> Result:
        return Result(x.array.shape, dtype, x.spec)

    def states_result(self) -> Result:
        shape = (self.batch, self.sequences, self.heads, self.columns, self.width)
        return Result(shape, jnp.float32, self.spec_of_states(shape))

    def spec_of_tokens(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        block = (None, self.size.heads * shape[1] // self.heads, self.size.chunk, shape[3])
        return pl.BlockSpec(block, lambda row, head, step, *_: (row, head, self.time(step), 0))

    def spec_of_chunks(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """[b, k, c, ...]: what there is one of for every chunk."""
        block = (None, self.size.heads, None, *shape[3:])
        return pl.BlockSpec(block, lambda row, head, step, *_: (row, head, self.time(step), 0, 0))

    def spec_of_states(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        def index(row, head, step, *scalars):
            return (row, self.sequence_at(row, self.time(step), scalars), head, 0, 0)

        return pl.BlockSpec((None, None, self.size.heads, *shape[3:]), index)

    def time(self, step: Any) -> Any:
        """Which chunk, in the order of time, a step visits."""
        return self.chunks - 1 - step if self.backwards else step

    def sequence_at(self, row: Any, time: Any, scalars: tuple) -> Any:
        return scalars[0][row * self.chunks + time] if scalars else 0

    def common_operands(self) -> dict[str, Operand]:
        """What every kernel reads."""
        operands = {
            "key": self.of_tokens(self.inputs.key),
            "value": self.of_tokens(self.inputs.value),
        }
        if self.decays is not None:
            operands["decays"] = self.of_decays()
        if self.inputs.gv is not None:
            operands["value_decays"] = self.of_tokens(self.inputs.gv)
        if columnwise(self.inputs):
            table = tpu_recurrence.tables(self.size.chunk)
            operands["sums"] = self.of_table(table)
            if self.backwards:
                operands["transposed"] = self.of_table(table.T)
        return operands

    # Inside a kernel

    def ends(self, scalars: tuple) -> tuple[Any, Any]:
        """Whether a step is the first it visits of a sequence, and whether the last."""
        row, step = pl.program_id(0), pl.program_id(2)
        first, last = step == 0, step == self.chunks - 1
        if scalars:
            at = lambda step: self.sequence_at(row, self.time(step), scalars)
            first |= at(jnp.maximum(step - 1, 0)) != at(step)
            last |= at(jnp.minimum(step + 1, self.chunks - 1)) != at(step)
        return first, last

    def over_heads(self, visit: Callable[[Any], None]) -> None:
        """`visit` every key head of the block."""
        count = together(self.inputs, self.size.heads)

        def some(index: Any, _: None) -> None:
            for place in range(count):
                visit(index * count + place)

        if self.size.heads == count:
            some(0, None)
        else:
            lax.fori_loop(0, self.size.heads // count, some, None)

    def rows_of(self, ref: Any, head: Any) -> jax.Array:
        """[g * c, d]: the query heads of a key head."""
        part = ref[pl.ds(head * self.group, self.group)].astype(jnp.float32)
        return part.reshape(-1, part.shape[-1])

    def write_rows(self, ref: Any, head: Any, x: jax.Array) -> None:
        part = x.reshape(self.group, self.size.chunk, -1)
        ref[pl.ds(head * self.group, self.group)] = part.astype(ref.dtype)

    def chunk_of(self, refs: Mapping[str, Any], head: Any) -> Chunk:
        """The tokens of a key head; none of the queries where they are not read."""
        key, value = (refs[name][head].astype(jnp.float32) for name in ("key", "value"))
        query = key
        if "query" in refs:
            query = self.rows_of(refs["query"], head) * self.spec.softmax_scale
        return Chunk(query, key, value)

    def fades(self, refs: Mapping[str, Any], head: Any) -> tuple[Still, Still]:
        """How the rows and the columns of the state of a key head fade."""
        shared = (self.size.chunk, self.group, self.dtype)
        tables = Tables(refs.get("sums"), refs.get("transposed"))
        rows = columns = Still(*shared)
        if self.uniform:
            rows = Uniform(refs["decays"][head], *shared)
        elif self.decays is not None:
            rows = Columnwise(refs["decays"][head], tables, *shared)
        if self.inputs.gv is not None:
            columns = Columnwise(refs["value_decays"][head], tables, *shared)
        return rows, columns

    # Starting one

    def run(
        self, kernel: Any, operands: Mapping[str, Operand], results: Mapping[str, Result]
    ) -> dict[str, jax.Array]:
        """Start `kernel(call, refs, scalars)`; its refs hold the state of a step too."""
        sequence = self.sequence()
        scalars = [] if sequence is None else [sequence]
        names = [*operands, *results, "scratch"]
        arrays = (*scalars, *(x.array for x in operands.values()))

        def body(*refs):
            numbers, refs = refs[: len(scalars)], refs[len(scalars) :]
            kernel(self, dict(zip(names, refs, strict=True)), numbers)

        shape = (self.size.heads, self.columns, self.width)
        outputs = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(self.batch, self.heads // self.size.heads, self.chunks),
                in_specs=[x.spec for x in operands.values()],
                out_specs=[x.spec for x in results.values()],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32)],
            ),
            out_shape=[result_shape(x.shape, x.dtype, *arrays) for x in results.values()],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=self.vmem,
            ),
            interpret=settings.interpret(),
        )(*arrays)
        return dict(zip(results, outputs, strict=True))
