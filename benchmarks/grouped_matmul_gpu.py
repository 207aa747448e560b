"""Grouped matmul on a GPU: every platform of ours beside its peers, checked, then timed.

python benchmarks/grouped_matmul_gpu.py                        every case, a table
python benchmarks/grouped_matmul_gpu.py --json results.json    and the figures as JSON
python benchmarks/grouped_matmul_gpu.py --cases mixtral --platforms triton --passes forward

A result is compared with the product in float32 of some rows of every group, or of some columns of
some weights: its error may be at most twice that of rounding the exact product to bfloat16, and a
little for sums in another order. What is wrong is not timed.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import grouped_matmul
from ejkernel.ops import default_executor, policy_override

PLATFORMS = ("pallas", "triton", "xla", "auto")
PASSES = ("forward", "rows", "weights")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: its shape, how uneven its groups are, which passes are worth timing."""

    name: str
    rows: int
    experts: int
    k: int
    n: int
    even: bool = False
    passes: tuple[str, ...] = PASSES
    slow: bool = False  # too slow, or too large, for XLA

    def sizes(self) -> np.ndarray:
        if self.even:
            return np.full(self.experts, self.rows // self.experts, np.int32)
        generator = np.random.default_rng(0)
        shares = generator.dirichlet(np.full(self.experts, 4.0))
        return generator.multinomial(self.rows, shares).astype(np.int32)

    def arrays(self) -> tuple[jax.Array, ...]:
        """Rows, weights, gradients of the output, sizes."""
        draw = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        rows = draw(0, (self.rows, self.k))
        weights = draw(1, (self.experts, self.k, self.n))
        return rows, weights, draw(2, (self.rows, self.n)), jnp.asarray(self.sizes())


CASES = (
    Case("small", 1000, 6, 192, 320),
    Case("mixtral", 32768, 8, 4096, 14336),
    Case("moonlight", 65536, 64, 2048, 1408),
    Case("qwen3_up", 131072, 128, 2048, 768),
    Case("qwen3_down", 131072, 128, 768, 2048),
    Case("decode", 256, 256, 7168, 2048, even=True, passes=("forward",), slow=True),
    Case("decode_8", 2048, 256, 7168, 2048, passes=("forward",), slow=True),
)


def expected(case: Case, which: str, arrays: tuple[jax.Array, ...]) -> tuple[np.ndarray, Callable]:
    """A part of the exact result, and how to cut it out of the whole."""
    rows, weights, d_out, sizes = arrays
    ends = np.cumsum(np.asarray(sizes))
    wide = lambda x: np.asarray(x.astype(jnp.float32))
    busy = np.nonzero(np.asarray(sizes))[0]
    few = busy[:: max(1, len(busy) // 4)][:4]
    if which == "weights":
        parts = []
        for e in few:
            inside = slice(ends[e] - int(sizes[e]), ends[e])
            parts.append(wide(rows[inside, -64:]).T @ wide(d_out[inside, -64:]))
        return np.stack(parts), lambda x: x[few][:, -64:, -64:]
    left = rows if which == "forward" else d_out
    picked = np.concatenate([[ends[e] - int(sizes[e]), ends[e] - 1] for e in few])
    groups = np.repeat(few, 2)
    parts = []
    for row, e in zip(picked, groups, strict=True):
        weight = wide(weights[e])
        parts.append(wide(left[row]) @ (weight if which == "forward" else weight.T))
    return np.stack(parts), lambda x: x[picked]


def errors(case: Case, which: str, arrays: tuple, result: jax.Array) -> tuple[float, float]:
    """Largest error of a result and of the rounded exact one, over the largest number."""
    truth, cut = expected(case, which, arrays)
    scale = np.abs(truth).max()
    got = np.asarray(cut(result).astype(jnp.float32))
    plain = np.asarray(jnp.asarray(truth).astype(jnp.bfloat16).astype(jnp.float32))
    return float(np.abs(got - truth).max() / scale), float(np.abs(plain - truth).max() / scale)


def ours(which: str, platform: str) -> Callable:
    """(rows, weights, d_out, sizes) -> the output or one of the gradients."""

    def call(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        run = lambda rows, weights: grouped_matmul(
            rows, weights, group_sizes=sizes, platform=platform
        )
        return differentiated(run, which, rows, weights, d_out)

    return jax.jit(call)


def differentiated(run: Callable, which: str, rows: Any, weights: Any, d_out: Any) -> Any:
    """What is not asked for is not computed: XLA drops it."""
    if which == "forward":
        return run(rows, weights)
    if which == "rows":
        return jax.vjp(lambda rows: run(rows, weights), rows)[1](d_out)[0]
    return jax.vjp(lambda weights: run(rows, weights), weights)[1](d_out)[0]


def ragged_dot(which: str) -> Callable:
    def call(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        run = lambda rows, weights: jax.lax.ragged_dot(rows, weights, sizes)
        return differentiated(run, which, rows, weights, d_out)

    return jax.jit(call)


def torch_peer(which: str, arrays: tuple[jax.Array, ...]) -> Callable | None:
    """Torch's grouped matmul, in the same pass."""
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return None
    if not torch.cuda.is_available() or not hasattr(torch, "_grouped_mm"):
        return None
    rows, weights, d_out, sizes = (torch.from_dlpack(x) for x in arrays)
    offsets = torch.cumsum(sizes, 0).to(torch.int32)
    if which == "forward":
        return lambda: torch._grouped_mm(rows, weights, offs=offsets)
    if which == "rows":
        return lambda: torch._grouped_mm(d_out, weights.transpose(-2, -1), offs=offsets)
    return lambda: torch._grouped_mm(rows.transpose(0, 1), d_out, offs=offsets)


def seconds_of(run: Callable, *args: Any, samples: int = 5, at_least: float = 0.05) -> float:
    """Seconds of one call among many back to back; the median of several samples."""
    jax.block_until_ready(run(*args))
    begin = time.perf_counter()
    jax.block_until_ready([run(*args) for _ in range(2)])
    repeats = max(2, min(200, int(at_least / max((time.perf_counter() - begin) / 2, 1e-6))))
    found = []
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(repeats):
            out = run(*args)
        jax.block_until_ready(out)
        found.append((time.perf_counter() - begin) / repeats)
    return sorted(found)[len(found) // 2]


def torch_seconds_of(run: Callable, samples: int = 5, repeats: int = 10) -> float:
    import torch  # type: ignore[import-not-found]

    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(samples):
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / repeats)
    return sorted(found)[len(found) // 2]


def measure(case: Case, which: str, platforms: list[str], peers: bool) -> dict[str, Any]:
    """Every implementation of one pass: milliseconds, TFLOP/s, errors, or why there are none."""
    arrays = case.arrays()
    runs = {
        f"ours {name}": ours(which, name) for name in platforms if not (name == "xla" and case.slow)
    }
    if peers and not case.slow:
        runs["ragged_dot"] = ragged_dot(which)
    results: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            results[name] = checked(case, which, arrays, lambda run=run: run(*arrays))
            if "wrong" not in results[name]:
                results[name]["ms"] = 1e3 * seconds_of(run, *arrays)
        except Exception as failure:  # one that cannot serve must not end the others
            results[name] = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
    if peers and (torch_run := torch_peer(which, arrays)):
        try:
            as_jax = lambda: jnp.from_dlpack(torch_run().contiguous())
            results["torch"] = checked(case, which, arrays, as_jax)
            results["torch"]["ms"] = 1e3 * torch_seconds_of(torch_run)
        except Exception as failure:
            results["torch"] = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
    work = 2 * int(np.sum(case.sizes())) * case.k * case.n
    for result in results.values():
        if "ms" in result:
            result["tflops"] = work / result["ms"] / 1e9
            if case.slow:
                result["weights TB/s"] = arrays[1].nbytes / result["ms"] / 1e9
            if "ms" in results.get("torch", {}):
                result["of torch"] = results["torch"]["ms"] / result["ms"]
    return results


def checked(case: Case, which: str, arrays: tuple, run: Callable) -> dict[str, Any]:
    error, plain = errors(case, which, arrays, run())
    if not error <= 2 * plain + 1e-5:
        return {"wrong": error, "plain": plain}
    return {"error": error, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description="Grouped matmul on a GPU beside its peers.")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--platforms", default=",".join(PLATFORMS))
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--no-peers", action="store_true", help="time our own platforms alone")
    parser.add_argument("--tune", action="store_true", help="measure every candidate first")
    parser.add_argument("--json", help="where to write the figures")
    chosen = parser.parse_args()
    versions = {
        name: importlib.metadata.version(name)
        for name in ("ejkernel", "jax", "jaxlib", "triton", "jax-triton", "torch")
        if importlib.util.find_spec(name.replace("-", "_")) is not None and _installed(name)
    }
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": versions,
        "cases": {},
    }
    platforms = [name for name in chosen.platforms.split(",") if name]
    for case in CASES:
        if case.name not in chosen.cases.split(","):
            continue
        for which in (name for name in chosen.passes.split(",") if name in case.passes):
            with policy_override(default_executor().chooser, allow_autotune=chosen.tune):
                results = measure(case, which, platforms, not chosen.no_peers)
            report["cases"][f"{case.name} {which}"] = results
            for who, result in results.items():
                said = ", ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in result.items()
                )
                print(f"{case.name:10} {which:8} {who:12} {said}", flush=True)
            if chosen.json:
                with open(chosen.json, "w") as file:
                    json.dump(report, file, indent=2)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
