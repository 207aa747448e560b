"""Flash attention on a GPU: every platform of ours and its peers, checked, then timed.

python benchmarks/flash_gpu.py                        every case, a table
python benchmarks/flash_gpu.py --json results.json    and the figures as JSON
python benchmarks/flash_gpu.py --cases full,window --passes forward --platforms triton --tune
python benchmarks/flash_gpu.py --peers "jax cudnn,torch sdpa" --limit 30 --total 200
python benchmarks/flash_gpu.py --workers 4            compile in four processes, time in one

A result is compared with the definition in float32 for one key head and its group of query heads:
its error may be at most twice that of plain attention in bfloat16. What is wrong is not timed.
Forward and backward passes count as 4 and 10 operations for each visible pair, head and dimension.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import flash_peers
import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock
from flash_cases import CASES, CAUSAL, TILE, Case, pairs, tiles
from programs import Programs, by_workers, interleaved, seconds_of, within

from ejkernel.cli.provenance import provenance
from ejkernel.kernels.flash_attention import OP, reference
from ejkernel.kernels.flash_attention.api import flash_attention
from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.ops import default_executor, executor, policy_override
from ejkernel.ops.executor import Request

PLATFORMS = ("pallas", "triton", "cuda", "auto")
PEERS = ("jax cudnn", "tokamax", "tokamax tuned", "torch sdpa", "torch flex")


def part(tree: Any, group: int) -> Any:
    """Of arrays [b, t, n, d] the first batch row, and the heads of the first key head."""
    return jax.tree.map(lambda x: x[:1, :, :group], tree)


class Truth:
    """Output and gradients as they are defined, in float32, and in plain bfloat16 attention."""

    def __init__(self, inputs: Inputs, spec: Any, d_out: Any, backward: bool):
        self._spec, self._backward = spec, backward
        self._group = group = inputs.query.shape[2] // inputs.key.shape[2]
        few = inputs._replace(
            query=part(inputs.query, group),
            key=part(inputs.key, 1),
            value=part(inputs.value, 1),
            bias=None if inputs.bias is None else inputs.bias[:, :group],
        )
        wide = jax.tree.map(
            lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, few
        )
        self._arguments = (wide, part(d_out, group).astype(jnp.float32))
        self._results: Any = None

    def lower(self) -> Any:
        """The program that computes it."""
        narrow = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)

        def define(inputs: Inputs, d_out: Any, rounded: Callable) -> list:
            take = lambda q, k, v: (
                reference.forward(inputs._replace(query=q, key=k, value=v), self._spec, rounded).out
            )
            return differentiated(take, inputs, d_out, self._backward)

        with jax.default_matmul_precision("highest"):
            both = lambda *args: [define(*args, rounded) for rounded in (lambda x: x, narrow)]
            return jax.jit(both).lower(*self._arguments)

    def compute(self, compiled: Callable) -> None:
        self._results = compiled(*self._arguments)

    def errors(self, results: list) -> tuple[float, float]:
        """The largest error of a run, and of plain attention, over the largest number there is."""
        right, plain = (each[: len(results)] for each in self._results)
        heads = (self._group, self._group, 1, 1)
        mine = [part(x, n) for x, n in zip(results, heads, strict=False)]
        return _off(mine, right), _off(plain, right)


def _off(results: list, right: list) -> float:
    return max(
        float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
        for a, b in zip(results, right, strict=True)
    )


def ours(spec: Any, platform: str) -> Callable:
    """Query, key, value and the other inputs to the output."""

    def call(q: Any, k: Any, v: Any, inputs: Inputs) -> jax.Array:
        inputs = inputs._replace(query=q, key=k, value=v)
        return executor.run(OP, inputs, spec, Request(platform=platform)).out

    return call


def jitted(function: Callable, backward: bool) -> Callable:
    """(inputs, d_out) -> output and, with `backward`, gradients of query, key and value."""
    return jax.jit(
        lambda inputs, d_out: differentiated(
            lambda q, k, v: function(q, k, v, inputs), inputs, d_out, backward
        )
    )


def differentiated(run: Callable, inputs: Inputs, d_out: Any, backward: bool) -> list:
    if not backward:
        return [run(*inputs[:3])]
    out, pull_back = jax.vjp(run, *inputs[:3])
    return [out, *pull_back(d_out)]


def measure(
    case: Case,
    platforms: list[str],
    others: list[str],
    passes: list[str],
    limit: float,
    end: float,
    alone: Any,
) -> dict[str, dict[str, Any]]:
    """By pass, every implementation of a case: milliseconds, TFLOP/s, errors, or why none.

    `alone` is entered once all is compiled, and keeps others off the device.
    """
    call = default_executor().invocation(flash_attention, **case.arguments())
    inputs, spec = call.inputs, call.spec
    d_out = jax.random.normal(jax.random.key(9), inputs.query.shape, jnp.bfloat16)
    runs = {f"ours {name}": ours(spec, name) for name in platforms}
    for name, function in flash_peers.in_jax(case, spec.softmax_scale).items():
        if name in others:
            runs[name] = lambda q, k, v, inputs, function=function: function(q, k, v, inputs.bias)

    programs, truth = Programs(limit), Truth(inputs, spec, d_out, "both" in passes)
    # Trying matmuls to find the fastest would take longer than the truth itself.
    programs.add("truth", truth.lower, xla_gpu_autotune_level=0)
    for which in passes:
        for name, function in runs.items():
            run = jitted(function, which == "both")
            programs.add(
                (which, name),
                lambda run=run, name=name: flash_peers.lowered(name, run, inputs, d_out),
            )
    programs.wait()
    with alone:
        return timed(case, inputs, d_out, programs, truth, list(runs), others, passes, limit, end)


def timed(
    case: Case,
    inputs: Inputs,
    d_out: Any,
    programs: Programs,
    truth: Truth,
    names: list[str],
    others: list[str],
    passes: list[str],
    limit: float,
    end: float,
) -> dict[str, dict[str, Any]]:
    """The programs of a case, checked, then timed, interleaved."""
    truth.compute(programs["truth"])

    def checked(result_of: Callable) -> dict[str, Any]:
        try:
            with within(min(limit, end - time.monotonic())):
                error, plain = truth.errors(result_of())
        except Exception as failure:  # one that does not support the case must not end the others
            return {"failed": f"{type(failure).__name__}: {failure}"[:300]}
        fine = {"error": error, "plain": plain}
        return fine if error <= 2 * plain else {"wrong": True, **fine}

    seen = pairs(inputs), tiles(inputs)
    report: dict[str, dict[str, Any]] = {}
    for which in passes:
        calls: dict[str, Callable] = {
            name: lambda key=(which, name): programs[key](inputs, d_out) for name in names
        }
        timers = {name: functools.partial(seconds_of, call) for name, call in calls.items()}
        if any(name.startswith("torch") for name in others) and importlib.util.find_spec("torch"):
            torch = flash_peers.Torch(case, inputs, d_out, which == "both")
            for name in filter(others.__contains__, torch.calls):
                calls[name] = functools.partial(torch.result, torch.calls[name])
                timers[name] = functools.partial(torch.seconds, torch.calls[name])
        results = report[which] = {name: checked(call) for name, call in calls.items()}
        right = [name for name, result in results.items() if result.keys() == {"error", "plain"}]
        for name, seconds in interleaved({name: timers[name] for name in right}).items():
            results[name] |= {"ms": 1e3 * seconds[len(seconds) // 2], "best ms": 1e3 * seconds[0]}
        # Two matmuls forward; five backward, one of which repeats the forward.
        work = (14 if which == "both" else 4) * case.heads * case.dim
        with_rates(results, work, *seen)
    return report


def with_rates(results: dict, work: int, seen: int, visited: int) -> dict[str, Any]:
    """The results with TFLOP/s, those that the visited tiles make, and the best peer's share."""
    timed = {name: result["ms"] for name, result in results.items() if "ms" in result}
    best = min((ms for name, ms in timed.items() if not name.startswith("ours")), default=None)
    for name, ms in timed.items():
        results[name]["tflops"] = work * seen / ms / 1e9
        results[name]["tile tflops"] = work * visited * TILE**2 / ms / 1e9
        if best and name.startswith("ours"):
            results[name]["ours / best peer"] = best / ms
    return results


def host(platform: str) -> dict[str, Any]:
    """1,000 calls back to back, through us and of the bare kernel, both under jit."""
    case = Case("host", 1, 1024, 16, 16, 128, CAUSAL)
    call = default_executor().invocation(flash_attention, **case.arguments())
    call = dataclasses.replace(call, platform=None if platform == "auto" else platform)
    choice = default_executor().chooser.choose(call)
    through = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True, platform=platform))
    bare = jax.jit(
        lambda q, k, v: (
            choice.run(
                call.inputs._replace(query=q, key=k, value=v),
                call.spec,
                choice.params,
                device=call.device,
            )[0].out
        )
    )
    text = through.lower(*call.inputs[:3]).compile().as_text() or ""

    def thousand(run: Callable) -> float:
        begin = time.perf_counter()
        for _ in range(1000):
            out = run(*call.inputs[:3])
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    thousand(through), thousand(bare)
    samples = [(thousand(through), thousand(bare)) for _ in range(5)]
    ours_ms, bare_ms = (1e3 * float(np.median(x)) for x in zip(*samples, strict=True))
    return {
        "ms": ours_ms / 1000,
        "bare ms": bare_ms / 1000,
        "ours / bare": ours_ms / bare_ms,
        "callback": "callback" in text,
        "serves": choice.source.platform.value,
    }


def table(report: dict[str, Any]) -> str:
    """A line for each case, pass and platform of ours; its peers in milliseconds."""
    columns = list(dict.fromkeys(n for rows in report["cases"].values() for n in rows))
    peers = [name for name in columns if not name.startswith("ours")]
    lines = [
        "| case | ours | ms | TF | " + " | ".join(peers) + " | ours / best peer |",
        "|" + "---|" * (5 + len(peers)),
    ]
    of = lambda rows, name: f"{rows[name]['ms']:.3f}" if "ms" in rows.get(name, {}) else "-"
    for case, rows in report["cases"].items():
        for name, result in rows.items():
            if not name.startswith("ours"):
                continue
            share = result.get("ours / best peer")
            said = (case, name.removeprefix("ours "), of(rows, name))
            said += (f"{result['tflops']:.0f}" if "tflops" in result else "wrong or failed",)
            said += (*(of(rows, peer) for peer in peers), "-" if share is None else f"{share:.3f}")
            lines.append(f"| {' | '.join(said)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Flash attention on a GPU, and its peers.")
    parser.add_argument("--cases", default=",".join([*(case.name for case in CASES), "host"]))
    parser.add_argument("--platforms", default=",".join(PLATFORMS))
    parser.add_argument("--peers", default=",".join(PEERS), help='or "none"')
    parser.add_argument("--passes", default="forward,both")
    parser.add_argument("--limit", type=float, default=40, help="seconds for one of them in a case")
    parser.add_argument("--total", type=float, default=230, help="seconds for everything")
    parser.add_argument("--tune", action="store_true", help="measure every candidate first")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile")
    parser.add_argument("--lock", help=argparse.SUPPRESS)  # held by the worker on the device
    parser.add_argument("--json", help="where to write the figures")
    chosen = parser.parse_args()
    names = chosen.cases.split(",")
    begin = time.monotonic()
    report: dict[str, Any] = {
        **provenance(),
        "cases": {},
        "host": {},
    }
    platforms, peers = chosen.platforms.split(","), chosen.peers.split(",")
    passes = chosen.passes.split(",")

    def save() -> None:
        report["seconds"] = time.monotonic() - begin
        if chosen.json:
            with open(chosen.json, "w") as file:
                json.dump(report, file, indent=2)

    if chosen.workers > 1:
        for found in by_workers(__file__, [name for name in names if name != "host"], chosen):
            report["cases"] |= found["cases"]
            save()
        names = ["host"] if "host" in names else []  # which nobody may disturb

    alone = FileLock(chosen.lock) if chosen.lock else contextlib.nullcontext()
    with policy_override(default_executor().chooser, allow_autotune=chosen.tune):
        for case in CASES:
            if case.name not in names:
                continue
            end = begin + chosen.total
            if time.monotonic() > end:
                print(f"{case.name}: no time left", flush=True)
                continue
            try:
                measured = measure(case, platforms, peers, passes, chosen.limit, end, alone)
            except Exception as failure:  # no truth, nothing to compare with
                measured = {"": {"all": {"failed": f"{type(failure).__name__}: {failure}"[:300]}}}
            for which, results in measured.items():
                report["cases"][f"{case.name} {which}"] = results
                for who, result in results.items():
                    print(f"{case.name:12} {which:8} {who:14} {said(result)}", flush=True)
            save()
        for platform in platforms if "host" in names else ():
            try:
                with alone:
                    report["host"][platform] = host(platform)
            except Exception as failure:
                report["host"][platform] = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
            print(f"{'host':21} ours {platform:9} {said(report['host'][platform])}", flush=True)
            save()
    print(table(report))


def said(result: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in result.items()
    )


if __name__ == "__main__":
    main()
