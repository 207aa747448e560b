"""What the documents list from the sources: environment variables, and every public name."""

import importlib
import inspect
import types

from benchmarks.report import results
from ejkernel import settings
from tools.site import names

_DOCS = results.ROOT / "docs"


def variables() -> str:
    """The table of environment variables."""
    return "\n".join(x for x in (settings.__doc__ or "").splitlines() if x.startswith("|"))


def index() -> str:
    """A table of names for every public package, with the page of each."""
    return "\n\n".join(f"## `{package}`\n\n{_table(package)}" for package in names.PACKAGES)


def _pages() -> dict[str, str]:
    """The page on which each name is documented, by the name alone."""
    found = {}
    for page in sorted(_DOCS.glob("*.md")):
        for path in names.asked_for(page.read_text()):
            found[path.rpartition(".")[2]] = page.name
    return found | {"dot_product_attention": "integrations.md"}


def _table(package: str) -> str:
    pages = _pages()
    rows = []
    for name in names.public(package):
        page = pages[name]
        link = f"`{name}`" if page == "api.md" else f"[`{name}`]({page})"
        rows.append([link, _summary(package, name)])
    return results.table(["name", "what it is"], rows)


def _summary(package: str, name: str) -> str:
    """The first line of its docstring."""
    if name == "equinox":  # importing it needs Equinox
        return "A drop-in for `equinox.nn.MultiheadAttention`."
    value = getattr(importlib.import_module(package), name)
    if not isinstance(value, types.ModuleType) and not callable(value):
        value = type(value)
    text = "The version of the package." if name == "__version__" else inspect.getdoc(value) or ""
    return text.partition("\n")[0].replace("|", "\\|")
