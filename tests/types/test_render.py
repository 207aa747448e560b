"""Pictures of masks."""

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from ejkernel.types import MaskInfo, drawing
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.drawing import _pairs, block_states
from ejkernel.types.rules import Band, Chunks, Segments


def unchecked(function):
    """`function` as users have it, without the checks of annotations that tests add."""
    return getattr(function, "__wrapped__", function)


def test_the_documented_picture():
    ids = jnp.repeat(jnp.array([[1, 1, 2, 2]]), 32, axis=1)
    text = MaskInfo.from_segments(ids).visualize(return_str=True)
    assert text.splitlines() == [
        "Attention mask (batch=0, head=0) block=(32x32) mask_shape=(1, 1, 128, 128)",
        "     01010202",
        "     ========",
        "01 ||████    ||",
        "01 ||████    ||",
        "02 ||    ████||",
        "02 ||    ████||",
        "     ========",
        "Legend mask: full='██'/##, partial='░░'/.., empty='  '",
        "Legend seg: left=Q block ID, top=KV block ID, PAD=-1, MIX=??",
    ]


def test_printing(capsys):
    mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, 2, -1, -1]])).apply_causal()
    assert mask.visualize(block_size=2, charset="ascii") is None
    assert capsys.readouterr().out.splitlines() == [
        "Attention mask (batch=0, head=0) block=(2x2) mask_shape=(1, 1, 6, 6)",
        "      00??",
        "      ======",
        " 00 ||..    ||",
        "MIX ||  ..  ||",
        "PAD ||      ||",
        "      ======",
        "Legend mask: full='██'/##, partial='░░'/.., empty='  '",
        "Legend seg: left=Q block ID, top=KV block ID, PAD=-1, MIX=??",
    ]


def test_without_segments_there_are_no_labels():
    mask = MaskInfo.from_random(1, 4, sparsity=0.0)
    lines = mask.visualize(block_size=2, show_segments=False, return_str=True).splitlines()
    assert lines[1:-1] == ["  ====", "||████||", "||████||", "  ===="]


def test_a_large_mask_is_drawn_in_larger_blocks():
    mask = MaskInfo.from_segments(jnp.zeros((1, 1000), int)).apply_causal()
    lines = mask.visualize(block_size=8, max_rows=5, max_cols=10, return_str=True).splitlines()
    assert "block=(200x104)" in lines[0]
    assert len(lines) == 1 + 1 + 1 + 5 + 1 + 2
    exact = mask.visualize(block_size=8, fit_in_screen=False, return_str=True).splitlines()
    assert "block=(8x8)" in exact[0]
    assert len(exact) == 1 + 1 + 1 + 125 + 1 + 2


def test_each_batch_row_and_head_has_its_own_picture():
    pairs = np.zeros((2, 2, 2, 2), bool)
    pairs[1, 1] = True
    mask = MaskInfo.from_attention_mask(jnp.array(pairs))
    draw = lambda batch, head: mask.visualize(2, batch, head, return_str=True)
    assert "██||" in draw(1, 1)
    assert "██||" not in draw(1, 0)
    for batch, head, name in ((2, 0, "batch"), (-1, 0, "batch"), (0, 2, "head")):
        with pytest.raises(IndexError, match=f"MaskInfo.visualize: {name} must be within 0 and 1"):
            draw(batch, head)


def test_wrong_options_are_explained():
    mask = MaskInfo.from_random(1, 4)
    with pytest.raises(ValueError, match=r"MaskInfo.visualize: block_size must be at least 1"):
        mask.visualize(block_size=0)
    with pytest.raises(ValueError, match="charset must be one of 'unicode', 'ascii', got 'utf'"):
        unchecked(MaskInfo.visualize)(mask, charset="utf")
    with pytest.raises(ValueError, match="a mask that is being traced has no values to show"):
        jax.jit(lambda mask: mask.visualize(return_str=True))(mask)


@examples(25)
@given(
    st.lists(st.integers(-1, 3), min_size=12, max_size=12),
    st.sampled_from([0, 3]),
    st.sampled_from([(5, 4), (3, 12)]),
)
def test_blocks_are_drawn_exactly(ids, window, block):
    block_q, block_k = block
    ids = jnp.array(ids)
    rule = (Segments(ids, ids) & Chunks(5)) | Band(-window, 0)
    mask = np.array(rule.dense(12, 12))[0]
    states = block_states(rule, 12, 12, block_q, block_k)
    for (i, j), state in np.ndenumerate(states):
        part = mask[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        assert state == (FULL if part.all() else PARTIAL if part.any() else EMPTY)


@pytest.mark.parametrize("block", [64, 100])
def test_large_blocks_are_drawn_exactly(block):
    ids = jnp.arange(300) // 37 * 5
    rule = Segments(ids, ids) & Band(-40, 0)
    mask = np.array(rule.dense(300, 300))[0]
    for (i, j), state in np.ndenumerate(block_states(rule, 300, 300, block, block)):
        part = mask[i * block : (i + 1) * block, j * block : (j + 1) * block]
        assert state == (FULL if part.all() else PARTIAL if part.any() else EMPTY)


def test_a_long_mask_is_drawn_without_making_it(monkeypatch):
    looked_at = []

    def count(rule, q_start, q_len, k_start, k_len):
        looked_at.append(q_len * k_len)
        return _pairs(rule, q_start, q_len, k_start, k_len)

    monkeypatch.setattr(drawing, "_pairs", count)
    ids = (np.arange(1 << 17) // 3000)[None]
    mask = MaskInfo.from_segments(jnp.array(ids)).apply_causal().apply_sliding_window((512, 0))
    lines = mask.visualize(block_size=128, return_str=True).splitlines()
    assert len(lines) == 32 + 6
    assert sum(looked_at) < 2**34 / 1000


def test_a_picture_for_a_notebook():
    mask = MaskInfo.from_segments(jnp.array([[0, 0, 1, -1]])).apply_causal()
    svg = ElementTree.fromstring(mask.to_svg())
    name = "{http://www.w3.org/2000/svg}"
    assert svg.tag == f"{name}svg"
    blocks = svg.find(f"{name}g").findall(f"{name}rect")
    # The ground, and the runs of full blocks in rows 0, 1 and 2.
    assert len(blocks) == 4
    assert blocks[2].get("width") == str(2 * int(blocks[1].get("width")))
    html = mask._repr_html_()
    assert "<svg" in html
    assert "Segments(" in html
    with pytest.raises(IndexError, match=r"MaskInfo.to_svg: head must be within 0 and 0, got 1"):
        mask.to_svg(head=1)


def test_a_traced_mask_has_a_name_instead_of_a_picture():
    shown = []
    jax.jit(lambda mask: shown.append(mask._repr_html_()))(MaskInfo.from_random(1, 4))
    assert shown[0].startswith("<code>MaskInfo(")


def test_many_rows_are_drawn_in_at_most_64_blocks():
    svg = MaskInfo.from_segments(jnp.zeros((1, 1000), int)).to_svg()
    assert "blocks of 16" in svg
