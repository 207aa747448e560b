"""The TPU kernels of gated linear attention: forward, the states between chunks, backward.

    tokens   [b, n or k, p, d]     blocks of some key heads, or of their query heads, and a chunk
    decays   [b, k, c, 1, chunk]   a number for each token, along the lanes
    states   [b, m, k, v, h]       one for each sequence of a row

The grid is (batch rows, blocks of key heads, chunks). The chunks of a row run one after the other
while the state stays in VMEM; each holds tokens of one sequence only. The tokens of a reversed call
are flipped first.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from ejkernel import settings
from ejkernel.kernels.common.mosaic_tpu.blocks import BlockOperand, BlockResult
from ejkernel.kernels.common.refs import Index, Ref
from ejkernel.kernels.gla_attention.chunk_grid import ChunkGrid
from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec, sequences
from ejkernel.kernels.gla_attention.pallas_tpu import chunk_recurrence
from ejkernel.kernels.gla_attention.pallas_tpu.chunk_recurrence import (
    ChunkTile,
    ColumnDecayTile,
    NoDecayTile,
    ScalarDecayTile,
    SumTables,
)
from ejkernel.ops.meshes import result_shape

Refs = Mapping[str, Ref]


class GlaStepSize(NamedTuple):
    """What a step computes: a chunk of some key heads."""

    chunk: int
    heads: int  # key heads


def has_column_decays(inputs: Inputs) -> bool:
    """Whether columns have decays of their own: a matmul for each doubling of a chunk."""
    return inputs.gv is not None or (inputs.gate is not None and inputs.gate.shape[-1] > 1)


def interleaved_heads(inputs: Inputs, heads: int) -> int:
    """How many of a step's key heads the compiler may interleave; with more, registers spill."""
    return math.gcd(heads, 2 if has_column_decays(inputs) else 4)


class GlaCall:
    """One call of a kernel that may use `vmem` bytes.

    `backwards`: from the last chunk in time to the first.
    """

    inputs: Inputs
    spec: Spec
    size: GlaStepSize
    vmem: int
    batch: int
    tokens: int
    heads: int
    width: int

    def __init__(
        self, inputs: Inputs, spec: Spec, size: GlaStepSize, *, vmem: int, backwards: bool = False
    ):
        self.inputs, self.spec, self.size, self.vmem = inputs, spec, size, vmem
        self.backwards = backwards
        self.batch, self.tokens, self.heads, self.width = inputs.key.shape
        self.columns: int = inputs.value.shape[3]
        self.group: int = inputs.query.shape[2] // self.heads
        self.sequences: int = sequences(inputs)
        shape = (self.batch, self.tokens, self.heads)
        self.grid: ChunkGrid = ChunkGrid(shape, size.chunk, 1, spec.reverse, inputs.cu_seqlens)
        self.chunks: int = self.grid.chunks
        self.dtype: np.dtype = inputs.query.dtype
        self.decays: jax.Array | None = self._decays()
        self.uniform: bool = self.decays is not None and self.decays.shape[3] == 1

    def to_chunks(self, x: jax.Array) -> jax.Array:
        """[b, s, n, d] -> [b, n, p, d], in temporal order."""
        x = jnp.swapaxes(self.grid.to_places(x), 1, 2)
        return jnp.flip(x, 2) if self.spec.reverse else x

    def to_tokens(self, x: jax.Array) -> jax.Array:
        """[b, n, p, d] -> [b, s, n, d]."""
        x = jnp.flip(x, 2) if self.spec.reverse else x
        return self.grid.to_tokens(jnp.swapaxes(x, 1, 2))

    def _decays(self) -> jax.Array | None:
        """[b, p, k, h or 1]: all decays of the rows of the state, 0 where there is no token."""
        gate, gamma = self.inputs.gate, self.inputs.g_gamma
        gate = None if gate is None else self.grid.to_places(gate)
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
        """[b * c]: the sequence of every chunk, in temporal order; None: there is one."""
        if self.grid.packing is None:
            return None
        order = self.grid.packing.sequence
        return (jnp.flip(order, 1) if self.spec.reverse else order).reshape(-1)

    def token_operand(self, x: jax.Array) -> BlockOperand:
        """[b, s, n or k, d]"""
        x = self.to_chunks(x)
        return BlockOperand(x, self.token_spec(x.shape))

    def decay_operand(self) -> BlockOperand:
        """The decays of the rows of the state."""
        x = jnp.swapaxes(cast(jax.Array, self.decays), 1, 2)
        x = jnp.flip(x, 2) if self.spec.reverse else x
        if not self.uniform:
            return BlockOperand(x, self.token_spec(x.shape))
        x = x.reshape(self.batch, self.heads, self.chunks, 1, self.size.chunk)
        return BlockOperand(x, self.chunk_spec(x.shape))

    def state_operand(self, x: jax.Array) -> BlockOperand:
        """[b, m, k, h, v]"""
        x = jnp.swapaxes(x, 3, 4)
        return BlockOperand(x, self.state_spec(x.shape))

    def table_operand(self, x: np.ndarray) -> BlockOperand:
        return BlockOperand(jnp.asarray(x), pl.BlockSpec(x.shape, lambda *_: (0, 0)))

    def result_like(self, x: BlockOperand, dtype: DTypeLike) -> BlockResult:
        return BlockResult(x.array.shape, dtype, x.spec)

    def states_result(self) -> BlockResult:
        shape = (self.batch, self.sequences, self.heads, self.columns, self.width)
        return BlockResult(shape, jnp.float32, self.state_spec(shape))

    def token_spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        block = (None, self.size.heads * shape[1] // self.heads, self.size.chunk, shape[3])
        return pl.BlockSpec(block, lambda row, head, step, *_: (row, head, self.time(step), 0))

    def chunk_spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """[b, k, c, ...], one for every chunk."""
        block = (None, self.size.heads, None, *shape[3:])
        return pl.BlockSpec(block, lambda row, head, step, *_: (row, head, self.time(step), 0, 0))

    def state_spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        def index(row: Index, head: Index, step: Index, *scalars: Ref) -> tuple[Index, ...]:
            return (row, self.sequence_at(row, self.time(step), scalars), head, 0, 0)

        return pl.BlockSpec((None, None, self.size.heads, *shape[3:]), index)

    def time(self, step: Index) -> Index:
        """The chunk of a step, in temporal order."""
        return self.chunks - 1 - step if self.backwards else step

    def sequence_at(self, row: Index, time: Index, scalars: tuple[Ref, ...]) -> Index:
        return scalars[0][row * self.chunks + time] if scalars else 0

    def common_operands(self) -> dict[str, BlockOperand]:
        """The operands of every kernel."""
        operands = {
            "key": self.token_operand(self.inputs.key),
            "value": self.token_operand(self.inputs.value),
        }
        if self.decays is not None:
            operands["decays"] = self.decay_operand()
        if self.inputs.gv is not None:
            operands["value_decays"] = self.token_operand(self.inputs.gv)
        if has_column_decays(self.inputs):
            table = chunk_recurrence.sum_table(self.size.chunk)
            operands["sums"] = self.table_operand(table)
            if self.backwards:
                operands["transposed"] = self.table_operand(table.T)
        return operands

    def ends(self, scalars: tuple[Ref, ...]) -> tuple[jax.Array, jax.Array]:
        """Whether a step is the first of its sequence, and whether it is the last."""
        row, step = pl.program_id(0), pl.program_id(2)
        first, last = step == 0, step == self.chunks - 1
        if scalars:
            at = lambda step: self.sequence_at(row, self.time(step), scalars)
            first |= at(jnp.maximum(step - 1, 0)) != at(step)
            last |= at(jnp.minimum(step + 1, self.chunks - 1)) != at(step)
        return first, last

    def over_heads(self, visit: Callable[[Index], None]) -> None:
        """`visit` every key head of the block."""
        count = interleaved_heads(self.inputs, self.size.heads)

        def some(index: Index, _: None) -> None:
            for place in range(count):
                visit(index * count + place)

        if self.size.heads == count:
            some(0, None)
        else:
            lax.fori_loop(0, self.size.heads // count, some, None)

    def rows_of(self, ref: Ref, head: Index) -> jax.Array:
        """[g * c, d]: the query heads of a key head."""
        part = ref[pl.ds(head * self.group, self.group)].astype(jnp.float32)
        return part.reshape(-1, part.shape[-1])

    def write_rows(self, ref: Ref, head: Index, x: jax.Array) -> None:
        part = x.reshape(self.group, self.size.chunk, -1)
        ref[pl.ds(head * self.group, self.group)] = part.astype(ref.dtype)

    def chunk_of(self, refs: Refs, head: Index) -> ChunkTile:
        """The tokens of a key head; the keys in place of queries that are not read."""
        key, value = (refs[name][head].astype(jnp.float32) for name in ("key", "value"))
        query = key
        if "query" in refs:
            query = self.rows_of(refs["query"], head) * self.spec.softmax_scale
        return ChunkTile(query, key, value)

    def decays_of(self, refs: Refs, head: Index) -> tuple[NoDecayTile, NoDecayTile]:
        """The decays of the rows and of the columns of the state of a key head."""
        shared = (self.size.chunk, self.group, self.dtype)
        rows = columns = NoDecayTile(*shared)
        if self.uniform:
            rows = ScalarDecayTile(refs["decays"][head], *shared)
        elif self.decays is not None:
            rows = ColumnDecayTile(refs["decays"][head], self._tables(refs), *shared)
        if self.inputs.gv is not None:
            columns = ColumnDecayTile(refs["value_decays"][head], self._tables(refs), *shared)
        return rows, columns

    def _tables(self, refs: Refs) -> SumTables:
        return SumTables(refs["sums"], refs.get("transposed"))

    def launch(
        self,
        kernel: Callable[["GlaCall", Refs, tuple[Ref, ...]], None],
        operands: Mapping[str, BlockOperand],
        results: Mapping[str, BlockResult],
    ) -> dict[str, jax.Array]:
        """Run `kernel(call, refs, scalars)`; its refs include the state, as `scratch`."""
        sequence = self.sequence()
        scalars = [] if sequence is None else [sequence]
        names = [*operands, *results, "scratch"]
        arrays = (*scalars, *(x.array for x in operands.values()))

        def body(*refs: Ref) -> None:
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


def forward(inputs: Inputs, spec: Spec, size: GlaStepSize, vmem: int) -> Outputs:
    """Output of every token, state after every sequence."""
    call = GlaCall(inputs, spec, size, vmem=vmem)
    operands = {"query": call.token_operand(inputs.query)} | call.common_operands()
    if inputs.initial_state is not None:
        operands["initial"] = call.state_operand(inputs.initial_state)
    shape = (*operands["query"].array.shape[:3], call.columns)
    results = {
        "out": BlockResult(shape, inputs.query.dtype, call.token_spec(shape)),
        "state": call.states_result(),
    }
    done = call.launch(_forward, operands, results)
    state = _with_empty_sequences(inputs, jnp.swapaxes(done["state"], 3, 4), inputs.initial_state)
    return Outputs(call.to_tokens(done["out"]), state)


def backward(
    inputs: Inputs, d_outputs: Outputs, spec: Spec, size: GlaStepSize, vmem: int
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    entered = _states(inputs, spec, size, vmem)
    call = GlaCall(inputs, spec, size, vmem=vmem, backwards=True)
    operands = {"query": call.token_operand(inputs.query)} | call.common_operands()
    results = {
        f"d_{name}": call.result_like(operands[name], getattr(inputs, name).dtype)
        for name in ("query", "key", "value")
    }
    if call.decays is not None:
        results["d_decays"] = call.result_like(operands["decays"], call.decays.dtype)
    if inputs.gv is not None:
        results["d_value_decays"] = call.result_like(operands["value_decays"], inputs.gv.dtype)
    results["d_initial"] = call.states_result()
    operands["entered"] = BlockOperand(entered, call.chunk_spec(entered.shape))
    operands["d_out"] = call.token_operand(d_outputs.out.astype(inputs.query.dtype))
    operands["d_state"] = call.state_operand(d_outputs.state.astype(jnp.float32))
    done = call.launch(_backward, operands, results)

    d_decays = d_gamma = None
    if call.decays is not None:
        shape = (call.batch, call.heads, -1, call.decays.shape[3])
        d_decays = call.to_tokens(done["d_decays"].reshape(shape))
        d_gamma = d_decays.sum((1, 3))
    d_initial = _with_empty_sequences(
        inputs, jnp.swapaxes(done["d_initial"], 3, 4), d_outputs.state
    )
    gradients = Inputs(
        *(call.to_tokens(done[name]) for name in ("d_query", "d_key", "d_value")),
        gate=None if inputs.gate is None else d_decays,
        g_gamma=None if inputs.g_gamma is None else d_gamma,
        gv=None if inputs.gv is None else call.to_tokens(done["d_value_decays"]),
        initial_state=None if inputs.initial_state is None else d_initial,
    )
    given = inputs._replace(cu_seqlens=None)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, given)


def _states(inputs: Inputs, spec: Spec, size: GlaStepSize, vmem: int) -> jax.Array:
    """[b, k, c, v, h]: the state before every chunk."""
    call = GlaCall(inputs, spec, size, vmem=vmem)
    operands = call.common_operands()
    if inputs.initial_state is not None:
        operands["initial"] = call.state_operand(inputs.initial_state)
    shape = (call.batch, call.heads, call.chunks, call.columns, call.width)
    result = BlockResult(shape, jnp.float32, call.chunk_spec(shape))
    return call.launch(_advance, operands, {"entered": result})["entered"]


def _with_empty_sequences(
    inputs: Inputs, states: jax.Array, otherwise: jax.Array | None
) -> jax.Array:
    """The states of all sequences; `otherwise` for those without a token, which have no chunk."""
    if inputs.cu_seqlens is None:
        return states
    empty = (jnp.diff(inputs.cu_seqlens, axis=1) == 0)[:, :, None, None, None]
    return jnp.where(empty, 0.0 if otherwise is None else otherwise, states)


def _load_state(refs: Refs, first: jax.Array, name: str) -> None:
    """Load the state of this name at the start of a sequence."""

    @pl.when(first)
    def _():
        scratch = refs["scratch"]
        given = refs.get(name)
        scratch[...] = jnp.zeros_like(scratch) if given is None else given[...].astype(jnp.float32)


def _store_state(refs: Refs, last: jax.Array, name: str) -> None:
    @pl.when(last)
    def _():
        refs[name][...] = refs["scratch"][...]


def _forward(call: GlaCall, refs: Refs, scalars: tuple[Ref, ...]) -> None:
    first, last = call.ends(scalars)
    _load_state(refs, first, "initial")

    def visit(head: Index) -> None:
        decays = call.decays_of(refs, head)
        out, refs["scratch"][head] = chunk_recurrence.forward(
            call.chunk_of(refs, head), *decays, refs["scratch"][head]
        )
        call.write_rows(refs["out"], head, out)

    call.over_heads(visit)
    _store_state(refs, last, "state")


def _advance(call: GlaCall, refs: Refs, scalars: tuple[Ref, ...]) -> None:
    first, _ = call.ends(scalars)
    _load_state(refs, first, "initial")
    refs["entered"][...] = refs["scratch"][...]

    def visit(head: Index) -> None:
        decays = call.decays_of(refs, head)
        state = refs["scratch"][head]
        refs["scratch"][head] = chunk_recurrence.advance(call.chunk_of(refs, head), *decays, state)

    call.over_heads(visit)


def _backward(call: GlaCall, refs: Refs, scalars: tuple[Ref, ...]) -> None:
    first, last = call.ends(scalars)
    _load_state(refs, first, "d_state")

    def visit(head: Index) -> None:
        gradients = chunk_recurrence.backward(
            call.chunk_of(refs, head),
            *call.decays_of(refs, head),
            refs["entered"][head],
            call.rows_of(refs["d_out"], head),
            refs["scratch"][head],
        )
        refs["scratch"][head] = gradients.state
        d_query, d_key, d_value = gradients.chunk
        call.write_rows(refs["d_query"], head, d_query * call.spec.softmax_scale)
        parts = {
            "d_key": d_key,
            "d_value": d_value,
            "d_decays": gradients.decays,
            "d_value_decays": gradients.value_decays,
        }
        for name, part in parts.items():
            if part is not None:
                refs[name][head] = part.astype(refs[name].dtype)

    call.over_heads(visit)
    _store_state(refs, last, "d_initial")
