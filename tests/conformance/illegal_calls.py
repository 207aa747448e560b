"""Illegal calls: a random legal call with one argument spoiled, for every operation.

`every(index)` takes a call of `ejkernel check --random` and changes one of its arguments, or adds
one, so that no reading of the documentation makes it legal.
"""

import inspect
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import ejkernel
from ejkernel.cli.random_calls.run import choices_of

SEED = 7
_ANYTHING = ("text", object(), {"a": 1}, 1j)


class Illegal(NamedTuple):
    """A call that must be refused; `why` names what is wrong with it."""

    operation: str
    arguments: dict[str, Any]
    why: str

    def run(self) -> Any:
        return getattr(ejkernel, self.operation)(**self.arguments)

    def said_by(self) -> tuple[str, ...]:
        """How a sentence of ours may begin."""
        return (f"{self.operation}: ", "MaskInfo", "Executor")


# What an argument that is no array may not be, by its name.
_STATIC: dict[str, tuple[Any, ...]] = {
    "softmax_scale": ("text", [1.0, 2.0], object(), 1j),
    "causal": ("text", 2, None, 0.5, [True]),
    "return_lse": ("text", 2, None, 0.5),
    "return_state": ("text", 2, None),
    "return_block_indices": ("text", 2, None),
    "reverse": ("text", 2, None),
    "transpose_rhs": ("text", 2, None),
    "sliding_window": (-1, (1, 2, 3), "text", 1.5, (-1, 2), (1,), [[1]], object(), {}),
    "logits_soft_cap": (-1.0, 0.0, "text", object(), [1.0, 2.0], float("nan")),
    "dropout_prob": (-0.1, 1.5, "text", None, float("nan"), [0.1]),
    "chunk_size": (0, -1, "text", 1.5, object()),
    "block_size": (0, -1, "text", 1.5, (16, 16, 16), object(), None),
    "layout": ("xyz", 3, None),
    "placement": ("xyz", 3, None, ["zigzag"]),
    "method": ("xyz", 3, None, ["ring"]),
    "kv_layout": ("xyz", 3, None),
    "platform": ("cude", 3, object(), ["xla"]),
    "cfg": ({}, 3, "text", object()),
    "mesh": (3, "text", object()),
    "in_specs": (3, "text", object()),
    "out_specs": (3, "text"),
    "mask_info": (3, "text", np.ones((2, 2), bool), object()),
    "mask_builder": (3, "text"),
    "axis_name": (3, object(), ["a"]),
    "preferred_element_type": ("text", 3, "int32"),
    "layer_idx": (-1, "text", 1.5),
    "num_layers": (0, -1, "text", 1.5),
    "dropout_seed": ("text", 1.5, [1, 2]),
    "causal_offset": ("text", 1.5, object(), [[1, 2]]),
}
# Arguments that make another one the reason of the refusal, or that go without it.
_NEEDS = {
    "dropout_seed": {"dropout_prob": 0.5},
    "layer_idx": {"num_layers": 4},
    "num_layers": {"layer_idx": 0},
}
_ALONE = {"layer_idx": ("decay", "g_gamma"), "num_layers": ("decay", "g_gamma")}

# The axes of the arrays that everybody passes; arrays of one call share the sizes of letters.
_QKV = {"query": "btnh", "key": "bskh", "value": "bskv"}
_SAME_LENGTH = {"query": "btnh", "key": "btkh", "value": "btkv"}
_LETTERS: dict[str, dict[str, str]] = {
    "flash_attention": _QKV,
    "scaled_dot_product_attention": _QKV,
    "ring_attention": _QKV,
    "blocksparse_attention": _QKV,
    "native_sparse_attention": _SAME_LENGTH,
    "gla_attention": {**_SAME_LENGTH, "initial_state": "Nkhv"},
    "lightning_attention": {**_SAME_LENGTH, "initial_state": "Nkhv"},
    "recurrent_attention": {**_SAME_LENGTH, "state": "Nkhv"},
    "page_attention": {
        "query": "bnh", "key_cache": "PSkh", "value_cache": "PSkv", "block_tables": "bj",
        "context_lens": "b",
    },
    "ragged_page_attention_v2": {
        "query": "tnh", "kv_pages": "PSkh", "block_tables": "bj", "context_lens": "b",
    },
    "ragged_page_attention_v3": {
        "query": "tnh", "key_pages": "PSkh", "value_pages": "PSkv", "page_indices": "bj",
    },
    "ragged_page_attention_v3_update": {
        "query": "tnh", "key": "tkh", "value": "tkv", "key_pages": "PSkh", "value_pages": "PSkv",
        "page_indices": "bj",
    },
    "grouped_matmul": {"inputs": "mk", "weights": "Ekn", "group_ids": "m", "existing_out": "mn"},
    "mean_pooling": {"x": "bth", "attention_mask": "bt"},
}  # fmt: skip

# Options that give axes another order.
_REARRANGED = ("kv_layout", "layout", "transpose_rhs")


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim > 0


def _required(operation: str) -> list[str]:
    parameters = inspect.signature(getattr(ejkernel, operation)).parameters.values()
    return [x.name for x in parameters if x.default is inspect.Parameter.empty]


def _spoiled_arrays(operation: str, given: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Arrays of another rank or kind, and things that are no arrays."""
    for name in _required(operation):
        yield name, None, "None"
    for name, x in given.items():
        if not _is_array(x):
            continue
        for other in _ANYTHING:
            yield name, other, repr(type(other))
        if x.ndim > 2:
            yield name, x[None, None], "two axes more"
        yield name, np.full(x.shape, "a"), "strings"
        yield name, x.astype(np.complex64), "complex numbers"
        yield name, [[1, 2], [3]], "a ragged list"
        if x.ndim > 1 and name in _LETTERS[operation] and name != "page_indices":
            yield name, x.reshape(-1), "one axis"
        if np.issubdtype(x.dtype, np.floating) and name in _required(operation):
            yield name, np.nan_to_num(x).astype(np.int32), "integers"
        elif np.issubdtype(x.dtype, np.integer) and not name.endswith(("pages", "cache")):
            yield name, x.astype(np.float32) + 0.5, "fractions"


def _spoiled_shapes(operation: str, given: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Arrays with one more along an axis that another array has, too."""
    letters = {k: v for k, v in _LETTERS[operation].items() if _is_array(given.get(k))}
    for name, axes in letters.items():
        x = given[name]
        if x.ndim != len(axes) or any(name in given for name in _REARRANGED):
            continue
        for axis, letter in enumerate(axes):
            others = [k for k, v in letters.items() if letter in v and k != name]
            if others and not (letter == "b" and x.shape[axis] == 0):
                wider = np.concatenate([x, x.take([0], axis)], axis)
                yield name, wider, f"axis {axis} of {wider.shape[axis]}, {others[0]} has one less"


def _spoiled_values(given: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Integers on the host that point to what is not there."""
    for name, x in given.items():
        if not isinstance(x, np.ndarray) or not np.issubdtype(x.dtype, np.integer) or not x.size:
            continue
        if name.startswith(("cu_seqlens", "cum_seqlens", "query_start_loc")):
            yield name, x + 1, "does not begin at 0"
            yield name, x[:1], "no sequence"
            if int(given.get("num_seqs", len(x) - 1)) == len(x) - 1:  # the last one is in use
                yield name, np.append(x[:-1], -1).astype(x.dtype), "decreases"
                yield name, np.append(x[:-1], 10**6).astype(x.dtype), "ends past the tokens"
        elif name == "context_lens" and int(given.get("num_seqs", 1)) > 0:
            yield name, x - x - 1, "negative"
            yield name, x - x + 10**6, "longer than the table"
        elif name in ("block_tables", "page_indices") and _has_context(given):
            yield name, np.full_like(x, 10**6), "pages that do not exist"
        elif name == "group_sizes":
            yield name, x - 10**6, "negative"
            yield name, x + 10**6, "more rows than there are"
        elif name == "block_counts":
            yield name, x - 10**6, "negative"
    for value in (0.0, -0.5, 1.5, float("nan")) if "decay" in given else ():
        yield "decay", value, f"a factor of {value}"


def _has_context(given: dict[str, Any]) -> bool:
    """Whether a sequence of a paged call has tokens in the cache."""
    lengths = given.get("context_lens")
    if lengths is None:
        lengths = np.diff(given["cu_seqlens_k"])
    count = int(given.get("num_seqs", len(lengths)))
    return bool((np.asarray(lengths)[:count] > 0).any())


def _spoiled_options(operation: str) -> Iterator[tuple[str, Any, str]]:
    parameters = inspect.signature(getattr(ejkernel, operation)).parameters
    for name, values in _STATIC.items():
        if name in parameters:
            for value in values:
                yield name, value, repr(value)
    yield "no_such_argument", 1, "unknown"


def every(index: int) -> list[Illegal]:
    """All ways in which call `index` is spoiled."""
    choices = choices_of(SEED, index)
    operation, given = choices.operation, choices.values()
    sources: tuple[Iterator[tuple[str, Any, str]], ...] = (
        _spoiled_arrays(operation, given),
        _spoiled_shapes(operation, given),
        _spoiled_values(given),
        _spoiled_options(operation),
    )
    return [_spoiled(operation, given, spoil) for source in sources for spoil in source]


def pairs(index: int, count: int) -> list[Illegal]:
    """Call `index`, spoiled in two arguments; the first is illegal whatever the second is."""
    choices = choices_of(SEED, index)
    operation, given = choices.operation, choices.values()
    kinds = [*_spoiled_arrays(operation, given), *_spoiled_options(operation)]
    others = [*kinds, *_spoiled_shapes(operation, given), *_spoiled_values(given)]
    chance, found = random.Random(index), []
    while len(found) < count:
        first, second = chance.choice(kinds), chance.choice(others)
        if first[0] != second[0]:
            found.append(_spoiled(operation, given, first, second))
    return found


def _spoiled(operation: str, given: dict[str, Any], *spoils: tuple[str, Any, str]) -> Illegal:
    """The call with these arguments in place of its own."""
    arguments = dict(given)
    for name, _, _ in spoils:
        arguments = {k: v for k, v in arguments.items() if k not in _ALONE.get(name, ())}
        arguments |= _NEEDS.get(name, {})
    arguments |= {name: value for name, value, _ in spoils}
    return Illegal(operation, arguments, ", ".join(f"{name}: {why}" for name, _, why in spoils))


def complaint(call: Illegal) -> str | None:
    """What is wrong with how a call is refused; None if it is refused in one sentence of ours."""
    from ejkernel.errors import UnsupportedError

    try:
        call.run()
    except (ValueError, TypeError, UnsupportedError) as error:
        text = str(error)
        frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
        raised = frames[-1].filename if frames else ""
        if not text.startswith(call.said_by()):
            return f"{type(error).__name__} in other words: {text[:150]!r} ({raised})"
        if "\n" in text or len(text) > 400:
            return f"more than a sentence: {text[:300]!r}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]!r}"
    return "accepted"
