"""Gated linear attention anywhere XLA runs: chunk by chunk, memory linear in the length."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.common import carry as carries
from ejkernel.kernels.gla_attention import recurrence_step
from ejkernel.kernels.gla_attention.config import GLAttentionConfig
from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec, sequences
from ejkernel.kernels.gla_attention.recurrence_grid import Grid, in_turn
from ejkernel.kernels.gla_attention.recurrence_step import Chunk
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.ops.platform import Device

# Numbers that a step works on, states and faded keys and queries, so that they stay in the cache of
# a CPU core.
_CACHED = 1 << 16


class Residuals(NamedTuple):
    """Nothing: the states between chunks are computed anew, so any forward serves any backward."""


class _Laid(NamedTuple):
    """The arrays of a call laid out in chunks, [b, p, n or k, ...]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    gate: jax.Array | None
    gv: jax.Array | None


def forward(inputs: Inputs, spec: Spec, params: Any) -> tuple[Outputs, Residuals]:
    """Output of every token, state after every sequence."""
    call = _Call(inputs, spec, params)
    grid, laid = call.grid, call.laid

    def visit(unit: Any, carry: tuple, time: Any) -> tuple[tuple, None]:
        state, out, states = carry
        state = grid.enter(states, state, unit, time, time - 1)
        part, state = recurrence_step.forward(call.chunk(unit, time), state)
        return (
            state,
            grid.write(out, part, unit, time),
            grid.leave(states, state, unit, time),
        ), None

    def run_unit(carry: tuple, turn: tuple) -> tuple[tuple, None]:
        unit, _ = turn
        step = lambda carry, turn: visit(unit, carry, turn[0])
        (_, *done), _ = in_turn(step, (call.no_state(), *carry), grid.chunks)
        return tuple(done), None

    out = call.zeros((*laid.query.shape[:-1], laid.value.shape[-1]), inputs.query.dtype)
    (out, states), _ = in_turn(run_unit, (out, call.initial()), grid.units)
    return Outputs(grid.collect(out), states), Residuals()


def backward(
    inputs: Inputs, residuals: Residuals, d_outputs: Outputs, spec: Spec, params: Any
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    call = _Call(inputs, spec, params)
    grid, laid = call.grid, call.laid
    initial = call.initial()
    d_out = grid.lay_out(d_outputs.out)

    def before(unit: Any, state: jax.Array, time: Any) -> tuple[jax.Array, jax.Array]:
        state = grid.enter(initial, state, unit, time, time - 1)
        return recurrence_step.advance(call.chunk(unit, time), state), state

    def visit(unit: Any, carry: tuple, time: Any, entered: jax.Array) -> tuple[tuple, None]:
        d_state, d_gamma, d_laid, d_states = carry
        d_state = grid.enter(d_states, d_state, unit, time, time + 1)
        chunk = call.chunk(unit, time)
        part = grid.read(d_out, unit, time, call.group).astype(call.dtype)
        d_chunk, d_state = recurrence_step.backward(chunk, entered, part, d_state)
        d_chunk, d_decay = call.unscaled(d_chunk, unit, time)
        d_laid = jax.tree.map(lambda x, part: grid.write(x, part, unit, time), d_laid, d_chunk)
        d_gamma = None if d_gamma is None else d_gamma + d_decay
        return (d_state, d_gamma, d_laid, grid.leave(d_states, d_state, unit, time)), None

    def run_unit(carry: tuple, turn: tuple) -> tuple[tuple, None]:
        (d_gammas, d_laid, d_states), (unit, _) = carry, turn
        step = lambda state, turn: before(unit, state, turn[0])
        _, entered = in_turn(step, call.no_state(), grid.chunks)
        d_gamma = None if d_gammas is None else call.no_state()[:, 0, 0]
        step = lambda carry, turn: visit(unit, carry, *turn)
        start = (call.no_state(), d_gamma, d_laid, d_states)
        end, _ = in_turn(step, start, grid.chunks, entered, backwards=True)
        _, d_gamma, d_laid, d_states = end
        if d_gammas is not None:
            d_gammas = grid.write_heads(d_gammas, d_gamma, unit)
        return (d_gammas, d_laid, d_states), None

    d_gammas = None if inputs.g_gamma is None else call.zeros(inputs.g_gamma.shape, call.dtype)
    d_laid = jax.tree.map(lambda x: call.zeros(x.shape, x.dtype), laid)
    d_states = call.zeros(initial.shape, call.dtype) + d_outputs.state
    (d_gammas, d_laid, d_states), _ = in_turn(run_unit, (d_gammas, d_laid, d_states), grid.units)
    d_laid = jax.tree.map(grid.collect, d_laid)
    gradients = Inputs(
        *d_laid[:3],
        gate=d_laid.gate,
        g_gamma=d_gammas,
        gv=d_laid.gv,
        initial_state=None if inputs.initial_state is None else d_states,
    )
    given = inputs._replace(cu_seqlens=None)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, given)


class _Call:
    """A call in chunks: how it is cut, its arrays laid out, and its chunks as steps take them."""

    def __init__(self, inputs: Inputs, spec: Spec, params: Any):
        self.inputs, self.spec = inputs, spec
        self.dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
        params = _heuristic(inputs, spec, None) if params is None else params
        batch, tokens, heads, self.rows = inputs.key.shape
        chunk = min(params.block_q, _power_above(tokens))
        shape = (batch, tokens, heads)
        self.grid = Grid(shape, chunk, params.block_k, spec.reverse, inputs.cu_seqlens)
        self.laid = jax.tree.map(
            self.grid.lay_out,
            _Laid(inputs.query, inputs.key, inputs.value, inputs.gate, inputs.gv),
        )
        self.group = inputs.query.shape[2] // heads

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
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

    def chunk(self, unit: Any, time: Any) -> Chunk:
        """The chunk of a unit that is visited at this time."""
        read = lambda x: self.grid.read(x, unit, time).astype(self.dtype)
        query = self.grid.read(self.laid.query, unit, time, self.group).astype(self.dtype)
        key, value, decays, value_decays = jax.tree.map(read, self.laid[1:])
        if self.inputs.g_gamma is not None:
            gamma = self.grid.read_heads(self.inputs.g_gamma, unit).astype(self.dtype)
            gamma = jnp.broadcast_to(gamma[:, None, None], (*key.shape[:2], 1))
            decays = gamma if decays is None else decays + gamma
            used = self.grid.used(unit, time)
            decays = decays if used is None else jnp.where(used, decays, 0.0)
        return Chunk(query * self.spec.softmax_scale, key, value, decays, value_decays)

    def unscaled(self, d_chunk: Chunk, unit: Any, time: Any) -> tuple[_Laid, Any]:
        """The gradients of the arrays of a chunk, and of the decay that its lanes [l] share."""
        d_decays, d_gamma = d_chunk.decays, None
        if self.inputs.g_gamma is not None and d_decays is not None:
            used = self.grid.used(unit, time)
            d_decays = d_decays if used is None else jnp.where(used, d_decays, 0.0)
            d_gamma = d_decays.sum((1, 2))
        return _Laid(
            d_chunk.query * self.spec.softmax_scale,
            d_chunk.key,
            d_chunk.value,
            None if self.inputs.gate is None else d_decays,
            d_chunk.value_decays,
        ), d_gamma


def _power_above(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(number - 1, 0).bit_length()


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
    chunk = 64 if not cpu else 16 if columnwise else 32
    chunk = min(chunk, _power_above(-(-tokens // sequences(inputs))))
    if not cpu or tokens <= chunk:
        return chunk, batch * heads
    group = inputs.query.shape[2] // heads
    levels = chunk.bit_length() + 1 if columnwise else 2
    a_lane = rows * columns * 2 + chunk * (1 + group) * levels * max(rows, columns)
    return chunk, max(1, _CACHED // a_lane)


def _candidates(inputs: Inputs, spec: Spec, device: Device) -> list[GLAttentionConfig]:
    """Chunks and lanes worth timing."""
    batch, tokens, heads, _ = inputs.key.shape
    longest = _power_above(tokens)
    chunks = dict.fromkeys(min(chunk, longest) for chunk in (16, 32, 64))
    lanes = dict.fromkeys((_heuristic(inputs, spec, device).block_k, batch * heads))
    return [GLAttentionConfig(block_q=c, block_k=n) for c in chunks for n in lanes]


IMPLEMENTATION = Implementation(
    forward=Pass(run=forward, features=ALL_FEATURES, heuristic=_heuristic, candidates=_candidates),
    backward=Pass(
        run=backward, features=ALL_FEATURES, heuristic=_heuristic, candidates=_candidates
    ),
)
