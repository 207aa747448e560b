"""The collectives of a program are counted in every form that XLA writes them."""

import pytest
from collectives import executed


class Compiled:
    def __init__(self, line):
        self.line = line

    def as_text(self):
        return f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  %y = {self.line}\n}}\n"


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        ("f32[4,8]{1,0} all-gather(%x)", "all-gather", 128),
        ("(f32[4]{0}, bf16[2]{0}) all-reduce(%x, %z)", "all-reduce", 20),
        ("(f32[4]{0}, f32[32]{0}) all-gather-start(%x)", "all-gather", 128),
        ("((f32[4], s8[4]), (f32[8], s8[8])) all-gather-start(%x, %z)", "all-gather", 40),
        ("(s8[4,2], s8[4,2], u32[], u32[]) collective-permute-start(%x)", "collective-permute", 8),
        ("f32[4]{0} all-reduce-start(%x)", "all-reduce", 16),
        ("pred[16]{0} all-to-all(%x)", "all-to-all", 16),
        ("f8e4m3fn[16]{0} reduce-scatter(%x)", "reduce-scatter", 16),
        ("s4[15]{0} all-to-all(%x)", "all-to-all", 8),
        ("f32[] all-reduce(%x)", "all-reduce", 4),
    ],
)
def test_the_result_is_counted_once(line, kind, size):
    assert executed(Compiled(line)) == [(kind, size)]


@pytest.mark.parametrize("shape", ["token[]", "f32[<=8]", "()"])
def test_what_is_not_known_is_an_error(shape):
    with pytest.raises(ValueError, match=r"unknown dtype|invalid literal|no array"):
        executed(Compiled(f"{shape} all-gather(%x)"))
