"""What the pages list from sources and draw from masks is complete and true."""

import inspect
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

import ejkernel
from docs import documents
from ejkernel.kernels import OPS
from ejkernel.ops import kernel_registry

sys.path.insert(0, str(documents.ROOT))
from benchmarks.report import masks, plot, reference, speed, support

DOCS = documents.ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"
PICTURES = re.findall(r'src="images/mask-([\w-]+)-light\.svg"', masks.PAGE.read_text())


@pytest.fixture(scope="module")
def drawn():
    return masks.drawn()


class TestMasks:
    def test_the_page_shows_every_picture(self, drawn):
        assert list(drawn) == PICTURES
        assert len(PICTURES) > 10

    @pytest.mark.parametrize("theme", plot.THEMES)
    @pytest.mark.parametrize("name", PICTURES)
    def test_a_cell_is_drawn_for_every_visible_pair(self, drawn, name, theme):
        mask = drawn[name]
        picture = ElementTree.fromstring(masks.picture(name, mask, theme))
        seen = np.zeros(mask.attention_mask.shape[-2:], bool)
        for row in picture.iter(f"{SVG}g"):
            query, first, last = re.fullmatch(
                r"query (\d+) sees keys? (\d+)(?: to (\d+))?", row.findtext(f"{SVG}title")
            ).groups()
            seen[int(query), int(first) : int(last or first) + 1] = True
            cells = row.find(f"{SVG}path").get("d").count("M")
            assert cells == int(last or first) - int(first) + 1
        assert (seen == np.asarray(mask.attention_mask)[0, 0]).all()


class TestSupport:
    @pytest.mark.parametrize("operation", OPS)
    def test_a_page_has_a_row_for_every_platform(self, operation):
        table = support.table(operation)
        assert table in (DOCS / f"{operation}.md").read_text()
        for source in kernel_registry.op(operation).sources:
            assert f"| `{source.platform.value}`" in table

    def test_what_a_platform_does_not_list_is_shown(self):
        row = next(x for x in support.table("flash_attention").splitlines() if "`cuda`" in x)
        assert {"`logits_soft_cap`", "`mask`"} <= set(re.split(r"[ ,|]+", row))
        assert "`causal`" not in row

    @pytest.mark.parametrize("operation", OPS)
    def test_a_page_has_papers_and_the_arguments(self, operation):
        text = (DOCS / f"{operation}.md").read_text()
        assert "\n## Papers\n" in text
        assert f"<!-- api: ejkernel.modules.{operation} " in text


def test_every_environment_variable_is_listed():
    source = (documents.ROOT / "ejkernel" / "settings.py").read_text()
    read = set(re.findall(r'_(?:read|flag)\("(EJKERNEL_\w+)"\)', source))
    assert len(read) > 5
    assert read == set(re.findall(r"^\| `(EJKERNEL_\w+)`", reference.variables(), re.MULTILINE))


@pytest.mark.parametrize("theme", plot.THEMES)
def test_every_bar_of_a_chart_says_its_value(theme):
    rows = speed.charted("flash_attention")
    chart = ElementTree.fromstring(plot.chart("Speed", rows, theme))
    said = [group.findtext(f"{SVG}title") for group in chart.iter(f"{SVG}g")]
    assert len(said) == sum(1 + (row.theirs is not None) for row in rows)
    assert all(f"{row.ours:.1f} TFLOP/s" in " ".join(said) for row in rows)


@pytest.mark.parametrize("operation", OPS)
def test_the_docstring_lists_the_platforms_of_the_operation(operation):
    same = {"scaled_dot_product_attention": "flash_attention"}  # its docstring refers to that one
    documented = inspect.getdoc(getattr(ejkernel, same.get(operation, operation)))
    (line,) = re.findall(r"^ +platform: (.*), or None for", documented, re.MULTILINE)
    registered = {source.platform.value for source in kernel_registry.op(operation).sources}
    assert sorted(re.findall(r'"(\w+)"', line)) == sorted(registered)
