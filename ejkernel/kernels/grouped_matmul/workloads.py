"""Named calls: the conformance suite, the tuner and the benchmark all read this list."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.grouped_matmul.config import GroupedMatmulConfig
from ejkernel.ops.workload import Draw, Workload, normal, value


def _matrices(
    rows: int = 96, k: int = 24, n: int = 40, weights: int = 6, transposed: bool = False
) -> dict[str, Draw]:
    shape = (n, k) if transposed else (k, n)
    return {"inputs": normal(rows, k), "weights": normal(weights, *shape, scale=k**-0.5)}


def _ids(rows: int = 96, low: int = 0, high: int = 6) -> dict[str, Draw]:
    return {"group_ids": Draw(lambda key, dtype: jax.random.randint(key, (rows,), low, high))}


def _sizes(*sizes: int) -> dict[str, Draw]:
    return {"group_sizes": value(lambda: jnp.array(sizes, jnp.int32))}


def _moe(rows: int, k: int, n: int, experts: int) -> dict[str, Draw]:
    return _matrices(rows, k, n, experts) | _ids(rows, 0, experts)


_TRAIN, _DECODE = frozenset({"tune", "train"}), frozenset({"tune", "decode"})

WORKLOADS = (
    Workload("ids", _matrices(127, 40, 96) | _ids(127)).core(),
    Workload("sizes", _matrices() | _sizes(17, 0, 40, 1, 30, 8)),
    Workload("one_group", _matrices(63, 60, 80, 1) | _sizes(63)),
    Workload("one_row", _matrices(1) | _ids(1)),
    Workload("more_groups_than_rows", _matrices(9, weights=32) | _ids(9, 0, 32)),
    Workload("rows_past_the_sum", _matrices() | _sizes(17, 0, 40, 1, 0, 8)),
    Workload("ids_out_of_range", _matrices() | _ids(96, -2, 9)),
    Workload("transposed", _matrices(transposed=True) | _ids() | {"transpose_rhs": True}),
    Workload(
        "transposed_wider",
        _matrices(96, 192, 16, transposed=True)
        | _sizes(50, 0, 20, 0, 0, 20)
        | {"transpose_rhs": True, "preferred_element_type": jnp.float32},
    ),
    Workload("offset", _matrices(weights=3) | _ids() | {"group_offset": 2}),
    Workload(
        "offset_array",
        _matrices(weights=3)
        | _sizes(17, 3, 40, 1, 20, 8)
        | {"group_offset": value(lambda: jnp.int32(3))},
    ).core(),
    Workload(
        "existing",
        _matrices(weights=3)
        | _ids(96, -1, 7)
        | {"group_offset": 1, "existing_out": normal(96, 40)},
    ),
    Workload(
        "existing_sizes",
        _matrices(weights=2)
        | _sizes(17, 3, 40, 1, 20, 8)
        | {"group_offset": value(lambda: jnp.array([2])), "existing_out": normal(96, 40)},
    ).core(),
    Workload("mixtral_8x7b_up", _moe(8192, 4096, 14336, 8), _TRAIN),
    Workload("mixtral_8x7b_down", _moe(8192, 14336, 4096, 8), _TRAIN),
    Workload("deepseek_v3_up", _moe(32768, 7168, 2048, 256), _TRAIN),
    Workload("deepseek_v3_down", _moe(32768, 2048, 7168, 256), _TRAIN),
    Workload("qwen3_30b_a3b_up", _moe(32768, 2048, 768, 128), _TRAIN),
    Workload("qwen3_30b_a3b_down", _moe(32768, 768, 2048, 128), _TRAIN),
    Workload("mixtral_8x7b_decode", _moe(128, 4096, 14336, 8), _DECODE),
    Workload("mixtral_8x7b_down_decode", _moe(128, 14336, 4096, 8), _DECODE),
    Workload("deepseek_v3_decode", _moe(1024, 7168, 2048, 256), _DECODE),
    Workload("deepseek_v3_down_decode", _moe(1024, 2048, 7168, 256), _DECODE),
    Workload("qwen3_30b_a3b_decode", _moe(512, 2048, 768, 128), _DECODE),
    Workload("qwen3_30b_a3b_down_decode", _moe(512, 768, 2048, 128), _DECODE),
)

# Tiles small enough that the workloads above have several of every size.
CONFIGS = (GroupedMatmulConfig(block_m=16),)
