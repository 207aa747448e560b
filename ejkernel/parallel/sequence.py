"""The order of the tokens of a sequence that is split over devices."""

import operator
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from ejkernel.kernels.common.arguments import as_array
from ejkernel.types.placement import PLACEMENTS, Placement, length_multiple, place, restore


def permute_sequence(
    x: ArrayLike, *, shards: int, placement: Placement, axis: int = 1
) -> jax.Array | np.ndarray:
    """The tokens of a sequence in the order in which `ring_attention` expects them.

    Of the result, cut into `shards` equal parts, part `i` holds:

    - `"contiguous"`: part `i` of the sequence; nothing moves.
    - `"zigzag"`: of `2 * shards` equal parts of the sequence, parts `i` and `2 * shards - 1 - i`.
      Under a causal mask every device then has the same work.
    - `"striped"`: the tokens `t` with `t % shards == i`. Every device has the same work under
      packed documents, too, but a window no longer saves hops.

    Args:
        x: tokens, embeddings, positions, segment ids: any array with a sequence axis.
        shards: how many devices the sequence is split over.
        placement: "contiguous", "zigzag" or "striped".
        axis: the sequence axis; its length is a multiple of `shards`, for zigzag of `2 * shards`.

    Returns:
        The permuted array, of the dtype of `x`: a NumPy array if `x` is one, else a JAX array.

    Raises:
        ValueError: if the length does not divide, or an argument is out of range.

    >>> import numpy as np
    >>> from ejkernel.parallel import permute_sequence
    >>> permute_sequence(np.arange(8), shards=2, placement="zigzag", axis=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    >>> permute_sequence(np.arange(8), shards=2, placement="striped", axis=0)
    array([0, 2, 4, 6, 1, 3, 5, 7])
    """
    array, axis = _checked("permute_sequence", x, shards, placement, axis)
    return place(array, shards, placement, axis)


def restore_sequence(
    x: ArrayLike, *, shards: int, placement: Placement, axis: int = 1
) -> jax.Array | np.ndarray:
    """The inverse of `permute_sequence`: the tokens in the order of their positions.

    `restore_sequence(permute_sequence(x)) == x`, with the same arguments for both.

    Args:
        x: an array with a sequence axis in placed order.
        shards: how many devices the sequence is split over.
        placement: "contiguous", "zigzag" or "striped".
        axis: the sequence axis; its length is a multiple of `shards`, for zigzag of `2 * shards`.

    Returns:
        The array in the order of positions: a NumPy array if `x` is one, else a JAX array.

    Raises:
        ValueError: if the length does not divide, or an argument is out of range.

    >>> import numpy as np
    >>> from ejkernel.parallel import restore_sequence
    >>> restore_sequence(np.array([0, 1, 6, 7, 2, 3, 4, 5]), shards=2, placement="zigzag", axis=0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    array, axis = _checked("restore_sequence", x, shards, placement, axis)
    return restore(array, shards, placement, axis)


def _checked(name: str, x: Any, shards: Any, placement: Any, axis: Any) -> tuple[Any, int]:
    """The array, and its axis counted from the front."""
    if placement not in PLACEMENTS:
        raise ValueError(
            f"{name}: placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}."
        )
    try:
        count, axis = operator.index(shards), operator.index(axis)
    except TypeError:
        given = f"{shards!r} and {axis!r}"
        raise ValueError(f"{name}: shards and axis must be ints, got {given}.") from None
    if count < 1:
        raise ValueError(f"{name}: shards must be positive, got {shards}.")
    array = x if isinstance(x, np.ndarray) else as_array(name, "x", x)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"{name}: axis {axis} is not an axis of an array of shape {array.shape}.")
    axis %= array.ndim
    if array.shape[axis] % length_multiple(count, placement):
        raise ValueError(
            f"{name}: with placement={placement!r} and {count} shards the length must be a "
            f"multiple of {length_multiple(count, placement)}, got {array.shape[axis]}."
        )
    return array, axis
