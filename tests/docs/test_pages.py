"""What tools/site makes of the files of the repository; needs no MkDocs."""

import sys

import pytest
from docs.documents import ROOT

sys.path.insert(0, str(ROOT))
from tools.site import pages

NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
LINKED = pages.linked_sources(pages.written().values())


def test_markdown_is_shown_as_a_page_and_not_as_source():
    assert [path for path in LINKED if path.suffix == ".md"] == []


@pytest.mark.parametrize(("place", "path"), pages.written().items())
def test_a_page_is_in_the_navigation(place, path):
    listed = f" {place}\n" in NAVIGATION
    assert listed or place.startswith("notes/")  # notes/index.md lists the others


def test_the_page_of_the_examples_links_to_the_programs():
    origin = ROOT / "examples" / "README.md"
    text = pages.with_links(origin.read_text(), origin, pages.place(origin))
    assert "(../source/examples/serve.py.md)" in text
    assert (ROOT / "examples" / "serve.py") in LINKED
