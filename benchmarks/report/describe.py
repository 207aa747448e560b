"""What recorded results say of their calls in words, so that a page can be made from them alone.

The scripts for GPUs record a case by its name; its shape, mask and target are in the script.
"""

from typing import Any

from benchmarks.report import calls
from ejkernel.cli.report.results import RATIO

# The files that are described; `make tables` writes the words into them.
NAMES = (*(f"h200/{operation}" for operation in calls.CALLS), "tpu_schedule")
# What the figures of static schedules are about, by the word in their names.
_SCHEDULED = {
    "flash": "flash_attention",
    "grouped": "grouped_matmul",
    "pages": "ragged_page_attention_v3",
}


def described(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """A result with what is said of its calls; any other as it is."""
    if name not in NAMES:
        return result
    if name == "tpu_schedule":
        figures = [x | {"operation": _operation(x["name"])} for x in result["figures"]]
        return result | {"figures": figures}
    operation = name.rpartition("/")[2]
    known = calls.CALLS[operation]
    ratios = (RATIO.fullmatch(key) for key in result.get("summary", {}))
    cases = (*result["cases"], *(ratio[1] for ratio in ratios if ratio))
    told = {"operation": operation, "dtype": "bfloat16"}
    return result | told | {"calls": {case: known[case] for case in cases}}


def _operation(name: str) -> str:
    return next(operation for word, operation in _SCHEDULED.items() if word in name)
