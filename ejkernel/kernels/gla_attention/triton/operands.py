"""What the Triton kernels are given: compile-time constants, and lists of segments and chunks.

Tokens are visited in time, from the first to the last or with `reverse` from the last to the first.
A sequence is cut into segments, whose states are computed in parallel, and a segment into chunks,
which are computed one after the other. Lists are made on the device where boundaries are traced;
only bounds are static.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from ejkernel import settings
from ejkernel.kernels.common.triton.bridge import matmul_precision, padded_size
from ejkernel.kernels.common.triton.device_types import StaticArguments
from ejkernel.kernels.gla_attention.inputs import Inputs, Spec, sequences

BEGINS, ENDS = 1, 2  # flags of the first and of the last segment of a sequence, in time
_MIN_LOG_DECAY = {"float16": -65504.0}  # in place of -inf: 0 times -inf would be NaN


@dataclasses.dataclass(frozen=True)
class LinearStatic(StaticArguments):
    """The constants of a launch.

    Attributes:
        chunk: tokens of a chunk.
        segments, chunks: entries of the lists.
        sequences: states of a batch row.
        packed: each batch row has lists of its own.
        segmented: sequences have several segments, whose first states are computed before.
        gate: the tokens have a gate.
        channel: there is one for every row of the state.
        gamma: the heads have a decay.
        initial: the sequences have a first state.
        block_rows, block_columns: the tile of the state of a program.
        backward_in_time: from the last chunk to the first, to gradients of states.
        from_zero: states of segments that begin with 0, instead of those before each chunk.
        last: also write the state after the last chunk of a sequence.
        flag_rows: rows of a state that share a flag, which says whether decays overflow.
        min_log_decay: the smallest logarithm of a decay.
        widened: float16 tokens are converted to float32 when they are loaded.
        precision: of matmuls.
        split_gates: sums of float32 gates are matmuls in bfloat16.
        spread_precision: of matmuls of ones and zeros and gradients of sums of gates.
        narrow_spread: those are in bfloat16, otherwise in float32.
        pair_precision: of those whose terms cancel.
        max_exponent: the largest exponent of a factor above 1.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    chunk: int
    segments: int
    chunks: int
    sequences: int
    packed: bool
    segmented: bool
    reverse: bool
    gate: bool
    channel: bool
    gamma: bool
    initial: bool
    block_rows: int
    block_columns: int
    scale: float
    min_log_decay: float
    widened: bool
    precision: str
    split_gates: bool
    spread_precision: str
    narrow_spread: bool
    pair_precision: str
    max_exponent: float
    backward_in_time: bool = False
    from_zero: bool = False
    last: bool = False
    flag_rows: int = 16

    def tiled(self, rows: int, columns: int) -> "LinearStatic":
        """With tiles of so many rows and columns of a state, or fewer if it has fewer."""
        return dataclasses.replace(
            self,
            block_rows=min(rows, padded_size(self.rows)),
            block_columns=min(columns, padded_size(self.columns)),
        )

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def decays(self) -> bool:
        return self.gate or self.gamma

    @property
    def levels(self) -> int:
        """Sizes 1, 2, 4, ... of the halves of blocks in a chunk."""
        return self.chunk.bit_length() - 1

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def flags(self) -> int:
        """Flags of a key head in a chunk."""
        return -(-self.rows // self.flag_rows)

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // self.block_columns)

    @property
    def added_heads(self) -> int:
        """Heads of the arrays that are added to the state: keys, or queries."""
        return self.heads if self.backward_in_time else self.kv_heads

    @property
    def added_group(self) -> int:
        return self.group if self.backward_in_time else 1

    @property
    def added_scale(self) -> float:
        return self.scale if self.backward_in_time else 1.0

    @property
    def flag_of_first(self) -> int:
        """The flag of the segment of a sequence that is visited first."""
        return ENDS if self.backward_in_time else BEGINS

    @property
    def flag_of_last(self) -> int:
        return BEGINS if self.backward_in_time else ENDS


class TokenLists(NamedTuple):
    """Segments and chunks in time, for all batch rows or, packed, for each.

    Attributes:
        segments: first token, number of tokens, sequence, first chunk, flags.
        chunks: first token, number of tokens.
    """

    segments: Int[Array, "rows 5 segments"]
    chunks: Int[Array, "rows 2 chunks"]


def token_lists(inputs: Inputs, reverse: bool, chunk: int, segment: int) -> TokenLists:
    """The segments of at most `segment` tokens, a multiple of `chunk`, and their chunks.

    Entries after the last have no tokens.
    """
    tokens = inputs.key.shape[1]
    if inputs.cu_seqlens is None:
        ends = np.array([0, tokens], np.int32)
        return TokenLists(*(x[None] for x in _lists(ends, tokens, reverse, chunk, segment)))
    ends = inputs.cu_seqlens.astype(jnp.int32)
    return TokenLists(*jax.vmap(lambda x: _lists(x, tokens, reverse, chunk, segment))(ends))


def most_pieces(tokens: int, count: int, size: int) -> int:
    """A bound on the pieces of `size` tokens of `count` sequences."""
    filled = min(count, tokens)
    return (tokens + filled * (size - 1)) // size


def _lists(
    ends: Int[Array, "c"] | np.ndarray, tokens: int, reverse: bool, chunk: int, segment: int
) -> tuple[Int[Array, "5 segments"], Int[Array, "2 chunks"]]:
    count = ends.shape[0] - 1
    ends = jnp.asarray(ends)
    sequence, offset, length = _pieces(
        ends[1:] - ends[:-1], segment, most_pieces(tokens, count, segment)
    )
    whole = (ends[1:] - ends[:-1])[sequence]
    token = ends[sequence + 1] - 1 - offset if reverse else ends[sequence] + offset
    begins = jnp.where(offset == 0, BEGINS, 0)
    flags = begins + jnp.where(offset + length == whole, ENDS, 0)
    of_segments = (length + chunk - 1) // chunk
    first_chunk = jnp.cumsum(of_segments) - of_segments

    owner, chunk_offset, chunk_length = _pieces(length, chunk, most_pieces(tokens, count, chunk))
    sign = -1 if reverse else 1
    segments = jnp.stack([token, length, sequence, first_chunk, flags])
    chunks = jnp.stack([token[owner] + sign * chunk_offset, chunk_length])
    return segments.astype(jnp.int32), chunks.astype(jnp.int32)


def _pieces(
    lengths: Int[Array, "n"], size: int, most: int
) -> tuple[Int[Array, "most"], Int[Array, "most"], Int[Array, "most"]]:
    """Lengths cut into pieces of at most `size`: whose piece, where it begins, how long it is."""
    counts = (lengths + size - 1) // size
    ends = jnp.cumsum(counts)
    piece = lax.iota(jnp.int32, most)
    owner = jnp.minimum((ends <= piece[:, None]).sum(1, dtype=jnp.int32), lengths.shape[0] - 1)
    offset = (piece - (ends - counts)[owner]) * size
    length = jnp.where(piece < ends[-1], jnp.clip(lengths[owner] - offset, 0, size), 0)
    return owner, jnp.where(length > 0, offset, 0), length


def covered_tokens(inputs: Inputs) -> jax.Array | None:
    """Which tokens are part of a sequence, [b, s, 1, 1]; None: all of them."""
    if inputs.cu_seqlens is None:
        return None
    token = lax.broadcasted_iota(jnp.int32, inputs.key.shape[:2], 1)
    inside = (inputs.cu_seqlens[:, :1] <= token) & (token < inputs.cu_seqlens[:, -1:])
    return inside[..., None, None]


def operand_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of states, scores and decayed tokens; in float16, they could overflow."""
    return np.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def static_arguments(
    inputs: Inputs, spec: Spec, segment: int, chunk: int, block_rows: int, block_columns: int
) -> LinearStatic:
    """The constants that all launches of a call share."""
    batch, tokens, heads, rows = inputs.query.shape
    kv_heads, columns = inputs.value.shape[2:]
    count = sequences(inputs)
    query_dtype = np.dtype(inputs.query.dtype).name
    widened, gate = query_dtype == "float16", inputs.gate
    # TF32 has the precision of float16, and the range of float32.
    precision = "tf32" if widened else matmul_precision(inputs.query.dtype)
    gate_dtype = "float32" if gate is None else np.dtype(gate.dtype).name
    return LinearStatic(
        batch=batch,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        rows=rows,
        columns=columns,
        chunk=chunk,
        segments=most_pieces(tokens, count, segment),
        chunks=most_pieces(tokens, count, chunk),
        sequences=count,
        packed=inputs.cu_seqlens is not None,
        segmented=segment < tokens,
        reverse=spec.reverse,
        gate=gate is not None,
        channel=gate is not None and gate.shape[-1] > 1,
        gamma=inputs.g_gamma is not None,
        initial=inputs.initial_state is not None,
        block_rows=min(block_rows, padded_size(rows)),
        block_columns=min(block_columns, padded_size(columns)),
        scale=spec.softmax_scale,
        min_log_decay=_MIN_LOG_DECAY.get(gate_dtype, -1e30),
        widened=widened,
        precision=precision,
        # Not in float32, which is exact without, nor in the interpreter, which has no bfloat16.
        split_gates=gate_dtype == "float32" != query_dtype and not settings.interpret(),
        # In float16 gradients that are scaled may overflow.
        spread_precision=precision if inputs.query.dtype == jnp.float32 else "tf32",
        narrow_spread=inputs.query.dtype == jnp.bfloat16,
        pair_precision="ieee" if inputs.query.dtype == jnp.float32 else "tf32x3",
        max_exponent=40.0,
    )
