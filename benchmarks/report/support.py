"""The support table of one operation: every platform, what it refuses, and how it was proven."""

from benchmarks.report import matrix, results
from ejkernel.ops import kernel_registry
from ejkernel.ops.implementation import ALL_FEATURES, Op, Pass, Source
from ejkernel.ops.platform import Backend

LEGEND = (
    "In order of preference; a call goes to the first platform that supports it. "
    "**R**: run on such a device; **C**: compiled for it; **I**: interpreted on a CPU; "
    "*not proven*: no recorded test; †: the same kernel, tested through another operation; "
    "–: not for this device, or not for the call of `ejkernel demo`. "
    "[What the names mean](errors.md#refused-calls)."
)


def table(operation: str) -> str:
    """The table, and what its letters mean."""
    op = kernel_registry.op(operation)
    with matrix.every_package_installed():
        passes = {source: _passes(source) for source in op.sources}
    rows = []
    for source, own in passes.items():
        lines = [
            [_refused(op, passes, run), *_proven(operation, source, direction)]
            for direction, run in own.items()
        ]
        names = list(own)
        if len(lines) == 2 and lines[0] == lines[1]:
            lines, names = lines[:1], ["both"]
        backend = "" if source.backend is Backend.ANY else f", {source.backend.value.upper()}"
        rows += [
            [f"`{source.platform.value}`{backend}", name, *line]
            for name, line in zip(names, lines, strict=True)
        ]
    header = ["platform", "pass", "does not support", *(x.title for x in matrix.COLUMNS)]
    return f"{results.table(header, rows)}\n\n{LEGEND}"


Passes = dict[matrix.Direction, Pass]


def _passes(source: Source) -> Passes:
    loaded = source.load()
    found = {direction: getattr(loaded, direction) for direction in matrix.DIRECTIONS}
    return {direction: run for direction, run in found.items() if run is not None}


def _refused(op: Op, passes: dict[Source, Passes], run: Pass) -> str:
    """The features of the operation that this pass does not list."""
    if run.features == ALL_FEATURES:
        return ""
    listed = [x.features for own in passes.values() for x in own.values()]
    known = {"mask", "blocks"} if "mask" in op.operands else set()
    known |= {name for features in listed if features != ALL_FEATURES for name in features}
    return ", ".join(f"`{name}`" for name in sorted(known - set(run.features)))


def _proven(operation: str, source: Source, direction: matrix.Direction) -> list[str]:
    """The proof on each kind of device."""
    cells = []
    for column in matrix.COLUMNS:
        proof = matrix.proof(operation, source, column, direction)
        supports = source in matrix.supporting(operation, column, direction)
        cells.append(proof if supports or matrix.NOT_PROVEN not in proof else "–")
    return cells
