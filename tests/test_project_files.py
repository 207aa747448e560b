"""Files that tools and hosts read around the project: they parse, and agree with the project."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="pyyaml is in the test dependencies: run make test")

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
FILES = [
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
    *sorted((ROOT / ".github").rglob("*.yml")),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_parses(path):
    assert isinstance(read(path), dict)


def test_the_citation_names_this_version_and_license():
    citation, project = read(ROOT / "CITATION.cff"), PROJECT["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)


def test_the_hooks_check_with_the_tools_that_the_project_pins():
    ruff, local = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert f"ruff=={ruff['rev'].removeprefix('v')}" in PROJECT["dependency-groups"]["dev"]
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
    (pyright,) = local["hooks"]
    assert "pyright" in pyright["entry"]


def test_the_workflow_runs_what_a_contributor_runs():
    jobs = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert oldest in jobs["quick"]["strategy"]["matrix"]["python"]


@pytest.mark.parametrize("name", ["bug_report.yml", "feature_request.yml"])
def test_an_issue_template_is_complete(name):
    template = read(TEMPLATES / name)
    assert {"name", "description", "body"} <= set(template)
    identifiers = [field["id"] for field in template["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(field["attributes"]["label"] for field in template["body"])


def test_a_bug_report_asks_for_the_environment():
    required = [
        field["attributes"]["label"]
        for field in read(TEMPLATES / "bug_report.yml")["body"]
        if field.get("validations", {}).get("required")
    ]
    assert "`ejkernel info --json`" in required
