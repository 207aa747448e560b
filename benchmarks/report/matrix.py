"""The support matrix: which platform takes a call on each device, and how that was proven."""

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.report import results
from ejkernel.cli.demo_calls import BASELINES
from ejkernel.kernels import OPS
from ejkernel.kernels.common import mosaic_gpu
from ejkernel.ops import default_executor, kernel_registry
from ejkernel.ops.implementation import Source
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import Backend, Device, Platform

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_NAMES = {"pallas": "Pallas", "triton": "Triton", "cuda": "cuDNN", "xla": "XLA"}
NOT_PROVEN = "not proven"


@dataclasses.dataclass(frozen=True)
class Column:
    """A kind of device: one that stands for it, and the targets whose evidence counts for it."""

    title: str
    device: Device
    dtype: Any
    run_on: tuple[str, ...]
    compiled_for: tuple[str, ...]


def _device(platform: str, kind: str, capability: tuple[int, int] | None = None) -> Device:
    return Device(platform, kind, capability, f"{kind}|absent")


COLUMNS = (
    Column("CPU", _device("cpu", "cpu"), jnp.float32, ("cpu",), ()),
    Column(
        "NVIDIA sm_80+",
        _device("gpu", "NVIDIA A100", (8, 0)),
        jnp.bfloat16,
        ("NVIDIA A100",),
        ("sm_80",),
    ),
    Column(
        "NVIDIA sm_90",
        _device("gpu", "NVIDIA H200", (9, 0)),
        jnp.bfloat16,
        ("NVIDIA H100", "NVIDIA H200"),
        ("sm_90",),
    ),
    Column(
        "TPU",
        _device("tpu", "TPU v5 lite"),
        jnp.bfloat16,
        ("TPU",),
        ("v4", "v5e", "v5p", "v6e", "7x"),
    ),
)
LEGEND = (
    "Each cell lists the platforms that support the call of `ejkernel demo` (in bfloat16 on GPUs "
    "and TPUs), in order of preference, forward / backward; one entry where both are the same. "
    "**R**: run on such a device; **C**: compiled for it; "
    "**I**: interpreted on a CPU; *not proven*: no recorded test. "
    "†: proven for another operation that runs the same kernel. "
    "XLA alone means plain JAX operations, without a custom kernel; a platform after XLA is "
    "used only when it is named."
)


@contextlib.contextmanager
def every_package_installed() -> Iterator[None]:
    """The matrix is about devices: what is installed here makes no difference to it."""
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=object()),
        mock.patch.object(mosaic_gpu.versions, "why_missing", return_value=None),
    ):
        yield


@functools.cache
def demo_call(operation: str, dtype: Any) -> Invocation:
    """The call of `ejkernel demo`, as shapes, in this dtype."""
    baseline = BASELINES[operation]
    found: list[Invocation] = []

    def capture(arrays: dict[str, Any]) -> None:
        narrow = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        call = default_executor().invocation(baseline.ours, **jax.tree.map(narrow, arrays))
        found.append(call.abstract())

    jax.eval_shape(capture, jax.eval_shape(lambda: baseline.arrays(baseline.tokens)))
    return found[0]


@functools.cache
def supporting(operation: str, column: Column, direction: Direction) -> list[Source]:
    """The sources that take the call, in order."""
    call = demo_call(operation, column.dtype)
    with every_package_installed():
        supported, _ = call.op.supporting(direction, call.inputs, call.spec, column.device, None)
    return [source for source, _ in supported]


def platforms(operation: str, column: Column, direction: Direction) -> list[Source]:
    """The sources that take the call, in order; XLA only where no other is preferred to it."""
    sources = supporting(operation, column, direction)
    if sources and sources[0].platform is Platform.XLA:
        return sources
    return [x for x in sources if x.platform is not Platform.XLA]


def _sharing(source: Source) -> list[str]:
    """The operations that run this very code."""
    return [name for name in OPS if source in kernel_registry.op(name).sources]


def _counts_for(entry: dict[str, Any], column: Column) -> str | None:
    """The letter that a record of evidence gives to a column, if any."""
    how, target = entry["how"], entry["target"]
    if how == "run" and target.startswith(column.run_on):
        return "R"
    if how == "compiled" and target in column.compiled_for:
        return "C"
    own_hardware = entry["backend"] == column.device.platform
    return "I" if how == "interpreted" and own_hardware else None


def proof(operation: str, source: Source, column: Column, direction: Direction) -> str:
    """How one direction on one platform was proven: letters, failures, or that it was not."""
    letters: dict[str, set[str]] = {}
    failed = 0
    sharing = _sharing(source)
    for entry in evidence():
        same = (entry["platform"], entry["backend"], entry["direction"]) == (
            source.platform.value,
            source.backend.value,
            direction,
        )
        if not same or entry["operation"] not in sharing:
            continue
        if letter := _counts_for(entry, column):
            failed += entry["failed"]
            if entry["passed"]:
                letters.setdefault(letter, set()).add(entry["operation"])
    if failed:
        return f"**{failed} failed**"
    if not letters:
        return f"*{NOT_PROVEN}*"
    marks = {letter: "" if operation in own else "†" for letter, own in letters.items()}
    return " ".join(f"{letter}{marks[letter]}" for letter in "RCI" if letter in letters)


def evidence() -> list[dict[str, Any]]:
    """All recorded evidence."""
    files = (results.load(name) for name in results.names("evidence"))
    return [entry for file in files if file for entry in file["evidence"]]


def cell(operation: str, column: Column) -> str:
    """Forward and backward on one kind of device."""
    parts = []
    for direction in DIRECTIONS:
        found = [
            f"{_NAMES[source.platform.value]} {proof(operation, source, column, direction)}"
            for source in platforms(operation, column, direction)
        ]
        parts.append(", ".join(found) or "unsupported")
    return parts[0] if parts[0] == parts[1] else " / ".join(parts)


def matrix() -> str:
    """The matrix of all operations in Markdown."""
    header = ["operation", *(column.title for column in COLUMNS)]
    rows = [
        [f"[`{name}`](docs/{name}.md)", *(cell(name, column) for column in COLUMNS)] for name in OPS
    ]
    return f"{results.table(header, rows)}\n\n{LEGEND}\n\n{conclusions()}"


def conclusions() -> str:
    """What the matrix shows, in words that follow from it."""
    plain = [f"`{name}`" for name in OPS if _is_plain(name, COLUMNS[2])]
    said = [_on_tpus()]
    if plain:
        said.append(f"On NVIDIA GPUs these run as plain XLA by default: {', '.join(plain)}.")
    return " ".join(said)


def _on_tpus() -> str:
    """What is known of the kernels for TPUs."""
    of_tpus = [entry for entry in evidence() if entry["backend"] == "tpu"]
    ran = {entry["operation"] for entry in of_tpus if entry["how"] == "run"}
    if ran:
        return f"Operations whose TPU kernels have run on a TPU: {len(ran)}."
    proofs = ["interpreted on a CPU"] if any(x["how"] == "interpreted" for x in of_tpus) else []
    compiled = _compiled_for_tpus(of_tpus)
    proofs += [f"compiled by libtpu for {compiled}"] if compiled else []
    recorded = f"they were {' and '.join(proofs)}" if proofs else "nothing is recorded of them"
    return f"**No TPU kernel has run on a TPU**: {recorded}."


def _compiled_for_tpus(of_tpus: list[dict[str, Any]]) -> str:
    """The generations that each operation was compiled for; most operations first."""
    targets: dict[str, set[str]] = {}
    for entry in of_tpus:
        if entry["how"] == "compiled" and entry["passed"]:
            targets.setdefault(entry["operation"], set()).add(entry["target"])
    operations: dict[str, list[str]] = {}
    for operation, found in sorted(targets.items()):
        listed = ", ".join(x for x in COLUMNS[3].compiled_for if x in found)
        operations.setdefault(listed, []).append(f"`{operation}`")
    ordered = sorted(operations.items(), key=lambda item: -len(item[1]))
    if len(ordered) <= 1:
        return "".join(operations)
    return "; for ".join(f"{listed} ({', '.join(names)})" for listed, names in ordered)


def _is_plain(operation: str, column: Column) -> bool:
    """Whether XLA is what runs by default."""
    firsts = (platforms(operation, column, direction)[:1] for direction in DIRECTIONS)
    return all(source.backend is Backend.ANY for first in firsts for source in first)


def sources() -> str:
    """Where the evidence comes from, a line for each record."""
    lines = []
    for name in results.names("evidence"):
        result = results.load(name)
        if result:
            tests = result["tests"]
            counts = f"{tests['passed']} tests passed, {tests['failed']} failed"
            link = f"[`{name}.json`](../benchmarks/results/{name}.json)"
            lines.append(f"- {link}: {counts}; {results.source(result)}")
    return "\n".join(lines) or "No evidence is recorded."


def details() -> str:
    """Every record of evidence, targets joined."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for entry in evidence():
        platform = f"{_NAMES[entry['platform']]} ({entry['backend']})"
        key = (entry["operation"], platform, entry["direction"], entry["how"])
        row = found.setdefault(key, [set(), 0, 0])
        row[0].add(entry["target"])
        row[1] += entry["passed"]
        row[2] += entry["failed"]
    rows = [
        [f"`{key[0]}`", *key[1:], ", ".join(sorted(filter(None, on))), f"{passed}", f"{failed}"]
        for key, (on, passed, failed) in sorted(found.items())
    ]
    header = ["operation", "platform", "direction", "how", "targets", "passed", "failed"]
    return results.table(header, rows, numbers=2)
