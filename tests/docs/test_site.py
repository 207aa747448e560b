"""The documentation site: every public name has a page, and every page loads in a browser.

`make test-docs` builds the site and names its folder in SITE; without it only the sources are read.
"""

import contextlib
import html.parser
import importlib
import json
import os
import sys
import time
import types
import urllib.parse
from pathlib import Path

import browser
import pytest
from docs.documents import ROOT

sys.path.insert(0, str(ROOT))
from tools.site import names, pages

SITE = ROOT / os.environ.get("SITE", "build/site")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
built = pytest.mark.skipif("SITE" not in os.environ, reason="runs in make test-docs")


def resolve(path):
    """What a dotted path names; the path itself where a package that it needs is missing."""
    package, _, name = path.rpartition(".")
    with contextlib.suppress(ImportError):
        return importlib.import_module(path)
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(package), name)
    return path


def documented():
    """Every object that a page documents, and the public ones of the modules among them."""
    asked = [resolve(path) for page in PAGES for path in names.asked_for(page.read_text())]
    modules = [value for value in asked if isinstance(value, types.ModuleType)]
    inside = [
        value
        for module in modules
        if not hasattr(module, "__path__")  # the names of a package are asked for one by one
        for name, value in vars(module).items()
        if not name.startswith("_")
    ]
    return [*asked, *inside]


class TestNames:
    def test_every_public_name_has_a_page(self):
        known = {id(value) for value in documented()}
        paths = {path for page in PAGES for path in names.asked_for(page.read_text())}
        public = (path for path in names.public_paths() if path not in paths)
        assert [path for path in public if id(resolve(path)) not in known] == []

    @pytest.mark.parametrize("package", names.PACKAGES)
    def test_the_names_of_a_package_are_all_read(self, package):
        module = importlib.import_module(package)
        offered = getattr(module, "__all__", None)
        if offered is None:
            names_here = {name for name in vars(module) if name[0] != "_"}
            files = {path.stem for path in Path(module.__file__).parent.iterdir()}
            offered = names_here - files - {"jaxtyping"}  # the last is put there by its import hook
        assert set(offered) <= set(names.public(package))

    def test_every_page_is_in_the_navigation(self):
        navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
        assert [page.name for page in PAGES if f" {page.name}\n" not in navigation] == []


class TestLinks:
    def test_a_link_to_a_source_leads_to_its_page(self):
        text = "[a](../ejkernel/ops/tuner.py#x), [b](../CHANGELOG.md)\n```\n[c](../LICENSE)\n```\n"
        changed = pages.with_links(text, ROOT / "docs" / "cli.md", "cli.md")
        assert "[a](source/ejkernel/ops/tuner.py.md#x), [b](changelog.md)" in changed
        assert "[c](../LICENSE)" in changed  # code stays

    @pytest.mark.parametrize("target", ["https://jax.dev/x.md", "no_such_page.md"])
    def test_other_links_stay(self, target):
        text = f"[a]({target})"
        assert pages.with_links(text, ROOT / "docs" / "cli.md", "cli.md") == text


class _Links(html.parser.HTMLParser):
    """The identifiers of a page, and what it links to."""

    def __init__(self, text):
        super().__init__()
        self.identifiers, self.targets = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.identifiers |= {given.get("id"), given.get("name")}
        self.targets += [given[key] for key in ("href", "src") if given.get(key)]


@built
class TestTheBuiltSite:
    def test_no_link_is_broken(self):
        read = {path: _Links(path.read_text()) for path in SITE.rglob("*.html")}
        broken = []
        for page, links in read.items():
            for target in map(urllib.parse.urlsplit, links.targets):
                if target.scheme or target.netloc or page.name == "404.html":
                    continue
                path = (page.parent / urllib.parse.unquote(target.path)).resolve()
                path = page if not target.path else path / "index.html" if path.is_dir() else path
                known = read[path].identifiers if path in read else ()
                fragment = urllib.parse.unquote(target.fragment)
                if not path.exists() or (fragment and fragment != "__" and fragment not in known):
                    broken.append((page.name, target.geturl()))
        assert len(read) > 50
        assert broken == []

    @pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
    def test_every_page_loads(self, width, height):
        """No complaint on the console, no request to another host, not wider than the screen."""
        places = [path.relative_to(SITE).as_posix() for path in sorted(SITE.rglob("*.html"))]
        # Sources are alike: one of them stands for all.
        places = [x for x in places if not x.startswith("source/") or "/executor" in x]
        found = {}
        with browser.served(SITE) as address, browser.browser() as tab:
            for place in places:
                tab.open(f"{address}/{place}", width, height)
                asked = [x for x in tab.requests if not x.startswith((address, "data:"))]
                wider = ["too wide"] * (tab.overflow() > 0)
                if wrong := [*tab.problems, *asked, *wider]:
                    found[place] = wrong
        assert found == {}

    def test_charts_have_the_colours_of_the_system(self):
        visible = (
            "Array.from(document.querySelectorAll('.chart > div'))"
            ".filter(one => one.offsetHeight).map(one => one.className)"
        )
        with browser.served(SITE) as address, browser.browser() as tab:
            for dark in (False, True, False):
                tab.open(f"{address}/benchmarks.html", dark=dark)
                expected = {"chart-dark" if dark else "chart-light"}
                deadline = time.monotonic() + 30
                while set(found := tab.value(visible)) != expected and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert set(found) == expected

    def test_the_search_finds_the_words_of_the_field(self):
        expected = {
            "GQA": "flash_attention",
            "varlen": "Masks with pictures",
            "KV cache": "page_attention",
            "MoE": "grouped_matmul",
            "FlashAttention": "flash_attention",
        }
        titles = (
            "Array.from(document.querySelectorAll('.md-search-result__item h1'))"
            ".map(title => title.textContent).join('; ')"
        )
        with browser.served(SITE) as address, browser.browser() as tab:
            for words, page in expected.items():
                tab.open(f"{address}/index.html?{urllib.parse.urlencode({'q': words})}")
                # Results come one by one.
                expression = f"({titles}).includes({json.dumps(page)})"
                assert tab.wait_for(expression, True), (words, tab.value(titles))

    def test_the_browser_notices_what_is_wrong(self, tmp_path):
        page = (
            "<script>console.error('one'); undefined_name()</script>"
            "<img src='http://other.invalid/x.png'><img src='missing.png'>"
        )
        (tmp_path / "bad.html").write_text(page)
        with browser.served(tmp_path) as address, browser.browser() as tab:
            tab.open(f"{address}/bad.html")
            problems = " ".join(tab.problems)
            assert "one" in problems
            assert "Uncaught" in problems
            assert "404" in problems
            assert "http://other.invalid/x.png" in tab.requests
