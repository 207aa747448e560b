"""Packed sequences: lengths, positions, sequence ids and chunks from cumulative lengths.

Sequences of different lengths stand one after the other in one array of tokens, and `cu_seqlens`
says where each begins: `[0, len_0, len_0 + len_1, ...]`, one entry more than there are sequences.
A sequence may be empty. NumPy arrays are taken wherever JAX arrays are; the result is a JAX array.

The number of tokens or chunks is a value, and a shape must be known while tracing: under
`jax.jit` pass `total_length` or `total_chunks`, and rows beyond the last token or chunk hold -1.

Values that are at hand (NumPy, or JAX arrays on a CPU) are checked; those on an accelerator are
not fetched for it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, DTypeLike, Int

from ejkernel.xla_utils.concrete import concrete_value

_AnyArray = Array | np.ndarray


def cdiv(a: Int[_AnyArray, "..."] | int, b: int) -> Int[_AnyArray, "..."] | int:
    """Ceiling division of integers, `(a + b - 1) // b`.

    Args:
        a: An integer or an array of integers.
        b: The divisor, positive.

    Returns:
        The smallest integers that are not below `a / b`, of the type of `a`.

    Raises:
        ValueError: If `b` is not positive.

    Example:
        >>> cdiv(9, 4)
        3
        >>> cdiv(jnp.array([0, 1, 8, 9]), 4).tolist()
        [0, 1, 2, 3]
    """
    if b <= 0:
        raise ValueError(f"cdiv: the divisor must be positive, got {b}.")
    return (a + b - 1) // b


def prepare_lens(cu_seqlens: Int[_AnyArray, "num_seqs_plus_one"]) -> Int[Array, "num_seqs"]:
    """The length of each sequence, `cu_seqlens[i + 1] - cu_seqlens[i]`.

    Args:
        cu_seqlens: Cumulative lengths.

    Returns:
        One length per sequence, in the dtype of `cu_seqlens`.

    Raises:
        ValueError: If `cu_seqlens` is not a rising list of integers.

    Example:
        >>> prepare_lens(jnp.array([0, 3, 5, 9])).tolist()
        [3, 2, 4]
    """
    cu_seqlens, _ = _checked(cu_seqlens, "prepare_lens")
    return cu_seqlens[1:] - cu_seqlens[:-1]


def prepare_lens_from_mask(
    mask: Bool[_AnyArray, "batch seq_len"] | Int[_AnyArray, "batch seq_len"],
) -> Int[Array, "batch"]:
    """The number of valid tokens in each row of a padding mask.

    Args:
        mask: True (or 1) where a token is valid.

    Returns:
        One length per row, int32.

    Raises:
        ValueError: If `mask` does not have two axes.

    Example:
        >>> prepare_lens_from_mask(jnp.array([[1, 1, 0], [1, 0, 0]], bool)).tolist()
        [2, 1]
    """
    return _mask_lens(mask, "prepare_lens_from_mask")


def prepare_cu_seqlens_from_mask(
    mask: Bool[_AnyArray, "batch seq_len"] | Int[_AnyArray, "batch seq_len"],
    out_dtype: DTypeLike = jnp.int32,
) -> Int[Array, "batch_plus_one"]:
    """The cumulative lengths of the rows of a padding mask.

    Args:
        mask: True (or 1) where a token is valid.
        out_dtype: The dtype of the result.

    Returns:
        `[0, len_0, len_0 + len_1, ...]`.

    Raises:
        ValueError: If `mask` does not have two axes.

    Example:
        >>> prepare_cu_seqlens_from_mask(jnp.array([[1, 1, 0], [1, 0, 0]], bool)).tolist()
        [0, 2, 3]
    """
    lens = _mask_lens(mask, "prepare_cu_seqlens_from_mask")
    return jnp.pad(jnp.cumsum(lens, dtype=out_dtype), (1, 0))


def prepare_position_ids(
    cu_seqlens: Int[_AnyArray, "num_seqs_plus_one"], *, total_length: int | None = None
) -> Int[Array, "total_tokens"]:
    """The position of each token within its sequence.

    Args:
        cu_seqlens: Cumulative lengths.
        total_length: The length of the result, needed under `jax.jit`; `cu_seqlens[-1]` if None.
            Tokens beyond the last sequence get -1.

    Returns:
        One position per token, in the dtype of `cu_seqlens`.

    Raises:
        ValueError: If `cu_seqlens` does not rise from 0, if it runs past `total_length`, or if the
            length cannot be known while tracing.

    Example:
        >>> prepare_position_ids(jnp.array([0, 3, 5, 9])).tolist()
        [0, 1, 2, 0, 1, 0, 1, 2, 3]
        >>> jax.jit(lambda cu: prepare_position_ids(cu, total_length=6))(jnp.array([0, 3, 5]))
        Array([ 0,  1,  2,  0,  1, -1], dtype=int32)
    """
    cu_seqlens, length = _sized_by_tokens(cu_seqlens, total_length, "prepare_position_ids")
    return _indices(cu_seqlens, length, cu_seqlens.dtype)[1]


def prepare_sequence_ids(
    cu_seqlens: Int[_AnyArray, "num_seqs_plus_one"], *, total_length: int | None = None
) -> Int[Array, "total_tokens"]:
    """Which sequence each token belongs to, counted from 0.

    An empty sequence keeps its number: after lengths 3, 0, 2 come the ids 0, 0, 0, 2, 2.

    Args:
        cu_seqlens: Cumulative lengths.
        total_length: The length of the result, needed under `jax.jit`; `cu_seqlens[-1]` if None.
            Tokens beyond the last sequence get -1.

    Returns:
        One id per token, in the dtype of `cu_seqlens`.

    Raises:
        ValueError: If `cu_seqlens` does not rise from 0, if it runs past `total_length`, or if the
            length cannot be known while tracing.

    Example:
        >>> prepare_sequence_ids(jnp.array([0, 3, 5, 9])).tolist()
        [0, 0, 0, 1, 1, 2, 2, 2, 2]
        >>> prepare_sequence_ids(jnp.array([0, 3, 3, 5])).tolist()
        [0, 0, 0, 2, 2]
    """
    cu_seqlens, length = _sized_by_tokens(cu_seqlens, total_length, "prepare_sequence_ids")
    return _indices(cu_seqlens, length, cu_seqlens.dtype)[0]


def prepare_token_indices(
    cu_seqlens: Int[_AnyArray, "num_seqs_plus_one"], *, total_length: int | None = None
) -> Int[Array, "total_tokens 2"]:
    """The pair (sequence id, position) of each token.

    Args:
        cu_seqlens: Cumulative lengths.
        total_length: The number of rows, needed under `jax.jit`; `cu_seqlens[-1]` if None. Rows
            beyond the last sequence hold -1.

    Returns:
        One row per token, in the dtype of `cu_seqlens`.

    Raises:
        ValueError: If `cu_seqlens` does not rise from 0, if it runs past `total_length`, or if the
            length cannot be known while tracing.

    Example:
        >>> prepare_token_indices(jnp.array([0, 2, 3])).tolist()
        [[0, 0], [0, 1], [1, 0]]
    """
    cu_seqlens, length = _sized_by_tokens(cu_seqlens, total_length, "prepare_token_indices")
    return jnp.stack(_indices(cu_seqlens, length, cu_seqlens.dtype), axis=1)


def prepare_chunk_indices(
    cu_seqlens: Int[_AnyArray, "num_seqs_plus_one"],
    chunk_size: int,
    *,
    total_chunks: int | None = None,
) -> Int[Array, "total_chunks 2"]:
    """The pair (sequence id, number of the chunk within its sequence) of each chunk.

    Every sequence is cut into `ceil(length / chunk_size)` chunks of its own; an empty one has none.

    Args:
        cu_seqlens: Cumulative lengths.
        chunk_size: Tokens per chunk.
        total_chunks: The number of rows, needed under `jax.jit`; as many as there are chunks if
            None. `ceil(total_length / chunk_size) + num_seqs` is always enough. Rows beyond the
            last chunk hold -1.

    Returns:
        One row per chunk, in the dtype of `cu_seqlens`.

    Raises:
        ValueError: If `cu_seqlens` decreases, if there are more chunks than `total_chunks`, or if
            their number cannot be known while tracing.

    Example:
        >>> prepare_chunk_indices(jnp.array([0, 3, 5, 9]), 2).tolist()
        [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]
    """
    name = "prepare_chunk_indices"
    cu_seqlens, values = _checked(cu_seqlens, name)
    _check_chunk_size(chunk_size, name)
    rows = _Size("chunks", "total_chunks", name).resolve(
        total_chunks, values, cu_seqlens, lambda cu: int(np.sum(cdiv(np.diff(cu), chunk_size)))
    )
    offsets = _chunk_offsets(cu_seqlens, chunk_size)
    return jnp.stack(_indices(offsets, rows, cu_seqlens.dtype), axis=1)


def prepare_chunk_offsets(
    cu_seqlens: Int[_AnyArray, "num_seqs_plus_one"], chunk_size: int
) -> Int[Array, "num_seqs_plus_one"]:
    """The number of chunks before each sequence.

    Args:
        cu_seqlens: Cumulative lengths.
        chunk_size: Tokens per chunk.

    Returns:
        `[0, chunks_0, chunks_0 + chunks_1, ...]`, in the dtype of `cu_seqlens`.

    Raises:
        ValueError: If `cu_seqlens` decreases or `chunk_size` is not positive.

    Example:
        >>> prepare_chunk_offsets(jnp.array([0, 3, 5, 9]), 2).tolist()
        [0, 2, 3, 5]
    """
    cu_seqlens, _ = _checked(cu_seqlens, "prepare_chunk_offsets")
    _check_chunk_size(chunk_size, "prepare_chunk_offsets")
    return _chunk_offsets(cu_seqlens, chunk_size).astype(cu_seqlens.dtype)


def identity_dtype_convert(dtype: DTypeLike) -> Callable[[Array], Array]:
    """A function that returns its input and converts the gradient to a dtype.

    Forward `y = x`; backward `d_x = d_y.astype(dtype)`.

    Where `dtype` differs from that of the input, JAX takes such a gradient at an input that is
    differentiated and has no other use, or right after a cast; in the middle of a network the
    operation before it refuses it.

    Args:
        dtype: The dtype of the gradient.

    Returns:
        The identity with that gradient.

    Example:
        >>> gradient_in_float32 = identity_dtype_convert(jnp.float32)
        >>> weight = jnp.ones(2, jnp.bfloat16)
        >>> jax.grad(lambda w: gradient_in_float32(w).sum())(weight)
        Array([1., 1.], dtype=float32)
    """

    @jax.custom_vjp
    def identity(x: Array) -> Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, d_y: (d_y.astype(dtype),))
    return identity


@functools.partial(jax.jit, static_argnames=("length", "dtype"))
def _indices(offsets: Array, length: int, dtype: DTypeLike) -> tuple[Array, Array]:
    """For each of `length` items, the range of `offsets` that holds it and its place in there."""
    offsets = _wide(offsets)
    item = jnp.arange(length, dtype=offsets.dtype)
    # Of ranges that begin at the same item only the last one is not empty.
    owner = jnp.searchsorted(offsets, item, side="right").astype(offsets.dtype) - 1
    inside = item < offsets[-1]
    place = item - offsets[owner]
    return jnp.where(inside, owner, -1).astype(dtype), jnp.where(inside, place, -1).astype(dtype)


def _chunk_offsets(cu_seqlens: Array, chunk_size: int) -> Array:
    cu_seqlens = _wide(cu_seqlens)
    chunks = cdiv(cu_seqlens[1:] - cu_seqlens[:-1], chunk_size)
    return jnp.pad(jnp.cumsum(chunks, dtype=cu_seqlens.dtype), (1, 0))


def _wide(integers: Array) -> Array:
    # A padded length or a chunk size may be more than int8 or int16 holds.
    return integers.astype(jnp.promote_types(integers.dtype, jnp.int32))


def _mask_lens(mask: _AnyArray, name: str) -> Array:
    if mask.ndim != 2:
        raise ValueError(f"{name}: mask must be [batch, seq_len], got shape {mask.shape}.")
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise ValueError(
            f"{name}: mask must be boolean, or integers 0 and 1, got {mask.dtype}; "
            ".astype(bool) makes a mask of 0 and 1 boolean."
        )
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def _checked(
    cu_seqlens: _AnyArray, name: str, *, from_zero: bool = False
) -> tuple[Array, np.ndarray | None]:
    """`cu_seqlens` as a JAX array, and its values where they are at hand."""
    if cu_seqlens.ndim != 1 or cu_seqlens.size == 0:
        raise ValueError(
            f"{name}: cu_seqlens must be [num_seqs + 1], got shape {cu_seqlens.shape}."
        )
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.signedinteger):
        raise ValueError(f"{name}: cu_seqlens must hold signed integers, got {cu_seqlens.dtype}.")
    values = concrete_value(cu_seqlens)
    values = None if values is None else values.astype(np.int64)
    if values is not None and np.any(np.diff(values) < 0):
        raise ValueError(f"{name}: cu_seqlens must not decrease, got {values.tolist()}.")
    if values is not None and from_zero and values[0] != 0:
        raise ValueError(f"{name}: cu_seqlens must begin with 0, got {values.tolist()}.")
    return jnp.asarray(cu_seqlens), values


def _sized_by_tokens(
    cu_seqlens: _AnyArray, total_length: int | None, name: str
) -> tuple[Array, int]:
    """`cu_seqlens`, checked, and the static number of tokens."""
    cu_seqlens, values = _checked(cu_seqlens, name, from_zero=True)
    size = _Size("tokens", "total_length", name)
    return cu_seqlens, size.resolve(total_length, values, cu_seqlens, lambda cu: int(cu[-1]))


class _Size(NamedTuple):
    """The number of rows of a result: what they are, which argument gives it, in which function."""

    items: str
    argument: str
    name: str

    def resolve(
        self,
        given: int | None,
        values: np.ndarray | None,
        cu_seqlens: Array,
        count: Callable[[np.ndarray], int],
    ) -> int:
        """The given size, which must be enough, or else the number of items."""
        if given is None:
            if isinstance(cu_seqlens, Tracer) and values is None:
                raise ValueError(
                    f"{self.name}: the number of {self.items} is not known while tracing; "
                    f"pass {self.argument}=."
                )
            # Without a given size the shape itself needs the values, wherever they are.
            return count(np.asarray(cu_seqlens, np.int64) if values is None else values)
        if given < 0:
            raise ValueError(f"{self.name}: {self.argument} must not be negative, got {given}.")
        if values is not None and count(values) > given:
            raise ValueError(
                f"{self.name}: cu_seqlens holds {count(values)} {self.items}, "
                f"more than {self.argument}={given}."
            )
        return given


def _check_chunk_size(chunk_size: int, name: str) -> None:
    if chunk_size <= 0:
        raise ValueError(f"{name}: chunk_size must be positive, got {chunk_size}.")
