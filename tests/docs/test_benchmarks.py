"""What the documents say of support and speed comes from recorded results of known commits."""

import dataclasses
import datetime
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from docs import documents
from ejkernel.cli import provenance
from ejkernel.cli.report import limits
from ejkernel.cli.report.results import parse
from ejkernel.cli.report.rows import Bar, Row
from ejkernel.ops import kernel_registry

sys.path.insert(0, str(documents.ROOT))
from benchmarks.report import matrix, plot, results, speed, targets

RESULTS = documents.ROOT / "benchmarks" / "results"
EVERY_RESULT = sorted(RESULTS.rglob("*.json"))
CPU, SM_80, SM_90, TPU = matrix.COLUMNS


def test_the_documents_are_up_to_date():
    command = [sys.executable, "-m", "benchmarks.report", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=documents.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_short():
    assert len((documents.ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", EVERY_RESULT, ids=lambda path: str(path.relative_to(RESULTS)))
class TestEveryResult:
    def test_it_says_where_it_comes_from(self, path):
        result = json.loads(path.read_text())
        assert [name for name in provenance.PROVENANCE if not result.get(name)] == []
        assert datetime.datetime.fromisoformat(result["date"]).utcoffset() == datetime.timedelta(0)

    def test_its_commit_is_in_the_history(self, path):
        if provenance.git("rev-parse", "--is-shallow-repository") != "false":
            pytest.skip("this is not a git checkout with its whole history")
        commit = json.loads(path.read_text()).get("commit") or ""
        assert not commit.endswith(provenance.CHANGED), (
            "measured on sources that were not committed"
        )
        assert provenance.git("cat-file", "-e", f"{commit}^{{commit}}") is not None, commit
        assert provenance.git("merge-base", "--is-ancestor", commit, "HEAD") is not None, commit


def entry(**change):
    """A record of evidence for the Triton kernel of flash attention."""
    return {
        "operation": "flash_attention",
        "platform": "triton",
        "backend": "gpu",
        "direction": "forward",
        "how": "run",
        "target": "NVIDIA H200",
        "passed": 3,
        "failed": 0,
    } | change


TRITON = next(x for x in kernel_registry.op("flash_attention").sources if x.platform == "triton")


@pytest.mark.parametrize(
    ("recorded", "column", "shown"),
    [
        ([], SM_90, "*not proven*"),
        ([entry()], SM_90, "R"),
        ([entry()], SM_80, "*not proven*"),
        ([entry(direction="backward")], SM_90, "*not proven*"),
        ([entry(platform="pallas")], SM_90, "*not proven*"),
        ([entry(how="compiled", target="sm_80")], SM_80, "C"),
        ([entry(how="compiled", target="sm_80")], SM_90, "*not proven*"),
        ([entry(how="interpreted", target="")], SM_80, "I"),
        ([entry(how="interpreted", target="")], TPU, "*not proven*"),
        ([entry(), entry(how="interpreted", target="")], SM_90, "R I"),
        ([entry(), entry(passed=8, failed=2)], SM_90, "**2 failed**"),
        ([entry(passed=0)], SM_90, "*not proven*"),
        ([entry(operation="blocksparse_attention")], SM_90, "R†"),
        ([entry(), entry(operation="blocksparse_attention", how="interpreted")], SM_90, "R I†"),
        ([entry(operation="grouped_matmul")], SM_90, "*not proven*"),
    ],
)
def test_a_cell_says_how_it_was_proven(recorded, column, shown, monkeypatch):
    monkeypatch.setattr(matrix, "evidence", lambda: recorded)
    assert matrix.proof("flash_attention", TRITON, column, "forward") == shown


def test_the_matrix_does_not_depend_on_what_is_installed():
    """Pallas on Hopper and Triton before it, although neither can run where the tests run."""
    names = lambda column: [
        source.platform.value for source in matrix.platforms("grouped_matmul", column, "forward")
    ]
    assert [names(column) for column in matrix.COLUMNS] == [
        ["xla"],
        ["triton"],
        ["pallas", "triton"],
        ["pallas"],
    ]


def test_that_no_kernel_ran_on_a_tpu_is_said_until_one_has(monkeypatch):
    compiled = entry(platform="pallas", backend="tpu", how="compiled", target="v5e")
    monkeypatch.setattr(matrix, "evidence", lambda: [compiled])
    said = "**No TPU kernel has run on a TPU**: they were compiled by libtpu for v5e."
    assert matrix._on_tpus() == said
    others = [compiled | {"operation": "gla_attention", "target": x} for x in ("v6e", "v4")]
    failed = compiled | {"target": "7x", "passed": 0, "failed": 1}
    monkeypatch.setattr(matrix, "evidence", lambda: [*others, compiled, failed])
    said = "compiled by libtpu for v5e (`flash_attention`); for v4, v6e (`gla_attention`)."
    assert matrix._on_tpus().endswith(said)
    monkeypatch.setattr(matrix, "evidence", lambda: [compiled | {"how": "run", "target": "TPU v4"}])
    assert matrix._on_tpus() == "Operations whose TPU kernels have run on a TPU: 1."


@pytest.mark.parametrize(
    ("value", "better", "bound", "verdict"),
    [
        (2.0, "lower", 2.0, "met"),
        (2.1, "lower", 2.0, "**missed**"),
        (1.9, "higher", 2.0, "**missed**"),
        (2.1, "higher", 2.0, "met"),
        (None, "higher", 2.0, "**missed**"),
        (2.1, "higher", None, ""),
    ],
)
def test_a_missed_target_is_marked(value, better, bound, verdict):
    row = Row("name", "what", "x", better, (Bar("ours", value),), bound)
    assert targets.line(row)[-1] == verdict


COMPARISON = speed.Comparison(
    "flash_attention", "causal both", "forward + backward", "words", 600, "auto", "a & b", 500
)


def test_what_users_get_is_compared_with_the_best_peer():
    rates = {"ours pallas": 700, "ours auto": 600, "a & b": 500, "other": 400}
    calls = {"causal both": {"call": "words", "pass": "forward + backward"}}
    cases = {"causal both": {name: {"tflops": rate} for name, rate in rates.items()}}
    (row,) = parse({"cases": cases, "calls": calls}, "file", {}).rows
    assert speed.compared("flash_attention", row) == COMPARISON


def test_a_call_without_a_rate_is_not_compared():
    rates = {"ours auto": {"tflops": 600}, "a & b": {"ms": 1}}
    cases = {"causal both": rates, "other": {"ours auto": {"ms": 1}, "a & b": {"tflops": 5}}}
    compared, other = parse({"cases": cases}, "file", {}).rows
    assert speed.compared("flash_attention", other) is None
    found = speed.compared("flash_attention", compared)
    assert (found.ours, found.peer, found.theirs, found.ratio) == (600, None, None, None)


@pytest.mark.parametrize(("auto", "verdict"), [(600.0, "met"), (500.0, "**missed**")])
def test_a_target_is_for_what_users_get(auto, verdict):
    bars = (Bar("ours auto", auto), Bar("ours pallas", 700.0))
    row = Row("name", "what", "TFLOP/s", "higher", bars, 550.0)
    assert targets.line(row)[1:] == [f"{auto:.0f} TFLOP/s", "at least 550 TFLOP/s", verdict]


def test_the_readme_names_the_timed_peers():
    rows = [row for name in speed._OPERATIONS for row in results.rows_of(f"h200/{name}")]
    timed = {bar.name for row in rows for bar in row.bars if not bar.ours}
    assert timed <= set(speed._PEERS)
    assert speed.peers() in (documents.ROOT / "README.md").read_text()


@pytest.mark.parametrize("theme", plot.THEMES)
def test_a_chart_is_to_scale_and_valid(theme):
    alone = dataclasses.replace(COMPARISON, peer=None, theirs=None)
    chart = ElementTree.fromstring(plot.chart("Speed", [COMPARISON, alone], theme))
    _, _, *bars = [float(x.get("width")) for x in chart.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(bars) == 3
    assert bars[0] == bars[2] == pytest.approx(bars[1] * 600 / 500, abs=0.1)
    assert bars[0] == pytest.approx(plot._scale(limits.H200_TFLOPS) * 600 / 790, abs=0.1)
