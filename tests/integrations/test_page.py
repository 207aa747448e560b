"""The page about drop-ins runs with the libraries that it is about."""

import pytest
from integrations.peers import need

from docs import documents

BLOCKS = documents.read(documents.ROOT / "docs" / "integrations.md")
NEEDED = sorted({package for block in BLOCKS for package in block.needs})


def test_every_library_has_a_block():
    assert NEEDED == ["equinox", "flax.linen", "flax.nnx"]


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize("package", NEEDED)
def test_the_page_runs(package):
    need(package)
    documents.run([block for block in BLOCKS if block.needs in ((), (package,))])
