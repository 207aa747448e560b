"""What the Triton kernels are given: compile-time constants, and where blocks of keys lie.

The blocks of a row are numbered in the order of their first keys, over all sequences packed into
it, so that a number says which block it is without its sequence.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ejkernel.kernels.common.constants import LOG2_E
from ejkernel.kernels.common.triton.bridge import matmul_precision, padded_size
from ejkernel.kernels.common.triton.device_types import INT32_ELEMENTS, StaticArguments
from ejkernel.kernels.native_sparse_attention import geometry
from ejkernel.kernels.native_sparse_attention.inputs import Inputs, Spec
from ejkernel.kernels.native_sparse_attention.triton.configs import SelectedTileConfig, group_width

_WORD = 32  # tokens whose membership one integer holds


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedStaticArguments(StaticArguments):
    """Compile-time constants of the kernels.

    A tile of queries has `head_block` query heads of one key head for `tokens` tokens: row
    `i * head_block + j` is head `j` of token `i`.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    head_width: int  # head_dim, padded to a tile
    value_width: int
    group_width: int  # query heads of a key head, padded to a power of two
    choices: int  # blocks in the list of a token
    block_size: int
    numbers: int  # exclusive bound on block numbers
    sequences: int  # packed into a row; 0 where it is one
    tokens: int
    head_block: int  # a power of two
    block_k: int  # keys that are loaded at once
    int64_offsets: bool  # a row of queries or outputs has more elements than an int32 counts
    precision: str
    scale: float
    exp2_scale: float  # of a product, to a logit in base 2

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        return self.tokens * self.head_block

    @property
    def head_blocks(self) -> int:
        """Of one key head."""
        return self.group_width // self.head_block

    @property
    def programs(self) -> int:
        """Of a kernel that computes one tile of queries in each."""
        return self.batch * self.kv_heads * self.head_blocks * self.tiles

    @property
    def tiles(self) -> int:
        """Of one row and key head; each sequence, and what follows the last, may have a cut one."""
        return -(-self.length // self.tokens) + self.sequences

    @property
    def slots(self) -> int:
        """Blocks that the tokens of a tile can have chosen."""
        return min(self.tokens * self.choices, self.numbers)

    @property
    def words(self) -> int:
        """Integers that say which tokens of a tile have chosen a block."""
        return -(-self.tokens // _WORD)

    @property
    def steps(self) -> int:
        """Tiles of keys in a block."""
        return -(-self.block_size // self.block_k)

    @property
    def uneven(self) -> bool:
        """Whether the last tile of a block holds keys of the next one."""
        return self.block_size % self.block_k > 0

    @property
    def k_stride(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v_stride(self) -> int:
        return self.kv_heads * self.value_dim


class KeyBlocks(NamedTuple):
    """The blocks of a row by their numbers, and those of each token."""

    spans: Int[Array, "2 numbers"]  # the first key of a block, and the end of its keys
    # The number of the first block of the token's sequence, and of the block that it lies in; the
    # latter is -1 for a token of no sequence.
    of_tokens: Int[Array, "2 t"]


def static_arguments(
    inputs: Inputs, spec: Spec, config: SelectedTileConfig
) -> SelectedStaticArguments:
    """The constants of a call in tiles of this shape."""
    batch, length, heads, head_dim = inputs.query.shape
    kv_heads, value_dim = inputs.value.shape[2:]
    return SelectedStaticArguments(
        batch=batch,
        length=length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        head_width=padded_size(head_dim),
        value_width=padded_size(value_dim),
        group_width=group_width(inputs),
        choices=inputs.block_indices.shape[3],
        block_size=spec.block_size,
        numbers=_numbers(length, inputs.cu_seqlens, spec.block_size),
        sequences=_sequences(inputs.cu_seqlens),
        tokens=config.tokens,
        head_block=config.head_block,
        block_k=config.block_k,
        int64_offsets=length * heads * max(head_dim, value_dim) >= INT32_ELEMENTS,
        precision=matmul_precision(inputs.query.dtype),
        scale=spec.softmax_scale,
        exp2_scale=spec.softmax_scale * LOG2_E,
    )


def _sequences(cu_seqlens: jax.Array | None) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _numbers(length: int, cu_seqlens: jax.Array | None, block_size: int) -> int:
    return -(-length // block_size) + _sequences(cu_seqlens)


def key_blocks(inputs: Inputs, spec: Spec) -> KeyBlocks:
    """The blocks of a call; numbers that no block has get a span without keys."""
    length, cu_seqlens, size = inputs.query.shape[1], inputs.cu_seqlens, spec.block_size
    number = jnp.arange(_numbers(length, cu_seqlens, size), dtype=jnp.int32)
    at = geometry.tokens(length, cu_seqlens)
    own = at.position // size
    if cu_seqlens is None:
        begin = number * size
        end = jnp.minimum(begin + size, length)
        return KeyBlocks(jnp.stack([begin, end]), jnp.stack([jnp.zeros_like(own), own]))
    cu_seqlens = cu_seqlens.astype(jnp.int32)
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    # The last block of a sequence may have as many keys as those before the first of the next one
    # leave over: a step for each sequence keeps their numbers apart.
    firsts = starts // size + jnp.arange(starts.shape[0], dtype=jnp.int32)
    owner = (firsts <= number[:, None]).sum(1, dtype=jnp.int32) - 1
    begin = starts[owner] + (number - firsts[owner]) * size
    end = jnp.maximum(jnp.minimum(begin + size, ends[owner]), begin)
    first = firsts[jnp.minimum(at.sequence, firsts.shape[0] - 1)]
    own = jnp.where(at.exists, first + own, -1)
    return KeyBlocks(jnp.stack([begin, end]), jnp.stack([first, own]))


def query_tiles(inputs: Inputs, static: SelectedStaticArguments) -> Int[Array, "2 tiles"]:
    """The first token of each tile, and the end of its tokens, which are of one sequence.

    What is not a number in one sequence then does not reach another one, as 0 times it would.
    """
    tile = jnp.arange(static.tiles, dtype=jnp.int32)
    if inputs.cu_seqlens is None:
        start = tile * static.tokens
        return jnp.stack([start, jnp.minimum(start + static.tokens, static.length)])
    bounds = jnp.pad(inputs.cu_seqlens.astype(jnp.int32), (0, 1), constant_values=static.length)
    starts, ends = bounds[:-1], bounds[1:]  # with the tokens of no sequence as a last one
    counts = (ends - starts + static.tokens - 1) // static.tokens
    last = jnp.cumsum(counts, dtype=jnp.int32)
    owner = (last <= tile[:, None]).sum(1, dtype=jnp.int32)
    exists = owner < starts.shape[0]
    owner = jnp.minimum(owner, starts.shape[0] - 1)
    start = starts[owner] + (tile - (last - counts)[owner]) * static.tokens
    start = jnp.where(exists, start, static.length)
    return jnp.stack([start, jnp.minimum(start + static.tokens, jnp.where(exists, ends[owner], 0))])
