"""The collectives of a compiled program, as often as they run, and what they send."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[\w.-]+) \(.*?\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)
_SHAPE = re.compile(r"(\w+)\[([^\]]*)\]")
_BITS = re.compile(r"(?:bf|[fsuc])(\d+)")  # f32, f8e4m3fn, ..


def executed(compiled: Any) -> list[tuple[str, int]]:
    """The kind of each collective and the bytes of its result, one in a loop for each trip."""
    text = compiled.as_text()
    bodies = dict(_COMPUTATION.findall(text))

    def of(name: str) -> Iterator[tuple[str, int]]:
        for line in bodies[name].splitlines():
            if found := _COLLECTIVE.search(line):
                yield found[2], _bytes(_result(*found.groups()))
            elif re.search(r" (?:while|conditional|call)\(", line):
                trips = int((re.search(r'known_trip_count":\{"n":"(\d+)"', line) or [1, 1])[1])
                for _ in range(trips):
                    for called in _called(line):
                        yield from of(called)

    (main,) = re.findall(r"^ENTRY (%[\w.-]+)", text, re.MULTILINE)
    return list(of(main))


def bytes_sent(compiled: Any, devices: int) -> float:
    """What a device sends in a program of so many, all of which take part in each collective.

    An all-reduce counts as a reduce-scatter and an all-gather.
    """
    share = (devices - 1) / devices
    of_result = {
        "all-gather": share,
        "all-to-all": share,
        "all-reduce": 2 * share,
        "collective-permute": 1,
        "reduce-scatter": devices - 1,
    }
    return sum(of_result[kind] * size for kind, size in executed(compiled))


def _called(line: str) -> list[str]:
    called = re.findall(r"(?:body|to_apply|\w+_computation)=(%[\w.-]+)", line)
    branches = re.search(r"branch_computations=\{(.*?)\}", line)
    return called + (branches[1].split(", ") if branches else [])


def _result(shape: str, kind: str, start: str | None) -> str:
    """The shape of what a collective gives; these asynchronous ones also give their operands."""
    if not (start and shape.startswith("(") and kind in ("all-gather", "collective-permute")):
        return shape
    depth, elements = 0, [""]
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements[1]


def _bytes(shape: str) -> int:
    arrays = _SHAPE.findall(shape)
    if not arrays:
        raise ValueError(f"no array in {shape!r}")
    counts = ((name, [int(x) for x in dims.split(",") if x]) for name, dims in arrays)
    return sum(-(-_bits(name) * int(np.prod(dims)) // 8) for name, dims in counts)


def _bits(name: str) -> int:
    if name == "pred":
        return 8
    if found := _BITS.match(name):
        return int(found[1])
    raise ValueError(f"unknown dtype {name!r}")
