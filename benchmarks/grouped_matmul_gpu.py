"""Grouped matmul on a GPU: every platform of ours beside its peers, checked, then timed.

python benchmarks/grouped_matmul_gpu.py                        every case, a table
python benchmarks/grouped_matmul_gpu.py --json results.json    and the figures as JSON
python benchmarks/grouped_matmul_gpu.py --cases mixtral --platforms triton --passes forward
python benchmarks/grouped_matmul_gpu.py --bars --platforms pallas,triton --peers torch --seconds 45

A result is compared with the product in float32 of the first and last rows of some groups, or of
some columns of some weights: its error may be at most twice that of rounding the exact product to
bfloat16, and a little for sums in another order. What is wrong is not timed. A card that has been
busy for a second runs slower than one that has not, so that all who take part are timed in turns.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import in_turns, seconds_of, torch_seconds_of

from ejkernel.cli.provenance import provenance
from ejkernel.modules import grouped_matmul
from ejkernel.ops import default_executor, policy_override

PLATFORMS = ("pallas", "triton", "xla", "auto")
PASSES = ("forward", "rows", "weights")
PEERS = ("torch", "ragged_dot")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: its shape, how uneven its groups are, which passes are worth timing.

    `bars` are TFLOP/s to reach in a pass, or TB/s of weights where few rows use each.
    """

    name: str
    rows: int
    experts: int
    k: int
    n: int
    even: bool = False
    passes: tuple[str, ...] = PASSES
    few: bool = False  # a few rows for each weight: too slow, or too large, for XLA
    bars: dict[str, float] = dataclasses.field(default_factory=dict)

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
    Case("mixtral", 32768, 8, 4096, 14336, bars={"forward": 660, "weights": 600}),
    Case("moonlight", 65536, 64, 2048, 1408, bars={"forward": 530, "weights": 500}),
    Case("qwen3_up", 131072, 128, 2048, 768, bars={"forward": 480}),
    Case("qwen3_down", 131072, 128, 768, 2048, bars={"forward": 430}),
    Case("decode", 256, 256, 7168, 2048, True, ("forward",), few=True, bars={"forward": 3.6}),
    Case("decode_8", 2048, 256, 7168, 2048, passes=("forward",), few=True),
    Case("small", 1000, 6, 192, 320),
)


def expected(case: Case, which: str, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, Callable]:
    """A part of the exact result, and how to cut it out of the whole."""
    rows, weights, d_out, _ = arrays
    sizes = case.sizes()
    ends = np.cumsum(sizes)
    starts = ends - sizes
    busy = np.nonzero(sizes)[0]
    few = busy[:: max(1, len(busy) // 4)][:4]
    if which == "weights":
        truth = _weight_gradient(rows[:, -64:], d_out[:, -64:], starts[few], ends[few])
        return truth, lambda x: x[few][:, -64:, -64:]
    picked = np.stack([starts[few], ends[few] - 1], axis=1)
    left = (rows if which == "forward" else d_out)[picked]
    truth = _products(left, weights[few], which == "rows")
    return truth, lambda x: x[picked]


@functools.partial(jax.jit, static_argnums=2)
def _products(left: Any, weights: Any, transposed: bool) -> Any:
    form = "erk,enk->ern" if transposed else "erk,ekn->ern"
    wide = (x.astype(jnp.float32) for x in (left, weights))
    return jnp.einsum(form, *wide, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def _weight_gradient(left: Any, right: Any, starts: Any, ends: Any) -> Any:
    index = jnp.arange(left.shape[0])
    inside = (index >= starts[:, None]) & (index < ends[:, None])
    mine = jnp.where(inside[..., None], left.astype(jnp.float32), 0.0)
    right = right.astype(jnp.float32)
    return jnp.einsum("erk,rn->ekn", mine, right, precision=jax.lax.Precision.HIGHEST)


def errors(case: Case, which: str, arrays: tuple, result: jax.Array) -> tuple[float, float]:
    """Largest error of a result and of the rounded exact one, over the largest number."""
    truth, cut = expected(case, which, arrays)
    scale = jnp.abs(truth).max()
    off = lambda x: float(jnp.abs(x.astype(jnp.float32) - truth).max() / scale)
    return off(cut(result)), off(truth.astype(jnp.bfloat16))


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


def measure(
    case: Case, which: str, arrays: tuple, platforms: list[str], peers: list[str]
) -> dict[str, Any]:
    """Every implementation of one pass: milliseconds, TFLOP/s, errors, or why there are none."""
    calls: dict[str, Callable] = {}
    for name in platforms:
        if not (name == "xla" and case.few):
            calls[f"ours {name}"] = functools.partial(ours(which, name), *arrays)
    if "ragged_dot" in peers and not case.few:
        calls["ragged_dot"] = functools.partial(ragged_dot(which), *arrays)
    torch_run = torch_peer(which, arrays) if "torch" in peers else None
    timers: dict[str, Callable] = {}
    if torch_run is not None:
        calls["torch"] = lambda: jnp.from_dlpack(torch_run().contiguous())
        timers["torch"] = functools.partial(torch_seconds_of, torch_run)
    results: dict[str, Any] = {}
    for name, run in calls.items():
        try:
            results[name] = checked(case, which, arrays, run)
        except Exception as failure:  # one that fails must not end the others
            results[name] = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
    right = [name for name, result in results.items() if "error" in result]
    times = in_turns(
        {name: timers.get(name) or functools.partial(seconds_of, calls[name]) for name in right}
    )
    work = 2 * int(np.sum(case.sizes())) * case.k * case.n
    for name, found in times.items():
        seconds = found[len(found) // 2]
        result = results[name]
        result |= {"ms": 1e3 * seconds, "tflops": work / seconds / 1e12}
        result["best tflops"] = work / found[0] / 1e12
        if case.few:
            result["weights TB/s"] = arrays[1].nbytes / seconds / 1e12
    for name, result in results.items():
        if "ms" in result and "ms" in results.get("torch", {}):
            result["of torch"] = results["torch"]["ms"] / result["ms"]
        if "ms" in result and which in case.bars and name.startswith("ours"):
            reached = result["weights TB/s" if case.few else "tflops"]
            result["of bar"] = reached / case.bars[which]
    return results


def checked(case: Case, which: str, arrays: tuple, run: Callable) -> dict[str, Any]:
    error, plain = errors(case, which, arrays, run())
    if not error <= 2 * plain + 1e-5:
        return {"wrong": error, "plain": plain}
    return {"error": error, "plain": plain}


def main() -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description="Grouped matmul on a GPU beside its peers.")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--platforms", default=",".join(PLATFORMS))
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--peers", default=",".join(PEERS), help="empty: our own platforms alone")
    parser.add_argument("--bars", action="store_true", help="only what has a figure to reach")
    parser.add_argument("--seconds", type=float, help="begin no pass after so many seconds")
    parser.add_argument("--tune", action="store_true", help="measure every candidate first")
    parser.add_argument("--json", help="where to write the figures, after each pass")
    chosen = parser.parse_args()
    platforms, peers, passes = (
        [name for name in x.split(",") if name]
        for x in (chosen.platforms, chosen.peers, chosen.passes)
    )
    report: dict[str, Any] = {**provenance(), "cases": {}}
    for case in (x for x in CASES if x.name in chosen.cases.split(",")):
        wanted = [x for x in passes if x in (case.bars if chosen.bars else case.passes)]
        arrays = case.arrays() if wanted else ()
        for which in wanted:
            if chosen.seconds and time.perf_counter() - begin > chosen.seconds:
                print(f"{case.name:10} {which:8} not begun: the time is over", flush=True)
                continue
            with policy_override(default_executor().chooser, allow_autotune=chosen.tune):
                results = measure(case, which, arrays, platforms, peers)
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


if __name__ == "__main__":
    main()
