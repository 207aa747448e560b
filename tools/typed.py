"""How much of what the package exports has a known type, as pyright sees it from outside.

    python tools/typed.py [--least PERCENT] [--list]

It runs `pyright --verifytypes ejkernel --ignoreexternal` with the Python that runs this script and
fails below `--least`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def completeness() -> dict:
    """Pyright's report: a score from 0 to 1, and every exported symbol."""
    # Pyright takes the packages of the `python` that stands first in PATH.
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
        "PYTHONPATH": str(ROOT),
    }
    command = [str(BIN / "pyright"), "--verifytypes", "ejkernel", "--ignoreexternal"]
    done = subprocess.run(
        [*command, "--outputjson"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    return json.loads(done.stdout)["typeCompleteness"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--least", type=float, default=0.0, help="percent below which it fails")
    parser.add_argument("--list", action="store_true", help="show every symbol without a type")
    given = parser.parse_args()
    report = completeness()
    exported = [x for x in report["symbols"] if x["isExported"]]
    unknown = [x for x in exported if not x["isTypeKnown"] or x["isTypeAmbiguous"]]
    if given.list:
        for symbol in unknown:
            said = [x["message"].partition("\n")[0] for x in symbol["diagnostics"]]
            print(f"    {symbol['name']}: {'; '.join(said)}")
    percent = 100 * report["completenessScore"]
    print(f"exported symbols with a known type: {percent:.1f} % of {len(exported)}")
    if percent < given.least:
        sys.exit(f"at least {given.least:g} % are wanted: tools/typed.py --list shows the others")


if __name__ == "__main__":
    main()
