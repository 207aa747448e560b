"""Illegal calls of what is no operation: masks, placement, experts and the drop-in for jax.nn."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from conformance.illegal_calls import Illegal
from jax.sharding import PartitionSpec

import ejkernel
from ejkernel.parallel import dispatch, permute_sequence, restore_sequence

_X = np.ones((2, 8, 2, 4), np.float32)
_IDS = np.zeros((2, 8), np.int32)
_MASK = ejkernel.MaskInfo.from_segments(_IDS)
_NO_ARRAY = ("text", object(), {"a": 1}, [[1, 2], [3]], np.full((2, 8), "a"))
_NO_SIZE = (0, -1, 1.5, "text", None, [1], float("nan"), object())
_NO_FLAG = ("text", 2, None, 0.5)
_NO_IDS = (*_NO_ARRAY, np.zeros((2, 8), np.float32), np.zeros((2, 8), np.complex64))
_NO_DTYPE = ("text", 3, object())
_NO_INT = ("text", 1.5, object(), {"a": 1}, float("nan"))


def _dispatched(**arguments: Any) -> Any:
    """`dispatch` on a mesh of two devices."""
    arrays = {k: arguments.pop(k) for k in ("rows", "group_ids")}
    spec = PartitionSpec("ep")
    inside = lambda: dispatch(**arrays, **arguments).rows
    return jax.shard_map(
        inside, mesh=jax.make_mesh((2,), ("ep",)), in_specs=(), out_specs=spec, check_vma=False
    )()


# A name that messages begin with, the function, a legal call, and what each argument may not be.
_CALLS: list[tuple[str, Callable[..., Any], dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    (
        "dot_product_attention",
        ejkernel.dot_product_attention,
        {"query": _X, "key": _X, "value": _X},
        {
            "query": (*_NO_ARRAY, None, _X[0], _X[:, :, :, :3], _X[..., None], _X.astype("c8")),
            "key": (*_NO_ARRAY, None, _X[0], _X[:1], _X[:, :7], _X[..., :3], _X.astype("i4")),
            "value": (*_NO_ARRAY, None, _X[0], _X[:1], _X[:, :7], _X.astype("f2")),
            "bias": (*_NO_ARRAY, np.ones((3, 8, 8), np.float32), np.ones((2, 2, 8, 7), "f4")),
            "mask": (*_NO_ARRAY, np.ones((3, 8, 8), bool), np.ones((2, 2, 8, 8), "f4")),
            "scale": ("text", object(), [1.0, 2.0], 1j),
            "is_causal": _NO_FLAG,
            "query_seq_lengths": (*_NO_ARRAY, np.ones(3, "i4"), np.ones(2, "f4"), _IDS),
            "key_value_seq_lengths": (*_NO_ARRAY, np.ones(3, "i4"), np.ones(2, "f4"), _IDS),
            "local_window_size": ("text", 1.5, (1, 2, 3), (-1, 2), object(), -1),
            "implementation": ("text", 3, object(), ["xla"]),
            "platform": ("text", 3, object(), ["xla"]),
            "return_residual": _NO_FLAG,
        },
    ),
    *(
        (
            function.__name__,
            function,
            {"x": _IDS, "shards": 2, "placement": "zigzag"},
            {
                "x": ("text", object(), None, {"a": 1}, [[1, 2], [3]], _IDS[:, :6], np.ones(8)),
                "shards": (*_NO_SIZE, 3, 16),
                "placement": ("text", 3, None, ["zigzag"], object()),
                "axis": (2, -3, 1.5, "text", None, [1], object()),
            },
        )
        for function in (permute_sequence, restore_sequence)
    ),
    (
        "dispatch",
        _dispatched,
        {"rows": _X[0], "group_ids": _IDS[0], "axis_name": "ep", "experts": 4},
        {
            "rows": ("text", object(), None, {"a": 1}, [[1, 2], [3]], _X[0, :7], np.float32(1)),
            "group_ids": (*_NO_IDS, None, _IDS, _IDS[0, :7], _IDS[0].astype("f4")),
            "axis_name": ("other", 3, object(), None, ("ep", "other")),
            "experts": (*_NO_SIZE, 3),
            "capacity": (0, -1, 1.5, "text", [1], float("nan"), object()),
        },
    ),
    (
        "MaskInfo.from_segments",
        ejkernel.MaskInfo.from_segments,
        {"q_segment_ids": _IDS},
        {
            "q_segment_ids": (*_NO_IDS, None, _IDS[0], _IDS[None]),
            "kv_segment_ids": (*_NO_IDS, _IDS[0], np.zeros((3, 8), np.int32)),
            "q_positions": (*_NO_IDS, _IDS[:, :7], np.zeros((3, 8), np.int32)),
            "kv_positions": (*_NO_IDS, _IDS[:, :7], np.zeros((3, 8), np.int32)),
            "is_attn_mask": _NO_FLAG,
        },
    ),
    (
        "MaskInfo.from_attention_mask",
        ejkernel.MaskInfo.from_attention_mask,
        {"attention_mask": np.ones((2, 8, 8), bool)},
        {
            "attention_mask": (*_NO_IDS, None, _IDS[0], np.ones((1, 1, 1, 8, 8), bool)),
            "q_positions": (*_NO_IDS, _IDS[:, :7]),
            "kv_positions": (*_NO_IDS, _IDS[:, :7]),
            "mask_is_valid": _NO_FLAG,
        },
    ),
    (
        "MaskInfo.from_cu_seqlens",
        ejkernel.MaskInfo.from_cu_seqlens,
        {"cu_seqlens_q": np.array([0, 2, 5]), "max_q_len": 8, "format": "packed"},
        {
            "cu_seqlens_q": (*_NO_IDS, None, _IDS, np.array([1, 2]), np.array([0, 3, 2])),
            "cu_seqlens_kv": (*_NO_IDS, _IDS, np.array([0, 9, 10]), np.array([0, 2])),
            "max_q_len": (*_NO_SIZE[1:], 4),
            "max_kv_len": (-1, 1.5, "text", [1], object(), 4),
            "format": ("text", 3, None, object(), ["packed"]),
        },
    ),
    (
        "MaskInfo.from_random",
        ejkernel.MaskInfo.from_random,
        {"batch_size": 2, "q_len": 8},
        {
            "batch_size": _NO_SIZE[1:],
            "q_len": _NO_SIZE[1:],
            "kv_len": (-1, 1.5, "text", [1], object()),
            "sparsity": (-0.1, 1.1, float("nan"), "text", None, object(), [0.5]),
            "seed": ("text", 1.5, None, object()),
        },
    ),
    (
        "MaskInfo.dynamic_init",
        ejkernel.MaskInfo.dynamic_init,
        {"input_ids": _IDS},
        {
            "input_ids": (*_NO_ARRAY[:4], None, _IDS[0], _IDS[None]),
            "mask_info": (3, "text", object(), _IDS),
            "attention_mask": (*_NO_IDS, _IDS[0]),
        },
    ),
    (
        "MaskInfo.create_chunked_attention_mask",
        ejkernel.MaskInfo.create_chunked_attention_mask,
        {"chunk_size": 2, "q_len": 8},
        {
            "chunk_size": _NO_SIZE,
            "q_len": _NO_SIZE[1:],
            "kv_len": (-1, 1.5, "text", [1], object()),
            "offset": ("text", 1.5, None, object()),
            "dtype": _NO_DTYPE,
        },
    ),
    *(
        (f"MaskInfo.{name}", getattr(_MASK, name), legal, spoils)
        for name, legal, spoils in (
            ("apply_causal", {}, {"offset": (*_NO_INT, None, [[1, 2]], np.ones(3, "i4"))}),
            (
                "apply_sliding_window",
                {"sliding_window": 3},
                {
                    "sliding_window": (*_NO_INT, None, (1, 2, 3), (-1, 2), -1),
                    "offset": (*_NO_INT, None),
                    "mode": ("text", 3, object(), ["decode"]),
                },
            ),
            (
                "apply_kv_lengths",
                {"kv_lengths": np.array([3, 4])},
                {
                    "kv_lengths": (*_NO_INT, None, np.ones(3, "i4"), np.ones((2, 2), "i4")),
                    "q_len": (*_NO_INT, 4, -1),
                    "end_index": (*_NO_INT, 3),
                    "sliding_window": (*_NO_INT, -1),
                },
            ),
            (
                "apply_chunked",
                {"chunk_size": 2},
                {"chunk_size": (0, -1, *_NO_INT, None), "offset": (*_NO_INT, None)},
            ),
            (
                "apply_token_type_ids",
                {"token_type_ids": _IDS},
                {"token_type_ids": (*_NO_IDS, None, _IDS[0, :7], np.zeros((3, 8), np.int32))},
            ),
            ("materialize_attention_mask", {}, {"dtype": _NO_DTYPE}),
            ("materialize_segment_ids", {}, {"per_head": _NO_FLAG}),
            ("to_dtype", {"dtype": bool}, {"dtype": _NO_DTYPE}),
            ("create_bias", {}, {"dtype": (*_NO_DTYPE, "int32")}),
            ("segment_lens", {"max_segments": 2}, {"max_segments": _NO_SIZE[1:]}),
            ("to_packed_cu_seqlens", {"max_segments": 2}, {"max_segments": _NO_SIZE[1:]}),
            (
                "block_map",
                {"block_q": 4, "block_k": 4},
                {"block_q": _NO_SIZE, "block_k": _NO_SIZE},
            ),
        )
    ),
]
NAMES = [name for name, _, _, _ in _CALLS]


class _Elsewhere(Illegal):
    """A call of a function that is no operation."""

    def run(self) -> Any:
        (call,) = [x for x in _CALLS if x[0] == self.operation]
        return call[1](**self.arguments)

    def said_by(self) -> tuple[str, ...]:
        """`dot_product_attention` leaves most checks to `flash_attention`."""
        return (f"{self.operation}: ", "MaskInfo", "flash_attention: ")


def every(name: str) -> Iterator[Illegal]:
    """All ways in which the call of this function is spoiled."""
    (call,) = [x for x in _CALLS if x[0] == name]
    _, function, legal, spoils = call
    function(**legal)  # it is legal before
    for argument, values in spoils.items():
        for value in values:
            yield _Elsewhere(name, {**legal, argument: value}, f"{argument}: {value!r}"[:60])
