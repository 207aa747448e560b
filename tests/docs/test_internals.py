"""The documents name only files that exist."""

import re
from pathlib import Path

import pytest
from docs.documents import ROOT

PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks" / "notes").glob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
    ]
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([\w.\-]+(?:/[\w.\-]+)+)`")
# A path in backquotes is one of the repository if it begins with a folder of it.
_OURS = ("ejkernel", "tests", "docs", "benchmarks", "examples", "tools", ".ci", ".github")
_FOLDERS = tuple(f"{folder}/" for folder in _OURS)


def missing(page: Path, text: str) -> list[str]:
    """The targets of relative links, and the paths in backquotes, that do not exist."""
    links = (target.partition("#")[0] for target in _LINK.findall(text) if ":" not in target)
    named = (path for path in _CODE.findall(text) if path.startswith(_FOLDERS))
    return [
        *(target for target in links if target and not (page.parent / target).exists()),
        *(path for path in named if not (ROOT / path).exists()),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_a_document_exists(page):
    assert missing(page, page.read_text()) == []


@pytest.mark.parametrize("page", ["internals.md", "glossary.md"])
def test_the_pages_of_contributors_link_to_the_code(page):
    targets = _LINK.findall((ROOT / "docs" / page).read_text())
    assert sum(target.startswith("../ejkernel/") for target in targets) > 20


def test_every_page_of_the_notes_is_in_their_index():
    notes = ROOT / "benchmarks" / "notes"
    linked = set(_LINK.findall((notes / "README.md").read_text()))
    assert {page.name for page in notes.glob("*.md")} - linked == {"README.md"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](index.md) and [b](index.md#top) and [c](https://example.org/x)", []),
        ("[a](no_such_page.md)", ["no_such_page.md"]),
        ("`ejkernel/ops/executor.py` and `rows/columns`", []),
        ("`ejkernel/ops/no_such_file.py`", ["ejkernel/ops/no_such_file.py"]),
    ],
)
def test_a_path_that_does_not_exist_is_found(text, found):
    assert missing(ROOT / "docs" / "index.md", text) == found
