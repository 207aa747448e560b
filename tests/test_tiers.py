"""The quick selection is what it says."""

import re

import pytest
import tiers
from test_layout import ROOT


def test_every_slow_test_exists():
    for name in tiers.SLOW:
        path, _, rest = name.partition("::")
        function = re.sub(r"\[.*", "", rest).rpartition("::")[2]
        assert f"def {function}(" in (ROOT / path).read_text(), name


def test_values_that_are_not_chosen_are_slow():
    first, second = tiers.quick(["a", "b"], "a")
    assert first == "a"
    assert [mark.name for mark in second.marks] == ["slow"]


def test_a_chosen_value_must_be_there():
    with pytest.raises(ValueError, match="no such values"):
        tiers.quick(["a"], "b")
