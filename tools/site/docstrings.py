"""Reads our docstrings for the site: the example at the end, and arguments described together."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
_TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Fences examples, and gives each of `a, b: text` an entry of its own."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring:
            text = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = _TOGETHER.sub(_apart, text)


def _apart(found: re.Match[str]) -> str:
    return "\n".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(", "))
