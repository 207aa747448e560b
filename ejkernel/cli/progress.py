"""How far `ejkernel tune` is: live lines in a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ejkernel.ops.tuner import Progress


class TuningProgress:
    """The passes under way, one line each: candidate, best time so far, time left for all.

    Args:
        passes: how many there are.
        console: where results are printed, too; without a terminal, lines go to stderr.
    """

    def __init__(self, passes: int, console: Console) -> None:
        self._passes = passes
        self._console = console if console.is_terminal else Console(stderr=True)
        self._under_way: dict[str, Progress] = {}
        self._finished = 0
        self._start = time.monotonic()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the lines while passes are tuned; nothing of them stays on the screen."""
        if not self._console.is_terminal:
            yield
            return
        with Live(
            get_renderable=self._lines, console=self._console, transient=True, refresh_per_second=4
        ):
            yield

    def update(self, name: str, progress: Progress) -> None:
        """A candidate of a pass has been measured."""
        self._under_way[name] = progress
        if not self._console.is_terminal:
            self._console.print(
                f"{self._line(name, progress)}; {progress.candidate}: {progress.outcome}",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )

    def finish(self, name: str) -> None:
        """A pass is done."""
        self._under_way.pop(name, None)
        self._finished += 1

    def seconds_left(self) -> float | None:
        """As if all passes took equally long; None before the first candidate."""
        shares = [x.number / x.total for x in list(self._under_way.values())]
        done = self._finished + sum(shares)
        elapsed = time.monotonic() - self._start
        return elapsed * (self._passes - done) / done if done else None

    def _lines(self) -> Text:
        lines = [self._line(name, x) for name, x in list(self._under_way.items())]
        waiting = f"pass {self._finished + 1} of {self._passes}: measuring the first candidate"
        return Text("\n".join(lines or [waiting]), no_wrap=True, overflow="ellipsis")

    def _line(self, name: str, progress: Progress) -> str:
        best = "none" if progress.best is None else f"{progress.best * 1e3:.3f} ms"
        minutes, seconds = divmod(round(self.seconds_left() or 0), 60)
        return (
            f"{name}: candidate {progress.number} of {progress.total}, best {best}, "
            f"{minutes}:{seconds:02d} left"
        )
