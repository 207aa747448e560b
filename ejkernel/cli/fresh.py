"""Measurements that need a process of their own: imports, first calls, peaks."""

import inspect
import os
import subprocess
import sys
import tempfile

from ejkernel.cli.measure import WrongResultError


def seconds(prepare: str, timed: str, check: str = "", **variables: str) -> float:
    """Seconds that `timed` takes in a new process after `prepare`; `check` must pass afterwards.

    `variables` are set in the environment of the process.
    """
    return value(
        prepare,
        "import time",
        "_began = time.perf_counter()",
        timed,
        "_took = time.perf_counter() - _began",
        check,
        "_took",
        **variables,
    )


def value(*code: str, **variables: str) -> float:
    """The last expression after all the other code ran in a new process with an empty cache."""
    *statements, expression = map(inspect.cleandoc, code)
    program = "\n".join([*statements, f"print(float({expression}))"])
    with tempfile.TemporaryDirectory() as empty:
        left_out = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
        environment = {name: x for name, x in os.environ.items() if name not in left_out}
        environment |= {"EJKERNEL_CACHE_DIR": empty, **variables}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
    if done.returncode:
        raise WrongResultError((done.stderr.strip().splitlines() or ["the process died"])[-1])
    return float(done.stdout.split()[-1])
