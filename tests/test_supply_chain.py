"""What builds and tests a release is pinned, and what the package consists of can be listed."""

import email.message
import importlib.util
import io
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
_SPEC = importlib.util.spec_from_file_location("sbom", ROOT / "tools" / "sbom.py")
assert _SPEC is not None
assert _SPEC.loader is not None
sbom = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sbom)


def test_every_action_is_pinned_by_commit():
    workflows = "".join(x.read_text() for x in (ROOT / ".github" / "workflows").iterdir())
    used = re.findall(r"uses: (.*)", workflows)
    assert used
    assert [x for x in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", x)] == []


def test_every_tool_of_a_build_is_pinned_by_hash():
    lines = (ROOT / "tools" / "build_requirements.txt").read_text().splitlines()[1:]
    assert [x for x in lines if not re.fullmatch(r"[\w-]+==[\w.]+ --hash=sha256:\w{64}", x)] == []
    pinned = dict(line.partition(" ")[0].split("==") for line in lines)
    for one in map(Requirement, PROJECT["build-system"]["requires"]):
        assert pinned[one.name] in one.specifier
    assert "build" in pinned


def test_every_tool_of_a_test_is_pinned_by_version():
    named = [x for group in PROJECT["dependency-groups"].values() for x in group]
    required = {Requirement(x).name for x in PROJECT["project"]["dependencies"]}
    tools = [x for x in named if isinstance(x, str) and Requirement(x).name not in required]
    assert [x for x in tools if "==" not in x] == []


def test_the_list_holds_what_the_package_requires():
    packages = sbom.installed("ejkernel", ["cli"])
    listed = sbom.document(packages, "ejkernel")
    assert json.loads(json.dumps(listed)) == listed
    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.6")
    assert listed["metadata"]["component"]["version"] == PROJECT["project"]["version"]
    references = {x["bom-ref"] for x in listed["components"]}
    names = {x["name"] for x in listed["components"]}
    assert {"jax", "jaxlib", "numpy", "jaxtyping", "filelock", "platformdirs", "rich"} <= names
    assert not names & {"pytest", "ruff", "triton"}
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", x) for x in references)
    root = f"pkg:pypi/ejkernel@{PROJECT['project']['version']}"
    assert {x["ref"] for x in listed["dependencies"]} == references | {root}
    assert {y for x in listed["dependencies"] for y in x["dependsOn"]} == references


@pytest.mark.parametrize(
    ("field", "value", "listed"),
    [
        ("License-Expression", "MIT OR " * 20 + "MIT", {"expression": "MIT OR " * 20 + "MIT"}),
        ("License", "Apache 2.0", {"license": {"name": "Apache 2.0"}}),
        ("License", "the whole text " * 20, None),
        ("Name", "one", None),
    ],
)
def test_an_spdx_expression_is_listed_as_one(monkeypatch, field, value, listed):
    metadata = email.message.Message()
    metadata["Version"] = "1.0"
    metadata[field] = value
    monkeypatch.setattr(sbom.importlib.metadata, "metadata", lambda _: metadata)
    monkeypatch.setattr(sbom.importlib.metadata, "requires", lambda _: [])
    component = sbom.document(sbom.installed("one", []), "one")["metadata"]["component"]
    assert component.get("licenses") == (None if listed is None else [listed])


FOUND = {"id": "PYSEC-1", "fixed_in": ["2.0"], "withdrawn": None}
WITHDRAWN = {"id": "PYSEC-2", "fixed_in": [], "withdrawn": "2026-01-01"}


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ({"vulnerabilities": []}, 0, "no known advisories of the 1 packages checked\n"),
        ({"vulnerabilities": [FOUND, WITHDRAWN]}, 1, "one 1.0: PYSEC-1, fixed in 2.0\n"),
        (
            OSError("no route"),
            0,
            "no known advisories of the 0 packages checked\n"
            "not checked, PyPI gave no answer: one 1.0 (no route)\n",
        ),
    ],
    ids=["none", "one", "offline"],
)
def test_advisories_are_an_exit_code_and_silence_is_named(monkeypatch, capsys, answer, code, said):
    def urlopen(url, timeout):
        assert url == "https://pypi.org/pypi/one/1.0/json"
        if isinstance(answer, OSError):
            raise answer
        return io.BytesIO(json.dumps(answer).encode())

    monkeypatch.setattr(sbom.urllib.request, "urlopen", urlopen)
    assert sbom.check([sbom.Package("one", "1.0", None, ())]) == code
    assert capsys.readouterr().out == said
