"""The representations of a mask that can be read from it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ejkernel.types import block_map as blocks
from ejkernel.types.arguments import concrete, host_values, static_integer
from ejkernel.types.conversion import mask_to_segment_ids, qkv_masks_to_cu_seqlens
from ejkernel.types.mask_base import MaskBase
from ejkernel.types.rules import Dense, Rule, Segments


class MaskProperties(MaskBase):
    """Everything that reads a mask and changes nothing."""

    @property
    def attention_mask(self) -> Shaped[Array, "*b n t s"]:
        """The mask of pairs `(B, 1 or H, Q, K)`, True where a query may see a key."""
        return self.get_or_compute_attention_mask(self.mask_dtype)

    @property
    def bias(self) -> Float[Array, "*b n t s"]:
        """`create_bias()`: 0 where allowed, -inf elsewhere, float32."""
        return self._cached("bias", self.create_bias)

    @property
    def q_segment_ids(self) -> Int[Array, "*b t"]:
        """Segment ids of the queries `(B, Q)`, int32, negative for padding."""
        return self._ids()[0]

    @property
    def kv_segment_ids(self) -> Int[Array, "*b s"]:
        """Segment ids of the keys `(B, K)`, int32, negative for padding."""
        return self._ids()[1]

    @property
    def q_attention_mask(self) -> Int[Array, "*b t"]:
        """1 for each query that is a token, 0 for padding, `(B, Q)` int32."""
        return self._valid()[0].astype(jnp.int32)

    @property
    def kv_attention_mask(self) -> Int[Array, "*b s"]:
        """1 for each key that is a token, 0 for padding, `(B, K)` int32."""
        return self._valid()[1].astype(jnp.int32)

    @property
    def q_lens(self) -> Int[Array, "*b"]:
        """Number of query tokens of each batch row, `(B,)` int32."""
        return self._valid()[0].sum(-1, dtype=jnp.int32)

    @property
    def kv_lens(self) -> Int[Array, "*b"]:
        """Number of key tokens of each batch row, `(B,)` int32."""
        return self._valid()[1].sum(-1, dtype=jnp.int32)

    @property
    def q_position_ids(self) -> Int[Array, "*b t"]:
        """Position of each query in its segment, -1 for padding, `(B, Q)` int32."""
        return self._positions()[0]

    @property
    def kv_position_ids(self) -> Int[Array, "*b s"]:
        """Position of each key in its segment, the largest int32 for padding, `(B, K)` int32."""
        return self._positions()[1]

    @property
    def cu_seqlens_q(self) -> Int[Array, "pairs"]:
        """First query token of each row and one past its last, `(2 B,)` int32."""
        return self.get_or_compute_qkv_cu_seqlens()[0]

    @property
    def cu_seqlens_kv(self) -> Int[Array, "pairs"]:
        """First key token of each row and one past its last, `(2 B,)` int32."""
        return self.get_or_compute_qkv_cu_seqlens()[1]

    @property
    def is_multi_sequence(self) -> Any:
        """Whether some row holds more than one segment; a Python bool where it can be known."""
        ids = self.q_segment_ids
        largest = jnp.max(ids, axis=-1)
        smallest = jnp.min(jnp.where(ids < 0, largest[..., None], ids), axis=-1)
        return _as_bool((largest > smallest).any())

    def is_self_attention(self) -> Any:
        """Whether queries and keys are the same tokens; a Python bool where it can be known.

        They are if the lengths agree and, where there are segment ids, those agree too.
        """
        if self.q_len != self.kv_len:
            return False
        for rule in self._ids_source.parts():
            if isinstance(rule, Segments) and rule.q_ids is not rule.kv_ids:
                return _as_bool((rule.q_ids == rule.kv_ids).all())
        return True

    def get_or_compute_attention_mask(self, dtype: DTypeLike = jnp.bool_) -> Any:
        """The mask of pairs `(B, 1 or H, Q, K)` in `dtype`, 1 where allowed."""
        dtype = np.dtype(dtype)
        return self._cached(("mask", dtype), lambda: self._compute_mask(dtype))

    def get_or_compute_segment_ids(self, per_head: bool = False) -> tuple[jax.Array, jax.Array]:
        """Segment ids of queries and keys.

        Args:
            per_head: give each head of a dense mask ids of its own.

        Returns:
            `(B, Q)` and `(B, K)`, int32; with `per_head` `(B, H, Q)` and `(B, H, K)`.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_attention_mask(jnp.array([[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]))
        >>> [ids.tolist() for ids in mask.get_or_compute_segment_ids()]
        [[[0, 0, 1]], [[0, 0, 1]]]
        """
        if not per_head:
            return self._ids()
        dense = [rule for rule in self._ids_source.parts() if isinstance(rule, Dense)]
        if self.rule.heads == 1 or not dense or self.q_ids is not None or self.batch_size is None:
            q_ids, kv_ids = self._ids()
            heads = (*q_ids.shape[:-1], self.rule.heads)
            return (
                jnp.broadcast_to(q_ids[..., None, :], (*heads, self.q_len)),
                jnp.broadcast_to(kv_ids[..., None, :], (*heads, self.kv_len)),
            )
        return mask_to_segment_ids(dense[-1].dense(self.q_len, self.kv_len), per_head=True)

    def get_or_compute_positions(self) -> tuple[jax.Array, jax.Array]:
        """Positions of queries `(B, Q)` and keys `(B, K)`, as given or counted in each segment.

        Padding has position -1 as a query and the largest int32 as a key, so that no causal
        comparison of positions lets it be seen.
        """
        return self._positions()

    def get_or_compute_qkv_cu_seqlens(
        self, *, out_dtype: DTypeLike = jnp.int32, max_segments: int = 128
    ) -> tuple[jax.Array, jax.Array]:
        """Start and end of the tokens of each row, `(2 B,)` for queries and for keys.

        Args:
            out_dtype: dtype of the result.
            max_segments: a bound on the number of segments, for callers that have one. Pairs have
                one entry per row however many segments it holds, so the result is the same.

        Returns:
            The inverse of `from_cu_seqlens`: `[start_0, end_0, start_1, end_1, ...]`.
        """
        static_integer("MaskInfo.get_or_compute_qkv_cu_seqlens: max_segments", max_segments, 1)
        dtype = np.dtype(out_dtype)
        return self._cached(
            ("cu_seqlens", dtype),
            lambda: qkv_masks_to_cu_seqlens(*self._valid(), out_dtype=dtype),
        )

    def get_qkv_masks(self, dtype: DTypeLike = jnp.bool_) -> tuple[jax.Array, ...]:
        """The masks of queries `(B, Q)`, of keys `(B, K)` and of pairs `(B, 1 or H, Q, K)`."""
        q_valid, kv_valid = self._valid()
        mask = self.get_or_compute_attention_mask(dtype)
        return q_valid.astype(dtype), kv_valid.astype(dtype), mask

    def create_bias(
        self, dtype: DTypeLike = jnp.float32, masked_value: ArrayLike = -np.inf
    ) -> Float[Array, "*b n t s"]:
        """A bias to add to attention logits: 0 where allowed, `masked_value` elsewhere.

        Args:
            dtype: a floating-point dtype.
            masked_value: what stands where a query may not see a key. A softmax over a row of
                nothing but -inf is NaN: guard such rows, or pass a finite value.

        Returns:
            `(B, 1 or H, Q, K)`.

        Raises:
            ValueError: if the dtype is not a floating-point one.

        >>> from ejkernel.types import MaskInfo
        >>> MaskInfo.from_segments(jnp.array([[0, 1]])).create_bias("float16").tolist()
        [[[[0.0, -inf], [-inf, 0.0]]]]
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"MaskInfo.create_bias: dtype must be floating-point, got {dtype!r}.")
        mask = self.get_or_compute_attention_mask()
        return jnp.where(mask, jnp.zeros((), dtype), jnp.asarray(masked_value, dtype))

    def segment_lens(self, max_segments: int) -> tuple[jax.Array, jax.Array]:
        """Number of tokens of each segment id, of queries and of keys.

        Args:
            max_segments: ids 0 to `max_segments - 1` are counted.

        Returns:
            `(B, max_segments)` for queries and for keys, int32.

        Raises:
            ValueError: if an id is not below `max_segments` and its value is at hand.

        >>> from ejkernel.types import MaskInfo
        >>> MaskInfo.from_segments(jnp.array([[0, 0, 2, -1]])).segment_lens(3)[0].tolist()
        [[2, 0, 1]]
        """
        where = "MaskInfo.segment_lens: max_segments"
        size = static_integer(where, max_segments, 1)
        ids = self._ids()
        for values in map(host_values, ids):
            if values is not None and values.max(initial=-1) >= size:
                raise ValueError(f"{where} must exceed the largest id {values.max()}, got {size}.")
        return _count(ids[0], size), _count(ids[1], size)

    def to_packed_cu_seqlens(self, max_segments: int) -> tuple[jax.Array, jax.Array]:
        """Cumulative lengths of all segments, as if the tokens of all rows stood in one row.

        Padding is left out, rows follow one another, and within a row segments are ordered by id
        (which must not decrease along the row). A segment that only queries or only keys have
        counts as empty for the others.

        Args:
            max_segments: number of segments that the result has room for.

        Returns:
            `(max_segments + 1,)` for queries and for keys, int32, from 0; the total fills the rest.

        Raises:
            ValueError: if ids decrease or there are too many segments, and the values are at hand.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1], [0, 0, 0, -1]]))
        >>> mask.to_packed_cu_seqlens(4)[0].tolist()
        [0, 2, 4, 7, 7]
        """
        where = "MaskInfo.to_packed_cu_seqlens"
        size = static_integer(f"{where}: max_segments", max_segments, 1)
        ids = tuple(array.reshape(-1, array.shape[-1]) for array in self._ids())
        for values in map(host_values, ids):
            if values is not None and any((np.diff(row[row >= 0]) < 0).any() for row in values):
                raise ValueError(f"{where}: segment ids must not decrease along a row.")
        (q_rank, kv_rank), total = _global_ranks(*ids)
        count = host_values(total)
        if count is not None and count > size:
            raise ValueError(f"{where}: max_segments must be at least {count}, got {size}.")
        lengths = (_count(rank.reshape(-1), size) for rank in (q_rank, kv_rank))
        q_packed, kv_packed = (jnp.pad(jnp.cumsum(each), (1, 0)) for each in lengths)
        return q_packed.astype(jnp.int32), kv_packed.astype(jnp.int32)

    def block_map(self, block_q: int, block_k: int) -> blocks.BlockMap:
        """Which blocks of the mask are empty, partial or full, and lists of the others.

        Args:
            block_q: queries in a block.
            block_k: keys in a block.

        Returns:
            The map, from the rules in O(blocks) work: the mask of pairs is not made.

        Raises:
            ValueError: if a block size is not positive.

        >>> from ejkernel.types import MaskInfo
        >>> mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1]])).apply_causal()
        >>> mask.block_map(2, 2).state[0, 0].tolist()
        [[1, 0], [0, 1]]
        """
        sizes = (block_q, block_k)
        return self._cached(
            ("block_map", sizes), lambda: _block_map(self.rule, self.q_len, self.kv_len, *sizes)
        )

    def _compute_mask(self, dtype: np.dtype) -> Shaped[Array, "*b n t s"]:
        mask = _dense(self.rule, self.q_len, self.kv_len).astype(dtype)
        if self.batch_size is None:
            return mask
        return jnp.broadcast_to(mask, (self.batch_size, *mask.shape[-3:]))


# One compilation each, and no intermediate masks of every rule.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _dense(rule: Rule, q_len: int, kv_len: int) -> jax.Array:
    return rule.dense(q_len, kv_len)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _block_map(rule: Rule, q_len: int, kv_len: int, block_q: int, block_k: int) -> blocks.BlockMap:
    return blocks.block_map(rule, q_len, kv_len, block_q, block_k)


def _as_bool(value: jax.Array) -> Any:
    return bool(value) if concrete(value) else value


def _count(ids: jax.Array, size: int) -> jax.Array:
    """How often each of 0 to size - 1 occurs along the last axis."""
    zeros = jnp.zeros(size, jnp.int32)
    count = lambda row: zeros.at[jnp.where(row < 0, size, row)].add(1, mode="drop")
    for _ in ids.shape[:-1]:
        count = jax.vmap(count)
    return count(ids)


def _global_ranks(
    q_ids: jax.Array, kv_ids: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Ids `[b, t]`, `[b, s]` renumbered without gaps over all rows, -1 staying; and how many."""
    ordered = jnp.sort(jnp.concatenate([q_ids, kv_ids], axis=-1), axis=-1)
    before = jnp.pad(ordered[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    is_new = (ordered >= 0) & (ordered != jnp.where(before < 0, -1, before))
    rank = jnp.cumsum(is_new, axis=-1)  # of each sorted id within its row, from 1
    first = jnp.cumsum(rank[:, -1]) - rank[:, -1]  # segments of the rows before

    def renumber(ids: jax.Array) -> jax.Array:
        place = jax.vmap(jnp.searchsorted)(ordered, ids)
        found = jnp.take_along_axis(rank, place, axis=-1) - 1 + first[:, None]
        return jnp.where(ids < 0, -1, found)

    return (renumber(q_ids), renumber(kv_ids)), rank[:, -1].sum()
