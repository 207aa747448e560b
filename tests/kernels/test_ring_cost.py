"""The cost model of ring attention: bytes, times, and what `auto` takes."""

import pytest

from ejkernel.kernels.ring_attention.cost import Sizes, bytes_sent, cheapest, rates_of, seconds
from ejkernel.ops.platform import Device

V5P = Device("tpu", "TPU v5", None, "")
H100 = Device("gpu", "NVIDIA H100", None, "")
LONG = Sizes(8, 1, 16384, 16384, 32, 8, 256, 2, hops=8, causal=True, balanced=True)


def test_bytes_of_a_call():
    """Of 2 devices with 3 tokens, 2 heads on 2, keys of 4 and values of 4 in 16 bits."""
    sizes = Sizes(2, 1, 3, 3, 2, 2, 8, 2, hops=2)
    q = k = 3 * 2 * 8 * 2
    g = 2 * k
    assert bytes_sent(sizes) == {
        "ring": (k, k + g + g),
        "all_gather": (k, k + g),
        "all_to_all": ((q + k) / 2, (2 * q + 2 * k) / 2),
    }
    assert bytes_sent(sizes._replace(hops=1))["ring"] == (0, 0)
    assert "all_to_all" not in bytes_sent(sizes._replace(kv_heads=1))


def test_a_long_balanced_ring_hides_its_transfers():
    assert cheapest(LONG, V5P) == "ring"
    assert cheapest(LONG._replace(hops=2), V5P) == "ring"


def test_an_exchange_of_heads_balances_what_a_contiguous_ring_does_not():
    sizes = LONG._replace(balanced=False)
    assert cheapest(sizes, V5P) == cheapest(sizes, H100) == "all_to_all"
    assert cheapest(sizes._replace(kv_heads=4), V5P) == "ring"


def test_few_keys_are_gathered_where_a_hop_is_too_short_to_hide_a_transfer():
    sizes = Sizes(8, 1, 64, 64, 28, 1, 256, 2, hops=8)
    assert cheapest(sizes, H100) == "all_gather"
    many = sizes._replace(kv_heads=28)
    assert seconds(many, rates_of(H100))["all_gather"] > 0
    assert cheapest(many, H100) == "ring"


@pytest.mark.parametrize(
    ("kind", "rate"),
    [("TPU v5 lite", 50e9), ("TPU v5", 100e9), ("TPU v6 lite", 100e9), ("NVIDIA H200", 450e9)],
)
def test_rates_are_those_of_the_device(kind, rate):
    assert rates_of(Device("tpu", kind, None, kind)).link == rate


def test_an_unknown_device_has_the_rates_of_its_platform():
    assert rates_of(Device("gpu", "NVIDIA X", None, "")) == rates_of(H100)
    assert rates_of(Device("cpu", "cpu", None, "")).flops < 1e13
