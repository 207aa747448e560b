"""What a page shows of a result: rows of bars, and where they come from."""

import dataclasses
from collections.abc import Mapping

AUTO = "ours auto"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the values of a file come from; None where that was not recorded."""

    file: str
    device: str | None
    versions: Mapping[str, str]
    date: str | None
    commit: str | None
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Bar:
    """One measured value; `problem` says why there is none."""

    name: str
    value: float | None
    ours: bool = True
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure or a call, with the values of all that ran it."""

    name: str
    what: str
    unit: str
    better: str
    bars: tuple[Bar, ...]
    bound: float | None = None
    limit: float | None = None
    operation: str | None = None
    dtype: str | None = None
    mask: tuple[str, ...] | None = None
    direction: str | None = None
    rate: bool = False  # drawn to one scale with the other rates of its unit

    @property
    def ours(self) -> Bar | None:
        """What a user gets without naming a platform, or the best of ours."""
        chosen = (bar for bar in self.bars if bar.name == AUTO and bar.value is not None)
        return next(chosen, self.best)

    @property
    def best(self) -> Bar | None:
        """The best of ours."""
        return self._best(ours=True)

    @property
    def peer(self) -> Bar | None:
        """The best of the others."""
        return self._best(ours=False)

    @property
    def ratio(self) -> float | None:
        """How much better ours is than the best peer; below 1 it is worse."""
        if self.ours is None or self.peer is None:
            return None
        one, other = self.ours.value or 0.0, self.peer.value or 0.0
        if self.better == "lower":
            one, other = other, one
        return one / other if other else None

    @property
    def met(self) -> bool | None:
        """Whether what a user gets meets the target; None where there is none."""
        if self.bound is None:
            return None
        if self.ours is None or self.ours.value is None:
            return False
        value = self.ours.value
        return value <= self.bound if self.better == "lower" else value >= self.bound

    def _best(self, ours: bool) -> Bar | None:
        choose = min if self.better == "lower" else max
        bars = (bar for bar in self.bars if bar.ours == ours and bar.value is not None)
        return choose(bars, key=lambda bar: bar.value or 0.0, default=None)


@dataclasses.dataclass(frozen=True)
class Result:
    """All rows of a file."""

    source: Source
    rows: tuple[Row, ...]


def amount(value: float | None, unit: str) -> str:
    """Three digits and the unit; "x" is a ratio."""
    if value is None:
        return "wrong result"
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{digits}x" if unit == "x" else f"{digits} {unit}"


def target(bound: float, better: str, unit: str) -> str:
    """A target in words."""
    return f"{'at most' if better == 'lower' else 'at least'} {amount(bound, unit)}"
