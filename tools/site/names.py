"""The public names of the package, read from its sources, and the pages that document them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The packages whose names are for users.
PACKAGES = (
    "ejkernel",
    "ejkernel.modules",
    "ejkernel.types",
    "ejkernel.ops",
    "ejkernel.parallel",
    "ejkernel.integrations",
    "ejkernel.xla_utils",
)
# An invisible line of a page, which asks for documentation: <!-- api: ejkernel.ops.Kernel -->
DIRECTIVE = re.compile(r"<!-- api: ([\w. \n]+) -->")


def public(package: str) -> list[str]:
    """What a package offers: its `__all__`, or every name that it imports `as` itself."""
    source = ROOT.joinpath(*package.split("."), "__init__.py").read_text()
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.name == alias.asname}
    return sorted(names)


def public_paths() -> list[str]:
    """Every public name with its package in front."""
    return [f"{package}.{name}" for package in PACKAGES for name in public(package)]


def asked_for(text: str) -> list[str]:
    """The names that a page documents."""
    return [name for found in DIRECTIVE.findall(text) for name in found.split()]
