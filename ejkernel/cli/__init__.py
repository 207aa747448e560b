"""The `ejkernel` command; it needs the extra `cli`."""

import contextlib
import gc
import importlib.util
import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 130  # the exit code of a shell for a process that Ctrl-C ended
_CLEANUP_SECONDS = 3.0


class _InterruptedError(BaseException):
    """Ctrl-C; not a `KeyboardInterrupt`, which typer turns into exit codes of its own."""


def main() -> None:
    """Run the command line; a missing package or Ctrl-C is one line, not a traceback."""
    # While modules are imported there is nothing to clean up, and extension modules may crash when
    # an exception comes from outside.
    signal.signal(signal.SIGINT, _end)
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"ejkernel: the command line needs {' and '.join(missing)}: "
            "in a checkout of ejkernel, pip install '.[cli]'."
        )
    from ejkernel.cli.app import app

    signal.signal(signal.SIGINT, _interrupt)
    with contextlib.suppress(_InterruptedError):
        app(prog_name="ejkernel")  # ends with SystemExit
    gc.collect()  # what the interrupted frames held: locks, which would be reported as leaked
    _end()


def _interrupt(*signal_and_frame: object) -> NoReturn:
    """Unwind, so that every command cleans up; a second Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, _end)
    if hasattr(signal, "setitimer"):  # an extension module that is being loaded drops exceptions
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, _CLEANUP_SECONDS)
    raise _InterruptedError


def _end(*signal_and_frame: object) -> NoReturn:
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        child.kill()
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{show_cursor}ejkernel: interrupted.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not `sys.exit`: JAX may still compute in its threads, and to finalize Python then may crash.
    os._exit(INTERRUPTED)
