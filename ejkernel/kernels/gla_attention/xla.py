"""Gated linear attention anywhere XLA runs: chunk by chunk, memory linear in the length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.kernels.common import carry as carries
from ejkernel.kernels.common.integers import next_power_of_two
from ejkernel.kernels.common.refs import Index
from ejkernel.kernels.gla_attention import chunk_grid, chunk_recurrence
from ejkernel.kernels.gla_attention.chunk_recurrence import Chunk
from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec, sequences
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.ops.platform import Device

# Elements of the states, keys and queries of a step: so many stay in the cache of a CPU core.
_CACHED = 3 << 15


class Residuals(NamedTuple):
    """Empty: the states between chunks are recomputed, so any forward pairs with any backward."""


class _PlacedArrays(NamedTuple):
    """The arrays of a call in chunks, [b, p, n or k, ...]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    gate: jax.Array | None
    gv: jax.Array | None


def run_forward(
    inputs: Inputs, spec: Spec, params: GLAttentionConfig | None
) -> tuple[Outputs, Residuals]:
    """Output of every token, state after every sequence."""
    call = _ChunkedCall(inputs, spec, params)
    grid, placed = call.grid, call.placed

    def visit(unit: Index, carry: tuple, time: Index) -> tuple[tuple, None]:
        state, out, states = carry
        state = grid.load_state(states, state, unit, time, time - 1)
        part, state = chunk_recurrence.forward(call.chunk(unit, time), state)
        return (
            state,
            grid.write(out, part, unit, time),
            grid.store_state(states, state, unit, time),
        ), None

    def run_unit(carry: tuple, indexed: tuple) -> tuple[tuple, None]:
        unit, _ = indexed
        step = lambda carry, indexed: visit(unit, carry, indexed[0])
        (_, *done), _ = chunk_grid.scan(step, (call.no_state(), *carry), grid.chunks)
        return tuple(done), None

    out = call.zeros((*placed.query.shape[:-1], placed.value.shape[-1]), inputs.query.dtype)
    (out, states), _ = chunk_grid.scan(run_unit, (out, call.initial()), grid.units)
    return Outputs(grid.to_tokens(out), states), Residuals()


def run_backward(
    inputs: Inputs,
    residuals: Residuals,
    d_outputs: Outputs,
    spec: Spec,
    params: GLAttentionConfig | None,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    call = _ChunkedCall(inputs, spec, params)
    grid, placed = call.grid, call.placed
    initial = call.initial()
    d_out = grid.to_places(d_outputs.out)

    def before(unit: Index, state: jax.Array, time: Index) -> tuple[jax.Array, jax.Array]:
        state = grid.load_state(initial, state, unit, time, time - 1)
        return chunk_recurrence.advance(call.chunk(unit, time), state), state

    def visit(unit: Index, carry: tuple, time: Index, entered: jax.Array) -> tuple[tuple, None]:
        d_state, d_gamma, d_placed, d_states = carry
        d_state = grid.load_state(d_states, d_state, unit, time, time + 1)
        chunk = call.chunk(unit, time)
        part = grid.read(d_out, unit, time, call.group).astype(call.dtype)
        d_chunk, d_state = chunk_recurrence.backward(chunk, entered, part, d_state)
        d_chunk, d_decay = call.unscaled(d_chunk, unit, time)
        d_placed = jax.tree.map(lambda x, part: grid.write(x, part, unit, time), d_placed, d_chunk)
        d_gamma = None if d_gamma is None else d_gamma + d_decay
        return (d_state, d_gamma, d_placed, grid.store_state(d_states, d_state, unit, time)), None

    def run_unit(carry: tuple, indexed: tuple) -> tuple[tuple, None]:
        (d_gammas, d_placed, d_states), (unit, _) = carry, indexed
        step = lambda state, indexed: before(unit, state, indexed[0])
        _, entered = chunk_grid.scan(step, call.no_state(), grid.chunks)
        d_gamma = None if d_gammas is None else call.no_state()[:, 0, 0]
        step = lambda carry, indexed: visit(unit, carry, *indexed)
        start: tuple = (call.no_state(), d_gamma, d_placed, d_states)
        end, _ = chunk_grid.scan(step, start, grid.chunks, entered, reverse=True)
        _, d_gamma, d_placed, d_states = end
        if d_gammas is not None:
            d_gammas = grid.write_heads(d_gammas, d_gamma, unit)
        return (d_gammas, d_placed, d_states), None

    d_gammas = None if inputs.g_gamma is None else call.zeros(inputs.g_gamma.shape, call.dtype)
    d_placed = jax.tree.map(lambda x: call.zeros(x.shape, x.dtype), placed)
    d_states = call.zeros(initial.shape, call.dtype) + d_outputs.state
    (d_gammas, d_placed, d_states), _ = chunk_grid.scan(
        run_unit, (d_gammas, d_placed, d_states), grid.units
    )
    d_placed = jax.tree.map(grid.to_tokens, d_placed)
    gradients = Inputs(
        *d_placed[:3],
        gate=d_placed.gate,
        g_gamma=d_gammas,
        gv=d_placed.gv,
        initial_state=None if inputs.initial_state is None else d_states,
    )
    given = inputs._replace(cu_seqlens=None)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, given)


class _ChunkedCall:
    """A call in chunks: the grid, the arrays in places, and the chunks of a step."""

    def __init__(self, inputs: Inputs, spec: Spec, params: GLAttentionConfig | None):
        self.inputs, self.spec = inputs, spec
        self.dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
        params = _heuristic(inputs, spec, None) if params is None else params
        batch, tokens, heads, self.rows = inputs.key.shape
        chunk = min(params.block_q, next_power_of_two(tokens))
        shape = (batch, tokens, heads)
        self.grid = chunk_grid.ChunkGrid(
            shape, chunk, params.block_k, spec.reverse, inputs.cu_seqlens
        )
        self.placed = jax.tree.map(
            self.grid.to_places,
            _PlacedArrays(inputs.query, inputs.key, inputs.value, inputs.gate, inputs.gv),
        )
        self.group = inputs.query.shape[2] // heads

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return carries.zeros(shape, dtype, self.inputs)

    def no_state(self) -> jax.Array:
        """The state [l, h, v] of a unit before it has entered a sequence."""
        lanes = self.grid.rows * self.grid.heads
        return self.zeros((lanes, self.rows, self.inputs.value.shape[-1]), self.dtype)

    def initial(self) -> jax.Array:
        """The state before every sequence."""
        batch, _, heads, columns = self.inputs.value.shape
        zeros = self.zeros((batch, sequences(self.inputs), heads, self.rows, columns), self.dtype)
        given = self.inputs.initial_state
        return zeros if given is None else zeros + given

    def chunk(self, unit: Index, time: Index) -> Chunk:
        """The chunk of a unit that is visited at this time."""
        read = lambda x: self.grid.read(x, unit, time).astype(self.dtype)
        query = self.grid.read(self.placed.query, unit, time, self.group).astype(self.dtype)
        key, value, decays, value_decays = jax.tree.map(read, self.placed[1:])
        if self.inputs.g_gamma is not None:
            gamma = self.grid.read_heads(self.inputs.g_gamma, unit).astype(self.dtype)
            gamma = jnp.broadcast_to(gamma[:, None, None], (*key.shape[:2], 1))
            decays = gamma if decays is None else decays + gamma
            used = self.grid.used(unit, time)
            decays = decays if used is None else jnp.where(used, decays, 0.0)
        return Chunk(query * self.spec.softmax_scale, key, value, decays, value_decays)

    def unscaled(
        self, d_chunk: Chunk, unit: Index, time: Index
    ) -> tuple[_PlacedArrays, jax.Array | None]:
        """The gradients of the arrays of a chunk, and of the decay that its lanes [l] share."""
        d_decays, d_gamma = d_chunk.decays, None
        if self.inputs.g_gamma is not None and d_decays is not None:
            used = self.grid.used(unit, time)
            d_decays = d_decays if used is None else jnp.where(used, d_decays, 0.0)
            d_gamma = d_decays.sum((1, 2))
        return _PlacedArrays(
            d_chunk.query * self.spec.softmax_scale,
            d_chunk.key,
            d_chunk.value,
            None if self.inputs.gate is None else d_decays,
            d_chunk.value_decays,
        ), d_gamma


def _heuristic(inputs: Inputs, spec: Spec, device: Device | None) -> GLAttentionConfig:
    """Chunks and lanes from the shapes.

    A decay for each column costs a matmul for each doubling of the chunk; on a CPU, short chunks
    of few lanes, whose arrays stay in the cache, are the fastest.
    """
    chunk, lanes = _sizes(inputs, device is None or device.platform == "cpu")
    return GLAttentionConfig(block_q=chunk, block_k=lanes)


def _sizes(inputs: Inputs, cpu: bool) -> tuple[int, int]:
    batch, tokens, heads, rows = inputs.key.shape
    columns = inputs.value.shape[-1]
    columnwise = any(x is not None and x.shape[-1] > 1 for x in (inputs.gate, inputs.gv))
    chunk = 64 if not cpu else 8 if columnwise else 32
    chunk = min(chunk, next_power_of_two(-(-tokens // sequences(inputs))))
    if not cpu or tokens <= chunk:
        return chunk, batch * heads
    group = inputs.query.shape[2] // heads
    levels = chunk.bit_length() + 1 if columnwise else 2
    a_lane = rows * columns * 2 + chunk * (1 + group) * levels * max(rows, columns)
    return chunk, max(1, _CACHED // a_lane)


def _candidates(inputs: Inputs, spec: Spec, device: Device) -> list[GLAttentionConfig]:
    """Chunks and lanes worth timing."""
    batch, tokens, heads, _ = inputs.key.shape
    longest = next_power_of_two(tokens)
    guess = _heuristic(inputs, spec, device)
    chunks = dict.fromkeys(min(chunk, longest) for chunk in (guess.block_q, 16, 32, 64))
    lanes = dict.fromkeys((guess.block_k, batch * heads))
    return [GLAttentionConfig(block_q=c, block_k=n) for c in chunks for n in lanes]


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward, features=ALL_FEATURES, heuristic=_heuristic, candidates=_candidates
    ),
    backward=Pass(
        run=run_backward, features=ALL_FEATURES, heuristic=_heuristic, candidates=_candidates
    ),
)
