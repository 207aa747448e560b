"""Flash attention on a GPU: every platform of ours beside its peers, checked, then timed.

python benchmarks/flash_gpu.py                        every case, a table
python benchmarks/flash_gpu.py --json results.json    and the figures as JSON
python benchmarks/flash_gpu.py --cases full,window --platforms triton --tune

A result is compared with the definition in float32 for one key head and its group of query heads:
its error may be at most twice that of plain attention in bfloat16. What is wrong is not timed.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention import OP, reference
from ejkernel.kernels.flash_attention.api import flash_attention
from ejkernel.kernels.flash_attention.inputs import Inputs
from ejkernel.ops import default_executor, executor, policy_override
from ejkernel.ops.executor import Request

PLATFORMS = ("pallas", "triton", "cuda", "xla", "auto")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: its shape, and what it asks for beyond that."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    cuts: tuple[int, ...] = ()  # where documents begin and end
    bias: bool = False

    def arguments(self) -> dict[str, Any]:
        shape = (self.batch, self.length, self.heads, self.dim)
        kv_shape = (self.batch, self.length, self.kv_heads, self.dim)
        draw = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        arguments = {"query": draw(0, shape), "key": draw(1, kv_shape), "value": draw(2, kv_shape)}
        if self.bias:
            arguments["bias"] = draw(3, (1, self.heads, self.length, self.length))
        if self.cuts:
            arguments["cum_seqlens_q"] = jnp.array(self.cuts, jnp.int32)
        return {**arguments, **self.options}


def _documents() -> tuple[int, ...]:
    inner = np.random.default_rng(0).choice(np.arange(1, 16384), 36, replace=False)
    return (0, *map(int, np.sort(inner)), 16384)


CAUSAL = {"causal": True}
CASES = (
    Case("causal", 1, 16384, 16, 16, 128, CAUSAL),
    Case("full", 1, 16384, 16, 16, 128),
    Case("causal_4k", 4, 4096, 16, 16, 128, CAUSAL),
    Case("full_4k", 4, 4096, 16, 16, 128),
    Case("causal_64", 4, 4096, 32, 8, 64, CAUSAL),
    Case("full_64", 4, 4096, 32, 8, 64),
    Case("causal_256", 2, 8192, 8, 8, 256, CAUSAL),
    Case("packed_8", 1, 16384, 16, 16, 128, CAUSAL, tuple(range(0, 16385, 2048))),
    Case("packed_37", 1, 16384, 16, 16, 128, CAUSAL, _documents()),
    Case("window", 1, 16384, 16, 16, 128, CAUSAL | {"sliding_window": (1023, 0)}),
    Case("soft_cap", 1, 16384, 16, 16, 128, CAUSAL | {"logits_soft_cap": 50.0}),
    Case("bias", 1, 4096, 16, 16, 128, bias=True),
)


def pairs(inputs: Inputs) -> int:
    """How many (query, key) pairs of one head the mask allows, over the batch."""
    rule, length = inputs.mask, inputs.query.shape[1]
    rows = min(length, 1024)

    @jax.jit
    def some(start: Any) -> jax.Array:
        return rule.slice(start, rows, 0, length).dense(rows, length).sum()  # type: ignore[union-attr]

    return inputs.query.shape[0] * sum(int(some(i)) for i in range(0, length, rows))


def part(tree: Any, group: int) -> Any:
    """Of arrays [b, t, n, d] the first batch row, and the heads of the first key head."""
    return jax.tree.map(lambda x: x[:1, :, :group], tree)


def errors(inputs: Inputs, spec: Any, run: Callable, backward: bool) -> tuple[float, float]:
    """Largest error of a run and of plain bfloat16 attention, over the largest number there is."""
    group = inputs.query.shape[2] // inputs.key.shape[2]
    few = inputs._replace(
        query=part(inputs.query, group),
        key=part(inputs.key, 1),
        value=part(inputs.value, 1),
        bias=None if inputs.bias is None else inputs.bias[:, :group],
    )
    d_out = jax.random.normal(jax.random.key(9), inputs.query.shape, jnp.bfloat16)

    def define(inputs: Inputs, d_out: Any, rounded: Callable = lambda x: x) -> list:
        take = lambda q, k, v: (
            reference.forward(inputs._replace(query=q, key=k, value=v), spec, rounded).out
        )
        out, pull_back = jax.vjp(take, *inputs[:3])
        return [out, *(pull_back(d_out) if backward else ())]

    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, few
    )
    narrow = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    along = part(d_out, group).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        truth = jax.jit(define)(wide, along)
        plain = jax.jit(functools.partial(define, rounded=narrow))(wide, along)
    got = run(inputs, d_out)
    got = [part(got[0], group), *(part(x, n) for x, n in zip(got[1:], (group, 1, 1), strict=False))]
    off = lambda x: max(
        float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
        for a, b in zip(x, truth, strict=True)
    )
    return off(got), off(plain)


def ours(spec: Any, platform: str, backward: bool) -> Callable:
    """(inputs, d_out) -> output and, with `backward`, gradients of query, key and value."""

    def call(inputs: Inputs, d_out: Any) -> list:
        run = lambda q, k, v: (
            executor.run(
                OP, inputs._replace(query=q, key=k, value=v), spec, Request(platform=platform)
            ).out
        )
        return differentiated(run, inputs, d_out, backward)

    return jax.jit(call)


def differentiated(run: Callable, inputs: Inputs, d_out: Any, backward: bool) -> list:
    if not backward:
        return [run(*inputs[:3])]
    out, pull_back = jax.vjp(run, *inputs[:3])
    return [out, *pull_back(d_out)]


def peers(case: Case, spec: Any, backward: bool) -> dict[str, Callable]:
    """What others offer in JAX for the case, in the same form."""
    found: dict[str, Callable] = {}
    window = case.options.get("sliding_window")
    if not case.cuts and spec.logits_soft_cap is None:
        found["jax.nn cudnn"] = lambda q, k, v, bias: jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            is_causal=bool(case.options.get("causal")),
            local_window_size=window and (window[0], 0),
            implementation="cudnn",
        )
    try:
        import tokamax  # type: ignore[import-not-found]

        if not case.cuts and window is None:
            found["tokamax"] = lambda q, k, v, bias: tokamax.dot_product_attention(
                q,
                k,
                v,
                bias=bias,
                is_causal=bool(case.options.get("causal")),
                logits_soft_cap=spec.logits_soft_cap,
            )
    except ImportError:
        pass

    def jitted(function: Callable) -> Callable:
        return jax.jit(
            lambda inputs, d_out: differentiated(
                lambda q, k, v: function(q, k, v, inputs.bias), inputs, d_out, backward
            )
        )

    return {name: jitted(function) for name, function in found.items()}


def torch_peers(case: Case, inputs: Inputs, spec: Any, backward: bool) -> dict[str, Any]:
    """Torch's attentions, the output checked like that of the others, timed by torch's events."""
    try:
        import torch  # type: ignore[import-not-found]
        from torch.nn.attention import flex_attention as flex  # type: ignore[import-not-found]
    except ImportError:
        return {}
    if not torch.cuda.is_available() or case.bias or "logits_soft_cap" in case.options:
        return {}
    tensors = [
        torch.from_dlpack(x).transpose(1, 2).contiguous().requires_grad_(backward)
        for x in inputs[:3]
    ]
    grouped, length = case.heads != case.kv_heads, case.length
    causal, window = case.options.get("causal"), case.options.get("sliding_window")
    calls: dict[str, Callable] = {}
    if not case.cuts and window is None:
        calls["torch sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            *tensors, is_causal=bool(causal), enable_gqa=grouped
        )
    ids = torch.zeros(length, dtype=torch.int32, device="cuda")
    for i, (a, b) in enumerate(zip(case.cuts, case.cuts[1:], strict=False)):
        ids[a:b] = i
    reach = length if window is None else window[0]

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (ids[q] == ids[k]) & (k <= q) & (q - k <= reach)

    blocks = flex.create_block_mask(visible, None, None, length, length) if causal else None
    compiled = torch.compile(flex.flex_attention)
    calls["torch flex"] = lambda: compiled(*tensors, block_mask=blocks, enable_gqa=grouped)
    results: dict[str, Any] = {}
    for name, call in calls.items():

        def checked(inputs: Inputs, d_out: Any, call: Callable = call) -> list:
            return [jnp.from_dlpack(call().detach().transpose(1, 2).contiguous())]

        error, plain = errors(inputs, spec, checked, backward=False)
        if not error <= 2 * plain:
            results[name] = {"wrong": error, "plain": plain}
            continue

        def run(call: Callable = call) -> None:
            out = call()
            if backward:
                torch.autograd.grad(out, tensors, torch.ones_like(out))

        for _ in range(3):
            run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        samples = []
        for _ in range(5):
            begin.record()
            for _ in range(10):
                run()
            end.record()
            torch.cuda.synchronize()
            samples.append(begin.elapsed_time(end) / 1e4)
        results[name] = {"ms": 1e3 * min(samples), "error": error, "plain": plain}
    return results


def seconds_of(run: Callable, *args: Any, samples: int = 5, at_least: float = 0.1) -> float:
    """Seconds of one call among many back to back; the best of several samples."""
    jax.block_until_ready(run(*args))
    begin = time.perf_counter()
    jax.block_until_ready([run(*args) for _ in range(3)])
    repeats = max(3, int(at_least / max((time.perf_counter() - begin) / 3, 1e-6)))
    best = float("inf")
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(repeats):
            out = run(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - begin) / repeats)
    return best


def measure(case: Case, platforms: list[str], backward: bool) -> dict[str, Any]:
    """Every implementation of one case: seconds, TFLOP/s, errors, or why there are none."""
    call = default_executor().invocation(flash_attention, **case.arguments())
    inputs, spec = call.inputs, call.spec
    # Two matmuls forward; five backward, one of which repeats the forward.
    work = (14 if backward else 4) * pairs(inputs) * case.heads * case.dim
    d_out = jax.random.normal(jax.random.key(9), inputs.query.shape, jnp.bfloat16)
    runs = {f"ours {name}": ours(spec, name, backward) for name in platforms}
    results: dict[str, Any] = {}
    for name, run in (runs | peers(case, spec, backward)).items():
        try:
            error, plain = errors(inputs, spec, run, backward)
            if not error <= 2 * plain:
                results[name] = {"wrong": error, "plain": plain}
                continue
            seconds = seconds_of(run, inputs, d_out)
            results[name] = {"ms": 1e3 * seconds, "error": error, "plain": plain}
        except Exception as failure:  # one that cannot serve must not end the others
            results[name] = {"failed": f"{type(failure).__name__}: {failure}"[:300]}
    results |= torch_peers(case, inputs, spec, backward)
    timed = {name: result["ms"] for name, result in results.items() if "ms" in result}
    others = [ms for name, ms in timed.items() if not name.startswith("ours")]
    for name, ms in timed.items():
        results[name]["tflops"] = work / ms / 1e9
        if others and name.startswith("ours"):
            results[name]["of best peer"] = min(others) / ms
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Flash attention on a GPU beside its peers.")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--platforms", default=",".join(PLATFORMS))
    parser.add_argument("--passes", default="forward,both")
    parser.add_argument("--tune", action="store_true", help="measure every candidate first")
    parser.add_argument("--json", help="where to write the figures")
    chosen = parser.parse_args()
    device = jax.devices()[0]
    versions = {
        name: importlib.metadata.version(name)
        for name in ("ejkernel", "jax", "jaxlib", "triton", "jax-triton", "torch", "tokamax")
        if importlib.util.find_spec(name.replace("-", "_")) is not None
    }
    report: dict[str, Any] = {"device": device.device_kind, "versions": versions, "cases": {}}
    for case in CASES:
        if case.name not in chosen.cases.split(","):
            continue
        for name in chosen.passes.split(","):
            with policy_override(default_executor().chooser, allow_autotune=chosen.tune):
                results = measure(case, chosen.platforms.split(","), name == "both")
            report["cases"][f"{case.name} {name}"] = results
            for who, result in results.items():
                said = ", ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in result.items()
                )
                print(f"{case.name:12} {name:8} {who:14} {said}", flush=True)
            if chosen.json:
                with open(chosen.json, "w") as file:
                    json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
