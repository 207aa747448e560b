"""List what an installed ejkernel consists of, and ask for known advisories.

    python tools/sbom.py > ejkernel.cdx.json    a CycloneDX 1.6 document, from installed metadata
    python tools/sbom.py --advisories           known vulnerabilities of these versions, from PyPI

Both go over the packages that ejkernel requires on this machine, directly or not; `--extra cli`
adds those of an extra. `--advisories` exits with 1 if there are any; where PyPI does not answer, it
says so and exits with 0.
"""

import argparse
import importlib.metadata
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.metadata import PackageMetadata
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPI = "https://pypi.org/pypi/{}/{}/json"
SECONDS = 10.0


class Package(NamedTuple):
    """An installed package; `requires` are the names of packages that it needs here."""

    name: str
    version: str
    license: dict[str, Any] | None  # an SPDX expression or a name, as CycloneDX has them
    requires: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def installed(root: str, extras: Sequence[str]) -> list[Package]:
    """The root and every package that it requires here, in the order of their names."""
    found: dict[str, Package] = {}
    waiting, seen = [(canonicalize_name(root), tuple(extras))], set()
    while waiting:
        if (one := waiting.pop()) in seen:
            continue
        seen.add(one)
        name, wanted = one
        metadata = importlib.metadata.metadata(name)
        needed = list(_requirements(name, wanted))
        requires = {canonicalize_name(x.name) for x in needed}
        requires |= set(found[name].requires) if name in found else set()
        found[name] = Package(
            name, metadata["Version"], _license(metadata), tuple(sorted(requires))
        )
        waiting += [(canonicalize_name(x.name), tuple(x.extras)) for x in needed]
    return [found[name] for name in sorted(found)]


def _license(metadata: PackageMetadata) -> dict[str, Any] | None:
    if expression := metadata.get("License-Expression"):
        return {"expression": expression}
    name = metadata.get("License")
    return {"license": {"name": name}} if name and len(name) < 80 else None  # or the whole text


def _requirements(name: str, extras: Sequence[str]) -> list[Requirement]:
    """What a package requires on this machine."""
    given = map(Requirement, importlib.metadata.requires(name) or [])
    return [
        x
        for x in given
        if x.marker is None or any(x.marker.evaluate({"extra": e}) for e in ("", *extras))
    ]


def document(packages: list[Package], root: str) -> dict[str, Any]:
    """The packages as CycloneDX has them; the same for the same versions."""
    components = {x.name: _component(x) for x in packages}
    by_name = {x.name: x.purl for x in packages}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": components.pop(root)},
        "components": list(components.values()),
        "dependencies": [
            {"ref": x.purl, "dependsOn": [by_name[name] for name in x.requires]} for x in packages
        ],
    }


def _component(package: Package) -> dict[str, Any]:
    licenses = {"licenses": [package.license]} if package.license else {}
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        **licenses,
    }


def advisories(package: Package) -> list[str]:
    """The known vulnerabilities of this version; an `OSError` where PyPI does not answer."""
    url = PYPI.format(package.name, package.version)
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        known = json.load(answer).get("vulnerabilities", [])
    return [
        f"{package.name} {package.version}: {x['id']}, fixed in {', '.join(x['fixed_in']) or '-'}"
        for x in known
        if not x.get("withdrawn")
    ]


def check(packages: list[Package]) -> int:
    """Print the advisories of all packages; the exit code."""
    found, unanswered = [], []
    for package in packages:
        try:
            found += advisories(package)
        except (OSError, ValueError) as error:  # offline, unknown there, or no JSON
            unanswered.append(f"{package.name} {package.version} ({error})")
    checked = len(packages) - len(unanswered)
    print("\n".join(found) or f"no known advisories of the {checked} packages checked")
    if unanswered:
        print(f"not checked, PyPI gave no answer: {'; '.join(unanswered)}")
    return 1 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extra", action="append", default=[], help="of ejkernel, as cli or cuda")
    parser.add_argument("--advisories", action="store_true", help="ask PyPI about these versions")
    options = parser.parse_args()
    packages = installed("ejkernel", options.extra)
    if options.advisories:
        others = [x for x in packages if x.name != "ejkernel"]
        sys.exit(check(others))
    print(json.dumps(document(packages, "ejkernel"), indent=1))


if __name__ == "__main__":
    main()
