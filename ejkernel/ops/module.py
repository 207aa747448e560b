"""The two public forms of an operation: a function, and a class that an `Executor` takes."""

import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel.ops.config import Config
from ejkernel.ops.eager import NOT_COMPILED, EagerPrograms

Function = TypeVar("Function", bound=Callable[..., Any])

# What other libraries (jax.nn, tokamax, splash, FlashAttention, cuDNN, flash-linear-attention) call
# an argument, where the nearest spelling would not find it: the first that an operation has.
NAMES_ELSEWHERE = {
    "attn_bias": ("bias",),
    "attn_logits_soft_cap": ("logits_soft_cap",),
    "attn_mask": ("attention_mask",),
    "backend": ("platform",),
    "block_table": ("block_tables", "page_indices"),
    "config": ("cfg",),
    "cu_q_lens": ("cu_seqlens_q", "query_start_loc"),
    "cu_seqlens": ("cum_seqlens_q", "cu_seqlens_q"),
    "cu_seqlens_k": ("cum_seqlens_k", "cu_seqlens"),
    "cu_seqlens_kv": ("cum_seqlens_k", "cu_seqlens_k", "cu_seqlens"),
    "cu_seqlens_q": ("cum_seqlens_q", "query_start_loc", "cu_seqlens"),
    "deterministic": ("cfg",),
    "dropout_p": ("dropout_prob",),
    "dropout_rate": ("dropout_prob",),
    "dropout_rng": ("dropout_seed",),
    "g": ("gate",),
    "implementation": ("platform",),
    "is_causal": ("causal",),
    "k": ("key",),
    "k_cache": ("key_cache", "key_pages"),
    "k_pages": ("key_pages", "key_cache"),
    "key_value_seq_lengths": ("mask_info",),
    "kv_seqlen": ("mask_info",),
    "lengths": ("context_lens",),
    "lhs": ("inputs",),
    "local_window_size": ("sliding_window",),
    "mask": ("attention_mask",),
    "output_final_state": ("return_state",),
    "page_table": ("block_tables", "page_indices"),
    "q": ("query",),
    "q_seqlen": ("mask_info",),
    "query_seq_lengths": ("mask_info",),
    "return_attn_probs": ("return_lse",),
    "return_residual": ("return_lse",),
    "return_residuals": ("return_lse",),
    "rhs": ("weights",),
    "rng": ("dropout_seed",),
    "save_residuals": ("return_lse",),
    "scale": ("softmax_scale",),
    "seed": ("dropout_seed",),
    "segment_ids": ("mask_info",),
    "seq_lens": ("context_lens",),
    "sinks": ("softmax_aux",),
    "sm_scale": ("softmax_scale",),
    "soft_cap": ("logits_soft_cap",),
    "softcap": ("logits_soft_cap",),
    "v": ("value",),
    "v_cache": ("value_cache", "value_pages"),
    "v_pages": ("value_pages", "value_cache"),
    "window_size": ("sliding_window",),
}


def operation(function: Function) -> Function:
    """Decorator of a public function: checks of the keywords that all operations have.

    For an unknown keyword the error names the nearest argument. Signature, docstring and source
    remain those of the function.
    """
    parameters = inspect.signature(function).parameters
    kinds = {name: _kind(x) for name, x in parameters.items()}
    eager = EagerPrograms(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # The setting is a check of the caller's own code.
        if getattr(jax.config, "jax_numpy_rank_promotion", "allow") != "allow":
            with jax.numpy_rank_promotion("allow"):
                return checked(*args, **kwargs)
        for name, x in kwargs.items():
            if name not in kinds:
                raise TypeError(_unknown_argument(function.__name__, name, list(kinds)))
            kind = kinds[name]
            if kind is not None and not isinstance(x, kind.types):
                shown = reprlib.repr(x).replace("\n", " ")
                raise ValueError(f"{function.__name__}: {name} must be {kind.words}, got {shown}.")
        result = eager(args, kwargs)
        return function(*args, **kwargs) if result is NOT_COMPILED else result

    return cast(Function, checked)


class _Kind(NamedTuple):
    """What an argument may be that every operation takes the same way."""

    types: tuple[type, ...]
    words: str


_FLAG = _Kind((bool, np.bool_), "True or False")
_COMMON = {
    "platform": _Kind((str, type(None)), "the name of a platform"),
    "in_specs": _Kind((tuple, list, PartitionSpec, type(None)), "partition specs"),
    "out_specs": _Kind((tuple, list, PartitionSpec, type(None)), "partition specs"),
}


def _kind(parameter: inspect.Parameter) -> _Kind | None:
    return _FLAG if isinstance(parameter.default, bool) else _COMMON.get(parameter.name)


def _unknown_argument(function: str, name: str, names: list[str]) -> str:
    nearest = [x for x in NAMES_ELSEWHERE.get(name, ()) if x in names]
    nearest += difflib.get_close_matches(name, names, n=1)
    hint = f"the nearest is {nearest[0]!r}" if nearest else f"it has {', '.join(names)}"
    return f"{function}: unknown argument {name!r}; {hint}."


class BoundFunction(Generic[Function]):
    """A function as the `__call__` of a class without state: `self` is not passed on."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __get__(self, instance: object, owner: type) -> Function:
        return self.function if instance is not None else self._unbound

    @functools.cached_property
    def _unbound(self) -> Function:
        """What the class itself has: the function with a parameter `self` before its own."""

        @functools.wraps(self.function)
        def unbound(self_: object, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs)

        signature = inspect.signature(self.function)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = signature.replace(parameters=[own, *signature.parameters.values()])
        unbound.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return cast(Function, unbound)


class Module:
    """An operation as an object: `executor(FlashAttention(), query=..., ...)`.

    Called directly it is the function of the same name. A subclass names that function,
    `__call__: Final = BoundFunction(function)`, and the class of its configurations.
    """

    config: ClassVar[type[Config]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
