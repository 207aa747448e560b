"""The tree keeps its shape: layers point one way, files stay small, an op has its files."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ejkernel import kernel_registry
from ejkernel.kernels import OPS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ejkernel"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 700
# An interface: one class whose methods are docstrings and one call each.
LONGEST_INTERFACE = {"ejkernel/types/mask.py": 820}

# From the bottom up: a file may import from its own layer and from those before it.
LAYERS = ("errors", "settings", "xla_utils", "types", "ops", "kernels", "modules", "cli")
# `ejkernel/__init__.py` itself re-exports from here and may be imported from the command line only.
TOP_LEVEL_IMPORTS = "ops"

FILES_OF_EVERY_OP = {"__init__.py", "api.py", "workloads.py"}
FILES_OF_AN_OP_OF_ITS_OWN = {"reference.py", "xla.py"}


def _relative(path):
    return str(path.relative_to(ROOT))


def _imported_modules(path):
    """Every module of ours that a file names in an import, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_relative(path)}:{node.lineno} imports relatively"
            if node.module == "ejkernel":
                yield from (f"ejkernel.{alias.name}" for alias in node.names)
            else:
                yield node.module


def _layer(module):
    """The layer of `ejkernel.<layer>...`, or None for the package itself and its own names."""
    part = module.split(".")[1] if "." in module else ""
    return part if part in LAYERS else None


def _upward_imports(path):
    own = _layer(".".join(("ejkernel", *path.relative_to(PACKAGE).with_suffix("").parts)))
    reach = LAYERS.index(own or TOP_LEVEL_IMPORTS)
    for module in _imported_modules(path):
        if module.split(".")[0] != "ejkernel":
            continue
        layer = _layer(module)
        above = own != "cli" if layer is None else LAYERS.index(layer) > reach
        if above:
            yield f"{_relative(path)} imports {module}"


def test_layers_point_one_way():
    assert [line for path in SOURCES for line in _upward_imports(path)] == []


def test_every_folder_is_a_layer():
    ours = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    ours -= {"__init__.py", "__pycache__", "data"}
    assert {name.removesuffix(".py") for name in ours} == set(LAYERS)


@pytest.mark.parametrize(
    ("file", "line", "upward"),
    [
        ("types/mask.py", "from ejkernel.ops import Executor", True),
        ("ops/executor.py", "from ejkernel import kernels", True),
        ("ops/executor.py", "from ejkernel import kernel_registry", True),
        ("ops/executor.py", "def f():\n    import ejkernel.kernels.flash_attention.api", True),
        ("__init__.py", "from ejkernel.modules import flash_attention", True),
        ("ops/executor.py", "from ejkernel import settings", False),
        ("cli/info.py", "from ejkernel import __version__", False),
        ("types/mask.py", "import jax", False),
    ],
)
def test_the_layer_check_sees_what_it_must(tmp_path, monkeypatch, file, line, upward):
    path = tmp_path / "ejkernel" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "ejkernel")
    assert bool(list(_upward_imports(path))) == upward


def test_no_file_is_too_long():
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    lengths = {_relative(path): len(path.read_text().splitlines()) for path in files}
    limit = lambda path: LONGEST_INTERFACE.get(path, LONGEST_FILE)
    assert {path: lines for path, lines in lengths.items() if lines > limit(path)} == {}


def test_the_package_never_asserts():
    """A user's mistake gets a sentence, and `python -O` changes nothing."""
    found = [
        f"{_relative(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_one_folder_for_each_operation():
    assert {path.parent.name for path in (PACKAGE / "kernels").glob("*/api.py")} == set(OPS)
    assert sorted(OPS) == list(OPS)


@pytest.mark.parametrize("op", OPS)
def test_an_operation_has_its_files(op):
    """One that only renames another has no kernels; every other has a definition and XLA."""
    files = {path.name for path in (PACKAGE / "kernels" / op).glob("*.py")}
    renamed = not any(f".{op}." in source.where for source in kernel_registry.op(op).sources)
    assert files >= FILES_OF_EVERY_OP | (set() if renamed else FILES_OF_AN_OP_OF_ITS_OWN)


_PLATFORM_MODULES_LOADED = """
import sys
import {module}
platforms = ("cuda", "pallas", "reference", "triton", "xla")
for name in sorted(sys.modules):
    if name.startswith("ejkernel.kernels.") and name.split(".")[-1].split("_")[0] in platforms:
        print(name)
    if name in ("jax.experimental.pallas", "triton", "jax_triton", "rich", "typer", "matplotlib"):
        print(name)
"""


@pytest.mark.parametrize("module", ["ejkernel", "ejkernel.modules", "ejkernel.types"])
def test_importing_loads_no_platform_and_leaves_no_trace(tmp_path, module):
    places = {name: str(tmp_path) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")},
        **places,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    code = _PLATFORM_MODULES_LOADED.format(module=module)
    run = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == []
    assert list(tmp_path.rglob("*")) == []
