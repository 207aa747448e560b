"""The command line does what it says, and says what it cannot do."""

import dataclasses
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ejkernel.cli import bench, demo, figures, mask, measure, subjects
from ejkernel.cli import tune as tuning
from ejkernel.cli.app import app
from ejkernel.kernels import OPS
from ejkernel.ops import executor
from ejkernel.ops.implementation import Pass
from ejkernel.ops.persistent import ShippedTable


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def test_the_help_lists_every_command():
    shown = run("--help")
    assert shown.exit_code == 0
    for command in ("info", "demo", "check", "bench", "tune", "mask"):
        assert f" {command} " in shown.output


def test_without_its_packages_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from ejkernel.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == ("ejkernel: the command line needs typer: pip install 'ejkernel[cli]'.\n")


def test_info_names_versions_settings_and_who_serves_each_operation():
    shown = run("info")
    assert shown.exit_code == 0
    assert "jax 0." in shown.output
    assert "EJKERNEL_AUTOTUNE_POLICY" in shown.output
    for op in OPS:
        lines = [line for line in shown.output.splitlines() if f" {op} " in line]
        assert len(lines) == 2
        assert all("xla (any)" in line for line in lines)


class TestMask:
    def test_draws_a_causal_triangle(self):
        shown = run("mask", "--length", "32", "--causal", "--block", "16", "--ascii")
        rows = [line.split("||")[1] for line in shown.output.splitlines() if "||" in line]
        assert rows == ["..  ", "##.."]

    def test_documents_window_and_padding_are_rules_of_one_mask(self):
        info = mask.build(8, documents=[3, 4], causal=True, window=(1, 0))
        rows = ["10000000", "11000000", "01100000", "00010000", "00011000", "00001100", "00000110"]
        expected = [[letter == "1" for letter in row] for row in [*rows, "0" * 8]]
        assert info.attention_mask[0, 0].tolist() == expected

    def test_writes_an_svg(self, tmp_path):
        path = tmp_path / "mask.svg"
        assert run("mask", "--causal", "--svg", str(path)).exit_code == 0
        assert path.read_text().lstrip().startswith("<svg")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--window", "a"], "--window takes numbers like 3 or 3,4, got 'a'."),
            (["--window", "1,2,3"], "--window takes one number or LEFT,RIGHT"),
            (["--window", "-1"], "sliding_window must be at least 0, got -1."),
            (["--length", "8", "--documents", "5,6"], "documents of 11 tokens do not fit into 8."),
        ],
    )
    def test_refuses_nonsense_in_one_sentence(self, arguments, said):
        shown = run("mask", *arguments)
        assert shown.exit_code == 2
        assert said in " ".join(shown.output.replace("│", " ").split())


class TestBench:
    @pytest.fixture
    def figure(self, monkeypatch):
        def use(measured):
            one = figures.Figure("pace", "pace of the test", "x", "higher", 3, measured)
            monkeypatch.setattr(bench, "FIGURES", (one,))

        return use

    def test_writes_device_versions_commit_and_figures(self, figure, tmp_path):
        figure(lambda: 4.5)
        path = tmp_path / "result.json"
        assert run("bench", "--json", str(path)).exit_code == 0
        written = json.loads(path.read_text())
        assert written.keys() == {"device", "versions", "commit", "figures"}
        (entry,) = written["figures"]
        assert (entry["value"], entry["bound"], entry["holds"]) == (4.5, 3, True)

    def test_a_figure_that_falls_short_is_shown_as_such(self, figure):
        figure(lambda: 2.0)
        shown = run("bench")
        assert shown.exit_code == 0
        assert "falls short" in shown.output

    def test_reports_no_figure_for_a_wrong_result(self, figure, tmp_path):
        def wrong():
            raise measure.WrongResultError("off by 1")

        figure(wrong)
        path = tmp_path / "result.json"
        shown = run("bench", "--json", str(path))
        assert shown.exit_code == 1
        assert "pace: off by 1" in shown.output
        assert json.loads(path.read_text())["figures"][0]["value"] is None

    def test_an_unknown_figure_is_an_error_that_lists_the_known(self):
        shown = run("bench", "--only", "speed")
        assert shown.exit_code == 2
        assert "gradient_memory" in shown.output

    def test_every_figure_of_the_readme_has_a_name_of_its_own(self):
        names = [figure.name for figure in figures.FIGURES]
        assert len(set(names)) == len(names) >= 10

    def test_the_file_in_a_folder_is_named_after_the_device(self, tmp_path):
        assert bench._file(tmp_path).name == "cpu.json"


class TestMeasure:
    def test_a_result_off_by_more_than_rounding_is_wrong(self):
        measure.check_close([1.0, 2.0 + 1e-6], [1.0, 2.0], ulps=32)
        with pytest.raises(measure.WrongResultError, match="off by"):
            measure.check_close([1.0, 2.0 + 1e-4], [1.0, 2.0], ulps=32)

    def test_nan_is_wrong(self):
        with pytest.raises(measure.WrongResultError):
            measure.check_close([float("nan")], [1.0], ulps=32)


class TestCheck:
    def test_compares_a_named_call_with_the_reference(self):
        shown = run("check", "--op", "scaled_dot_product_attention", "--workload", "plain")
        assert shown.exit_code == 0
        (line,) = [line for line in shown.output.splitlines() if "xla (any)" in line]
        assert [cell.strip() for cell in line.split("│")[3:6]] == ["1", "0", "0"]

    def test_a_wrong_implementation_is_found(self, monkeypatch):
        right = executor.run

        def off(op, inputs, spec, request):
            results = right(op, inputs, spec, request)
            return results._replace(out=results.out + 1e-3)

        monkeypatch.setattr(executor, "run", off)
        shown = run("check", "--op", "scaled_dot_product_attention", "--workload", "plain")
        assert shown.exit_code == 1
        assert "plain: value off by" in shown.output

    def test_an_unknown_operation_is_an_error_that_lists_the_known(self):
        shown = run("check", "--op", "attention")
        assert shown.exit_code == 2
        assert "flash_attention" in shown.output


def test_demo_shows_an_operation_checked_and_timed(monkeypatch):
    subject = subjects.one("scaled_dot_product_attention")
    monkeypatch.setattr(demo, "shown", lambda subject, most: subject.workloads[:1])
    shown = run("demo", "--op", subject.name)
    assert shown.exit_code == 0
    assert "WRONG" not in shown.output
    for column in ("plain JAX", "peak memory", "with gradient", "xla (any)"):
        assert column in shown.output


def test_demo_goes_on_after_an_operation_that_fails(monkeypatch):
    def fail(subject, workload):
        raise ValueError("no luck today")

    monkeypatch.setattr(demo, "rows", fail)
    shown = run("demo")
    assert shown.exit_code == 1
    assert shown.output.count("FAILED, ValueError: no luck today") >= len(OPS)


class TestTune:
    def test_writes_a_table_that_the_package_reads(self, tmp_path, monkeypatch):
        def two(self, inputs, spec, device, ordered):
            first = self.heuristic(inputs, spec, device)
            return [first, dataclasses.replace(first, q_blocksize=16)]

        monkeypatch.setattr(Pass, "choices", two)
        name = "scaled_dot_product_attention"
        arguments = ["--workload", "plain", "--dtype", "float32", "--rounds", "1"]
        assert run("tune", name, *arguments, "--output", str(tmp_path)).exit_code == 0
        subject = subjects.one(name)
        plain = subject.invocation(subject.workloads[0].build())
        table = ShippedTable(name, tmp_path)
        assert table.get(plain.key)["fwd_params"].keys() == {"q_blocksize", "kv_blocksize"}
        backward = dataclasses.replace(plain, direction="backward")
        assert table.get(backward.key)["bwd_params"].keys() == {"q_blocksize", "kv_blocksize"}

    def test_a_single_candidate_is_nothing_to_write(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Pass, "choices", lambda self, *call: [self.guess(*call)])
        name = "scaled_dot_product_attention"
        arguments = ["--workload", "plain", "--rounds", "1", "--output", str(tmp_path)]
        shown = run("tune", name, *arguments)
        assert shown.exit_code == 0
        assert "nothing to write" in shown.output
        assert list(tmp_path.iterdir()) == []

    def test_several_processes_write_what_one_would(self, tmp_path):
        asked = ("plain", "mask")
        named = [x for name in asked for x in ("--workload", name)]
        options = ["--dtype", "float32", "--rounds", "1", "--workers", "2"]
        shown = run("tune", "mean_pooling", *named, *options, "--output", str(tmp_path))
        assert shown.exit_code == 0
        subject = subjects.one("mean_pooling")
        table = ShippedTable(subject.name, tmp_path)
        for call in subject.workloads[:6]:
            known = table.get(subject.invocation(call.build()).key) is not None
            assert known == (call.name in asked)

    def test_a_call_that_fails_costs_no_other(self, tmp_path, monkeypatch):
        def few(self, name, direction):
            if direction == "backward":
                raise MemoryError("no room left")
            return tuned(self, name, direction)

        tuned = tuning.Task._tuned
        monkeypatch.setattr(tuning.Task, "_tuned", few)
        options = ["--workload", "mask", "--dtype", "float32", "--rounds", "1"]
        shown = run("tune", "mean_pooling", *options, "--output", str(tmp_path))
        assert shown.exit_code == 1
        assert "1 of these failed" in shown.output
        assert "no room" in shown.output
        subject = subjects.one("mean_pooling")
        [call] = [x for x in subject.workloads if x.name == "mask"]
        assert ShippedTable(subject.name, tmp_path).get(subject.invocation(call.build()).key)

    def test_an_unknown_named_call_is_an_error_that_lists_the_known(self):
        shown = run("tune", "flash_attention", "--workload", "nonsense")
        assert shown.exit_code == 2
        assert "causal_offset" in shown.output
