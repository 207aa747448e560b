"""Which values may be looked at: those at hand, never those of a trace or an accelerator."""

import numpy as np
from jax import Array
from jax.core import Tracer


def concrete_value(array: Array | np.ndarray) -> np.ndarray | None:
    """The values of an array if they are at hand, else None.

    Args:
        array: A NumPy array, a JAX array, or a tracer.

    Returns:
        The values of a NumPy array or of a JAX array on CPU devices of this process; None for a
        tracer and for whatever would have to be fetched from an accelerator or another process.

    Example:
        >>> import jax
        >>> concrete_value(jax.numpy.arange(3)).tolist()
        [0, 1, 2]
        >>> jax.make_jaxpr(lambda x: x if concrete_value(x) is None else -x)(1.0)
        { lambda ; a:f32[]. let  in (a,) }
    """
    if isinstance(array, Tracer):
        return None
    if isinstance(array, Array) and not (
        array.is_fully_addressable and all(d.platform == "cpu" for d in array.devices())
    ):
        return None
    return np.asarray(array)
