"""Attention over pages on a GPU: checked against float32, then timed.

python benchmarks/paged_gpu.py                        every case, a table
python benchmarks/paged_gpu.py --json results.json    and the figures as JSON
python benchmarks/paged_gpu.py --cases decode_64,prefill --candidates prefill
python benchmarks/paged_gpu.py --workers 4            compile in four processes, time in one

Some rows of some sequences are compared with the definition in float32: their error may be at most
twice that of plain attention in the dtype of the query. What is wrong is not timed. Times are those
of the kernels on the device, by CUPTI, summed; without CUPTI those of many calls back to back.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock
from programs import by_workers, seconds_of

from ejkernel.cli.provenance import PROVENANCE, provenance
from ejkernel.kernels.ragged_page_attention_v3 import triton as paged_triton
from ejkernel.modules import flash_attention, ragged_page_attention_v3
from ejkernel.ops import default_executor
from ejkernel.ops.platform import device_of

HEADS, KV_HEADS, DIM = 32, 8, 128
FIGURES = {"bandwidth": "TB/s", "operations": "TFLOP/s", "time": "us"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: what each sequence has in new tokens and in all, and what its figure is."""

    name: str
    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    page: int = 64
    cache: str = "bfloat16"
    figure: str = "bandwidth"
    bar: float | None = None

    def arguments(self) -> dict[str, Any]:
        per_sequence = -(-max(self.lengths) // self.page)
        used = [-(-length // self.page) for length in self.lengths]
        pages = sum(used) + 7
        order = np.random.default_rng(0).permutation(pages).astype(np.int32)
        table = np.full((len(used), per_sequence), -1, np.int32)
        for row, count, end in zip(table, used, np.cumsum(used), strict=True):
            row[:count] = order[end - count : end]
        cache = (pages, self.page, KV_HEADS, DIM)
        arguments = {
            "query": draw(0, (sum(self.queries), HEADS, DIM), "bfloat16"),
            "key_pages": draw(1, cache, self.cache),
            "value_pages": draw(2, cache, self.cache),
            "cu_seqlens_q": jnp.array([0, *np.cumsum(self.queries)], jnp.int32),
            "cu_seqlens_k": jnp.array([0, *np.cumsum(self.lengths)], jnp.int32),
            "page_indices": jnp.asarray(table),
        }
        if self.cache != "bfloat16":
            one = jnp.ones((KV_HEADS,), jnp.float32)
            arguments |= {"k_scale": one, "v_scale": one}
        return arguments

    def amount(self) -> float:
        """Bytes of keys and values that are read once, or operations of the two matmuls."""
        if self.figure == "bandwidth":
            width = jnp.dtype(self.cache).itemsize * KV_HEADS * DIM * 2
            return float(sum(self.lengths) * width)
        both = zip(self.queries, self.lengths, strict=True)
        pairs = sum(q * (length - q) + q * (q + 1) / 2 for q, length in both)
        return 4.0 * pairs * HEADS * DIM


@functools.cache
def _numbers() -> np.ndarray:
    """Normal numbers, a prime number of them: repeated they differ from page to page."""
    return np.random.default_rng(0).standard_normal(1_000_003).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _repeated(numbers: Any, seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    index = jnp.arange(int(np.prod(shape)), dtype=jnp.uint32) + jnp.uint32(seed * 77_777)
    return numbers[index % numbers.shape[0]].reshape(shape).astype(dtype)


def draw(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Random numbers, quickly made."""
    return _repeated(_numbers(), seed, shape, dtype)


def _uneven() -> tuple[int, ...]:
    some = np.random.default_rng(1).exponential(1.0, 256)
    return tuple(int(x) for x in np.maximum(some / some.mean() * 2048, 1))


ONES = (1,) * 64
LONG = 131072
CASES = (
    Case("decode_64", ONES, (8192,) * 64, bar=3.8),
    Case("decode_16", ONES, (8192,) * 64, page=16, bar=3.4),
    Case("decode_256", ONES, (8192,) * 64, page=256),
    Case("uneven", (1,) * 256, _uneven(), bar=3.4),
    Case("one_long", (1,), (LONG,), bar=3.2),
    Case("short", (1,) * 8, (512,) * 8, figure="time", bar=25.0),
    Case("beside", ONES, (LONG, *(512,) * 63), figure="time"),
    Case("fp8", ONES, (8192,) * 64, cache="float8_e4m3fn"),
    Case("fp8_e5m2", ONES, (8192,) * 64, cache="float8_e5m2"),
    Case("int8", ONES, (8192,) * 64, cache="int8"),
    Case("prefill", (4096,) * 8, (4096,) * 8, figure="operations"),
    Case("chunk", (1024,) * 8, (8192,) * 8, figure="operations"),
    Case("mixed", (1,) * 56 + (2048,) * 8, (8192,) * 56 + (2048,) * 8, figure="time"),
    Case("mixed_decodes", (1,) * 56, (8192,) * 56, figure="time"),
    Case("mixed_prefills", (2048,) * 8, (2048,) * 8, figure="time"),
)


def plain(query: Any, keys: Any, values: Any, positions: Any, rounded: Callable) -> jax.Array:
    """Attention of rows [r, g, h] at these positions over keys [s, h], rounded on its way."""
    logits = DIM**-0.5 * rounded(jnp.einsum("rgh,sh->grs", rounded(query), rounded(keys)))
    seen = jnp.arange(keys.shape[0]) <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1)
    return rounded(jnp.einsum("grs,sh->rgh", rounded(weights), rounded(values)))


@functools.cache
def compared(case: Case) -> Callable:
    """(arguments, output) -> largest error of it, that of plain attention, the largest number."""
    narrow = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    starts = np.cumsum([0, *case.queries])
    group = HEADS // KV_HEADS

    def three(sequence: int, head: int, arguments: dict[str, Any], out: jax.Array) -> jax.Array:
        q, length = case.queries[sequence], case.lengths[sequence]
        rows = np.unique(np.linspace(0, q - 1, 17).astype(int))
        pages = arguments["page_indices"][sequence, : -(-length // case.page)]
        heads = slice(head * group, (head + 1) * group)
        keys, values = (
            arguments[name][pages, :, head].reshape(-1, DIM)[:length].astype(jnp.float32)
            for name in ("key_pages", "value_pages")
        )
        at = starts[sequence] + rows
        call = (
            arguments["query"][at, heads].astype(jnp.float32),
            keys,
            values,
            jnp.asarray(length - q + rows),
        )
        with jax.default_matmul_precision("highest"):
            truth = plain(*call, lambda x: x)
            narrowed = plain(*call, narrow)
        got = out[at, heads].astype(jnp.float32)
        return jnp.stack([jnp.abs(x).max() for x in (got - truth, narrowed - truth, truth)])

    last = len(case.queries) - 1
    return jax.jit(lambda *call: jnp.maximum(three(0, 0, *call), three(last, KV_HEADS - 1, *call)))


def errors(case: Case, arguments: dict[str, Any], out: jax.Array) -> tuple[float, float]:
    """Largest error of the output and of plain attention, over the largest number there is."""
    ours, theirs, largest = np.asarray(compared(case)(arguments, out))
    return float(ours / largest), float(theirs / largest)


def device_times(run: Callable, *args: Any, calls: int = 12) -> dict[str, float]:
    """Milliseconds of the kernels of one call by name, and their sum; medians of several calls."""
    try:
        from jax.experimental.mosaic.gpu.profiler import measure

        _, found = measure(run, aggregate=False, iterations=calls)(*args)
    except Exception as failure:  # not on every machine
        return {
            "all": 1e3 * seconds_of(functools.partial(run, *args)),
            f"without CUPTI: {failure}"[:60]: 0.0,
        }
    assert found is not None
    middle = sorted(found, key=lambda one: sum(ms for _, ms in one))[len(found) // 2]
    times: dict[str, float] = {"all": sum(ms for _, ms in middle)}
    for name, ms in middle:
        times[name[:24]] = times.get(name[:24], 0.0) + ms
    return times


def configurations(arguments: dict[str, Any]) -> list[Any]:
    """What the tuner may choose for a call."""
    found = []

    def note(arguments: dict[str, Any]) -> None:
        call = default_executor().invocation(ragged_page_attention_v3, **arguments)
        device = device_of(jax.tree.leaves(call.inputs))
        chosen = paged_triton.IMPLEMENTATION.forward
        assert chosen is not None
        found.extend(chosen.choices(call.inputs, call.spec, device))

    jax.eval_shape(note, arguments)
    return found


def attention(platform: str, cfg: Any) -> Callable:
    """The call as one program."""
    return jax.jit(lambda x: ragged_page_attention_v3(**x, platform=platform, cfg=cfg))


def timed(case: Case, arguments: dict[str, Any], run: Callable) -> dict[str, Any]:
    """One case under one configuration."""
    error, allowed = errors(case, arguments, run(arguments))
    if not error <= 2 * allowed:  # NaN is wrong too
        return {"wrong": error, "plain": allowed}
    times = device_times(run, arguments)
    milliseconds = times.pop("all")
    result: dict[str, Any] = {"ms": milliseconds, "error": error, "plain": allowed}
    if case.figure == "time":
        result["us"] = 1e3 * milliseconds
    else:
        result[FIGURES[case.figure]] = case.amount() / milliseconds / 1e9
    return result | {"kernels_us": {name: round(1e3 * ms, 1) for name, ms in times.items()}}


def flash(case: Case, lock: Any) -> dict[str, Any]:
    """The same prefill by our flash attention in Triton, whose keys lie one after the other."""
    count, length = len(case.queries), case.queries[0]
    shapes = [(count, length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    run = jax.jit(lambda *x: flash_attention(*x, causal=True, platform="triton"))
    run.lower(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)).compile()
    with lock:
        arrays = [draw(seed, shape, "bfloat16") for seed, shape in enumerate(shapes)]
        milliseconds = device_times(run, *arrays)["all"]
    return {"ms": milliseconds, "TFLOP/s": case.amount() / milliseconds / 1e9}


def paged(case: Case, platform: str, candidates: bool, lock: Any) -> Iterator[dict[str, Any]]:
    """The results of a case under the guess, or under all configurations."""
    shapes = jax.eval_shape(case.arguments)
    for cfg in configurations(shapes) if candidates else [None]:
        result: dict[str, Any] = {}
        if cfg is not None:
            result["cfg"] = [v for v in cfg.to_dict().values() if isinstance(v, int)]
        if case.bar is not None:
            result["bar"] = case.bar
        try:
            run = attention(platform, cfg)
            run.lower(shapes).compile()
            with lock:
                result |= timed(case, case.arguments(), run)
        except Exception as failure:  # one that fails must not end the others
            result["failed"] = f"{type(failure).__name__}: {failure}"[:300]
        yield result


def say(name: str, result: dict[str, Any]) -> None:
    shown = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in result.items()
    )
    print(f"{name:16} {', '.join(shown)}", flush=True)


def summary(cases: dict[str, Any]) -> dict[str, float]:
    """The figures that compare two cases."""
    ms = {name: result["ms"] for name, result in cases.items() if "ms" in result}
    found: dict[str, float] = {}
    if {"beside", "one_long"} <= ms.keys():
        found["beside / one_long (at most 1.2)"] = ms["beside"] / ms["one_long"]
    for name in ("fp8", "fp8_e5m2", "int8"):
        if {name, "decode_64"} <= ms.keys():
            found[f"{name} over bfloat16 (at least 1.6)"] = ms["decode_64"] / ms[name]
    if {"prefill", "flash"} <= ms.keys():
        found["prefill over flash (at least 0.9)"] = ms["flash"] / ms["prefill"]
    if {"mixed", "mixed_decodes", "mixed_prefills"} <= ms.keys():
        apart = ms["mixed_decodes"] + ms["mixed_prefills"]
        found["mixed / apart (at most 1.15)"] = ms["mixed"] / apart
    return found


def work(
    chosen: argparse.Namespace, names: list[str], lock: Any, keep: Callable[[dict], None]
) -> dict[str, Any]:
    """Cases one after the other, written down as they come."""
    known = {case.name: case for case in CASES}
    results: dict[str, Any] = {}
    for name in names:
        if name == "flash":
            found = [flash(known["prefill"], lock)]
        else:
            every = name in chosen.candidates.split(",")
            found = paged(known[name], chosen.platform, every, lock)
        for result in found:
            say(name, result)
            best = results.get(name, {}).get("ms", float("inf"))
            if name not in results or result.get("ms", float("inf")) < best:
                results[name] = result
            keep(results)
    return results


def keep(path: str | None, source: dict[str, Any], results: dict[str, Any]) -> None:
    """Write what was measured so far."""
    if path:
        report = {**source, "cases": results, "summary": summary(results)}
        Path(path).write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention over pages on a GPU.")
    parser.add_argument("--cases", default=",".join(["flash", *(case.name for case in CASES)]))
    parser.add_argument("--platform", default="triton")
    parser.add_argument("--candidates", default="", help="cases to time in all configurations")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--lock", help=argparse.SUPPRESS)  # held by the worker on the device
    chosen = parser.parse_args()
    names = chosen.cases.split(",")
    results: dict[str, Any] = {}
    if chosen.workers > 1:
        for found in by_workers(__file__, names, chosen):
            # This process leaves the device to its workers, and takes their word for what it is.
            source = {name: found[name] for name in PROVENANCE}
            results |= found["cases"]
            keep(chosen.json, source, results)
    else:
        lock = FileLock(chosen.lock) if chosen.lock else contextlib.nullcontext()
        results = work(chosen, names, lock, functools.partial(keep, chosen.json, provenance()))
    for name, value in summary(results).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
