"""`ejkernel demo` on real screens, and its plain-JAX baselines against the definitions."""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyte
import pytest
from typer.testing import CliRunner

from ejkernel.cli import demo, demo_rows, measure, oracle, provenance
from ejkernel.cli.app import app
from ejkernel.cli.demo_calls import BASELINES
from ejkernel.cli.demo_rows import Comparison, Row
from ejkernel.cli.oracle import Deviation
from ejkernel.kernels import OPS
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor
from ejkernel.ops.executor import use
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import device_of

ESCAPE = b"\x1b"
ERASE_LINE = rb"(?=\r\x1b\[2K)"  # with which every change of the progress bar begins

# What the command prints, with rows that take no time: `{body}` may replace the measurement.
PROGRAM = """
import sys, time
from ejkernel.cli import demo, demo_rows, main
from ejkernel.cli.demo_rows import Comparison, Row
from ejkernel.cli.oracle import Deviation

def measure_row(operation, baseline, report):
    report("compiling")
    {body}
    return Row(operation, ("xla", "xla"), "q_blocksize=256", ("GPU", "TPU"), (),
               Deviation(1e-7, 4e-6), Comparison(0.01, 0.05), Comparison(1.234, 150.0), 12.0)

demo_rows.measure_row = measure_row
sys.argv = ["ejkernel", "demo", {options}]
main()
"""


REAL = """
import sys
from ejkernel.cli import main
sys.argv = ["ejkernel", "demo", "--op", "mean_pooling"]
main()
"""


def program(body="time.sleep(0.05)", options=""):
    return PROGRAM.format(body=body, options=options)


def environment(**changes):
    """That of a user: nothing in it speaks of a terminal but what is given."""
    names = ("COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "XLA_FLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "JAX_PLATFORMS": "cpu", **changes}


class Terminal:
    """A program in a pseudo-terminal, and what its screen showed."""

    def __init__(self, columns, lines, code, **changes):
        self.emulator = pyte.Screen(columns, lines)
        self.received = b""
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment(**{"TERM": "xterm-256color", **changes}),
        )
        os.close(terminal)

    def wait_for(self, text):
        """Read until this text has come."""
        while text.encode() not in self.received:
            self.received += os.read(self._controller, 65536)

    def finish(self):
        """The screens to the end, each as it stood when the next change began."""
        with contextlib.suppress(OSError):  # the program has closed its side
            while data := os.read(self._controller, 65536):
                self.received += data
        os.close(self._controller)
        self.process.wait(timeout=30)
        stream, screens = pyte.ByteStream(self.emulator), []
        for change in re.split(ERASE_LINE, self.received):
            stream.feed(change)
            screens.append([text.rstrip() for text in self.emulator.display])
        return screens


def shown(screen):
    """The operations in a screen, from top to bottom."""
    return [text.split()[0] for text in screen if text.split() and text.split()[0] in OPS]


class Bar(NamedTuple):
    operation: str
    finished: int


def progress_bars(screen):
    """What the progress bars in a screen say; there should be one."""
    found = [re.match(r"(\w+).*?(\d+)/14 ", text) for text in screen]
    return [Bar(match[1], int(match[2])) for match in found if match]


def row(operation=OPS[0], **changes):
    whole = Row(
        operation,
        ("xla", "xla"),
        "q=256 kv=512",
        ("GPU", "TPU"),
        (),
        Deviation(1e-7, 4e-6),
        Comparison(0.01, 0.031),
        Comparison(1.2, 5.04),
        12.3,
    )
    return whole._replace(**changes)


def check_progress(screens):
    """In every screen the newest row and one progress bar, up to the last operation."""
    seen = set()
    for screen in itertools.takewhile(lambda screen: shown(screen) != list(OPS), screens):
        bars = progress_bars(screen)
        assert len(bars) == 1 or not shown(screen)
        for bar in bars:
            seen.add(bar.finished)
            assert bar.operation in ("starting", *OPS[max(0, bar.finished - 1) : bar.finished + 1])
            assert shown(screen)[: bar.finished] == list(OPS[: bar.finished])
    assert seen == set(range(len(OPS)))


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 40)])
class TestInATerminal:
    def test_all_rows_their_progress_and_the_verdict_are_visible(self, columns, lines):
        terminal = Terminal(columns, lines, program())
        screens = terminal.finish()
        check_progress(screens)
        final = screens[-1]
        assert terminal.process.returncode == 0
        assert shown(final) == list(OPS)
        assert final[0].startswith("ejkernel ")  # nothing has scrolled away
        written = [text for text in final if text]
        assert written[-4].startswith("14 of 14 correct in ")
        assert "5.0x as fast as plain JAX, 121.6x with gradients" in written[-4]
        assert written[-3].startswith("Next: ejkernel ")
        assert not terminal.emulator.cursor.hidden

    def test_a_real_run(self, columns, lines, tmp_path):
        changes = {"EJKERNEL_CACHE_DIR": str(tmp_path), "XLA_FLAGS": os.environ["XLA_FLAGS"]}
        terminal = Terminal(columns, lines, REAL, **changes)
        screens = terminal.finish()
        final = screens[-1]
        assert terminal.process.returncode == 0, final
        assert any(text.startswith("1 of 1 correct in ") for text in final)
        measured = next(text for text in final if text.startswith("mean_pooling"))
        assert re.fullmatch(r"mean_pooling +xla +\d+%( +[\d.]+ +[\d.]+x){2} +[\d.]+x.*", measured)
        assert ("block_size=" in measured) == (columns == 120)
        steps = re.findall(r"mean_pooling: (\w+)", "\n".join(map("\n".join, screens)))
        assert list(dict.fromkeys(steps)) == ["compiling", "checking", "timing"]


def test_a_small_terminal_scrolls_and_keeps_the_newest_row():
    terminal = Terminal(80, 6, program())
    for screen in terminal.finish():
        for bar in progress_bars(screen):
            assert not bar.finished or OPS[bar.finished - 1] in shown(screen)


def test_interrupting_says_how_far_it_came_and_restores_the_cursor():
    terminal = Terminal(80, 24, program("time.sleep(30 if operation == 'gla_attention' else 0)"))
    terminal.wait_for("gla_attention: compiling")
    os.kill(terminal.process.pid, signal.SIGINT)
    final = terminal.finish()[-1]
    assert terminal.process.returncode == 130
    assert "Interrupted after 2 of 14 operations." in final
    assert not any("Traceback" in text for text in final)
    assert not terminal.emulator.cursor.hidden


class TestWithoutATerminal:
    @pytest.mark.parametrize(("changes", "width"), [({}, 80), ({"COLUMNS": "120"}, 120)])
    def test_lines_are_plain_and_come_one_by_one(self, changes, width):
        code = program("operation == 'flash_attention' and sys.stdin.readline()")
        with subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(**changes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            assert lines[3].startswith(OPS[0])  # while the next operation waits for input
            process.stdin.write("go on\n")
            process.stdin.flush()
            lines = [text.rstrip("\n") for text in (*lines, *process.stdout)]
        assert process.returncode == 0
        assert not re.search(r"[\x00-\x1f]", "".join(lines))
        assert max(map(len, lines)) <= width
        assert shown(lines) == list(OPS)
        assert any("q_blocksize" in text for text in lines) == (width == 120)

    def test_a_dumb_terminal_gets_no_control_characters(self):
        terminal = Terminal(80, 24, program("pass", "'--op', 'mean_pooling'"), TERM="dumb")
        assert shown(terminal.finish()[-1]) == ["mean_pooling"]
        assert ESCAPE not in terminal.received


class TestLines:
    @pytest.mark.parametrize("width", [80, 120, 200])
    @pytest.mark.parametrize("operation", OPS)
    def test_fit_and_name_the_operation_whole(self, width, operation):
        slow = row(operation, forward=Comparison(12.3, 9.9), gradient=Comparison(99.99, 99999.0))
        for one in (row(operation), slow, demo.Failure(operation, "ValueError: " + 50 * "long ")):
            text = demo.line(one, width).plain
            assert text.split()[0] == operation
            assert len(text) <= width
            assert "\n" not in text

    def test_columns_stand_under_their_headers(self):
        groups, names = demo.header(80)
        text = demo.line(row(memory=123.4), 80).plain
        assert len(names) == len(text) <= 80
        for header, value in (("error", "2%"), ("memory", "123x")):
            end = names.index(header) + len(header)
            assert text[:end].endswith(value)
        assert groups.index("forward") > names.index("error")

    def test_show_the_share_of_the_allowed_error(self):
        assert " 25% " in demo.line(row(deviation=Deviation(1e-7, 4e-7)), 80).plain
        wrong = demo.line(row(deviation=Deviation(5e-7, 4e-7)), 80).plain
        assert "WRONG" in wrong
        assert "%" not in wrong

    def test_more_is_shown_where_there_is_room(self):
        assert "no GPU, TPU" not in demo.line(row(), 80).plain
        assert "q=256 kv=512" in demo.line(row(), 120).plain
        assert "no GPU, TPU" in demo.line(row(), 120).plain

    def test_reasons_stand_once(self):
        rows = [row(name) for name in OPS[:3]]
        assert demo.platforms([*rows, row(missing=())]) == ["xla for 4 of 4; no GPU, TPU"]
        old = row(platforms=("triton", "xla"), missing=("TPU",), unavailable=("cuda: too old",))
        assert demo.platforms([old, *rows]) == [
            "triton with gradients by xla for 1 of 4, xla for 3 of 4; no GPU, TPU",
            "cuda: too old (1 of 4)",
        ]
        assert demo.platforms([demo.Failure(OPS[0], "x")]) == []

    def test_the_verdict_counts_only_what_is_correct(self):
        rows = [row(), row(deviation=Deviation(1.0, 0.1)), demo.Failure("gla_attention", "x")]
        assert demo.verdict(rows, 61.2) == (
            "1 of 3 correct in 61 s; median 3.1x as fast as plain JAX, 4.2x with gradients"
        )
        assert demo.verdict(rows[1:], 1.0) == "0 of 2 correct in 1 s"


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments])


def test_an_unknown_operation_is_an_error():
    result = run("--op", "attention")
    assert result.exit_code == 2
    assert "no operation 'attention'" in result.output


def test_an_operation_that_raises_costs_no_other(monkeypatch):
    def fail(name, baseline, report):
        if name == "mean_pooling":
            raise ValueError("too short\nby far")
        return row(name)

    monkeypatch.setattr(demo_rows, "measure_row", fail)
    result = run("--op", "mean_pooling", "--op", "gla_attention")
    assert result.exit_code == 1
    assert "FAILED ValueError: too short by far" in result.output
    assert "\nmean_pooling: ValueError: too short by far\n" in result.output
    assert "1 of 2 correct" in result.output


def test_the_rows_can_be_written_to_a_file(monkeypatch, tmp_path):
    def some(name, baseline, report):
        if name == "mean_pooling":
            raise ValueError("too short")
        return row(name)

    monkeypatch.setattr(demo_rows, "measure_row", some)
    path = tmp_path / "demo.json"
    run("--op", "mean_pooling", "--op", "gla_attention", "--json", str(path))
    written = json.loads(path.read_text())
    assert written.keys() == {*provenance.PROVENANCE, "seconds", "rows"}
    assert written["rows"]["mean_pooling"] == {"failed": "ValueError: too short"}
    gla = written["rows"]["gla_attention"]
    assert gla["speedup"] == pytest.approx(3.1)
    assert gla["gradient_speedup"] == pytest.approx(4.2)
    assert gla["error"] < gla["allowed"]


def test_a_wrong_result_is_shown_and_fails(monkeypatch):
    right = BASELINES["mean_pooling"]
    for wrong in (
        lambda x, attention_mask: right.ours(x, attention_mask) * 1.001,
        lambda x, attention_mask: right.ours(jax.lax.stop_gradient(x), attention_mask),
        lambda x, attention_mask: right.ours(x, attention_mask) * jnp.nan,
    ):
        changed = measured_with(right, ours=wrong)
        monkeypatch.setitem(BASELINES, "mean_pooling", changed)
        result = run("--op", "mean_pooling")
        assert result.exit_code == 1
        assert "WRONG" in result.output
        assert "mean_pooling: off by " in result.output
        assert "0 of 1 correct" in result.output


def measured_with(baseline, **changes):
    """The baseline on few tokens."""
    return dataclasses.replace(baseline, tokens=128, **changes)


def test_a_baseline_that_computes_something_else_makes_ours_wrong():
    right = BASELINES["mean_pooling"]
    changed = measured_with(right, plain=lambda x, attention_mask: x.mean(axis=1))
    measured = demo_rows.measure_row("mean_pooling", changed)
    assert not measured.deviation.fine


def test_a_baseline_that_is_wrong_in_its_own_dtype_allows_nothing():
    right = BASELINES["mean_pooling"]

    def rough(x, attention_mask):
        out = right.plain(x, attention_mask)
        return out if x.dtype == jnp.float64 else out * jnp.nan

    with pytest.raises(measure.WrongResultError, match="plain JAX is off by inf"):
        demo_rows.measure_row("mean_pooling", measured_with(right, plain=rough))


class Definition(Executor):
    """Runs the reference of every operation."""

    def __init__(self):
        super().__init__(ConfigSelectorChain(ConfigCache()))

    def run(self, op, inputs, spec, request):
        call = Invocation(op, inputs, spec, device_of(jax.tree.leaves(inputs)))
        outputs = oracle.definition(call)(inputs)
        return outputs if request.finish is None else request.finish(outputs)


def test_every_operation_has_a_baseline_in_words():
    assert tuple(BASELINES) == OPS
    for baseline in BASELINES.values():
        assert f"{baseline.tokens} tokens" in baseline.call
        assert "`" in baseline.description
        assert "\n" not in baseline.call + baseline.description
        assert 1024 <= baseline.tokens <= 4096


@pytest.mark.parametrize("name", OPS)
def test_plain_jax_is_the_definition(name):
    """In float64, values and gradients: what the demo takes for the truth is the truth."""
    baseline = BASELINES[name]
    with jax.enable_x64(True):
        arguments = demo_rows.draw(baseline, 128).on_host(np.float64)
        got = jax.jit(demo_rows.gradient_of(baseline.plain))(*arguments)
        with use(Definition()):
            expected = jax.jit(demo_rows.gradient_of(baseline.ours))(*arguments)
        for x, exact in zip(oracle.arrays(got), oracle.arrays(expected), strict=True):
            assert oracle.distance(x, exact) <= 1e-12 * oracle.largest(exact)
