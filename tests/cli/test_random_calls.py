"""`ejkernel check --random`: calls are legal and the same everywhere, what is wrong is found."""

import contextlib
import dataclasses
import inspect
import io
import json
from concurrent.futures.process import BrokenProcessPool

import jax
import numpy as np
import pytest
from cli.commands import WIDTHS, run, sentence, too_wide

from ejkernel.cli import subjects
from ejkernel.cli.outcome import Outcome
from ejkernel.cli.random_calls import arrays, judge
from ejkernel.cli.random_calls import run as random_calls
from ejkernel.cli.random_calls.choices import fields_of
from ejkernel.cli.random_calls.others import Pooling
from ejkernel.cli.random_calls.run import CallResult, Options, choices_of
from ejkernel.cli.random_calls.softmax import Flash
from ejkernel.kernels import OPS
from ejkernel.ops import kernel_registry

# What says how a call runs or what it returns, not what it means; rings need several devices.
ELSEWHERE = {"platform", "cfg", "mesh", "in_specs", "out_specs", "axis_name"}
ELSEWHERE |= {"return_lse", "return_state", "return_block_indices"}
POOLING = OPS.index("mean_pooling")


def program_says(program):
    """What a printed program prints."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(program, {})
    return shown.getvalue()


class TestDrawing:
    def test_every_operation_has_calls(self):
        assert set(random_calls.KINDS) == set(OPS)

    def test_a_seed_and_an_index_name_a_call(self):
        calls = [choices_of(3, i) for i in range(len(OPS))]
        assert calls == [choices_of(3, i) for i in range(len(OPS))]
        assert [x.operation for x in calls] == list(OPS)
        assert calls[0] != choices_of(4, 0)
        assert calls[0] != choices_of(3, len(OPS))

    def test_numbers_are_the_same_on_every_machine(self):
        np.testing.assert_array_equal(
            arrays.normal(2, seed=3), np.array([2.040919, -2.555665], np.float32)
        )

    def test_selected_operations_keep_their_indices(self):
        assert random_calls.indices(0, 3, OPS) == [0, 1, 2]
        assert random_calls.indices(0, 2, ["mean_pooling"]) == [POOLING, POOLING + len(OPS)]
        assert random_calls.indices(POOLING + 1, 1, ["mean_pooling"]) == [POOLING + len(OPS)]

    @pytest.mark.parametrize("operation", OPS)
    def test_the_calls_use_every_argument(self, operation):
        drawn = [choices_of(0, i) for i in random_calls.indices(0, 80, [operation])]
        used = set().union(*(choices.arguments() for choices in drawn))
        function = subjects.one(operation).function
        assert used == set(inspect.signature(function).parameters) - ELSEWHERE

    @pytest.mark.parametrize("operation", OPS)
    def test_the_calls_are_legal(self, operation):
        """Also with one choice simplified, as minimising does it."""
        subject = subjects.one(operation)
        for index in random_calls.indices(0, 2, [operation]):
            choices = choices_of(0, index)
            simpler = [x for field in fields_of(choices) for x in choices.simpler(field)]
            for one in (choices, simpler[index % len(simpler)], simpler[-1]):
                jax.eval_shape(lambda one=one: subject.invocation(one.values()).inputs)

    def test_sizes_of_groups_without_an_offset_are_those_of_the_weights(self):
        drawn = [choices_of(0, i) for i in random_calls.indices(0, 200, ["grouped_matmul"])]
        without = [x for x in drawn if x.by_sizes and x.offset is None]
        assert any(x.others for x in without)
        for choices in without:
            assert choices.arguments()["group_sizes"].count(",") + 1 == choices.groups

    def test_redrawn_arrays_differ_and_lose_what_is_spoiled(self):
        make = lambda: arrays.nan_where(np.arange(4) > 2, arrays.normal(4, seed=1))
        nan_filled = make()
        assert np.isnan(nan_filled).tolist() == [False, False, False, True]
        with arrays.drawn_again(0, nan_filled=False):
            np.testing.assert_array_equal(make()[:3], nan_filled[:3])
            assert np.isfinite(make()).all()
        with arrays.drawn_again(1):
            assert (make()[:3] != nan_filled[:3]).all()


class TestMinimising:
    def test_what_does_not_matter_is_simplified(self):
        fails = lambda x: x.causal and x.head_dim > 40 and (x.keys or x.queries) >= 3
        first = next(x for i in range(2000) if fails(x := choices_of_flash(i)))
        found = random_calls.simplified(first, fails)
        simplest = Flash(operation="flash_attention")
        expected = {"causal": True, "head_dim": 41}
        assert found in (
            dataclasses.replace(simplest, **expected, queries=3),
            dataclasses.replace(simplest, **expected, keys=3),
        )

    def test_it_ends_after_some_tries(self):
        tries = []
        fails = lambda x: tries.append(x) or True
        random_calls.simplified(choices_of(0, 1), fails)
        assert 0 < len(tries) <= 100

    def test_the_program_makes_the_call(self):
        assert "verdict='correct'" in program_says(choices_of(0, POOLING).program("xla"))


def choices_of_flash(index):
    return choices_of(1, len(OPS) * index + OPS.index("flash_attention"))


@pytest.fixture
def replace_pooling(monkeypatch):
    """Registers another mean pooling in front of that of XLA, which it may call."""
    op = kernel_registry.op("mean_pooling")
    monkeypatch.setattr(op, "sources", list(op.sources))
    right = op.sources[-1].load().forward

    def register(change):
        def pool(inputs, spec, params, device):
            params = right.heuristic(inputs, spec, device)
            return change(inputs, *right(inputs, spec, params, device=device))

        features = ["attention_mask", "cu_seqlens"]
        kernel_registry.register(op.name, "xla", "any", priority=9, features=features)(pool)

    yield register
    op.revision += 1  # calls with these sources are not to be found again


class TestWrongKernels:
    @pytest.mark.parametrize("factor", [1.1, np.nan])
    def test_a_wrong_gradient_is_found(self, factor, monkeypatch):
        """No allowance for rounded residuals is made by a backward pass that is wrong itself."""
        source = kernel_registry.op("mean_pooling").sources[-1]
        right = source.load()
        run = lambda *x, device: right.backward(*x, device=device)
        wrong = lambda *x, device: jax.tree.map(lambda y: factor * y, run(*x, device=device))
        backward = dataclasses.replace(right.backward, run=wrong)
        changed = dataclasses.replace(source, where=dataclasses.replace(right, backward=backward))
        monkeypatch.setattr(kernel_registry.op("mean_pooling"), "sources", [changed])
        (one,) = random_calls.judged(Options(0), Pooling(operation="mean_pooling", length=3))
        assert one.outcome.verdict == "wrong"
        assert one.outcome.detail.startswith("gradient off by")

    @pytest.mark.slow
    def test_a_wrong_kernel_is_found_minimised_and_printed(self, replace_pooling, tmp_path):
        def wide_is_wrong(inputs, outputs, residuals):
            wrong = outputs._replace(out=outputs.out * 1.1)
            return (wrong if inputs.x.shape[-1] > 8 else outputs), residuals

        replace_pooling(wide_is_wrong)
        path = tmp_path / "calls.json"
        shown = run("check", "--random", "3", "--op", "mean_pooling", "--json", str(path))
        assert shown.exit_code == 1
        (record,) = [x for x in json.loads(path.read_text())["wrong"] if x["program"]]
        assert "x=normal(1, 1, 9)" in record["program"]
        assert record["program"] in shown.output
        assert f"call {record['call']}, mean_pooling xla (any): value off by" in shown.output
        assert "value off by 1.0e-01" in program_says(record["program"])

    def test_a_kernel_that_multiplies_what_is_masked_by_zero_is_found(self, replace_pooling):
        replace_pooling(
            lambda inputs, outputs, residuals: (
                outputs._replace(out=outputs.out + 0 * inputs.x.sum()),
                residuals,
            )
        )
        masked = Pooling(operation="mean_pooling", length=9, mask_chance=0.5)
        for choices, verdict in (
            (masked, "wrong"),
            (dataclasses.replace(masked, mask_chance=None), "correct"),
        ):
            (one,) = random_calls.judged(Options(0, gradients=False), choices)
            assert one.outcome.verdict == verdict

    def test_a_crash_is_wrong(self, replace_pooling, monkeypatch):
        def crash(inputs, outputs, residuals):
            raise RuntimeError("out of\nluck")

        replace_pooling(crash)
        monkeypatch.setattr(random_calls, "minimised", lambda *_: "pass")
        shown = run("check", "--random", "1", "--op", "mean_pooling")
        assert shown.exit_code == 1
        assert "mean_pooling xla (any): RuntimeError: out of luck" in shown.output

    def test_an_error_by_luck_counts_only_if_it_comes_again(self, monkeypatch):
        excesses = iter([1.5, 2.0, 0.5, 1.5, 3.9, 1.1, 1.5, 9.0])

        def outcome_of(*_):
            excess = next(excesses)
            return Outcome("wrong" if excess > 1 else "correct", "", excess)

        monkeypatch.setattr(judge, "outcome_of", outcome_of)
        choices = Pooling(operation="mean_pooling")
        verdicts = [random_calls.judged(Options(0), choices)[0].outcome.verdict for _ in range(3)]
        assert verdicts == ["correct", "wrong", "wrong"]
        assert next(excesses, None) is None

    def test_a_refused_call_is_wrong(self):
        class Flat(Pooling):
            def arguments(self):
                return {"x": "normal(2)"}

        (one,) = random_calls.judged(Options(0), Flat(operation="mean_pooling"))
        assert one.outcome.verdict == "wrong"
        assert one.outcome.detail.startswith("ValueError: mean_pooling: x must be")


def test_right_kernels_are_counted_and_recorded(tmp_path):
    path = tmp_path / "calls.json"
    shown = run("check", "--random", "2", "--op", "mean_pooling", "--json", str(path))
    assert shown.exit_code == 0
    last = POOLING + len(OPS)
    assert shown.output.endswith(
        f"seed 0, calls {POOLING} to {last}: 2 correct, 0 wrong, 0 unsupported\n"
    )
    record = json.loads(path.read_text())
    assert record["counts"] == [
        {"operation": "mean_pooling", "platform": "xla (any)", "correct": 2}
    ]
    assert record["wrong"] == []
    assert {"device", "versions", "date", "commit", "seed", "first", "last"} <= set(record)


@pytest.mark.parametrize("columns", WIDTHS)
def test_what_is_printed_fits(columns, monkeypatch):
    """A program is printed as it is, to be pasted."""
    wrong = Outcome("wrong", "ValueError: " + "a long story " * 20)
    one = CallResult(7, OPS[7], "xla", "xla (any)", wrong)
    monkeypatch.setattr(random_calls, "judged", lambda *_: [one])
    monkeypatch.setattr(random_calls, "minimised", lambda *_: "pass")
    shown = run("check", "--random", "2", columns=columns)
    assert shown.exit_code == 1
    assert too_wide(shown, columns) == []


def test_named_calls_and_random_calls_exclude_each_other():
    shown = run("check", "--random", "2", "--workload", "plain")
    assert shown.exit_code == 2
    assert "--random cannot be combined with --workload or --dtype." in sentence(shown)


def test_a_platform_of_another_device_is_wrong_usage():
    shown = run("check", "--random", "1", "--op", "mean_pooling", "--platform", "triton")
    assert shown.exit_code == 2
    assert "no implementation for this device matches these options." in sentence(shown)


def test_a_call_whose_process_dies_is_wrong_and_the_others_are_not(monkeypatch):
    def run_in_process(function, options, chunk):
        if 3 in chunk:
            raise BrokenProcessPool
        return [[CallResult(i, OPS[i], "xla", "xla (any)", Outcome("correct", ""))] for i in chunk]

    monkeypatch.setattr(random_calls, "run_in_process", run_in_process)
    calls = list(random_calls.every(Options(0), [2, 3, 4], workers=2))
    assert [[one.outcome.verdict for one in call] for call in calls] == [
        ["correct"],
        ["wrong"],
        ["correct"],
    ]


@pytest.mark.slow
def test_several_processes_give_what_one_gives():
    wanted = random_calls.indices(0, 3, ["mean_pooling"])
    alone, shared = (list(random_calls.every(Options(0), wanted, x)) for x in (1, 2))
    assert alone == shared
