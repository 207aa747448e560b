"""What MkDocs calls while it builds the site: files of the repository, charts, API sections."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.site import names, pages

_ALONE = ("index.md", "benchmarks.md")  # the only page of their tab
_NEEDS = re.compile(r"^```python needs=\S+$", re.MULTILINE)  # read by the tests of the documents
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img [^>]*src="([^"]+)">\s*'
    r"</picture>"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written elsewhere in the repository, and the sources they link to."""
    written = pages.written()
    for place, path in written.items():
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=path.read_text()))
    for path in sorted(pages.linked_sources(written.values())):
        place = pages.place(path)
        if place.endswith(".md"):
            files.append(File.generated(config, place, content=pages.source_page(path)))
        else:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead to places on the site, and charts in the page, where they can be hovered."""
    origin = pages.written().get(page.file.src_uri)
    if origin is None:
        return markdown
    if page.file.src_uri in _ALONE:
        page.meta["hide"] = ["navigation"]
    markdown = _NEEDS.sub("```python", markdown)
    markdown = _PICTURE.sub(lambda found: _chart(origin, dark=found[1], light=found[2]), markdown)
    markdown = names.DIRECTIVE.sub(lambda found: _documentation(found[1].split()), markdown)
    return pages.with_links(markdown, origin, page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site on which a public name is not documented."""
    found: Any = config.plugins["autorefs"]
    missing = []
    for name in names.public_paths():
        try:
            found.get_item_url(name)
        except KeyError:
            missing.append(name)
    if missing:
        raise PluginError(f"public names without a page: {', '.join(missing)}")


def _documentation(paths: list[str]) -> str:
    """The section of a page that is made from docstrings."""
    parts = []
    for path in paths:
        whole = pages.ROOT.joinpath(*path.split(".")).is_dir()  # its names have pages of their own
        parts.append(f"::: {path}" + ("\n    options:\n      members: false" if whole else ""))
    return "## API\n\n" + "\n\n".join(parts)


def _chart(origin: Path, dark: str, light: str) -> str:
    parts = {"light": origin.parent / light, "dark": origin.parent / dark}
    drawn = [
        f'<div class="chart-{name}">{path.read_text().strip()}</div>'
        for name, path in parts.items()
    ]
    return f'<div class="chart">{"".join(drawn)}</div>'
