"""`ejkernel info` fits on a screen, names everything in full, and has it all as JSON."""

import json
import re

import jax
import pytest
from cli.commands import WIDTHS, run, too_wide

from docs import documents
from ejkernel.cli import info, subjects
from ejkernel.kernels import OPS
from ejkernel.ops.persistent import PersistentCache

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the expected platforms are those of a CPU"
)
PAGE = (documents.ROOT / "docs" / "cli.md").read_text()


@pytest.fixture(scope="module")
def facts():
    return json.loads(run("info", "--json").stdout)


@pytest.mark.parametrize("columns", WIDTHS)
def test_one_line_per_operation_that_fits(columns):
    shown = run("info", columns=columns)
    assert shown.exit_code == 0
    assert too_wide(shown, columns) == []
    lines = shown.output.splitlines()
    assert len(lines) <= 40
    for op in OPS:
        (row,) = [line.split() for line in lines if line.startswith(f"{op} ")]
        assert row[1:3] == ["xla", "xla"]


def test_the_platforms_of_other_devices_are_those_that_are_registered():
    shown = run("info", columns=80).output
    assert re.search(r"^flash_attention +xla +xla +pallas cuda triton +pallas *$", shown, re.M)
    assert re.search(r"^grouped_matmul +xla +xla +pallas triton +pallas *$", shown, re.M)


def test_a_kernel_that_runs_only_where_it_is_named_is_not_shown_as_preferred(facts):
    shown = run("info", columns=80).output
    assert re.search(r"^gla_attention +xla +xla +xla +pallas *$", shown, re.M)
    assert re.search(r"^mean_pooling +xla +xla +xla +xla *$", shown, re.M)
    assert facts["operations"]["gla_attention"]["devices"]["gpu"] == ["xla", "triton"]


def test_the_page_shows_the_table(facts):
    screen = PAGE.partition("```bash\nejkernel info\n```")[2].partition("\n```\n")[0]
    page = screen.partition("\noperation ")[2].splitlines()
    shown = run("info", columns=80).output.partition("\noperation ")[2].splitlines()
    assert [line.rstrip() for line in shown][: len(page)] == page


def test_names_versions_devices_cache_and_shipped_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    PersistentCache("mean_pooling").put(("cpu|cpu", "mean_pooling@v1", "0" * 16), {"block": 1})
    shown = run("info", columns=200).output
    assert re.search(r"^versions +ejkernel 0\.1\.0, python 3\.\d+\.\d+, jax 0\.", shown, re.M)
    assert re.search(r"^devices +8 x cpu", shown, re.M)
    assert f"{tmp_path} (mean_pooling: 1 tuned)" in shown
    assert "no tuned table for cpu; there is NVIDIA H200" in shown
    assert f"EJKERNEL_CACHE_DIR={tmp_path}" in shown


def test_says_why_platforms_for_this_device_are_unavailable(monkeypatch):
    monkeypatch.setattr(info.jax, "default_backend", lambda: "tpu")
    shown = run("info", columns=80)
    reason = r"^pallas unavailable for \d+: needs a TPU and the device is a CPU$"
    assert re.search(reason, shown.output, re.M)
    assert too_wide(shown, 80) == []


@pytest.mark.parametrize("columns", WIDTHS)
def test_every_setting_can_be_listed(columns):
    shown = run("info", "--settings", columns=columns)
    assert too_wide(shown, columns) == []
    names = re.findall(r"^(EJKERNEL_\w+) = ", shown.output, re.M)
    documented = re.findall(r"^\| `(EJKERNEL_\w+)`", info.settings.__doc__, re.M)
    assert sorted(names) == sorted(documented)


def test_the_keys_of_the_json_are_those_that_are_documented(facts):
    table = PAGE.partition("## `ejkernel info`")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert documented == list(facts)


def test_the_json_holds_every_operation(facts):
    assert list(facts["operations"]) == list(OPS)
    flash = facts["operations"]["flash_attention"]
    assert flash.keys() == {"forward", "backward", "devices"}
    for direction in subjects.DIRECTIONS:
        assert flash[direction]["platforms"] == ["xla"]
        assert "pallas (tpu)" in flash[direction]["unavailable"]
    assert flash["devices"]["gpu"] == ["pallas", "cuda", "triton", "xla"]
    assert facts["shipped"]["NVIDIA H200"]["flash_attention"] > 0


def test_looking_at_the_operations_agrees_with_looking_at_a_real_call(facts):
    subject = subjects.one("mean_pooling")
    call = subject.invocation(subject.workloads[0].build())
    supported, _ = call.op.supporting("forward", call.inputs, call.spec, call.device, None)
    shown = facts["operations"]["mean_pooling"]["forward"]["platforms"]
    assert [source.platform.value for source, _ in supported] == shown


def test_a_backend_that_jax_only_asserts_is_named(monkeypatch):
    def fail():
        raise AssertionError

    monkeypatch.setattr(info.jax, "devices", fail)
    shown = run("info", JAX_PLATFORMS="cuda")
    assert shown.exit_code == 1
    assert shown.output == "ejkernel: JAX cannot use a device: JAX_PLATFORMS is 'cuda'\n"


def test_a_backend_that_is_not_there_is_one_sentence(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(info.jax, "devices", fail)
    shown = run("info")
    assert shown.exit_code == 1
    assert (
        shown.output == "ejkernel: JAX cannot use a device: Unable to initialize backend 'cuda'\n"
    )
