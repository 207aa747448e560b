"""Reads the Python blocks of a Markdown document and runs them statement by statement."""

import ast
import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Documents that the package was promised to follow; a checkout alone does not have them.
PROMISED = ROOT.parent / "shared" / "seeds"


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block of Python: where it stands and what it says.

    `needs` are the packages that it uses beyond those of the test suite: "```python needs=flax".
    """

    document: str
    heading: str
    line: int
    source: str
    needs: tuple[str, ...] = ()

    def statements(self) -> list[ast.stmt]:
        # Leading newlines give every error the line of the document.
        return ast.parse("\n" * self.line + self.source).body


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A statement that must raise, and what to run so that the document can go on."""

    error: type[Exception]
    match: str
    instead: str = ""
    unless: Callable[[], bool] = lambda: False


def read(path: Path) -> list[Block]:
    """The Python blocks of a document, each with the heading it stands under."""
    blocks, heading, fence, start = [], "", None, 0
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if fence is None and line.startswith("```"):
            fence, start = line[3:].strip(), number
        elif fence is not None and line.startswith("```"):
            language, _, needs = fence.partition(" needs=")
            if language == "python":
                source = "\n".join(lines[start : number - 1])
                packages = tuple(needs.split(",")) if needs else ()
                blocks.append(Block(path.name, heading, start, source, packages))
            fence = None
        elif fence is None and (found := re.match(r"#+ (.*)", line)):
            heading = found[1].strip()
    return blocks


def run(
    blocks: list[Block],
    *,
    preludes: Mapping[str, str] | None = None,
    refusals: Mapping[str, Refusal] | None = None,
    checks: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the blocks in order in one namespace and return it.

    Args:
        blocks: The blocks of one document.
        preludes: Code run before the first block under a heading; "" stands for the beginning.
        refusals: What a statement that holds this text must raise.
        checks: Code run after the last block under a heading.
    """
    preludes, refusals, checks = dict(preludes or {}), dict(refusals or {}), dict(checks or {})
    seen: set[str] = set()
    namespace: dict[str, Any] = {"__name__": "__document__"}
    _execute(preludes.pop("", ""), namespace, "prelude")
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        _execute(preludes.pop(block.heading, ""), namespace, f"prelude of {block.heading}")
        for statement in block.statements():
            with _refused(ast.unparse(statement), refusals, seen, namespace):
                exec(compile(ast.Module([statement], []), block.document, "exec"), namespace)
        if following is None or following.heading != block.heading:
            _execute(checks.pop(block.heading, ""), namespace, f"check of {block.heading}")
    # A table entry that no block reached is out of date.
    left = [*preludes, *checks, *(set(refusals) - seen)]
    if left:
        raise LookupError(f"{blocks[0].document}: no block uses {left}.")
    return namespace


def _execute(source: str, namespace: dict[str, Any], name: str) -> None:
    exec(compile(inspect.cleandoc(source), f"<{name}>", "exec"), namespace)


@contextlib.contextmanager
def _refused(text: str, refusals: Mapping[str, Refusal], seen: set[str], namespace) -> Iterator:
    entry = next((entry for entry in refusals if entry in text), None)
    if entry is None:
        yield
        return
    seen.add(entry)
    refusal = refusals[entry]
    if refusal.unless():
        yield
        return
    try:
        yield
    except refusal.error as error:
        if not re.search(refusal.match, str(error), re.DOTALL):
            raise
    else:
        raise AssertionError(f"{text!r} must raise {refusal.error.__name__}, and did not.")
    _execute(refusal.instead, namespace, "instead")
