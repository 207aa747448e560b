"""What the pages of the site are made from, and where each file of the repository is on it."""

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTES = ROOT / "benchmarks" / "notes"

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
_OTHER_PAGES = {
    ROOT / "README.md": "readme.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "examples" / "README.md": "examples/index.md",
    NOTES / "README.md": "notes/index.md",
    **{path: f"notes/{path.name}" for path in NOTES.glob("*.md") if path.stem != "README"},
}


def written() -> dict[str, Path]:
    """Every page that somebody wrote: its place on the site, and its file."""
    own = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return own | {place: path for path, place in _OTHER_PAGES.items()}


def place(path: Path) -> str:
    """Where a file or folder of the repository is on the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if path in _OTHER_PAGES:
        return _OTHER_PAGES[path]
    inside = f"source/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        return f"{inside}/index.md"
    return f"{inside}.md" if path.suffix == ".py" else inside


def resolve(origin: Path, target: str) -> Path | None:
    """The file that a relative link means; None for an address, and for what does not exist."""
    if ":" in target:
        return None
    path = Path(posixpath.normpath(origin.parent / target))
    return path if path.exists() and path.is_relative_to(ROOT) else None


def with_links(text: str, origin: Path, here: str) -> str:
    """The text with every link to a file of the repository leading to its place on the site."""

    def rewritten(found: re.Match[str]) -> str:
        path = resolve(origin, found[2])
        if path is None:
            return found[0]
        return found[1] + posixpath.relpath(place(path), posixpath.dirname(here) or ".") + found[3]

    parts = _FENCED.split(text)  # code at every other place
    return "".join(part if i % 2 else LINK.sub(rewritten, part) for i, part in enumerate(parts))


def linked_sources(files: Iterable[Path]) -> set[Path]:
    """The files and folders that are no pages and that these files link to, with their contents."""
    found: set[Path] = set()
    for origin in files:
        for _, target, _ in LINK.findall(origin.read_text()):
            path = resolve(origin, target)
            if path and place(path).startswith("source/"):
                found.add(path)
    folders = [path for path in found if path.is_dir()]
    return found | {path for folder in folders for path in contents(folder)}


def contents(folder: Path) -> list[Path]:
    """The text files below a folder."""
    kinds = {".py", ".json", ".md", ".txt"}
    return sorted(path for path in folder.rglob("*") if path.suffix in kinds and path.is_file())


def source_page(path: Path) -> str:
    """The page of a Python file, or of a folder: what is in it."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\nhide:\n  - navigation\n  - toc\n---\n\n# {name}\n\n"
    if path.is_dir():
        here = posixpath.dirname(place(path))
        lines = [
            f"- [{x.relative_to(path).as_posix()}]({posixpath.relpath(place(x), here)})"
            for x in contents(path)
        ]
        return head + "\n".join(lines) + "\n"
    return f"{head}````python\n{path.read_text()}````\n"
