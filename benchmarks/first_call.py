"""How long a user waits for the first call of a new shape, with empty caches.

python benchmarks/first_call.py                                  every case, a table
python benchmarks/first_call.py --cases causal,layers_32 --json first.json
python benchmarks/first_call.py --policy autotune                with the default policy of a GPU
python benchmarks/first_call.py --profile causal_grad            where the time of tracing goes

Every case runs in a process of its own with caches of its own: import, trace and lower, compile,
first run. Programs are those that XLA compiled during the call; one is the caller's own. Shapes are
not in the shipped tables. The case `search` is what `ejkernel.autotune` takes for the gradient of
the case `causal`: the whole search of the forward and backward passes, in the column `first call`.
Peers compute the same call by `jax.nn.dot_product_attention`: cuDNN's kernels on a GPU, plain XLA
elsewhere.
"""

import argparse
import cProfile
import itertools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS = 32
COMPILED = "/jax/core/compile/backend_compile_duration"
COLUMNS = ("import", "lower", "compile", "run", "first call")


def _attention(length: int, batch: int = 2, heads: int = 24, dim: int = 96) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    small = jax.default_backend() == "cpu"
    shape = (1, 1024, 8, 64) if small else (batch, length, heads, dim)
    return {name: jnp.ones(shape, jnp.float32 if small else jnp.bfloat16) for name in "qkv"}


def _flash(**options: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    from ejkernel.modules import flash_attention

    arrays = _attention(3008)
    call = lambda x: flash_attention(x["q"], x["k"], x["v"], **options)
    return call, arrays


def causal() -> tuple[Callable[..., Any], dict[str, Any]]:
    return _flash(causal=True)


def window() -> tuple[Callable[..., Any], dict[str, Any]]:
    return _flash(causal=True, sliding_window=(511, 0))


def packed() -> tuple[Callable[..., Any], dict[str, Any]]:
    import jax.numpy as jnp

    from ejkernel.modules import flash_attention
    from ejkernel.types import MaskInfo

    arrays = _attention(3008)
    batch, length = arrays["q"].shape[:2]
    ids = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32) // 700, (batch, length))

    def call(x: dict[str, Any]) -> Any:
        mask = MaskInfo.from_segments(x["ids"])
        return flash_attention(x["q"], x["k"], x["v"], mask_info=mask, causal=True)

    return call, arrays | {"ids": ids}


def bias() -> tuple[Callable[..., Any], dict[str, Any]]:
    import jax.numpy as jnp

    from ejkernel.modules import flash_attention

    arrays = _attention(1984)
    _, length, heads, _ = arrays["q"].shape
    arrays["bias"] = jnp.zeros((1, heads, length, length), arrays["q"].dtype)
    return lambda x: flash_attention(x["q"], x["k"], x["v"], bias=x["bias"]), arrays


def blocksparse() -> tuple[Callable[..., Any], dict[str, Any]]:
    import jax.numpy as jnp
    import numpy as np

    from ejkernel.modules import blocksparse_attention

    arrays = _attention(3072)
    blocks = arrays["q"].shape[1] // 128
    mask = jnp.asarray(np.random.default_rng(0).random((blocks, blocks)) < 0.3)
    mask |= jnp.eye(blocks, dtype=bool)

    def call(x: dict[str, Any]) -> Any:
        return blocksparse_attention(x["q"], x["k"], x["v"], block_mask=x["mask"], block_size=128)

    return call, arrays | {"mask": mask}


def grouped() -> tuple[Callable[..., Any], dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from ejkernel.modules import grouped_matmul

    small = jax.default_backend() == "cpu"
    rows, experts, k, n = (1024, 8, 128, 256) if small else (6016, 24, 1152, 1664)
    dtype = jnp.float32 if small else jnp.bfloat16
    arrays = {
        "x": jnp.ones((rows, k), dtype),
        "w": jnp.ones((experts, k, n), dtype),
        "ids": jnp.arange(rows, dtype=jnp.int32) % experts,
    }
    return lambda x: grouped_matmul(x["x"], x["w"], x["ids"]), arrays


def paged() -> tuple[Callable[..., Any], dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from ejkernel.modules import page_attention

    small = jax.default_backend() == "cpu"
    dtype = jnp.float32 if small else jnp.bfloat16
    sequences, per_sequence, kv_heads, dim = (4, 8, 2, 64) if small else (24, 40, 4, 96)
    pages = sequences * per_sequence
    cache = (pages, 32, kv_heads, dim)
    arrays = {
        "q": jnp.ones((sequences, 6 * kv_heads, dim), dtype),
        "k": jnp.ones(cache, dtype),
        "v": jnp.ones(cache, dtype),
        "lengths": jnp.full((sequences,), 32 * per_sequence - 5, jnp.int32),
        "table": jnp.arange(pages, dtype=jnp.int32).reshape(sequences, per_sequence),
    }
    call = lambda x: page_attention(
        x["q"], x["k"], x["v"], context_lens=x["lengths"], block_tables=x["table"]
    )
    return call, arrays


def layers() -> tuple[Callable[..., Any], dict[str, Any]]:
    import jax.numpy as jnp

    from ejkernel.modules import flash_attention

    arrays = _attention(3008)
    arrays["w"] = jnp.ones((LAYERS,), arrays["q"].dtype)

    def call(x: dict[str, Any]) -> Any:
        h = x["q"]
        for i in range(LAYERS):
            h = h + x["w"][i] * flash_attention(h, x["k"], x["v"], causal=True)
        return h

    return call, arrays


def peer() -> tuple[Callable[..., Any], dict[str, Any]]:
    import jax

    arrays = _attention(3008)
    by = "xla" if jax.default_backend() == "cpu" else "cudnn"
    call = lambda x: jax.nn.dot_product_attention(
        x["q"], x["k"], x["v"], is_causal=True, implementation=by
    )
    return call, arrays


def tokamax() -> tuple[Callable[..., Any], dict[str, Any]]:
    from tokamax import dot_product_attention

    return (
        lambda x: dot_product_attention(x["q"], x["k"], x["v"], is_causal=True),
        _attention(3008),
    )


_FORWARD = (causal, window, packed, bias, blocksparse, grouped, peer, tokamax)
CASES: dict[str, tuple[Callable[[], Any], bool]] = {
    **{f.__name__: (f, False) for f in (*_FORWARD, paged)},
    **{f"{f.__name__}_grad": (f, True) for f in (*_FORWARD, layers)},
    "search": (causal, True),
}


def one(name: str, profile: bool) -> dict[str, Any]:
    """Measure a case in this process."""
    start = time.perf_counter()
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.ones(3) + 1)  # the backend starts here
    begun = time.perf_counter()
    build, grad = CASES[name]
    function, arrays = build()
    jax.block_until_ready(arrays)
    imported = time.perf_counter()
    if grad:
        value = function
        loss = lambda x, rest: value(x | rest).astype(jnp.float32).sum()
        floats = {k: v for k, v in arrays.items() if jnp.issubdtype(v.dtype, jnp.floating)}
        others = {k: v for k, v in arrays.items() if k not in floats}
        function, arguments = jax.grad(loss), (floats, others)
    else:
        arguments = (arrays,)

    compiled: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(seconds) if event == COMPILED else None
    )
    if name == "search":
        import ejkernel

        searching = time.perf_counter()
        tuned = ejkernel.autotune(function, *arguments)
        return {
            "case": name,
            "backend": begun - start,
            "import": imported - begun,
            "first call": time.perf_counter() - searching,
            "programs": len(compiled),
            "passes": len(tuned.entries),
        }
    tracing = cProfile.Profile()
    times = [time.perf_counter()]
    if profile:
        tracing.enable()
    lowered = jax.jit(function).lower(*arguments)
    if profile:
        tracing.disable()
    times.append(time.perf_counter())
    early = len(compiled)
    executable = lowered.compile()
    times.append(time.perf_counter())
    jax.block_until_ready(executable(*arguments))
    times.append(time.perf_counter())
    if profile:
        for order in ("cumulative", "tottime"):
            pstats.Stats(tracing, stream=sys.stderr).sort_stats(order).print_stats(60)
    lower, compile_, run = (b - a for a, b in itertools.pairwise(times))
    return {
        "case": name,
        "backend": begun - start,
        "import": imported - begun,
        "lower": lower,
        "compile": compile_,
        "run": run,
        "first call": times[-1] - times[0],
        "programs": len(compiled),
        "programs while tracing": early,
        "seconds in those": sum(compiled[:early]),
    }


def in_process(name: str, policy: str, profile: bool) -> dict[str, Any]:
    """Measure a case in a process that finds nothing of earlier ones."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "EJKERNEL_AUTOTUNE_POLICY": policy,
            "EJKERNEL_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": folder,
            "XDG_CACHE_HOME": folder,
        }
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, *(["--profile", name] if profile else [])],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        return {"case": name, "failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--policy", default="heuristics", choices=("heuristics", "autotune"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", default="", metavar="CASES")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, bool(options.profile))))
        return
    rows = []
    print(f"{'case':18}" + "".join(f"{c:>12}" for c in COLUMNS) + f"{'programs':>10}", flush=True)
    for name in options.cases.split(","):
        row = in_process(name, options.policy, name in options.profile.split(","))
        rows.append(row)
        if "failed" in row:
            print(f"{name:18} failed", flush=True)
            continue
        seconds = "".join(f"{row[x]:12.2f}" if x in row else " " * 12 for x in COLUMNS)
        print(f"{name:18}{seconds}{row['programs']:10d}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"policy": options.policy, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
