"""Ours against peers on an H200."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.report import calls, limits, results

_PASSES = {
    "forward": "forward",
    "both": "forward + backward",
    "rows": "gradient of the rows",
    "weights": "gradient of the weights",
}
_CALLS = {"flash_attention": calls.FLASH, "grouped_matmul": calls.GROUPED_MATMUL}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One call that was timed together with its peers in the same run, rates in TFLOP/s."""

    operation: str
    case: str
    direction: str
    ours: float
    platform: str
    peer: str | None
    theirs: float | None
    bandwidth: float | None = None  # TB/s of a call that is bandwidth bound

    @property
    def call(self) -> str:
        return _CALLS[self.operation][self.case]

    @property
    def what(self) -> str:
        return _PASSES[self.direction]

    @property
    def share(self) -> float:
        """The part of the hardware limit that is reached."""
        if self.bandwidth is not None:
            return self.bandwidth / limits.H200_TERABYTES
        return self.ours / limits.H200_TFLOPS

    @property
    def ratio(self) -> float | None:
        return None if self.theirs is None else self.ours / self.theirs


def comparisons(operation: str) -> list[Comparison]:
    """Every call of an operation that has a result of ours."""
    result = results.load(f"h200/{operation}")
    return list(_read(operation, result)) if result else []


def _read(operation: str, result: dict[str, Any]) -> Iterator[Comparison]:
    for name, found in result["cases"].items():
        case, _, direction = name.rpartition(" ")
        rates = {who: one["tflops"] for who, one in found.items() if "tflops" in one}
        ours = {who: rate for who, rate in rates.items() if who.startswith("ours ")}
        peers = {who: rate for who, rate in rates.items() if who not in ours}
        if not ours:
            continue
        # What a user gets without naming a platform, where that was timed.
        mine = "ours auto" if "ours auto" in ours else max(ours, key=rates.__getitem__)
        peer = max(peers, key=rates.__getitem__, default=None)
        platform = mine.removeprefix("ours ")
        theirs = None if peer is None else rates[peer]
        bandwidth = _bandwidth(operation, case, found[mine])
        yield Comparison(operation, case, direction, rates[mine], platform, peer, theirs, bandwidth)


def _bandwidth(operation: str, case: str, found: dict[str, Any]) -> float | None:
    """TB/s of a call that reads much and computes little: keys and values, or weights, once."""
    if operation == "grouped_matmul":
        return found.get("weights TB/s")
    size = calls.DECODE_BYTES.get(case)
    return None if size is None else size / found["ms"] / 1e9


def charted(operation: str) -> list[Comparison]:
    """The calls that a chart of TFLOP/s can show: those that are not bandwidth bound."""
    return [one for one in comparisons(operation) if one.bandwidth is None]


def speed_table(operation: str) -> str:
    """Every call of an operation with its best peer."""
    rows = []
    for one in comparisons(operation):
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        ratio = f"**{ratio}**" if one.ratio is not None and one.ratio < 1 else ratio
        rows.append(
            [
                one.call,
                one.what,
                f"{one.ours:.0f} ({one.platform})",
                "no peer" if one.theirs is None else f"{one.theirs:.0f} ({one.peer})",
                ratio,
                f"{one.share:.0%}",
            ]
        )
    header = ["call", "pass", "ours, TFLOP/s", "best peer", "ratio", "of limit"]
    return results.table(header, rows, numbers=4)


# The calls of the README: what most models do, and both kinds of limit.
_HEADLINES = (
    ("flash_attention", "causal", "forward"),
    ("flash_attention", "causal", "both"),
    ("flash_attention", "causal_64", "both"),
    ("flash_attention", "causal_256", "forward"),
    ("flash_attention", "packed_37", "both"),
    ("flash_attention", "window", "both"),
    ("grouped_matmul", "mixtral", "forward"),
    ("grouped_matmul", "qwen3_up", "forward"),
)
_PAGED_HEADLINES = ("decode_64", "uneven")


def headlines() -> list[Comparison]:
    """The calls of the README that were timed, in order."""
    found = {
        (one.operation, one.case, one.direction): one
        for operation in _CALLS
        for one in comparisons(operation)
    }
    return [found[key] for key in _HEADLINES if key in found]


def headline_table() -> str:
    """The headline figures: against the best peer, and against the hardware."""
    rows = []
    for one in headlines():
        peer = "no peer" if one.theirs is None else f"{one.theirs:.0f} ({one.peer})"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        said = f"`{one.operation}` {one.what}: {one.call}"
        rows.append([said, f"{one.ours:.0f} TFLOP/s", peer, ratio, f"{one.share:.0%}"])
    paged = results.load("h200/ragged_page_attention_v3")
    for case in _PAGED_HEADLINES if paged else ():
        rate = paged["cases"][case]["TB/s"]
        said = f"`ragged_page_attention_v3`: {calls.PAGED[case]}"
        share = f"{rate / limits.H200_TERABYTES:.0%}"
        rows.append([said, f"{rate:.2f} TB/s", "not compared", "", share])
    header = ["call", "ours", "best peer", "ratio", "of hardware limit"]
    return results.table(header, rows, numbers=4)


def slower() -> str:
    """How many of all timed calls are slower than their best peer."""
    ratios = [one.ratio for operation in _CALLS for one in comparisons(operation)]
    known = [ratio for ratio in ratios if ratio is not None]
    behind = sum(ratio < 1 for ratio in known)
    verb = "is" if behind == 1 else "are"
    return (
        f"Of all {len(known)} calls that were timed together with a peer, {behind} {verb} slower "
        "than the best one ([all figures](docs/benchmarks.md))."
    )
