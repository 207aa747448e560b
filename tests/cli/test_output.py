"""Files that commands write, and what is said where they cannot be written."""

import pytest
from cli.commands import run, sentence

from ejkernel.cli import bench, check, demo, output

OPTIONS = {
    "bench": ["--only", "import", "--json"],
    "check": ["--op", "mean_pooling", "--random", "1", "--json"],
    "demo": ["--op", "mean_pooling", "--json"],
    "mask": ["--causal", "--svg"],
}


@pytest.fixture
def _no_work(monkeypatch):
    for module, name in ((bench, "_measured"), (check, "_check_random"), (demo, "Screen")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("worked first"))


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("command", OPTIONS)
def test_a_file_below_a_file_is_refused_before_the_work(command):
    shown = run(command, *OPTIONS[command], "/dev/null/x.json")
    assert shown.exit_code == 2
    assert "cannot write /dev/null/x.json: /dev/null is not a folder." in sentence(shown)


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("command", sorted({*OPTIONS} - {"bench"}))
def test_a_folder_is_refused_before_the_work(command, tmp_path):
    shown = run(command, *OPTIONS[command], str(tmp_path))
    assert shown.exit_code == 2
    assert "it is a folder." in sentence(shown)


def test_the_folder_of_a_file_is_made_and_nothing_else(tmp_path):
    path = tmp_path / "some" / "folder" / "mask.svg"
    assert run("mask", "--causal", "--svg", str(path)).exit_code == 0
    assert [file.name for file in path.parent.iterdir()] == ["mask.svg"]


def test_a_failure_while_writing_is_a_sentence_and_keeps_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "mask.svg"
    path.write_text("before")
    monkeypatch.setattr(output.os, "replace", full)
    shown = run("mask", "--causal", "--svg", str(path))
    assert shown.exit_code == 2
    assert "No space left on device." in sentence(shown)
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["mask.svg"]


def test_a_device_can_be_written():
    assert run("mask", "--causal", "--svg", "/dev/null").exit_code == 0


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path):
    link, target = tmp_path / "mask.svg", tmp_path / "target"
    target.write_text("before")
    link.symlink_to(target)
    assert run("mask", "--causal", "--svg", str(link)).exit_code == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<svg")
    assert {file.name for file in tmp_path.iterdir()} == {"mask.svg", "target"}


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("command", OPTIONS)
def test_a_file_in_a_read_only_folder_is_refused_before_the_work(command, tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("before")
    monkeypatch.setattr(output.os, "access", lambda where, mode: where != tmp_path)
    shown = run(command, *OPTIONS[command], str(path))
    assert shown.exit_code == 2
    assert f"no permission for {tmp_path}." in sentence(shown)
    assert path.read_text() == "before"


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("name", ["x.json", ""])
def test_a_folder_in_place_of_the_file_of_bench_is_refused_before_the_work(name, tmp_path):
    (tmp_path / (name or "cpu.json")).mkdir()
    shown = run("bench", *OPTIONS["bench"], str(tmp_path / name))
    assert shown.exit_code == 2
    assert "it is a folder." in sentence(shown)
