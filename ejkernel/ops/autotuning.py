"""The whole search, for the operations that a function calls."""

import reprlib
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.executor import default_executor
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.policy import policy_override
from ejkernel.ops.recording import AutotuningResult, autotune_recorded, record_invocations


def autotune(function: Callable[..., Any], *args: Any, **kwargs: Any) -> AutotuningResult:
    """Measure every candidate configuration of the operations that a call makes.

    `function(*args, **kwargs)` is traced, not run. Each operation that it calls, with the gradients
    that it takes, is measured on this device on random data. The fastest configurations are kept
    in the caches of this process and of the user, where later calls of these shapes find them.

    Args:
        function: calls operations of this package, for example a training step. What was compiled
            by `jax.jit` before is not traced again, and its operations are not seen.
        *args: its arguments; a `jax.ShapeDtypeStruct` stands for an array.
        **kwargs: its keyword arguments.

    Returns:
        The measured configurations by key; as a context manager, an overlay. `save` and `load`
        keep them in a file.

    Raises:
        ValueError: `function` is no function, or called no operation.
        RuntimeError: there are several processes (`jax.process_count()`), which would not find the
            same winners.

    >>> import jax, jax.numpy as jnp
    >>> import ejkernel
    >>> x = jax.ShapeDtypeStruct((2, 64, 8), jnp.float32)
    >>> tuned = ejkernel.autotune(ejkernel.mean_pooling, x)
    >>> len(tuned.entries)
    1
    """
    return autotune_recorded(default_executor().chooser, calls_of(function, *args, **kwargs))


def calls_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Invocation]:
    """The calls of operations that `function(*args, **kwargs)` makes, found by tracing it.

    Raises:
        ValueError: there are none, or `function` cannot be called.
    """
    if not callable(function):
        raise ValueError(
            "autotune: the first argument must be a function and the others its arguments, got "
            f"{reprlib.repr(function)}."
        )
    leaves, treedef = jax.tree.flatten((args, kwargs))
    traced = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        merged = [next(rest) if is_array else x for is_array, x in zip(traced, leaves, strict=True)]
        call_args, call_kwargs = jax.tree.unflatten(treedef, merged)
        return function(*call_args, **call_kwargs)

    arrays = [leaf for is_array, leaf in zip(traced, leaves, strict=True) if is_array]
    chooser = default_executor().chooser
    unmeasured = policy_override(chooser, allow_autotune=False, allow_heuristics=True)
    with record_invocations() as calls, unmeasured:
        jax.eval_shape(call, arrays)
    if not calls:
        raise ValueError(
            "autotune: the function called no operation of ejkernel; one that jax.jit has compiled "
            "before is not traced again, give the function itself."
        )
    return list(calls.values())
