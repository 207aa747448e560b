"""The figures of docs/scale.md, recomputed by hand where that is easy."""

import sys
from xml.etree import ElementTree

import pytest

from docs import documents

sys.path.insert(0, str(documents.ROOT))
from benchmarks.report import plot, scale

V5P, V6E, H100 = scale.CHIPS
FLOPS = {V5P.name: 459e12, V6E.name: 918e12, H100.name: 989e12}  # published, bfloat16
MILLION = 2**20
TOKEN = 2 * 8 * 128 * 2  # bytes of the keys and values of a token


def work(chip, chips, tokens):
    """Seconds of half of all pairs, two matmuls forward and five backward, at half the rate."""
    pairs = tokens**2 / 2 / chips
    return 7 * 2 * pairs * 128 * 128 / (FLOPS[chip.name] / 2)


@pytest.mark.parametrize("chip", scale.CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("chips", scale.COUNTS)
def test_every_form_has_the_same_work_and_none_is_faster_than_it(chip, chips):
    ideal = pytest.approx(work(chip, chips, MILLION))
    for name in ("ring", "zig-zag", "all-gather", "head exchange"):
        cost = scale.FORMS[name](chip, chips, MILLION)
        assert cost.ideal == ideal
        assert cost.compute == (pytest.approx(2 * cost.ideal) if name == "ring" else ideal)
        assert cost.total >= cost.compute * (1 - 1e-9)
        assert cost.total <= (cost.compute + cost.communicate) * (1 + 1e-9)
        assert 0 < cost.share <= 1


def test_a_zig_zag_ring_takes_half_the_time_of_a_contiguous_one_that_is_hidden():
    contiguous = scale.ring(V5P, 1024, MILLION, balanced=False)
    zigzag = scale.ring(V5P, 1024, MILLION, balanced=True)
    assert zigzag.total == pytest.approx(contiguous.total / 2)
    assert zigzag.communicate == contiguous.communicate < zigzag.total


def test_a_ring_sends_keys_forward_and_with_their_gradients_backward():
    cost = scale.ring(V5P, 1024, MILLION, balanced=True)
    shard = MILLION // 1024 * TOKEN
    sent = 1023 * shard + 1023 * 3 * shard + 2 * shard  # float32 gradients: twice the keys
    assert cost.communicate == pytest.approx(sent / 100e9 + 2 * 1023 * 1e-6)


def test_a_ring_that_leaves_its_island_waits_for_the_network():
    inside, outside = (scale.ring(H100, chips, MILLION, balanced=True) for chips in (8, 16))
    rate = lambda cost, chips: 4 * (chips - 1) / chips * MILLION * TOKEN / cost.communicate
    assert rate(inside, 8) == pytest.approx(450e9, rel=0.1)
    assert rate(outside, 16) == pytest.approx(50e9, rel=0.1)


def test_a_window_has_the_hops_that_it_reaches():
    cost = scale.pruned(V5P, 1024, MILLION)  # shards of 1024 tokens: four hops after the first
    shard = 1024 * TOKEN
    assert cost.communicate == pytest.approx((4 * 4 + 2) * shard / 100e9 + 8e-6)
    pairs = 1024 * scale.WINDOW
    assert cost.compute == pytest.approx(7 * 2 * pairs * 128 * 128 / (FLOPS[V5P.name] / 2))


def test_keys_that_do_not_fit_are_not_gathered():
    assert scale.all_gather(V6E, 1024, MILLION) is not None
    assert scale.all_gather(V6E, 1024, 10 * MILLION) is None
    assert "too large" in scale.times()


def test_heads_are_exchanged_before_a_ring_of_an_eighth():
    """With one KV head per chip, a ring of 128 sends an eighth of what a ring of 1024 sends."""
    whole = scale.ring(H100, 1024, MILLION, balanced=True)
    exchanged = scale.head_exchange(H100, 1024, MILLION)
    assert whole.communicate / 9 < exchanged.communicate < whole.communicate / 7


def test_the_page_shows_the_choice_of_the_cost_model():
    row = next(line for line in scale.choices().splitlines() if line.startswith("| TPU v5p | 128k"))
    assert "`all_to_all`" in row
    assert "`ring`" in row


@pytest.mark.parametrize("theme", plot.THEMES)
def test_the_chart_is_to_scale_and_valid(theme):
    chart = ElementTree.fromstring(scale.chart(theme))
    rects = list(chart.iter("{http://www.w3.org/2000/svg}rect"))
    bars = [float(x.get("width")) for x in rects[len(scale.FORMS) :]]
    shares = [
        cost.share if (cost := run(chip, chips, tokens)) else 0
        for chip in scale.CHIPS
        for chips, _, tokens in scale.scenarios()
        for run in scale.FORMS.values()
    ]
    longest = max(bars)
    assert bars == pytest.approx([longest * share for share in shares], abs=0.3)
