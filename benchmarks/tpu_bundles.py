"""Reads the final schedules that libtpu writes: what a step of a TPU kernel costs.

A bundle is what a core starts in one cycle. The program of a kernel is a loop over the steps of its
grid; it is cut here where it branches. Blocks that use the matrix unit are the work on a tile, one
block for each way that a kernel has to work on one. What else a step does is the longest way from
the head of the loop through one of them to its end that does no other vector work: scalar code and
copies, all of which are counted as if they were made in every step. What is left, such as setting
sums to zero and writing them out, happens once in a row of tiles and is counted separately.

Kernels over pages loop over blocks of them within a step. There a round is the way through that
loop which starts the copies of a block and works on a whole one.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# The columns of libtpu's table; loads include fills, stores include spills.
UNITS = ("mxu", "xlu", "valu", "pop", "eup", "loads", "fills", "stores", "spills", "salu")
# Scalar code may carry the first stores of what it branches to, but no more vector work than that.
_MOST_STORES, _MOST_VECTOR = 16, 64
# A branch takes effect after so many more bundles.
_DELAY = 4


class Block(NamedTuple):
    """Bundles from one branch to the next, and how often they use each unit."""

    start: int
    bundles: int
    used: dict[str, int]

    @property
    def heavy(self) -> bool:
        """Whether it is more than scalar code and copies."""
        vector = self.used["valu"] > _MOST_VECTOR or self.used["stores"] > _MOST_STORES
        return self.used["mxu"] > 0 or vector


class Schedule(NamedTuple):
    """The blocks of a kernel in the order of the program, and where each may go on.

    `matrix_units`: how many operations of the matrix unit a bundle holds.
    """

    name: str
    blocks: list[Block]
    after: list[list[int]]
    matrix_units: int

    @property
    def tiles(self) -> list[int]:
        """The blocks that use the matrix unit."""
        return [i for i, block in enumerate(self.blocks) if block.used["mxu"]]

    @property
    def loop(self) -> tuple[int, int]:
        """The first and the last block of the loop over steps: the longest way back."""
        back = [
            (i - target, target, i)
            for i, targets in enumerate(self.after)
            for target in targets
            if target <= i
        ]
        _, head, tail = max(back, default=(0, 0, len(self.blocks) - 1))
        return head, tail

    def overhead(self, through: Sequence[int]) -> int:
        """Bundles of a step without those of the blocks that it goes through, one by one."""
        head, tail = self.loop
        stops = [head, *through, tail]
        between = sum(self._way(one, other) for one, other in itertools.pairwise(stops))
        return between + self.blocks[head].bundles + self.blocks[tail].bundles

    def _way(self, start: int, end: int) -> int:
        """Bundles of the blocks between two on the longest way without vector work."""
        longest = {end: 0}
        for i in range(end - 1, start - 1, -1):
            ways = [longest[j] for j in self.after[i] if i < j and j in longest]
            if ways and (i == start or not self.blocks[i].heavy):
                longest[i] = max(ways) + (0 if i == start else self.blocks[i].bundles)
        return longest.get(start, 0)

    def round(self, tile: int, copies: int, times: int) -> int:
        """Bundles of a round of the smallest loop around a tile, the tile's own left out.

        The copies of a round are started by a scalar block, number `copies` of them by length,
        that runs so many times.
        """
        head, tail = min(
            (
                (target, i)
                for i, targets in enumerate(self.after)
                for target in targets
                if target <= tile <= i
            ),
            key=lambda ends: ends[1] - ends[0],
        )
        inside = [i for i in range(head, tail + 1) if not self.blocks[i].heavy]
        start = sorted(inside, key=lambda i: -self.blocks[i].bundles)[copies]
        stops = dict.fromkeys((head, start, tile, tail))
        between = sum(self._shortest(one, other) for one, other in itertools.pairwise(stops))
        ends = sum(self.blocks[i].bundles for i in stops if i not in (start, tile))
        return between + ends + times * self.blocks[start].bundles

    def _shortest(self, start: int, end: int) -> int:
        """Bundles of the blocks between two on the shortest way."""
        least = {end: 0}
        for i in range(end - 1, start - 1, -1):
            ways = [least[j] for j in self.after[i] if i < j and j in least]
            if ways:
                least[i] = min(ways) + (0 if i == start else self.blocks[i].bundles)
        return least[start]

    def ends(self) -> list[Block]:
        """What happens once in a row of tiles."""
        head, tail = self.loop
        inside = self.blocks[head : tail + 1]
        return [block for block in inside if block.heavy and not block.used["mxu"]]


def schedules(folder: Path) -> Iterator[Schedule]:
    """The kernels in a folder that libtpu wrote to; programs without a matrix unit are left out."""
    for table in sorted(folder.glob("*final_hlo-static-per-bundle-utilization.txt")):
        stamp, name = table.name.split("-")[:2]
        program = next(
            (
                x
                for x in folder.glob(f"{stamp}-{name}-*-final_bundles.txt")
                if "analysis" not in x.name
            ),
            None,
        )
        if program is None or name.startswith("<"):
            continue
        text = program.read_text()
        if "tpu_custom_call" in text or "inlined_call_operand" in text:
            capacity, used = _table(table.read_text())
            if any(row["mxu"] for row in used):
                yield _schedule(name, capacity["mxu"], used, text)


def _table(text: str) -> tuple[dict[str, int], list[dict[str, int]]]:
    numbers = [
        dict(zip(UNITS, map(int, line.split()), strict=True))
        for line in text.splitlines()
        if re.fullmatch(r"[\d\s]+", line) and line.strip()
    ]
    return numbers[0], numbers[1:]


def _schedule(name: str, matrix_units: int, used: list[dict[str, int]], text: str) -> Schedule:
    lines = [line for line in text.splitlines() if re.match(r"\s*(0x[0-9a-f]+|0)\s", line)]
    assert len(lines) == len(used), f"{name}: {len(lines)} bundles, {len(used)} in the table"
    starts: dict[str, int] = {}
    for i, line in enumerate(lines):
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", line):
            starts.setdefault(region, i)
    branches = {}  # the last bundle that still runs -> (target, whether it may go on)
    for i, line in enumerate(lines):
        found = re.search(r"sbr\.rel (\([^)]*\) )?target = \$region(\d+)", line)
        if found and found[2] in starts:
            branches[min(i + _DELAY, len(lines) - 1)] = (starts[found[2]], found[1] is not None)
    cuts = {0, len(lines)} | {i + 1 for i in branches} | {target for target, _ in branches.values()}
    order = sorted(cuts)
    index = {start: i for i, start in enumerate(order)}
    blocks, after = [], []
    for start, end in itertools.pairwise(order):
        total = {unit: sum(row[unit] for row in used[start:end]) for unit in UNITS}
        blocks.append(Block(start, end - start, total))
        target, goes_on = branches.get(end - 1, (None, True))
        ahead = [index[end]] if goes_on and end < len(lines) else []
        after.append(ahead + ([] if target is None else [index[target]]))
    return Schedule(name, blocks, after, matrix_units)


def vmem(folder: Path, name: str) -> int:
    """The bytes of VMEM that a kernel holds: where its last allocation ends."""
    ends = [0]
    for text in (x.read_text() for x in folder.glob(f"*-{name}-*-post-delay-converter.txt")):
        found = re.findall(r"space=vmem, size = (\w+), offset = (\w+)", text)
        ends += [int(size, 0) + int(offset, 0) for size, offset in found]
    return max(ends)
