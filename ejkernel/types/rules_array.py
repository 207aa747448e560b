"""Rules that follow from an array per token, or from a whole mask."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from ejkernel.types.rule import Rule
from ejkernel.types.rule_arrays import Grid, Index, Start, cut, head_of, take

ZeroPolicy = Literal["q", "kv", "both", "none"]

# Ids of tokens that match nothing: different for queries and keys, so that they are never equal.
NO_QUERY, NO_KEY = np.int32(-(2**31)), np.int32(-(2**31) + 1)


class Match(Rule):
    """Shared by the rules of the form "query and key carry the same id"."""

    def id_pair(self) -> tuple[jax.Array, jax.Array]:
        """Ids of queries `[..., t]` and of keys `[..., s]`; equal ids allow a pair.

        A query that matches nothing has the id `NO_QUERY`, such a key `NO_KEY`.
        """
        raise NotImplementedError

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        query, key = self.id_pair()
        return query[..., None, :, None] == key[..., None, None, :]

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        query, key = self.id_pair()
        query = _Summary(query, grid.block_q, -2)
        key = _Summary(key, grid.block_k, -3)
        some = (query.least <= key.most) & (key.least <= query.most)
        # Interleaved numbers have overlapping ranges but disjoint sets: compare the sets modulo 32.
        some &= (query.signature & key.signature) != 0
        every = (query.most == key.most) & query.uniform & key.uniform
        return some, every


class _Summary:
    """What is known of the numbers of each block: range, residues, and whether they are all one."""

    def __init__(self, values: jax.Array, block: int, axis: int):
        values = cut(values, block)  # [..., blocks, block]
        real = values > NO_KEY
        limits = np.iinfo(np.int32)
        bits = jnp.where(real, jnp.uint32(1) << (values & 31).astype(jnp.uint32), jnp.uint32(0))
        # One pass over the numbers, which also compiles in half the time of four.
        summaries = lax.reduce(
            (values, values, jnp.where(real, values, limits.max), bits),
            (np.int32(limits.max), np.int32(limits.min), np.int32(limits.max), np.uint32(0)),
            lambda a, b: (
                jnp.minimum(a[0], b[0]),
                jnp.maximum(a[1], b[1]),
                jnp.minimum(a[2], b[2]),
                a[3] | b[3],
            ),
            (values.ndim - 1,),
        )
        # [..., 1, nq, 1] for queries, [..., 1, 1, nk] for keys.
        place = lambda x: jnp.expand_dims(x, (-3, -1) if axis == -2 else (-3, -2))
        smallest, self.most, self.least, self.signature = map(place, summaries)
        self.uniform = smallest == self.most


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(Match):
    """`q_ids[q] == kv_ids[k]`, both at least 0: tokens of one segment; negative ids are padding.

    `documents`, where known, promises that queries and keys have the same ids, that these are below
    it, never decrease, and that padding comes last: documents laid end to end. `starts`, where that
    is known too, says where each begins, and in all places that are left where the last one ends.
    """

    q_ids: Int[Array, "#b t"] | Int[Array, "t"]
    kv_ids: Int[Array, "#b s"] | Int[Array, "s"]
    documents: int | None = None
    starts: Int[Array, "#b m"] | Int[Array, "m"] | None = None

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        return self._changed(
            q_ids=take(self.q_ids, q_start, q_len, -1, fill=-1),
            kv_ids=take(self.kv_ids, k_start, k_len, -1, fill=-1),
            documents=None,
            starts=None,
        )

    def describe(self) -> tuple[object, ...]:
        # How many documents there are changes from call to call, and no choice follows from it.
        return ("segments", "array", "array", *(["documents"] if self.documents else []))

    def id_pair(self) -> tuple[jax.Array, jax.Array]:
        query, key = self.q_ids.astype(jnp.int32), self.kv_ids.astype(jnp.int32)
        return jnp.where(query < 0, NO_QUERY, query), jnp.where(key < 0, NO_KEY, key)

    def features(self) -> frozenset[str]:
        return frozenset({"segments"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TokenTypes(Match):
    """`q_types[q] == kv_types[k]`; unless `zero_policy` is `"none"`, type 0 matches nothing.

    The policies `"q"`, `"kv"` and `"both"` say whose zeros count as padding. As only equal types
    match, a zero on one side meets a zero on the other, and the three mean the same mask.
    """

    q_types: Int[Array, "#b t"] | Int[Array, "t"]
    kv_types: Int[Array, "#b s"] | Int[Array, "s"]
    zero_policy: ZeroPolicy = "q"

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        return self._changed(
            q_types=take(self.q_types, q_start, q_len, -1, fill=NO_QUERY),
            kv_types=take(self.kv_types, k_start, k_len, -1, fill=NO_KEY),
        )

    def id_pair(self) -> tuple[jax.Array, jax.Array]:
        query, key = self.q_types.astype(jnp.int32), self.kv_types.astype(jnp.int32)
        if self.zero_policy in ("q", "both"):
            query = jnp.where(query == 0, NO_QUERY, query)
        if self.zero_policy in ("kv", "both"):
            key = jnp.where(key == 0, NO_KEY, key)
        return query, key

    def features(self) -> frozenset[str]:
        return frozenset({"token_types"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(Rule):
    """`mask[q, k]`: a mask that was given whole; axes of size 1 are broadcast."""

    mask: Bool[Array, "#b #n #t #s"] | Bool[Array, "#n #t #s"]

    def head(self, n: Index) -> Rule:
        return self._changed(mask=head_of(self.mask, n))

    def sliced(self, q_start: Start, q_len: int, k_start: Start, k_len: int) -> Rule:
        mask = self.mask
        if mask.shape[-2] > 1:
            mask = take(mask, q_start, q_len, -2, fill=False, row_rank=3)
        if mask.shape[-1] > 1:
            mask = take(mask, k_start, k_len, -1, fill=False, row_rank=3)
        return self._changed(mask=mask)

    def allowed(self, q_len: int, kv_len: int) -> jax.Array:
        return self.mask

    def block_bounds(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        # Of a mask that is a constant of the program XLA would evaluate all this while it compiles:
        # 2048 x 2048 pairs take it 16 seconds.
        some = every = lax.optimization_barrier(self.mask)
        for axis, block in ((-1, grid.block_k), (-2, grid.block_q)):
            if self.mask.shape[axis] > 1:
                some = jnp.swapaxes(cut(jnp.swapaxes(some, axis, -1), block).any(-1), axis, -1)
                every = jnp.swapaxes(cut(jnp.swapaxes(every, axis, -1), block).all(-1), axis, -1)
        return some, every

    @property
    def heads(self) -> int:
        return self.mask.shape[-3]

    def features(self) -> frozenset[str]:
        return frozenset({"mask"})
