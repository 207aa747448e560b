"""Compiles random calls of every TPU kernel on default blocks: none may run out of memory.

    PYTHONPATH=.venv/tpu .venv/bin/python benchmarks/tpu_shapes.py                    200 of each
    ... --kernels grouped_matmul --first 20 --count 30 --generations v5e v6e --json FOLDER

Every call is compiled for one generation, in turn, forward and backward. With `--json` the outcome
of each is added to what the file there has already, and what it has is not compiled again: the
script can be stopped and started. `make test-tpu` installs libtpu and compiles the first.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import jax  # noqa: E402
from tpu.ahead_of_time import GENERATIONS  # noqa: E402
from tpu.random_shapes import KERNELS, fits, random_call  # noqa: E402


def outcome(kernel: str, number: int, generation: str) -> dict[str, Any]:
    """What came of one call: fine, refused in words beforehand, or why it does not compile."""
    from ejkernel.errors import UnsupportedError

    call = random_call(kernel, number)
    start, found = time.process_time(), {}
    try:
        if not fits(generation, call):
            found = {"failed": "is not kernels alone"}
    except UnsupportedError as error:
        found = {"refused": str(error)}
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {str(error)[:600]}"}
    seconds = round(time.process_time() - start, 1)
    return {
        "number": number,
        "generation": generation,
        "seconds": seconds,
        **found,
        **({"call": call.words} if found else {}),
    }


def known(path: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """What a file has, by kernel and number."""
    if not path.exists():
        return {}
    kernels = json.loads(path.read_text())["kernels"]
    return {name: {x["number"]: x for x in rows} for name, rows in kernels.items()}


def keep(path: Path, found: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Write all that was found, a line for each call."""
    from ejkernel.cli.provenance import provenance

    kernels = {name: [rows[x] for x in sorted(rows)] for name, rows in sorted(found.items())}
    result = {
        **provenance("no TPU: compiled ahead of time by libtpu, the compiler for TPUs"),
        "figures": [_figure(name, rows) for name, rows in kernels.items()],
    }
    lines = json.dumps(result, indent=1)[:-2] + ',\n "kernels": {'
    for i, (name, rows) in enumerate(kernels.items()):
        lines += f'{"," if i else ""}\n  "{name}": [\n   '
        lines += ",\n   ".join(map(json.dumps, rows)) + "\n  ]"
    path.write_text(lines + "\n }\n}\n")


def _figure(kernel: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    failed, refused = (sum(what in x for x in rows) for what in ("failed", "refused"))
    besides = f" ({refused} raised UnsupportedError before compilation)" if refused else ""
    return {
        "name": f"{kernel}_shapes",
        "what": f"`{kernel}`: calls out of {len(rows)} random ones that fail to compile with "
        f"default block sizes{besides}",
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
    parser.add_argument("--again", action="store_true", help="also those that the file has")
    parser.add_argument("--json", type=Path, help="folder for tpu_shapes.json")
    options = parser.parse_args()
    path = options.json / "tpu_shapes.json" if options.json else None
    found = known(path) if path else {}
    for number in range(options.first, options.first + options.count):
        for kernel in options.kernels:
            rows = found.setdefault(kernel, {})
            if number in rows and not options.again:
                continue
            generation = options.generations[number % len(options.generations)]
            rows[number] = result = outcome(kernel, number, generation)
            jax.clear_caches()  # hundreds of programs would be kept
            print(kernel, json.dumps(result), flush=True)
            if path:
                keep(path, found)


if __name__ == "__main__":
    main()
