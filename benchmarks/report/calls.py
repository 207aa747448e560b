"""The calls that were timed on a GPU, in words, read from the benchmark scripts."""

import sys
from pathlib import Path

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


FLASH = {case.name: flash(case) for case in flash_cases.CASES}
# Keys and values in bfloat16, of calls with one query for each sequence.
DECODE_BYTES = {
    case.name: case.batch * case.length * case.kv_heads * case.dim * 2 * 2
    for case in flash_cases.CASES
    if case.queries == 1
}
GROUPED_MATMUL = {case.name: grouped_matmul(case) for case in grouped_matmul_gpu.CASES}
PAGED = {case.name: paged(case) for case in paged_gpu.CASES}
PAGED["flash"] = f"`flash_attention` on the same lengths as prefill: {PAGED['prefill']}"
PAGED_HEADS = f"{paged_gpu.HEADS} query and {paged_gpu.KV_HEADS} KV heads of {paged_gpu.DIM}"
