"""A task of `ejkernel tune` whose process dies; worker processes import it from here."""

import dataclasses
import os

from ejkernel.cli.tune import Outcome, Task

DIES = "dies"


@dataclasses.dataclass(frozen=True)
class Dying(Task):
    """Succeeds at once, but for the pass of one call."""

    def __call__(self, one, report):
        if one.call == DIES:
            os._exit(9)
        return Outcome(f"{one}: tuned", {})
