"""Where a recorded result comes from: the device, the versions, the date and the commit.

Imports neither typer nor rich, so that benchmark scripts and test plugins need no extra.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from ejkernel import __version__

ROOT = Path(__file__).parents[2]
COMMIT_VARIABLE = "SOURCE_COMMIT"
CHANGED = "-changed"

PROVENANCE = ("device", "versions", "date", "commit")  # what every result records

_PACKAGES = ("jax", "jaxlib", "triton", "jax-triton", "libtpu", "torch", "tokamax")
# Results are written while a measurement runs; they do not change what is measured.
_SOURCES = ("ejkernel", "tests", "benchmarks", ":!benchmarks/results")


def provenance(device_name: str | None = None) -> dict[str, Any]:
    """Device, versions, date (UTC) and commit, as every file of results records them.

    Args:
        device_name: the device in words, where it is not the default device of JAX.
    """
    return {
        "device": device_name or device(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }


def device() -> str:
    """The default device in words."""
    kind = jax.devices()[0].device_kind
    if kind != "cpu":
        return kind
    cpuinfo = Path("/proc/cpuinfo")  # JAX calls every processor "cpu"
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"


def versions() -> dict[str, str]:
    """Versions of everything that decides how a call runs; optional packages where installed."""
    found = {"ejkernel": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the source tree, marked if the sources were changed since; None without git.

    The variable `SOURCE_COMMIT` names it for a copy of the tree, which may have no history or
    another one.
    """
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    # A virtual environment may lie inside another project's checkout.
    if git("rev-parse", "--show-toplevel") != str(ROOT):
        return None
    name = git("rev-parse", "--short=12", "HEAD")
    if name is None:  # a repository without commits
        return None
    return f"{name}{CHANGED}" if git("status", "--porcelain", "--", *_SOURCES) else name


def git(*arguments: str) -> str | None:
    """What a git command prints in the source tree; None where it fails or there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
