"""Nothing tells a user to install the package of the same name on the public index."""

import re

import pytest
from docs.documents import ROOT

_FILES = ("*.md", "docs/**/*.md", "benchmarks/notes/*.md", "examples/*", "ejkernel/**/*.py")
INSTRUCTIONS = sorted(path for kind in _FILES for path in ROOT.glob(kind) if path.is_file())
# A path such as dist/ejkernel-0.1.0-py3-none-any.whl is a wheel built from the checkout.
_FROM_INDEX = re.compile(r"pip install [^`#\n]*?(?<![\w/.-])ejkernel(?![\w/-]).*")
_WARNING = "pip install ejkernel` installs that one."


def from_index(text: str) -> list[str]:
    """The instructions of a text that install `ejkernel` from the public index."""
    return [found for found in _FROM_INDEX.findall(text) if found != _WARNING]


def test_no_document_or_error_installs_from_the_public_index():
    found = {path: from_index(path.read_text()) for path in INSTRUCTIONS}
    assert {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`pip install ejkernel[cuda]`", True),
        ("pip install 'ejkernel[cli]'.", True),
        ("pip install -U jax ejkernel", True),
        ('pip install ".[cuda,cli]"', False),
        ('pip install "dist/ejkernel-0.1.0-py3-none-any.whl[cli]"', False),
        (f"`{_WARNING}", False),
    ],
)
def test_an_installation_from_the_index_is_found(text, found):
    assert bool(from_index(text)) == found
