"""Ours against peers on an H200."""

import dataclasses

from benchmarks.report import results
from ejkernel.cli.report import limits
from ejkernel.cli.report.rows import Bar, Row

_OPERATIONS = ("flash_attention", "grouped_matmul")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One call that was timed together with its peers in the same run, rates in TFLOP/s."""

    operation: str
    case: str
    what: str
    call: str
    ours: float
    platform: str
    peer: str | None
    theirs: float | None
    bandwidth: float | None = None  # TB/s of a call that is bandwidth bound

    @property
    def share(self) -> float:
        """The part of the measured matmul peak, or of the bandwidth, that is reached."""
        if self.bandwidth is not None:
            return self.bandwidth / limits.H200_TERABYTES
        return self.ours / limits.H200_TFLOPS

    @property
    def ratio(self) -> float | None:
        return None if self.theirs is None else self.ours / self.theirs


def comparisons(operation: str) -> list[Comparison]:
    """Every call of an operation that has a rate of ours."""
    found = (compared(operation, row) for row in results.rows_of(f"h200/{operation}"))
    return [one for one in found if one is not None]


def compared(operation: str, row: Row) -> Comparison | None:
    """What a user gets, against the best timed peer; None without a rate of ours."""
    ours, theirs = _tflops(row.ours), _tflops(row.peer)
    if row.ours is None or ours is None:
        return None
    return Comparison(
        operation,
        row.name,
        row.direction or "",
        row.what,
        ours,
        row.ours.name.removeprefix("ours "),
        row.peer.name if row.peer and theirs is not None else None,
        theirs,
        row.ours.value if row.unit == "TB/s" else None,
    )


def _tflops(bar: Bar | None) -> float | None:
    return None if bar is None else bar.numbers.get("tflops")


def charted(operation: str) -> list[Comparison]:
    """The calls that a chart of TFLOP/s can show: those that are not bandwidth bound."""
    return [one for one in comparisons(operation) if one.bandwidth is None]


def speed_table(operation: str) -> str:
    """Every call of an operation with its best timed peer."""
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
    header = ["call", "pass", "ours, TFLOP/s", "best timed peer", "ratio", "of limit"]
    return results.table(header, rows, numbers=4)


# The calls of the README: what most models do, and both kinds of limit.
_HEADLINES = (
    ("flash_attention", "causal forward"),
    ("flash_attention", "causal both"),
    ("flash_attention", "causal_64 both"),
    ("flash_attention", "causal_256 forward"),
    ("flash_attention", "packed_37 both"),
    ("flash_attention", "window both"),
    ("grouped_matmul", "mixtral forward"),
    ("grouped_matmul", "qwen3_up forward"),
)
_PAGED_HEADLINES = ("decode_64", "uneven")


def headlines() -> list[Comparison]:
    """The calls of the README that were timed, in order."""
    found = {
        (one.operation, one.case): one
        for operation in _OPERATIONS
        for one in comparisons(operation)
    }
    return [found[key] for key in _HEADLINES if key in found]


def headline_table() -> str:
    """The headline figures: against the best timed peer, and against the limit."""
    rows = []
    for one in headlines():
        peer = "no peer" if one.theirs is None else f"{one.theirs:.0f} ({one.peer})"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        said = f"`{one.operation}` {one.what}: {one.call}"
        rows.append([said, f"{one.ours:.0f} TFLOP/s", peer, ratio, f"{one.share:.0%}"])
    paged = {row.name: row for row in results.rows_of("h200/ragged_page_attention_v3")}
    for row in (paged[case] for case in _PAGED_HEADLINES if case in paged):
        rate = row.bars[0].value
        said = f"`ragged_page_attention_v3`: {row.what}"
        share = f"{rate / limits.H200_TERABYTES:.0%}"
        rows.append([said, f"{rate:.2f} TB/s", "no peer timed", "", share])
    header = ["call", "ours", "best of the timed peers", "ratio", "of limit"]
    return results.table(header, rows, numbers=4)


def slower() -> str:
    """How many of all timed calls are slower than their best timed peer."""
    ratios = [one.ratio for operation in _OPERATIONS for one in comparisons(operation)]
    known = [ratio for ratio in ratios if ratio is not None]
    behind = sum(ratio < 1 for ratio in known)
    verb = "is" if behind == 1 else "are"
    return (
        f"Of the {len(known)} calls timed together with a peer, {behind} {verb} slower than the "
        "best of them ([all figures](docs/benchmarks.md))."
    )


# What a peer is, where its name in the results says too little.
_PEERS = {
    "jax cudnn": "cuDNN through `jax.nn.dot_product_attention`",
    "tokamax": "tokamax with its default (untuned) configurations",
    "torch": "`torch._grouped_mm`",
}


def peers() -> str:
    """The peers that were timed, by operation, and what was not timed."""
    said = []
    for operation in _OPERATIONS:
        rows = results.rows_of(f"h200/{operation}")
        names = {bar.name for row in rows for bar in row.bars if not bar.ours}
        timed = " and ".join(_PEERS.get(name, name) for name in sorted(names)) or "none"
        said.append(f"{timed} for `{operation}`")
    return (
        f"The timed peers are {', and '.join(said)}, each where it supports the call. "
        "FlashAttention-3 was not timed, and paged attention has no timed peer."
    )
