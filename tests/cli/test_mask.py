"""`ejkernel mask` draws any mask as large as the terminal allows, at the same cost."""

import re

import numpy as np
import pytest
from cli.commands import WIDTHS, run, sentence, too_wide
from rich.console import Console

from ejkernel.cli import mask, picture
from ejkernel.cli.mask import Recipe
from ejkernel.cli.picture import Picture, Style
from ejkernel.types import drawing
from ejkernel.types.block_map import EMPTY, FULL, PARTIAL
from ejkernel.types.rule import Rule


def test_draws_a_causal_triangle():
    shown = run("mask", "--length", "32", "--causal", "--block", "16", "--ascii")
    rows = [line.split("||")[1] for line in shown.output.splitlines() if "||" in line]
    assert rows == ["..  ", "##.."]


def test_documents_window_and_padding_are_rules_of_one_mask():
    built = Recipe(8, documents=(3, 4), causal=True, window=(1, 0)).build()
    rows = ["10000000", "11000000", "01100000", "00010000", "00011000", "00001100", "00000110"]
    expected = [[letter == "1" for letter in row] for row in [*rows, "0" * 8]]
    assert built.attention_mask[0, 0].tolist() == expected


RECIPES = [
    Recipe(50, causal=True),
    Recipe(50, causal=True, window=(7, 0)),
    Recipe(50, keys=70, causal=True, offset=20),
    Recipe(50, documents=(13, 21, 9)),
    Recipe(50, documents=(13, 21, 9), causal=True, window=(5, 0)),
    Recipe(50, chunk=12),
    Recipe(50, key_length=33),
]


def _exact(built, block_q, block_k):
    """The state of each block, from the dense mask."""
    dense = np.array(built.attention_mask[0, 0])
    blocks = [
        [rows[:, k : k + block_k] for k in range(0, dense.shape[1], block_k)]
        for rows in (dense[q : q + block_q] for q in range(0, dense.shape[0], block_q))
    ]
    state = lambda block: FULL if block.all() else PARTIAL if block.any() else EMPTY
    return np.array([[state(block) for block in row] for row in blocks])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: " ".join(recipe.rules()))
def test_pixels_of_few_tokens_are_exact(recipe):
    drawn = Picture.fitting(recipe.build(), columns=10, rows=10, block=None)
    exact = _exact(recipe.build(), drawn.block_q, drawn.block_k)
    assert drawn.states.tolist() == exact.tolist()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: " ".join(recipe.rules()))
def test_larger_pixels_called_full_or_empty_are(recipe):
    drawn = Picture.fitting(recipe.build(), columns=2, rows=2, block=None)
    exact = _exact(recipe.build(), drawn.block_q, drawn.block_k)
    certain = drawn.states != PARTIAL
    assert (drawn.states[certain] == exact[certain]).all()


def test_a_long_mask_costs_what_a_short_one_does(monkeypatch):
    """No pair of tokens is looked at, and the rules are evaluated for as many blocks."""
    sizes = []
    evaluate = drawing._blocks

    def counted(*arguments):
        bounds = evaluate(*arguments)
        sizes.append(bounds[0].size)
        return bounds

    def refuse(*arguments):
        raise AssertionError("pairs were looked at")

    monkeypatch.setattr(drawing, "_blocks", counted)
    monkeypatch.setattr(drawing, "_pairs", refuse)
    monkeypatch.setattr(Rule, "dense", refuse)
    for length in ("1000", "100000"):
        rules = ["--causal", "--documents", "300,500", "--window", "200,0"]
        assert run("mask", "--length", length, *rules, columns=80).exit_code == 0
    short, long = sizes
    assert long <= 2 * short


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("length", [3, 33, 1000, 100_000])
@pytest.mark.parametrize("style", [[], ["--ascii"]])
def test_a_picture_fits_the_terminal(columns, length, style):
    shown = run("mask", "--length", str(length), "--causal", *style, columns=columns)
    assert shown.exit_code == 0
    assert too_wide(shown, columns) == []
    lines = shown.output.splitlines()
    assert len(lines) <= 23
    if length >= 1000:  # and uses most of it
        assert max(map(len, lines)) > 0.8 * columns


def test_ticks_name_the_first_token_of_their_pixel():
    lines = run("mask", "--length", "64", "--causal", "--block", "1").output.splitlines()
    ticks = lines[1]
    corner = lines[2].index("┌") + 1
    for number in ticks.split():
        assert ticks.index(f" {number}") + 1 - corner == int(number)
    assert [line.split()[0] for line in lines[3::4][:3]] == ["0", "8", "16"]


def test_an_explicit_block_is_widened_only_to_fit():
    shown = run("mask", "--length", "1000", "--causal", "--block", "5", columns=80)
    assert "(pixel: 15 x 15)" in shown.output
    assert too_wide(shown, 80) == []


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("style", [[], ["--ascii"]])
def test_the_gallery_fits_a_small_terminal(columns, style):
    shown = run("mask", *style, columns=columns)
    assert shown.exit_code == 0
    assert too_wide(shown, columns) == []
    assert len(shown.output.splitlines()) <= 23


def test_the_gallery_shows_options_that_work():
    shown = run("mask", columns=80).output
    for name, recipe in mask._GALLERY.items():
        (options,) = re.findall(rf"^{name} +(--length .*)$", shown, re.M)
        drawn = run("mask", *options.split())
        assert drawn.exit_code == 0
        assert ", ".join(recipe.rules()) in drawn.output


def test_half_blocks_show_two_rows_of_pixels():
    drawn = Picture(np.array([[FULL, EMPTY, PARTIAL], [EMPTY, FULL, FULL], [FULL] * 3]), 1, 1)
    assert [line.plain for line in drawn.lines(Style())] == ["▀▄▓", "▀▀▀"]
    first, _ = drawn.lines(Style(colours=True))
    colours = picture._COLOURS
    assert first.plain == "▀▄▀"
    assert [str(span.style) for span in first.spans] == [
        colours[FULL],
        colours[FULL],
        f"{colours[PARTIAL]} on {colours[FULL]}",
    ]


def test_colours_only_where_the_terminal_has_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = {"force_terminal": True, "color_system": "standard"}
    assert mask._style(Console(**terminal), ascii_only=False).colours
    assert not mask._style(Console(**terminal), ascii_only=True).colours
    assert not mask._style(Console(**terminal, no_color=True), ascii_only=False).colours
    assert "\x1b" not in run("mask", "--length", "8").output


def test_writes_an_svg(tmp_path):
    path = tmp_path / "mask.svg"
    assert run("mask", "--length", "100000", "--causal", "--svg", str(path)).exit_code == 0
    assert path.read_text().lstrip().startswith("<svg")
    assert [file.name for file in tmp_path.iterdir()] == ["mask.svg"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--window", "a"], "--window takes numbers like 3 or 3,4, got 'a'."),
        (["--window", "1,2,3"], "--window takes one number or LEFT,RIGHT"),
        (["--window", "-1"], "sliding_window must not be negative, got (-1, -1)."),
        (["--length", "8", "--documents", "5,6"], "documents of 11 tokens do not fit into 8."),
        (["--documents", "5,-2"], "a document has at least 1 token, got -2."),
        (["--causal", "--svg", "/dev/null/x.svg"], "/dev/null is not a folder"),
        (["--length", "1000000000"], "less than or equal to 100000000"),
        (["--chunk", "99999999999"], "less than or equal to 100000000"),
        (["--key-length", "99999999999"], "less than or equal to 100000000"),
        (["--keys", "1000000000"], "less than or equal to 100000000"),
        (["--offset", "5"], "it shifts --causal or --window; give one."),
    ],
)
def test_refuses_nonsense_in_one_sentence(arguments, said):
    shown = run("mask", *arguments)
    assert shown.exit_code == 2
    assert said in sentence(shown)
