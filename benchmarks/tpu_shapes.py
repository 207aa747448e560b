"""Compiles random calls of every TPU kernel on default blocks: none may run out of memory.

    PYTHONPATH=.venv/tpu .venv/bin/python benchmarks/tpu_shapes.py                    200 of each
    ... --kernels grouped_matmul --first 20 --count 30 --generations v5e v6e --json FOLDER

Every call is compiled for one generation, in turn, forward and backward. With `--json` the outcome
is added to what the file there has already. `make test-tpu` installs libtpu and compiles the first.
"""

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from tpu.ahead_of_time import GENERATIONS, compiled  # noqa: E402
from tpu.random_shapes import KERNELS, random_call  # noqa: E402


def outcome(kernel: str, number: int, generation: str) -> dict[str, Any]:
    """What came of one call: fine, or why not."""
    call = random_call(kernel, number)
    start, failed = time.process_time(), None
    try:
        compiled(generation, call.function, call.arguments)
        compiled(generation, call.gradient, call.arguments)
    except Exception as error:
        failed = f"{type(error).__name__}: {str(error)[:600]}"
    return {
        "number": number,
        "generation": generation,
        "call": call.words,
        "seconds": round(time.process_time() - start, 1),
        "failed": failed,
    }


def keep(path: Path, kernel: str, done: list[dict[str, Any]]) -> None:
    """Add to the file what was compiled, and what failed in words."""
    from ejkernel.cli.bench import commit

    known = json.loads(path.read_text())["kernels"] if path.exists() else {}
    before = known.get(kernel, {"compiled": {}, "failed": []})
    again = {x["number"] for x in done}
    known[kernel] = {
        "compiled": {**before["compiled"], **{str(x["number"]): x["generation"] for x in done}},
        "failed": [
            *(x for x in before["failed"] if x["number"] not in again),
            *(x for x in done if x["failed"]),
        ],
    }
    result = {
        "device": "TPUs that are not here, by their compiler",
        "versions": {x: importlib.metadata.version(x) for x in ("ejkernel", "jax", "libtpu")},
        "commit": commit(),
        "figures": [_figure(name, one) for name, one in sorted(known.items())],
        "kernels": known,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def _figure(kernel: str, known: dict[str, Any]) -> dict[str, Any]:
    count, failed = len(known["compiled"]), len(known["failed"])
    return {
        "name": f"{kernel}_shapes",
        "what": f"`{kernel}`: of {count} random calls, those that do not compile on default blocks",
        "value": failed,
        "unit": "calls",
        "better": "lower",
        "bound": 0,
        "holds": not failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", nargs="+", default=KERNELS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--generations", nargs="+", default=list(GENERATIONS))
    parser.add_argument("--json", type=Path, help="folder for tpu_shapes.json")
    options = parser.parse_args()
    for number in range(options.first, options.first + options.count):
        for kernel in options.kernels:
            generation = options.generations[number % len(options.generations)]
            result = outcome(kernel, number, generation)
            said = result["failed"] or f"{result['seconds']} s"
            print(f"{kernel} {number} {generation}: {result['call']}: {said}", flush=True)
            if options.json:
                keep(options.json / "tpu_shapes.json", kernel, [result])


if __name__ == "__main__":
    main()
