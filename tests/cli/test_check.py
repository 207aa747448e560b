"""`ejkernel check` finds what is wrong and says so with its exit code."""

import pytest
from cli.commands import WIDTHS, run, sentence, too_wide

from ejkernel.cli import check
from ejkernel.kernels import OPS
from ejkernel.ops import executor

PLAIN = ("--op", "scaled_dot_product_attention", "--workload", "plain")


def test_compares_a_named_call_with_the_reference():
    shown = run("check", *PLAIN)
    assert shown.exit_code == 0
    (row,) = [line.split() for line in shown.output.splitlines() if "xla (any)" in line]
    assert row[-3:] == ["1", "0", "0"]
    assert shown.output.endswith("float32: 1 correct, 0 wrong, 4 unsupported on this device\n")


def test_a_wrong_implementation_is_found(monkeypatch):
    right = executor.run

    def off(op, inputs, spec, request):
        results = right(op, inputs, spec, request)
        return results._replace(out=results.out + 1e-3)

    monkeypatch.setattr(executor, "run", off)
    shown = run("check", *PLAIN)
    assert shown.exit_code == 1
    assert "scaled_dot_product_attention xla (any) plain: value off by" in shown.output


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_table_fits_with_every_name_in_full(columns, monkeypatch):
    long = check.Outcome("wrong", "ValueError: " + "a long story " * 20)
    monkeypatch.setattr(check, "examine", lambda case, dtype: long)
    shown = run("check", columns=columns)
    assert shown.exit_code == 1
    assert too_wide(shown, columns) == []
    for op in OPS:
        assert f"\n{op}  " in shown.output


def test_an_unknown_operation_is_wrong_usage():
    shown = run("check", "--op", "attention")
    assert shown.exit_code == 2
    assert "flash_attention" in shown.output


def test_options_that_match_nothing_are_wrong_usage():
    shown = run("check", "--op", "mean_pooling", "--platform", "cuda")
    assert shown.exit_code == 2
    assert "no implementation and named call match these options." in shown.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--seed", "3"],
            "Invalid value for --seed: it is for random calls; use it with --random.",
        ),
        (["--first", "3"], "Invalid value for --first: it is for random calls"),
        (["--no-gradients"], "Invalid value for --no-gradients: it is for random calls"),
        (["--workers", "2"], "Invalid value for --workers: it is for random calls"),
        (["--json", "x.json"], "Invalid value for --json: it is for random calls"),
        (["--platform", "mosaic"], "'mosaic' is not one of 'triton', 'pallas', 'cuda', 'xla'."),
        (["--workload", "nonsense"], "no operation has a named call 'nonsense'."),
        (
            ["--op", "mean_pooling", "--workload", "nonsense"],
            "mean_pooling has no named call 'nonsense'; it has plain,",
        ),
    ],
)
def test_an_option_without_effect_is_wrong_usage(options, said):
    shown = run("check", *options)
    assert shown.exit_code == 2
    assert said in sentence(shown)
