"""Retired words stay retired: `retired_words.txt` says what to use instead.

`python tests/test_words.py` prints every use, and the count for each file.
"""

import collections
import dataclasses
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("retired_words.txt")
_FOLDERS = ("ejkernel", "tests", "benchmarks", "examples", "tools")
KINDS = ("name", "part", "phrase", "allow")


@dataclasses.dataclass(frozen=True)
class Retired:
    """An entry of the list."""

    kind: str
    word: str
    instead: str
    where: tuple[str, ...] = ()

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """A phrase: its words with any white space, or the mark of a comment, between them."""
        words = r"(?:\s|#)+".join(map(re.escape, self.word.split()))
        before = r"(?<![\w.-])" if self.word[0].isalnum() else ""
        after = r"(?![\w-])" if self.word[-1].isalnum() else ""
        return re.compile(before + words + after, re.IGNORECASE)


class Use(NamedTuple):
    """A retired word in a file."""

    path: str
    line: int
    found: str
    entry: Retired

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r}, use {self.entry.instead}"


def read_list(text: str) -> tuple[list[Retired], frozenset[str]]:
    """The retired words, and the identifiers that stay."""
    retired, allowed = [], set()
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        # A replacement may hold "; " between two proposals, never " ; ".
        kind, word, *rest = (field.strip() for field in re.split(r"\s+;\s+", line))
        if kind not in KINDS:
            raise ValueError(f"{LIST.name}: unknown kind in {line!r}")
        if kind == "allow":
            allowed.add(word)
            continue
        where = tuple(x.strip() for x in rest[1].split(",")) if len(rest) > 1 else ()
        retired.append(Retired(kind, word, rest[0], where))
    return retired, frozenset(allowed)


RETIRED, ALLOWED = read_list(LIST.read_text())


def files() -> list[Path]:
    """The Python files and documents of the project."""
    found = [
        *(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "benchmarks" / "notes").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ]
    return sorted(path for path in found if path != Path(__file__).resolve())


def uses(path: str, text: str) -> list[Use]:
    """The retired words of a file."""
    if path == "CHANGELOG.md":  # what was released before stays as it is
        text = text.partition("\n## [Unreleased]")[2].partition("\n## [")[0]
    for quoted in ALLOWED:
        if '"' in quoted:
            text = text.replace(quoted, re.sub(r"\w", "_", quoted))  # still the same quotes
    # Most words are in no file at all: look closely only for those that are.
    lowered = f"{path} {text}".lower()
    entries = [
        entry
        for entry in RETIRED
        if (not entry.where or path.startswith(entry.where))
        and all(word in lowered for word in entry.word.lower().split())
    ]
    found = [
        Use(path, text.count("\n", 0, match.start()) + 1, match[0], entry)
        for entry in entries
        if entry.kind == "phrase"
        for match in entry.pattern.finditer(text)
    ]
    names = {x.word: x for x in entries if x.kind == "name"}
    parts = {x.word: x for x in entries if x.kind == "part"}
    for line, name in identifiers(path, text) if names or parts else ():
        if name in ALLOWED or name.rpartition(".")[2] in ALLOWED:
            continue
        name = name.rpartition(".")[2]
        if entry := names.get(name.lstrip("_")) or names.get(name):
            found.append(Use(path, line, name, entry))
        else:
            found += [Use(path, line, name, parts[x]) for x in parts_of(name) if x in parts]
    # A word that is retired as an identifier and as a phrase counts once.
    once = {(use.line, use.found): use for use in found}
    return sorted(once.values(), key=lambda use: use.line)


@functools.cache
def parts_of(name: str) -> list[str]:
    """The words of an identifier, in lower case.

    >>> parts_of("_newPeak_of_HTTPRows2")
    ['new', 'peak', 'of', 'http', 'rows']
    """
    return [x.lower() for x in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def identifiers(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Names with their lines: of the file, of Python code, of code in a document; `a.b`."""
    yield 1, Path(path).stem
    if not path.endswith(".py"):
        for code in re.finditer(r"```.*?```|`[^`\n]+`", text, re.DOTALL):
            line = text.count("\n", 0, code.start()) + 1
            for name in re.finditer(r"[A-Za-z_][\w.]*", code[0]):
                yield line + code[0].count("\n", 0, name.start()), name[0]
        return
    before: list[str] = ["", ""]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            owner = before[0] if before[1] == "." else ""
            yield token.start[0], f"{owner}.{token.string}" if owner else token.string
        elif token.type == tokenize.STRING and (inside := re.fullmatch(r"\"(\w+)\"", token.string)):
            yield token.start[0], inside[1]
        before = [before[1], token.string]


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def every_use() -> list[Use]:
    return [use for path in files() for use in uses(_relative(path), path.read_text())]


def test_no_retired_word_is_used():
    assert [str(use) for use in every_use()] == []


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("ejkernel/kernels/a.py", "new_peak = 0\n", ["new_peak"]),
        ("ejkernel/kernels/a.py", "class NewPeak: ...\n", ["NewPeak"]),
        ("ejkernel/kernels/peak_rows.py", "", ["peak_rows"]),
        ("ejkernel/cli/a.py", "peak_bytes = 0\n", []),  # retired for kernels only
        ("ejkernel/kernels/a.py", 'scratch = {"query_here": 1}\n', ["query_here"]),
        ("ejkernel/kernels/a.py", "# parts that are put\n#   together\n", ["put\n#   together"]),
        ("ejkernel/kernels/a.py", '"""Who can serve."""\n', ["can serve"]),
        ("tests/a.py", "for node in ast.walk(tree): pass\n", []),
        ("tests/a.py", "for node in plan.walk(tree): pass\n", ["walk"]),
        ("tests/a.py", "def test_overlap(): pass\n", []),  # `lap` is no part of it
        ("docs/a.md", "See `is_short` and a short page.", ["is_short"]),
        ("docs/a.md", "```python\nx = is_short(y)\n```\n", ["is_short"]),
        ("docs/a.md", "TPUs that are not here", ["TPUs that are not here", "that are not here"]),
        ("README.md", "besides", []),
        ("CHANGELOG.md", "\n## [Unreleased]\n- fine\n\n## [0.1.0]\n- mended\n", []),
        ("CHANGELOG.md", "\n## [Unreleased]\n- mended\n", ["mended"]),
        ("ejkernel/ops/a.py", "shrink_grid = 1\n", []),
        ("benchmarks/a.py", 'Case("beside")  # beside\n', ["beside"]),
    ],
)
def test_a_retired_word_is_found(path, text, found):
    assert [use.found for use in uses(path, text)] == found


def test_every_entry_has_a_replacement_and_is_listed_once():
    assert all(entry.instead for entry in RETIRED)
    listed = collections.Counter((entry.kind, entry.word) for entry in RETIRED)
    assert [word for word, count in listed.items() if count > 1] == []


if __name__ == "__main__":
    every = every_use()
    print(*every, sep="\n")
    for path, count in collections.Counter(use.path for use in every).most_common():
        print(f"{count:5}  {path}")
    print(f"{len(every):5}  in all")
