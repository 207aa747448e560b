"""`ejkernel bench --html`: a page from results, as a browser shows it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
from cli.commands import run, sentence

from ejkernel.cli import bench, figures
from ejkernel.cli.report import page, results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIGURE = {
    "name": "pace",
    "what": "pace of `the_test`",
    "value": 4.5,
    "unit": "x",
    "better": "higher",
    "bound": 3,
}
SOURCE = {
    "device": "NVIDIA H200",
    "versions": {"jax": "0.10.2"},
    "date": "2026-11-16T06:08:06+00:00",
    "commit": "0123456789ab",
}
CASES = SOURCE | {
    "operation": "flash_attention",
    "dtype": "bfloat16",
    "calls": {
        "full": {"call": "4 x 4096", "pass": "forward", "mask": []},
        "causal": {"call": "1 x 128", "pass": "forward", "mask": ["causal"], "bound": 700},
        "decode": {"call": "8 x 1", "mask": ["causal"], "bytes": 2e9, "dtype": "float16"},
    },
    "cases": {
        "full": {"ours pallas": {"tflops": 650.0}, "ours auto": {"tflops": 600.0, "ms": 3.5}},
        "causal": {
            "ours auto": {"tflops": 500.0},
            "peer": {"tflops": 625.0},
            "broken": {"wrong": float("nan"), "plain": 0.1},
            "absent": {"failed": "out of memory"},
        },
        "decode": {"ours auto": {"ms": 1.0, "tflops": 1.0}, "peer": {"ms": 2.0, "tflops": 0.5}},
    },
}


def rows(data):
    return results.parse(data, "file.json", {}).rows


class TestReading:
    def test_a_figure_has_a_value_and_a_target(self):
        (row,) = rows({"figures": [FIGURE]})
        assert (row.ours.value, row.bound, row.met, row.operation) == (4.5, 3, True, None)

    def test_a_figure_without_a_value_misses_its_target(self):
        (row,) = rows({"figures": [FIGURE | {"value": None}]})
        assert (row.met, row.bars[0].problem) == (False, "wrong result")

    def test_a_known_figure_says_what_an_older_file_does_not(self):
        known = figures.Figure("pace", "better words", "x", "higher", 3, lambda: 1.0, "op", None)
        (row,) = results.parse({"figures": [FIGURE]}, "file.json", {"pace": known}).rows
        assert (row.what, row.operation, row.dtype) == ("better words", "op", None)

    def test_the_operation_is_the_first_that_the_words_name(self):
        (row,) = rows({"figures": [FIGURE | {"what": "`jax.jit` of `mean_pooling`"}]})
        assert row.operation == "mean_pooling"

    def test_the_default_is_compared_with_the_best_peer_and_the_limit(self):
        full, causal, _ = rows(CASES)
        assert (full.ours.name, full.peer, full.ratio, full.met) == ("ours auto", None, None, None)
        assert (causal.ratio, causal.limit, causal.met) == (0.8, 790.0, False)
        assert [bar.name for bar in full.bars] == ["ours auto", "ours pallas"]

    def test_what_failed_has_no_value(self):
        causal = rows(CASES)[1]
        assert {bar.name: bar.problem for bar in causal.bars if bar.problem} == {
            "broken": "wrong result",
            "absent": "failed",
        }

    def test_a_bandwidth_bound_call_is_compared_in_bandwidth(self):
        decode = rows(CASES)[2]
        assert (decode.unit, decode.ours.value, decode.limit) == ("TB/s", 2.0, 4.8)
        assert decode.dtype == "float16"

    def test_a_ratio_has_its_target_in_its_name(self):
        data = {"cases": {}, "summary": {"a / b (at most 1.2)": 1.3}}
        (row,) = rows(data)
        assert (row.name, row.better, row.bound, row.met) == ("a / b", "lower", 1.2, False)

    def test_a_demo_is_compared_with_plain_jax(self):
        data = {"rows": {"mean_pooling": {"speedup": 0.5, "seconds": 0.001, "memory": 2.0}}}
        speed, memory = rows(data)
        assert (speed.ratio, speed.ours.numbers, memory.ratio) == (0.5, {"ms": 1.0}, 2.0)

    def test_every_recorded_result_is_read(self):
        known = {figure.name: figure for figure in bench.FIGURES}
        found = results.read([RESULTS], known)
        expected = {"cpu.json", "demo.json", "tpu_schedule.json", "tpu_shapes.json"}
        expected |= {f"h200/{path.name}" for path in (RESULTS / "h200").glob("*.json")}
        assert {result.source.file for result in found} == expected
        every = [row for result in found for row in result.rows]
        assert {row.operation for row in every if row.name != "import"} >= {"flash_attention"}
        assert [row.name for row in every if row.operation is None] == ["import"]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ([], "the file must be an object"),
        ({"figures": {}}, "figures must be a list"),
        ({"figures": [3]}, "figures[0] must be an object, got 3"),
        ({"figures": [FIGURE | {"value": "fast"}]}, "figures[0].value must be a finite number"),
        ({"figures": [FIGURE | {"value": True}]}, "figures[0].value must be a finite number"),
        ({"figures": [FIGURE | {"value": float("inf")}]}, "must be a finite number, got inf"),
        ({"figures": [FIGURE | {"value": 10**400}]}, "must be a finite number"),
        ({"figures": [FIGURE | {"bound": "3"}]}, "figures[0].bound must be a finite number"),
        ({"figures": [FIGURE | {"name": 3}]}, "figures[0].name must be text"),
        ({"figures": [FIGURE | {"unit": None}]}, "figures[0].unit must be text, got None"),
        ({"figures": [FIGURE | {"better": ["lower"]}]}, 'better must be "lower" or "higher"'),
        ({"figures": [FIGURE | {"mask": "causal"}]}, "mask must be a list of texts"),
        ({"figures": [], "versions": ["jax"]}, "versions must be an object"),
        ({"figures": [], "versions": {"jax": 1}}, "versions.jax must be text, got 1"),
        ({"figures": [], "device": {}}, "device must be text"),
        ({"cases": [1]}, "cases must be an object"),
        ({"cases": {"a": 1}}, "cases['a'] must be an object, got 1"),
        ({"cases": {"a": {"ours": {"tflops": "x"}}}}, "cases['a']['ours'].tflops must be"),
        ({"cases": {"a": {"TB/s": []}}}, "cases['a'].TB/s must be a finite number"),
        ({"cases": {"a": {}}, "calls": {"a": 1}}, "calls['a'] must be an object"),
        ({"cases": {}, "summary": {"x (at most 1.2.3)": 1}}, "must be a number, got '1.2.3'"),
        ({"cases": {}, "summary": {"x": "y"}}, "summary: x must be a finite number"),
        ({"rows": {"a": []}}, "rows['a'] must be an object"),
        ({"rows": {"a": {"speedup": "x"}}}, "rows['a'].speedup must be a finite number"),
        ({"tests": {}}, "holds no results"),
        ({"figures": []}, "no results found"),
    ],
)
def test_what_is_no_result_gets_one_sentence(tmp_path, data, complaint):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(data))
    shown = run("bench", "--html", str(tmp_path / "page.html"), "--results", str(path))
    assert shown.exit_code == 2
    assert complaint in sentence(shown)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "it is not UTF-8 text"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"figures": [' + b"9" * 5000 + b"]}", "is not JSON"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_json_gets_one_sentence(tmp_path, text, complaint):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_bytes(text)
    shown = run("bench", "--html", str(tmp_path / "page.html"), "--results", str(path))
    assert shown.exit_code == 2
    assert complaint in sentence(shown)


class TestCommand:
    @pytest.fixture(autouse=True)
    def figure(self, monkeypatch):
        one = figures.Figure("pace", "pace of the test", "x", "higher", 3, lambda: 2.0, "op")
        monkeypatch.setattr(bench, "FIGURES", (one,))

    def test_shows_what_was_measured_now(self, tmp_path):
        path = tmp_path / "folder" / "page.html"
        shown = run("bench", "--html", str(path))
        assert shown.exit_code == 0
        assert "figures and calls: 1" in sentence(shown)
        assert "missed: at least 3x" in path.read_text()

    def test_measures_nothing_for_recorded_results(self, tmp_path, monkeypatch):
        monkeypatch.setattr(bench, "_measured", lambda *_: pytest.fail("measured"))
        path = tmp_path / "page.html"
        shown = run("bench", "--html", str(path), "--results", str(RESULTS))
        assert shown.exit_code == 0
        assert "4ca41d61dae2" in path.read_text()

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            (["--results", "x"], "the page needs a file: --html FILE"),
            (
                ["--results", "x.json", "--html", "p", "--only", "pace"],
                "--results measures nothing",
            ),
            (["--results", "x.json", "--html", "p", "--json", "j"], "--results measures nothing"),
            (["--html", "."], "cannot write .: it is a folder"),
            (["--html", "/dev/null/page.html"], "/dev/null is not a folder"),
            (["--json", "/dev/null/page.json"], "/dev/null is not a folder"),
        ],
    )
    def test_options_that_do_not_fit_are_refused(self, options, complaint, monkeypatch):
        monkeypatch.setattr(bench, "_measured", lambda *_: pytest.fail("measured"))
        shown = run("bench", *options)
        assert shown.exit_code == 2
        assert complaint in sentence(shown)


class _Elements(HTMLParser):
    """The elements of a page, and the texts of scripts."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


HOSTILE = (
    "</script></style>\"'><img src=x onerror=\"document.title='run'\">"
    "<script>document.title='run'</script>{{script}} & `</code>"
)


def hostile():
    """A result whose every text tries to be part of the page."""
    figure = FIGURE | {"name": HOSTILE, "what": HOSTILE, "unit": HOSTILE, "bound": 9}
    figure |= {"operation": HOSTILE, "dtype": HOSTILE, "mask": [HOSTILE, "\n"]}
    source = {"device": HOSTILE, "versions": {HOSTILE: HOSTILE}, "date": HOSTILE}
    source |= {"commit": HOSTILE, "note": HOSTILE}
    call = {"call": HOSTILE, "pass": HOSTILE, "mask": [HOSTILE]}
    cases = {HOSTILE: {"ours auto": {"tflops": 1.0, HOSTILE: 2.0}, HOSTILE: {"tflops": 2.0}}}
    both = source | {"operation": HOSTILE, "cases": cases, "calls": {HOSTILE: call}}
    return [results.parse(x, HOSTILE, {}) for x in (source | {"figures": [figure]}, both)]


def test_texts_from_results_stay_texts():
    elements = _Elements(page.page(hostile())).found
    names = [tag for tag, _ in elements]
    assert names.count("script") == names.count("style") == 1
    assert "img" not in names
    allowed = re.compile(r"data-\w+|aria-\w+|class|id|role|name|value|href|tabindex|hidden|type")
    graphics = re.compile(r"lang|charset|content|http-equiv|scope|width|height|rx|[xy][12]?")
    attributes = {name for _, found in elements for name in found}
    assert [x for x in attributes if not (allowed.fullmatch(x) or graphics.fullmatch(x))] == []


def test_the_page_may_load_nothing_and_run_one_script():
    text = page.page(hostile())
    policy = next(x["content"] for _, x in _Elements(text).found if "http-equiv" in x)
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-\S+'; script-src 'sha256-\S+'", policy
    )
    assert "http:" not in text.replace(HOSTILE, "")
    assert "https:" not in text


@pytest.fixture(scope="module")
def tab():
    with browser.browser() as tab:
        yield tab


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    known = {figure.name: figure for figure in bench.FIGURES}
    path.write_text(page.page(results.read([RESULTS], known)))
    return path.as_uri()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page.page([results.parse(CASES, "file.json", {})]))
    return path.as_uri()


class TestBrowser:
    ROWS = "[...document.querySelectorAll('.row')].filter((x) => x.checkVisibility())"
    COUNT = f"{ROWS}.length"

    @staticmethod
    def shown(tab):
        """The calls that can be seen."""
        call = "(x) => x.querySelector('.what').textContent.split(' (')[0]"
        return tab.value(f"{TestBrowser.ROWS}.map({call})")

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [390, 1200])
    def test_it_fits_loads_nothing_and_has_no_errors(self, tab, recorded, width, dark):
        tab.open(recorded, width, dark=dark)
        assert tab.problems == []
        assert [x for x in tab.requests if x != recorded] == []
        assert tab.overflow() == 0
        tab.value("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
        assert tab.overflow() == 0
        paper = tab.value("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")

    @pytest.mark.parametrize(
        ("fragment", "names"),
        [
            ("", ["full", "causal", "decode"]),
            ("#operation=flash_attention", ["full", "causal", "decode"]),
            ("#mask=none", ["full"]),
            ("#mask=causal", ["causal", "decode"]),
            ("#mask=causal&dtype=bfloat16", ["causal"]),
            ("#dtype=float16", ["decode"]),
            ("#show=missed", ["causal"]),
            ("#show=slower", ["causal"]),
            ("#mask=none&show=missed", []),
            ("#mask=of+nobody", ["full", "causal", "decode"]),
        ],
    )
    def test_the_address_filters(self, tab, small, fragment, names):
        words = {"full": "forward 4 x 4096", "causal": "forward 1 x 128", "decode": "8 x 1"}
        tab.open(small + fragment)
        seen = self.shown(tab)
        assert len(seen) == len(names)
        assert all(x.startswith(words[name]) for x, name in zip(seen, names, strict=True))
        status = f"{len(names)} of 3 shown" if names else "Nothing fits these filters."
        assert tab.value("document.querySelector('[role=status]').textContent") == status
        cells = "[...document.querySelectorAll('tbody tr')].filter((x) => !x.hidden).length"
        assert tab.value(cells) == sum(len(CASES["cases"][name]) for name in names)

    def test_a_choice_changes_the_address_and_reset_takes_it_back(self, tab, small):
        tab.open(small)
        tab.value(
            "{ const field = document.querySelector('select[name=dtype]'); field.value = 'float16';"
            " field.dispatchEvent(new Event('change', { bubbles: true })); }"
        )
        assert tab.wait_for("location.hash", "#dtype=float16") == "#dtype=float16"
        assert tab.wait_for(self.COUNT, 1) == 1
        tab.value("document.querySelector('button').click()")
        assert tab.wait_for("location.hash", "") == ""
        assert tab.wait_for(self.COUNT, 3) == 3

    def test_the_links_of_the_summary_filter(self, tab, small):
        tab.open(small)
        tab.value("document.querySelector('header a').click()")
        assert tab.wait_for(self.COUNT, 1) == 1

    def test_a_bar_is_to_scale_and_shows_its_values(self, tab, small):
        tab.open(small)
        bars = "[...document.querySelectorAll('.row')][0].querySelectorAll('.bar')"
        width = lambda shape: f"{bars}[0].querySelector('{shape}').getBoundingClientRect().width"
        share = tab.value(f"{width('rect.ours')} / {width('rect.base')}")
        assert share == pytest.approx(600 / 790, abs=0.002)
        place = tab.value(
            f"(({{ x, y }}) => [x + 5, y + 5])({bars}[0].getBoundingClientRect())",
        )
        move = {"type": "mouseMoved", "x": place[0], "y": place[1]}
        tab.call("Input.dispatchMouseEvent", **move)
        tip = "document.getElementById('tip')"
        assert tab.wait_for(f"{tip}.hidden", False) is False
        said = tab.value(f"{tip}.textContent").splitlines()
        assert said[:2] == ["ours auto: 600 TFLOP/s", "76% of the measured matmul peak"]
        assert "ms: 3.5" in said

    def test_texts_from_results_do_not_run(self, tab, tmp_path):
        path = tmp_path / "page.html"
        path.write_text(page.page(hostile()))
        tab.open(path.as_uri(), 390)
        tab.value("new Promise((done) => setTimeout(done, 100))")
        assert tab.value("document.title") == "ejkernel: benchmark report"
        assert tab.problems == []
        assert tab.overflow() == 0
        source = tab.value("document.querySelector('.source').textContent")
        assert source.count(HOSTILE) == 7  # device, versions, date, commit, file, note
        assert len(self.shown(tab)) == 2
