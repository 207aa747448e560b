"""`ejkernel bench` reports measured figures, and none for a wrong result."""

import json

import numpy as np
import pytest
from cli.commands import run

from ejkernel.cli import bench, figures, measure, provenance


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
        assert written.keys() == {*provenance.PROVENANCE, "figures"}
        (entry,) = written["figures"]
        assert (entry["value"], entry["bound"], entry["holds"]) == (4.5, 3, True)

    def test_a_figure_that_falls_short_is_shown_as_such(self, figure):
        figure(lambda: 2.0)
        shown = run("bench")
        assert shown.exit_code == 0
        assert "missed" in shown.output

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
        measure.check_close(np.array([1.0, 2.0 + 1e-6]), np.array([1.0, 2.0]), ulps=32)
        with pytest.raises(measure.WrongResultError, match="off by"):
            measure.check_close(np.array([1.0, 2.0 + 1e-4]), np.array([1.0, 2.0]), ulps=32)

    def test_nan_is_wrong(self):
        with pytest.raises(measure.WrongResultError):
            measure.check_close(np.array([float("nan")]), np.array([1.0]), ulps=32)
