"""Running sums along the sequence, restarted at every chunk or every packed sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import DTypeLike, Float, Int

from ejkernel.xla_utils.utils import prepare_token_indices

_AnyArray = Array | np.ndarray


def chunk_local_cumsum(
    g: Float[_AnyArray, "b t ..."],
    chunk_size: int,
    *,
    reverse: bool = False,
    cu_seqlens: Int[_AnyArray, "num_seqs_plus_one"] | None = None,
    output_dtype: DTypeLike | None = None,
) -> Float[Array, "b t ..."]:
    """The running sum of `g` along the sequence, restarted at every chunk.

    `out[t] = sum of g[u] for u <= t in the chunk of t` (`u >= t` if `reverse`): for log decays
    that is the decay since the beginning of the chunk. Each chunk is summed by itself, so that
    its precision does not depend on where it stands.

    Args:
        g: What to sum, with the sequence on axis 1.
        chunk_size: Tokens per chunk.
        reverse: Sum from the end of each chunk to its beginning.
        cu_seqlens: Cumulative lengths of packed sequences; chunks then begin anew with each
            sequence, the batch must be 1, and tokens beyond the last sequence give 0.
        output_dtype: The dtype of the result; if None, float32 (float64 for float64).

    Returns:
        The sums, in the shape of `g`.

    Raises:
        ValueError: If `chunk_size` is not positive, or `cu_seqlens` comes with a batch.

    Example:
        >>> chunk_local_cumsum(jnp.ones((1, 5)), 2).tolist()
        [[1.0, 2.0, 1.0, 2.0, 1.0]]
    """
    name = "chunk_local_cumsum"
    if chunk_size <= 0:
        raise ValueError(f"{name}: chunk_size must be positive, got {chunk_size}.")
    length = g.shape[1]
    if cu_seqlens is None:
        position = jnp.arange(length)
        return _restarting_sum(g, position % chunk_size == 0, None, reverse, output_dtype)
    _check_batch(g, name)
    sequence, position = prepare_token_indices(cu_seqlens, total_length=length).T
    begins = position % chunk_size == 0
    return _restarting_sum(g, begins, sequence >= 0, reverse, output_dtype)


def chunk_global_cumsum(
    s: Float[_AnyArray, "b t ..."],
    *,
    reverse: bool = False,
    cu_seqlens: Int[_AnyArray, "num_seqs_plus_one"] | None = None,
    output_dtype: DTypeLike | None = None,
) -> Float[Array, "b t ..."]:
    """The running sum of `s` along the sequence, restarted at every packed sequence.

    `out[t] = sum of s[u] for u <= t in the sequence of t` (`u >= t` if `reverse`).

    Args:
        s: What to sum, with the sequence on axis 1.
        reverse: Sum from the end of each sequence to its beginning.
        cu_seqlens: Cumulative lengths of packed sequences; the batch must then be 1, and tokens
            beyond the last sequence give 0.
        output_dtype: The dtype of the result; if None, float32 (float64 for float64).

    Returns:
        The sums, in the shape of `s`.

    Raises:
        ValueError: If `cu_seqlens` comes with a batch.

    Example:
        >>> chunk_global_cumsum(jnp.ones((1, 5)), cu_seqlens=jnp.array([0, 3, 5])).tolist()
        [[1.0, 2.0, 3.0, 1.0, 2.0]]
    """
    length = s.shape[1]
    if cu_seqlens is None:
        return _restarting_sum(s, jnp.arange(length) == 0, None, reverse, output_dtype)
    _check_batch(s, "chunk_global_cumsum")
    sequence, position = prepare_token_indices(cu_seqlens, total_length=length).T
    return _restarting_sum(s, position == 0, sequence >= 0, reverse, output_dtype)


def _check_batch(values: _AnyArray, name: str) -> None:
    if values.shape[0] != 1:
        raise ValueError(
            f"{name}: cu_seqlens describes one packed row, got a batch of {values.shape[0]}."
        )


@functools.partial(jax.jit, static_argnames=("reverse", "output_dtype"))
def _restarting_sum(
    values: _AnyArray,
    begins: Array,
    valid: Array | None,
    reverse: bool,
    output_dtype: DTypeLike | None,
) -> Array:
    """Running sums along axis 1 that start over where `begins` [t] is True."""
    values = jnp.asarray(values)
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    along = (1, -1, *[1] * (values.ndim - 2))
    if valid is not None:
        values = jnp.where(valid.reshape(along), values, 0)
        begins |= ~valid
    if reverse:
        # Read backwards, a part begins where the next one begins read forwards.
        begins = jnp.append(begins[1:], True)

    def joined(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        left_sum, left_begins = left
        right_sum, right_begins = right
        return jnp.where(right_begins, right_sum, left_sum + right_sum), left_begins | right_begins

    begins = jnp.broadcast_to(begins.reshape(along), values.shape)
    sums, _ = lax.associative_scan(joined, (values, begins), reverse=reverse, axis=1)
    return sums if output_dtype is None else sums.astype(output_dtype)
