"""Call many shapes again and again: memory, memory maps and compiled programs must not grow.

    python tools/long_run.py                                2,000 shapes, ten rounds: hours
    python tools/long_run.py --shapes 100 --rounds 4 --json FILE

Every shape is a random call of `ejkernel check --random`, run with its gradient as a user runs it.
After `--keep` calls JAX is told to forget its programs, as a long program must that keeps meeting
new shapes. What the process holds is noted after each round; from the second to the last, resident
memory may grow by 2 % and memory maps by 2 %. `--threads 8` makes the calls of a round in several
threads.
"""

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from ejkernel.cli import oracle  # noqa: E402
from ejkernel.cli.provenance import provenance  # noqa: E402
from ejkernel.cli.random_calls.run import choices_of, comparison  # noqa: E402
from ejkernel.errors import UnsupportedError  # noqa: E402
from ejkernel.ops import default_executor, executor  # noqa: E402
from ejkernel.ops.executor import Request  # noqa: E402

GROWTH = 0.02


def held() -> dict[str, int]:
    """What this process holds: resident memory and maps from the kernel, and what we remember."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    (resident,) = [int(line.split()[1]) for line in status if line.startswith("VmRSS:")]
    return {
        "resident_mib": resident // 1024,
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "live_arrays": len(jax.live_arrays()),
        "calls_remembered": len(default_executor()._compiled),
    }


def one_call(seed: int, index: int) -> None:
    """A random call and, where it has one, its gradient."""
    choices = choices_of(seed, index)
    call = comparison(choices).call
    run = lambda inputs: executor.run(call.op, inputs, call.spec, Request())
    try:
        jax.block_until_ready(run(call.inputs))
        if choices.differentiable:
            jax.block_until_ready(oracle.with_gradients(run)(call.inputs))
    except UnsupportedError:
        return


def rounds(options: argparse.Namespace) -> Iterator[dict[str, int]]:
    """What the process holds after each round of all shapes."""
    for number in range(1, options.rounds + 1):
        for first in range(0, options.shapes, options.keep):
            calls = range(first, min(first + options.keep, options.shapes))
            with ThreadPoolExecutor(options.threads) as pool:
                list(pool.map(lambda index: one_call(options.seed, index), calls))
            jax.clear_caches()
        yield {"round": number, **held()}


def growth(noted: list[dict[str, int]], name: str) -> float:
    """From the second round to the last."""
    return noted[-1][name] / noted[1][name] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--keep", type=int, default=100, help="calls before programs are forgotten")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    if options.rounds < 3:
        parser.error("--rounds: growth is from the second round to the last, at least 3")
    warnings.simplefilter("ignore")
    noted: list[dict[str, int]] = []
    for one in rounds(options):
        noted.append(one)
        print(json.dumps(one), flush=True)
    grown = {name: round(growth(noted, name), 4) for name in ("resident_mib", "maps")}
    print(f"growth from the second round to the last: {grown}, {GROWTH:.0%} allowed")
    if options.json:
        given: dict[str, Any] = {k: v for k, v in vars(options).items() if k != "json"}
        record = provenance() | {"options": given, "rounds": noted, "growth": grown}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(x > GROWTH for x in grown.values()))


if __name__ == "__main__":
    main()
