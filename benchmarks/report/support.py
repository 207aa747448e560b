"""The support table of one operation: every platform, what it refuses, and how it was proven."""

import dataclasses

from benchmarks.report import matrix, results
from ejkernel.kernels.flash_attention.inputs import KERNEL_FEATURES, Inputs, Spec
from ejkernel.ops import kernel_registry
from ejkernel.ops.implementation import ALL_FEATURES, Pass, Source
from ejkernel.ops.platform import Backend, Platform

LEGEND = (
    "In order of preference; a call runs on the first platform that supports it. "
    "‡: used only when it is named, since it has not run on such a device. "
    "**R**: run on such a device; **C**: compiled for it; **I**: interpreted on a CPU; "
    "*not proven*: no recorded test; †: proven for another operation that runs the same kernel; "
    "–: not for this device, or not for the call of `ejkernel demo`. "
    "[What the names mean](errors.md#refused-calls)."
)
_ARGUMENTS = {*Inputs._fields, *(field.name for field in dataclasses.fields(Spec))} - {"mask"}
_MASK_KINDS = KERNEL_FEATURES - _ARGUMENTS


def table(operation: str) -> str:
    """The table, and what its letters mean."""
    op = kernel_registry.op(operation)
    with matrix.every_package_installed():
        passes = {source: _passes(source) for source in op.sources}
    known = _features(operation)
    rows = []
    for source, own in passes.items():
        lines = [
            [_refused(known, run), *_proven(operation, source, direction)]
            for direction, run in own.items()
        ]
        names = list(own)
        if len(lines) == 2 and lines[0] == lines[1]:
            lines, names = lines[:1], ["both"]
        rows += [
            [_title(operation, source), name, *line]
            for name, line in zip(names, lines, strict=True)
        ]
    header = ["platform", "pass", "does not support", *(x.title for x in matrix.COLUMNS)]
    return f"{results.table(header, rows)}\n\n{LEGEND}"


def _title(operation: str, source: Source) -> str:
    """The platform, what it runs on, and whether XLA is preferred to it there."""
    if source.backend is Backend.ANY:
        return f"`{source.platform.value}`"
    found = [matrix.supporting(operation, column, "forward") for column in matrix.COLUMNS]
    yields = any(
        x.platform is Platform.XLA
        for own in found
        if source in own
        for x in own[: own.index(source)]
    )
    mark = "‡" if yields else ""
    return f"`{source.platform.value}`,\N{NO-BREAK SPACE}{source.backend.value.upper()}{mark}"


Passes = dict[matrix.Direction, Pass]


def _passes(source: Source) -> Passes:
    loaded = source.load()
    found = {direction: getattr(loaded, direction) for direction in matrix.DIRECTIONS}
    return {direction: run for direction, run in found.items() if run is not None}


def _features(operation: str) -> frozenset[str]:
    """Every feature that a call of the operation can have."""
    call = matrix.demo_call(operation, matrix.COLUMNS[0].dtype)
    defaults = type(call.inputs)._field_defaults
    masks = [name for name, default in defaults.items() if hasattr(default, "features")]
    static = [x.name for x in dataclasses.fields(call.spec) if x.default is not dataclasses.MISSING]
    kinds = _MASK_KINDS if masks else ()
    return frozenset({*set(defaults).difference(masks), *static, *kinds})


def _refused(known: frozenset[str], run: Pass) -> str:
    """The features of the operation that this pass does not list."""
    if run.features == ALL_FEATURES:
        return "nothing"
    return ", ".join(f"`{name}`" for name in sorted(known - run.features)) or "nothing"


def _proven(operation: str, source: Source, direction: matrix.Direction) -> list[str]:
    """The proof on each kind of device."""
    cells = []
    for column in matrix.COLUMNS:
        proof = matrix.proof(operation, source, column, direction)
        supports = source in matrix.supporting(operation, column, direction)
        cells.append(proof if supports or matrix.NOT_PROVEN not in proof else "–")
    return cells
