"""The collectives of a compiled program, as often as they run, and what they send."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[\w.-]+) \(.*?\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
)
_SHAPE = re.compile(r"([a-z]+)(\d+)\[([\d,]*)\]")


def executed(compiled: Any) -> list[tuple[str, int]]:
    """The kind of each collective and the bytes of its result, one in a loop for each trip."""
    text = compiled.as_text()
    bodies = dict(_COMPUTATION.findall(text))

    def of(name: str) -> Iterator[tuple[str, int]]:
        for line in bodies[name].splitlines():
            if found := _COLLECTIVE.search(line):
                yield found[2], _bytes(found[1])
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


def _bytes(shape: str) -> int:
    sizes = [(int(bits), dims.split(",")) for _, bits, dims in _SHAPE.findall(shape)]
    return sum(bits // 8 * int(np.prod([int(x or 1) for x in dims])) for bits, dims in sizes)
