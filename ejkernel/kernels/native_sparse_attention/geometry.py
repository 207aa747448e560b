"""Tokens and blocks in a row of packed sequences; a plain row is one sequence."""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ejkernel.kernels.native_sparse_attention.inputs import Inputs, SelectionInputs, Spec

_Numbers = TypeVar("_Numbers")


class Tokens(NamedTuple):
    """The tokens of a row; the sequence of one after the last sequence starts after every key."""

    exists: Bool[Array, "t"]
    sequence: Int[Array, "t"]
    start: Int[Array, "t"]  # the first token of its sequence
    position: Int[Array, "t"]  # the token's place in it


class Pools(NamedTuple):
    """The complete blocks of a row, sequence after sequence, and which of them the tokens see."""

    begin: Int[Array, "c"]  # the first token of each
    first: Int[Array, "t"]  # the first one of the token's sequence
    seen: Int[Array, "t"]  # how many of its sequence are complete by the token
    own: Int[Array, "t"]  # the one that the token lies in, -1 if that one is never complete


def tokens(length: int, cu_seqlens: jax.Array | None) -> Tokens:
    """The tokens of a row of this length."""
    index = jnp.arange(length, dtype=jnp.int32)
    if cu_seqlens is None:
        nothing = jnp.zeros_like(index)
        return Tokens(jnp.ones_like(index, bool), nothing, nothing, index)
    exists = index < cu_seqlens[-1]
    sequence = jnp.searchsorted(cu_seqlens, index, side="right").astype(jnp.int32) - 1
    start = jnp.where(exists, cu_seqlens[sequence], length).astype(jnp.int32)
    return Tokens(exists, sequence, start, jnp.maximum(index - start, 0))


def tokens_of_queries(inputs: Inputs | SelectionInputs) -> Tokens:
    """The tokens of the queries of a call."""
    return of_queries(tokens(inputs.key.shape[1], inputs.cu_seqlens), inputs)


def of_queries(numbers: _Numbers, inputs: Inputs | SelectionInputs) -> _Numbers:
    """Numbers of all tokens, `[..., t]` each, as those of the queries of a call."""
    start, count = inputs.query_start, inputs.query.shape[1]
    if start is None:
        return numbers
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, count, x.ndim - 1), numbers)


def pools(length: int, cu_seqlens: jax.Array | None, block_size: int, at: Tokens) -> Pools:
    """The complete blocks of a row of this length; `begin` is as long as there can be blocks."""
    block = jnp.arange(length // block_size, dtype=jnp.int32)
    seen = jnp.where(at.exists, (at.position + 1) // block_size, 0)
    if cu_seqlens is None:
        own = at.position // block_size
        own = jnp.where(own < block.shape[0], own, -1)
        return Pools(block * block_size, at.start, seen, own)
    cu_seqlens = cu_seqlens.astype(jnp.int32)
    complete = jnp.diff(cu_seqlens) // block_size  # [sequences]
    last = jnp.cumsum(complete, dtype=jnp.int32)
    before = last - complete
    owner = jnp.searchsorted(last, block, side="right").astype(jnp.int32)
    owner = jnp.minimum(owner, complete.shape[0] - 1)
    begin = cu_seqlens[owner] + (block - before[owner]) * block_size
    begin = jnp.clip(begin, 0, length - block_size)  # no token sees those past the last

    sequence = jnp.minimum(at.sequence, complete.shape[0] - 1)
    first = before[sequence]
    inside = at.exists & (at.position // block_size < complete[sequence])
    own = jnp.where(inside, first + at.position // block_size, -1)
    return Pools(begin, first, seen, own)


def clean(inputs: Inputs, at: Tokens) -> Inputs:
    """The inputs with zeros where a row holds no sequence, so that nothing there is used.

    `at` are the tokens of the queries.
    """
    if inputs.cu_seqlens is None:
        return inputs
    every = at if inputs.query_start is None else tokens(inputs.key.shape[1], inputs.cu_seqlens)
    floats = {
        name: zero_outside(getattr(inputs, name), every if name in ("key", "value") else at)
        for name in ("query", "key", "value", "g_cmp", "g_slc", "g_swa")
        if getattr(inputs, name) is not None
    }
    return inputs._replace(**floats)


def zero_outside(x: jax.Array, at: Tokens) -> jax.Array:
    """[b, t, ...] with zeros for the tokens that belong to no sequence."""
    return jnp.where(at.exists.reshape(-1, *(1,) * (x.ndim - 2)), x, 0)


def pooled(x: jax.Array, blocks: Pools, spec: Spec) -> jax.Array:
    """The mean of [b, t, k, d] over each complete block, [b, blocks, k, d]."""
    members = blocks.begin[:, None] + jnp.arange(spec.block_size, dtype=jnp.int32)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return x[:, members].astype(dtype).mean(2).astype(x.dtype)
