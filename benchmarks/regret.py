"""How much slower the heuristics are than the fastest configuration, on calls drawn at random.

python benchmarks/regret.py --json benchmarks/results/h200/regret.json
python benchmarks/regret.py --ops flash_attention --first 20 --count 20 --workers 5 --minutes 6
python benchmarks/regret.py --summary --json benchmarks/results/h200/regret.json

Call number i of an operation is always the same one, so that several runs add up: what the file
holds already is not measured again. Of each call every candidate is checked and timed, forward and
backward; the fastest and the heuristic's choice are then timed again, interleaved. The regret is
the time of the latter over that of the former, minus one; zero where they are the same.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock

from ejkernel import modules
from ejkernel.cli.provenance import provenance
from ejkernel.errors import TuningWarning
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Tuner
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.tuner import describe
from ejkernel.types import MaskInfo

Call = tuple[dict[str, Any], dict[str, Any]]  # shapes of arrays, and other arguments
BYTES = 2  # of a bfloat16


def _array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _pick(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _length(rng: np.random.Generator, low: int, high: int) -> int:
    """Log-uniform; mostly a multiple of 64, sometimes any number."""
    length = int(np.exp(rng.uniform(np.log(low), np.log(high))))
    return length if rng.random() < 0.2 else max(64, length // 64 * 64)


def flash_attention(rng: np.random.Generator) -> Call:
    length = _length(rng, 256, 24000)
    dim = _pick(rng, 64, 64, 80, 96, 128, 128, 128, 128, 192, 256)
    kv_heads, group = _pick(rng, 2, 4, 8, 8, 16, 32), _pick(rng, 1, 1, 2, 4, 8)
    # At most some 40 TFLOP in the forward pass, and 2**29 elements of queries.
    heads = kv_heads * group
    most = min(2.0e13 / (length**2 * heads * dim), 2.0**29 / (length * heads * dim))
    batch = max(1, min(_pick(rng, 1, 2, 4, 8, 16), int(most)))
    arrays = {
        "query": _array(batch, length, heads, dim),
        "key": _array(batch, length, kv_heads, dim),
        "value": _array(batch, length, kv_heads, dim),
    }
    options: dict[str, Any] = {"causal": rng.random() < 0.8}
    kind = rng.random()
    if kind < 0.15:
        options |= {"causal": True, "sliding_window": (_pick(rng, 128, 512, 1024, 4096) - 1, 0)}
    elif kind < 0.3:
        documents = int(rng.integers(2, 2 + max(1, length // 400)))
        cuts = np.sort(rng.choice(np.arange(1, length), documents - 1, replace=False))
        ids = np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
        options["mask_info"] = MaskInfo.from_segments(np.broadcast_to(ids, (batch, length)))
    if rng.random() < 0.08:
        options["logits_soft_cap"] = 50.0
    if rng.random() < 0.06 and length <= 4096:
        arrays["bias"] = _array(1, heads, length, length)
    return arrays, options


def blocksparse_attention(rng: np.random.Generator) -> Call:
    size = _pick(rng, 64, 128)
    blocks = int(np.exp(rng.uniform(np.log(8), np.log(96))))
    dim, kv_heads, group = _pick(rng, 64, 128, 128), _pick(rng, 4, 8, 16), _pick(rng, 1, 2, 4)
    length, batch = blocks * size, _pick(rng, 1, 2)
    mask = rng.random((blocks, blocks)) < rng.uniform(0.05, 0.5)
    mask |= np.eye(blocks, dtype=bool)
    arrays = {
        "query": _array(batch, length, kv_heads * group, dim),
        "key": _array(batch, length, kv_heads, dim),
        "value": _array(batch, length, kv_heads, dim),
    }
    return arrays, {"block_mask": jnp.asarray(mask), "block_size": size}


def grouped_matmul(rng: np.random.Generator) -> Call:
    experts = _pick(rng, 8, 16, 32, 64, 128)
    sizes = (768, 1024, 1408, 1536, 2048, 2880, 4096, 7168)
    k, n = _pick(rng, *sizes), _pick(rng, *sizes)
    while experts * k * n > 2**30:
        experts //= 2
    rows = _length(rng, 64, 60000)
    uneven = rng.dirichlet(np.full(experts, _pick(rng, 0.5, 2.0, 20.0)))
    ids = rng.choice(experts, rows, p=uneven).astype(np.int32)
    arrays = {"inputs": _array(rows, k), "weights": _array(experts, k, n)}
    return arrays, {"group_ids": jnp.asarray(ids)}


def ragged_page_attention_v3(rng: np.random.Generator) -> Call:
    sequences = _pick(rng, 1, 4, 8, 16, 32, 64, 128, 256)
    longest = int(np.exp(rng.uniform(np.log(256), np.log(32768))))
    longest = min(longest, 2**21 // sequences)
    lengths = np.maximum(16, (longest * rng.uniform(0.3, 1.0, sequences)).astype(int))
    new = np.ones(sequences, int)
    if rng.random() < 0.35:  # prefill, or a mixture
        some = rng.random(sequences) < _pick(rng, 0.2, 1.0)
        new = np.where(some, np.minimum(lengths, int(_length(rng, 64, 4096))), 1)
    page, dim = _pick(rng, 16, 32, 64, 128), _pick(rng, 64, 128, 128)
    kv_heads, group = _pick(rng, 1, 2, 4, 8, 8), _pick(rng, 1, 4, 8)
    used = -(-lengths // page)
    table = np.full((sequences, int(used.max())), -1, np.int32)
    order = rng.permutation(int(used.sum())).astype(np.int32)
    for row, count, end in zip(table, used, np.cumsum(used), strict=True):
        row[:count] = order[end - count : end]
    arrays = {
        "query": _array(int(new.sum()), kv_heads * group, dim),
        "key_pages": _array(int(used.sum()), page, kv_heads, dim),
        "value_pages": _array(int(used.sum()), page, kv_heads, dim),
    }
    lists = {
        "cu_seqlens_q": jnp.array([0, *np.cumsum(new)], jnp.int32),
        "cu_seqlens_k": jnp.array([0, *np.cumsum(lengths)], jnp.int32),
        "page_indices": jnp.asarray(table),
    }
    return arrays, lists


OPS: dict[str, tuple[Callable[[np.random.Generator], Call], int]] = {
    "flash_attention": (flash_attention, 60),
    "grouped_matmul": (grouped_matmul, 60),
    "blocksparse_attention": (blocksparse_attention, 20),
    "ragged_page_attention_v3": (ragged_page_attention_v3, 20),
}


def call(op: str, number: int) -> Invocation:
    """The call of this number, with shapes in place of arrays of floats."""
    seed = np.random.SeedSequence([sorted(OPS).index(op), number])
    arrays, rest = OPS[op][0](np.random.default_rng(seed))
    executor = Executor(ConfigSelectorChain(ConfigCache()))
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items()}
    inv = executor.invocation(getattr(modules, op), **zeros, **rest)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_float(x) else x
    return dataclasses.replace(inv, inputs=jax.tree.map(shape, inv.inputs))


def measured(inv: Invocation, lock: Path) -> dict[str, Any]:
    """The times of all candidates, and the regret of the heuristic."""
    tuner = Tuner(device_lock=FileLock(lock), report=lambda _: None)
    selector = ConfigSelectorChain(ConfigCache(), tuner=tuner)
    choices = selector.candidates(inv)
    row: dict[str, Any] = {"heuristic": describe(choices[0]), "candidates": len(choices)}
    if len(choices) == 1:
        return row | {"best": row["heuristic"], "regret": 0.0}
    start = time.perf_counter()
    tuned = tuner.autotune(inv, choices)
    row["seconds"] = round(time.perf_counter() - start, 2)
    if tuned is None:
        return row | {"failed": "no candidate ran"}
    row["times"] = {describe(choice): seconds for choice, seconds in tuned.measurements}
    row["dropped"] = {describe(choice): reason[:200] for choice, reason in tuned.dropped}
    row["best"] = describe(tuned.best)
    if tuned.best is choices[0]:
        return row | {"regret": 0.0}
    again = tuner.compare(inv, [tuned.best, choices[0]])
    if again is None or len(again.measurements) < 2:
        return row | {"failed": "the heuristic's choice does not run"}
    best, guess = (seconds for _, seconds in again.measurements)
    return row | {"regret": max(0.0, guess / best - 1)}


def shapes(inv: Invocation) -> str:
    """The call in one line."""
    named = zip(getattr(inv.inputs, "_fields", ()), inv.inputs, strict=False)
    arrays = [f"{name}{list(x.shape)}" for name, x in named if hasattr(x, "shape")]
    mask = getattr(inv.inputs, "mask", None)
    return " ".join(arrays) + ("" if mask is None else f" {mask!r}")


def work(tasks: list[tuple[str, int]], results: Path, lock: Path, until: float) -> None:
    """Measure some calls in this process; each pass is a line of the file."""
    warnings.simplefilter("ignore", TuningWarning)
    for op, number in tasks:
        for direction in ("forward", "backward"):
            if time.time() > until:
                return
            row: dict[str, Any] = {"op": op, "number": number, "direction": direction}
            try:
                inv = dataclasses.replace(call(op, number), direction=direction)
                supported, _ = inv.op.supporting(direction, inv.inputs, inv.spec, inv.device, None)
                if not supported or (inv.op.backward_follows_forward and direction == "backward"):
                    continue
                row["call"] = shapes(inv)
                row |= measured(inv, lock)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            with FileLock(f"{results}.lock"), results.open("a") as file:
                file.write(json.dumps(row) + "\n")


def summary(rows: list[dict[str, Any]]) -> None:
    """Median and 90th percentile of the regret, by operation and direction."""
    print(f"{'operation':28}{'pass':10}{'calls':>6}{'median':>9}{'90th':>9}{'worst':>9}  failed")
    for op in OPS:
        for direction in ("forward", "backward"):
            some = [x for x in rows if x["op"] == op and x["direction"] == direction]
            found = sorted(x["regret"] for x in some if "regret" in x)
            if not some:
                continue
            figures = (
                ""
                if not found
                else "".join(
                    f"{100 * x:8.1f}%"
                    for x in (statistics.median(found), float(np.quantile(found, 0.9)), found[-1])
                )
            )
            print(f"{op:28}{direction:10}{len(found):6d}{figures}  {len(some) - len(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--summary", action="store_true", help="of what the file holds, only")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        task = json.loads(options.work)
        work(task["tasks"], Path(task["results"]), Path(task["lock"]), task["until"])
        return
    rows = []
    with contextlib.suppress(FileNotFoundError):
        rows = json.loads(options.json.read_text())["calls"]
    if not options.summary:
        known = {(x["op"], x["number"]) for x in rows if "failed" not in x}
        tasks = [
            (op, i)
            for op in options.ops.split(",")
            for i in range(options.first, options.first + (options.count or OPS[op][1]))
            if (op, i) not in known
        ]
        rows += run(tasks, options.workers, time.time() + 60 * options.minutes)
        text = {**provenance(), "calls": rows}
        options.json.write_text(json.dumps(text, indent=1) + "\n")
    summary(rows)


def run(tasks: list[tuple[str, int]], workers: int, until: float) -> list[dict[str, Any]]:
    """Measure with several processes: all compile, one at a time uses the device."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        processes = []
        for i in range(workers):
            task = {
                "tasks": tasks[i::workers],
                "results": str(results),
                "lock": f"{folder}/device.lock",
                "until": until,
            }
            command = [sys.executable, __file__, "--json", "none", "--work", json.dumps(task)]
            processes.append(subprocess.Popen(command, env=environment))
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, until + 30 - time.time()))
            process.kill()
        return [json.loads(line) for line in results.read_text().splitlines()]


if __name__ == "__main__":
    main()
