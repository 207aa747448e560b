"""The calls that were timed on a GPU, in words, read from the benchmark scripts."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts import one another by name

import flash_cases
import grouped_matmul_gpu
import paged_gpu


def flash(case: flash_cases.Case) -> str:
    """A call of flash attention."""
    heads = f"{case.heads} heads" if case.heads == case.kv_heads else _grouped(case)
    tokens = f"{case.batch} x {case.length}"
    if case.queries:
        tokens = f"{case.batch} x {case.queries} query on {case.length} keys"
    parts = [tokens, f"{heads} of {case.dim}"]
    options = case.options
    parts += ["causal"] if options.get("causal") else []
    parts += [f"{len(case.cuts) - 1} packed documents"] if case.cuts else []
    if "sliding_window" in options:
        parts.append(f"sliding window {options['sliding_window'][0] + 1}")
    if "logits_soft_cap" in options:
        parts.append(f"soft cap {options['logits_soft_cap']:.0f}")
    parts += ["bias for every pair"] if case.bias else []
    return ", ".join(parts)


def _grouped(case: flash_cases.Case) -> str:
    return f"{case.heads} query and {case.kv_heads} KV heads"


def grouped_matmul(case: grouped_matmul_gpu.Case) -> str:
    """A call of grouped matmul."""
    loads = "equally" if case.even else "unevenly"
    return f"{case.rows} rows, {case.experts} {loads} loaded experts of {case.k} x {case.n}"


def paged(case: paged_gpu.Case) -> str:
    """A call of ragged page attention."""
    groups: dict[tuple[int, int], int] = {}
    for queries, length in zip(case.queries, case.lengths, strict=True):
        groups[queries, length] = groups.get((queries, length), 0) + 1
    if len(groups) > 3:
        mean = round(sum(case.lengths) / len(case.lengths))
        said = f"{len(case.lengths)} sequences of uneven length, {mean} on average, decode"
    else:
        said = "; ".join(_sequences(count, *key) for key, count in groups.items())
    cache = "" if case.cache == "bfloat16" else f", cache in {case.cache}"
    return f"{said}; pages of {case.page}{cache}"


def _sequences(count: int, queries: int, length: int) -> str:
    what = "1 sequence" if count == 1 else f"{count} sequences"
    if queries == 1:
        return f"{what} of {length} decode"
    if queries == length:
        return f"{what} of {length} prefill"
    return f"{what} prefill {queries} tokens on a context of {length}"


PASSES = {
    "forward": "forward",
    "both": "forward + backward",
    "rows": "gradient of the rows",
    "weights": "gradient of the weights",
}
_PAGED = {case.name: paged(case) for case in paged_gpu.CASES}
_PAGED["flash"] = f"`flash_attention` on the same lengths as prefill: {_PAGED['prefill']}"
# How `paged_gpu.py` names the ratios of its summary.
_RATIOS = {
    "beside / one_long": "time of one sequence of 131072 with 63 of 512, relative to it alone",
    "fp8 over bfloat16": "speed-up of a cache in float8_e4m3fn over bfloat16",
    "fp8_e5m2 over bfloat16": "speed-up of a cache in float8_e5m2 over bfloat16",
    "int8 over bfloat16": "speed-up of a cache in int8 over bfloat16",
    "prefill over flash": "speed of prefill relative to `flash_attention` on the same lengths",
    "mixed / apart": "time of decode and prefill in one call, relative to two calls",
}


def _mask(case: flash_cases.Case) -> list[str]:
    """The rules of a mask."""
    rules = {
        "causal": case.options.get("causal"),
        "packed documents": case.cuts,
        "sliding window": "sliding_window" in case.options,
    }
    return [name for name, present in rules.items() if present]


def _flash() -> dict[str, dict[str, Any]]:
    found = {}
    for case in flash_cases.CASES:
        told: dict[str, Any] = {"call": flash(case), "mask": _mask(case)}
        if case.queries == 1:  # keys and values in bfloat16
            told["bytes"] = case.batch * case.length * case.kv_heads * case.dim * 2 * 2
        for direction in ("forward", "both"):
            found[f"{case.name} {direction}"] = told | {"pass": PASSES[direction]}
    return found


def _grouped_matmul() -> dict[str, dict[str, Any]]:
    found = {}
    for case in grouped_matmul_gpu.CASES:
        for direction in case.passes:
            told = {"call": grouped_matmul(case), "mask": [], "pass": PASSES[direction]}
            bound = {"bound": case.bars[direction]} if direction in case.bars else {}
            found[f"{case.name} {direction}"] = told | bound
    return found


def _paged() -> dict[str, dict[str, Any]]:
    return {name: {"call": words, "mask": ["causal"]} for name, words in (_PAGED | _RATIOS).items()}


# What is said of every case that a file may hold, by operation.
CALLS = {
    "flash_attention": _flash(),
    "grouped_matmul": _grouped_matmul(),
    "ragged_page_attention_v3": _paged(),
}
