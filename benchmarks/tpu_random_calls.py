"""Compiles the random calls of `ejkernel check --random` for TPUs that are not present.

    PYTHONPATH=.venv/tpu .venv/bin/python benchmarks/tpu_random_calls.py --count 500 --json FILE

Every call that has a TPU kernel is compiled by libtpu for one generation after the other, forward
and backward in one program. What does not compile is printed as a program.
"""

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import jax  # noqa: E402
from tpu.ahead_of_time import GENERATIONS, compiled, device  # noqa: E402

from ejkernel.cli import oracle  # noqa: E402
from ejkernel.cli.provenance import provenance  # noqa: E402
from ejkernel.cli.random_calls.run import choices_of, comparison, indices  # noqa: E402
from ejkernel.errors import UnsupportedError  # noqa: E402
from ejkernel.kernels import OPS  # noqa: E402
from ejkernel.ops import executor, kernel_registry  # noqa: E402
from ejkernel.ops.executor import Request  # noqa: E402

_PLATFORM = "pallas"


def has_tpu_kernel(operation: str) -> bool:
    return any(x.backend == "tpu" for x in kernel_registry.op(operation).sources)


def outcome(seed: int, index: int, generation: str) -> dict[str, Any]:
    """What came of one call: compiled, refused in words beforehand, or why it does not compile."""
    choices = choices_of(seed, index)
    found = {"call": index, "operation": choices.operation, "generation": generation}
    try:
        call = comparison(choices).call
        run = lambda x: executor.run(call.op, x, call.spec, Request(platform=_PLATFORM))
        supported, _ = call.op.supporting(
            "backward", call.inputs, call.spec, device(generation), _PLATFORM
        )
        compiled(generation, oracle.with_gradients(run) if supported else run, call.inputs)
    except UnsupportedError as refusal:
        return found | {"outcome": "refused", "detail": str(refusal)}
    except Exception as error:
        print(choices.program(_PLATFORM))
        return found | {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"[:600]}
    return found | {"outcome": "compiled"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    rows = []
    wanted = indices(options.first, options.count, [x for x in OPS if has_tpu_kernel(x)])
    for number, index in enumerate(wanted):
        generation = list(GENERATIONS)[number % len(GENERATIONS)]
        rows.append(outcome(options.seed, index, generation))
        print(json.dumps(rows[-1]), flush=True)
        jax.clear_caches()  # hundreds of programs would be kept
    counts = collections.Counter(row["outcome"] for row in rows)
    print(dict(counts))
    if options.json:
        where = "no TPU: compiled ahead of time by libtpu, the compiler for TPUs"
        record = provenance(where) | {"seed": options.seed, "counts": counts, "calls": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
