"""The tree keeps its shape: layers point one way, files stay small, an op has its files."""

import ast
import functools
import importlib.util
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
LONGEST_FILE = 720  # a kernel with its launch, about 700
# An interface: one class whose methods are docstrings and one call each.
LONGEST_INTERFACE = {"ejkernel/types/mask.py": 820}

_SPEC = importlib.util.spec_from_file_location("code_metrics", ROOT / "tools" / "code_metrics.py")
code_metrics = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(code_metrics)

# From the bottom up: a file may import from its own layer and from those before it.
LAYERS = (
    "errors",
    "settings",
    "xla_utils",
    "types",
    "ops",
    "kernels",
    "modules",
    "parallel",
    "integrations",
    "cli",
)
# `ejkernel/__init__.py` re-exports from here and may be imported from the command line only.
TOP_LEVEL_IMPORTS = "integrations"

FILES_OF_EVERY_OP = {"__init__.py", "api.py", "workloads.py"}
FILES_OF_AN_OP_OF_ITS_OWN = {"reference.py", "xla"}
# The modules, or folders of modules, that hold kernels: loaded when a call may use them.
PLATFORMS = ("cudnn", "pallas_sm90", "pallas_tpu", "triton", "xla")
MOST_UNTYPED = 0.10  # of all parameters of the package


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
        ("modules/__init__.py", "from ejkernel.integrations import jax_nn", True),
        ("__init__.py", "from ejkernel.cli import app", True),
        ("__init__.py", "from ejkernel.modules import flash_attention", False),
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
    names = {path.name for path in (PACKAGE / "kernels" / op).iterdir()}
    names |= {name.removesuffix(".py") for name in names}
    renamed = not any(f".{op}." in source.where for source in kernel_registry.op(op).sources)
    assert names >= FILES_OF_EVERY_OP | (set() if renamed else FILES_OF_AN_OP_OF_ITS_OWN)


def _platforms():
    """Every platform of every operation, as a file or as a folder."""
    return [
        path
        for path in sorted((PACKAGE / "kernels").glob("*/*"))
        if path.parent.name in OPS and path.name.removesuffix(".py") in PLATFORMS
    ]


def test_every_source_is_a_platform_of_its_operation():
    """So that what the following tests say of platforms is said of all implementations."""
    sources = {source.where for op in OPS for source in kernel_registry.op(op).sources}
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in _platforms()
    }
    assert sources == set(modules)


@pytest.mark.parametrize("path", _platforms(), ids=_relative)
def test_a_platform_has_an_implementation(path):
    """A folder has it in its `__init__.py`, which says what is supported and dispatches."""
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path).read_text())
    assigned = [x for node in tree.body if isinstance(node, ast.Assign) for x in node.targets]
    assert "IMPLEMENTATION" in [getattr(target, "id", None) for target in assigned]


def _users(module):
    """The operations whose files import a module, themselves or through another of `common/`."""
    users, asked, seen = set(), [module], set()
    while asked:
        name = asked.pop()
        seen.add(name)
        for path in (PACKAGE / "kernels").rglob("*.py"):
            if not any(x == name or x.startswith(name + ".") for x in _names_imported(path)):
                continue
            folder = path.relative_to(PACKAGE / "kernels").parts[0]
            own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if folder != "common":
                users.add(folder)
            elif own not in seen:
                asked.append(own)
    return users


@functools.cache
def _names_imported(path):
    """Modules that a file imports, and what it imports from them, either may be the module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


@pytest.mark.parametrize(
    "module",
    [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((PACKAGE / "kernels" / "common").rglob("*.py"))
        if path.read_text()
    ],
)
def test_what_is_common_belongs_to_several_operations(module):
    assert len(_users(module)) >= 2


def test_no_private_name_crosses_a_file():
    assert code_metrics.private_names() == []


def test_no_function_stands_in_two_files():
    assert code_metrics.identical_bodies() == []


def test_parameters_have_types():
    untyped, count = code_metrics.parameters()
    assert len(untyped) / count < MOST_UNTYPED, untyped


_PLATFORM_MODULES_LOADED = """
import sys
import {module}
platforms = {{"reference", *{platforms}}}
for name in sorted(sys.modules):
    # Any part of the path may be a platform: of a folder also the modules inside.
    if name.startswith("ejkernel.kernels.") and platforms.intersection(name.split(".")[2:]):
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
    done = _platform_modules_loaded(module, environment, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == []
    assert list(tmp_path.rglob("*")) == []


def test_importing_the_package_loads_nothing_else(tmp_path):
    code = "import sys; before = {*sys.modules}; import ejkernel; print(*{*sys.modules} - before)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"ejkernel"}
    assert [name for name in done.stdout.split() if name.startswith("ejkernel.")] == []


@pytest.mark.parametrize("name", ["flash_attention", "dot_product_attention", "MaskInfo"])
def test_a_name_of_the_package_loads_no_platform(tmp_path, name):
    done = _platform_modules_loaded(f"ejkernel\nejkernel.{name}", os.environ, tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def _platform_modules_loaded(module, environment, folder):
    code = _PLATFORM_MODULES_LOADED.format(module=module, platforms=PLATFORMS)
    run = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(run, env=environment, cwd=folder, capture_output=True, text=True)


def test_the_check_of_platforms_sees_folders_and_files(tmp_path):
    module = "ejkernel.kernels.flash_attention.xla.tiles, ejkernel.kernels.mean_pooling.xla"
    found = _platform_modules_loaded(module, os.environ, tmp_path).stdout.split()
    assert {"ejkernel.kernels.flash_attention.xla", "ejkernel.kernels.mean_pooling.xla"} < {*found}
