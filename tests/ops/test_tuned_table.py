"""What a tuned table knows is used as it stands: the best forward with the best backward pass."""

import contextlib
import dataclasses
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import as_shapes

from ejkernel import settings
from ejkernel.cli import subjects
from ejkernel.errors import TuningWarning
from ejkernel.kernels.flash_attention import OP, xla
from ejkernel.kernels.flash_attention.config import FlashAttentionConfig
from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.ragged_page_attention_v3.triton.configs import presets, tile_config
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Tuner,
    measuring,
    tuner,
)
from ejkernel.ops.config import BwdParams, Config, FwdParams
from ejkernel.ops.executor import Request
from ejkernel.ops.implementation import Choice, Implementation, Pass, Source
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.persistent import ShippedTable, write_tuned
from ejkernel.ops.platform import Backend, Device, Platform, device_of
from ejkernel.ops.tuner import Tuned
from ejkernel.types.rules import Segments

SPEC = Spec(softmax_scale=0.5)
INPUTS = Inputs(*jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8)))


def two_ways(ran, forward=xla.run_forward):
    """Flash attention by XLA under three names, which note who ran with what."""

    def implementation(name, forward):
        def of(direction, run):
            def noted(*arguments):
                ran.append((name, direction, arguments[-1]))
                return run(*arguments)

            # The blocks are told apart, but make no difference here.
            kind = {"forward": FwdParams, "backward": BwdParams}[direction]
            default = kind(q_blocksize=64, kv_blocksize=64)
            return Pass(
                run=noted, features=frozenset({"segments"}), heuristic=lambda *call: default
            )

        return Implementation(
            forward=of("forward", forward), backward=of("backward", xla.run_backward)
        )

    sources = [
        Source(Platform.PALLAS, Backend.ANY, implementation("pallas", xla.run_forward)),
        Source(Platform.TRITON, Backend.ANY, implementation("triton", forward)),
        Source(Platform.XLA, Backend.ANY, implementation("xla", xla.run_forward)),
    ]
    return OP.renamed("flash_attention", sources=sources)


class Stopwatch(Tuner):
    """Times as they are given, in the order of the candidates."""

    def __init__(self, *seconds):
        super().__init__()
        self.seconds = list(seconds)

    def measure(self, function, *args):
        return self.seconds.pop(0)


@dataclasses.dataclass(frozen=True)
class OtherConfig(Config):
    fields: int = 0


class Untouchable(Tuner):
    def autotune(self, inv, choices):
        raise AssertionError("the table knows this call")

    compare = autotune


def executor(tuner, events):
    chain = ConfigSelectorChain(
        ConfigCache(),
        policy=AutotunePolicy(),
        tuner=tuner,
        on_event=lambda name, **data: events.append((name, data.get("level"))),
    )
    return Executor(chain)


def gradient(executor, op):
    out = lambda q: executor.run(op, INPUTS._replace(query=q), SPEC, Request()).out.sum()
    return jax.grad(out)(INPUTS.query)


def calls(op):
    device = device_of(jax.tree.leaves(INPUTS))
    forward = Invocation(op, INPUTS, SPEC, device)
    return forward, dataclasses.replace(forward, direction="backward")


def test_with_a_table_the_first_call_tunes_nothing_and_pairs_the_best(
    tmp_path, monkeypatch, as_a_user_calls
):
    ran, events = [], []
    op = two_ways(ran)
    forward, backward = calls(op)
    best = {
        forward.key: FlashAttentionConfig(
            platform="pallas", fwd_params=FwdParams(q_blocksize=16, kv_blocksize=32)
        ),
        backward.key: FlashAttentionConfig(
            platform="triton", bwd_params=BwdParams(q_blocksize=32, kv_blocksize=16)
        ),
    }
    [path] = write_tuned(tmp_path, op.name, best)
    assert path.parent.name == forward.device.kind.lower()
    table = ShippedTable(op.name, tmp_path)
    monkeypatch.setattr(ShippedTable, "for_op", lambda name: table)
    gradient(executor(Untouchable(), events), op)
    assert set(events) == {("cache_hit", "shipped")}
    assert {(name, direction) for name, direction, _ in ran} == {
        ("pallas", "forward"),
        ("triton", "backward"),
    }
    blocks = {(direction, p.q_blocksize, p.kv_blocksize) for _, direction, p in ran}
    assert blocks == {("forward", 16, 32), ("backward", 32, 16)}


def test_a_case_of_an_op_reads_the_table_of_that_op(tmp_path, monkeypatch, as_a_user_calls):
    """Unless its configurations have other fields."""
    op, events = two_ways([]), []
    tuned = FlashAttentionConfig(platform="xla")
    write_tuned(tmp_path, op.name, dict.fromkeys((call.key for call in calls(op)), tuned))
    tables = {name: ShippedTable(name, tmp_path) for name in (op.name, "case", "other")}
    monkeypatch.setattr(ShippedTable, "for_op", tables.get)
    gradient(executor(Untouchable(), events), op.renamed("case"))
    assert set(events) == {("cache_hit", "shipped")}
    assert op.renamed("other", config=OtherConfig).tuned_as == ()


def test_scaled_dot_product_attention_reads_what_flash_attention_was_tuned_to():
    shape = lambda heads: jax.ShapeDtypeStruct((2, 64, heads, 16), jnp.bfloat16)
    arrays = dict(zip(("query", "key", "value"), map(shape, (8, 2, 2)), strict=True))
    keys = {}

    def look(arrays):
        for name in ("flash_attention", "scaled_dot_product_attention"):
            call = subjects.one(name).invocation(arrays | {"causal": True})
            keys[name] = call.call_key
            assert call.op.tuned_as == (() if name == "flash_attention" else ("flash_attention",))

    jax.eval_shape(look, arrays)
    assert len(keys) == 2
    assert len(set(keys.values())) == 1


def test_tuning_finds_the_best_of_each_pass():
    ran, events = [], []
    op = two_ways(ran)
    # Forward pallas, triton, xla; then backward.
    who = executor(Stopwatch(1.0, 2.0, 3.0, 2.0, 1.0, 3.0), events)
    for call in calls(op):
        who.chooser.tune(call)
    chosen = [who.chooser.choose(call).source.platform for call in calls(op)]
    assert chosen == [Platform.PALLAS, Platform.TRITON]
    assert [name for name, _ in events].count("autotune_start") == 2


def with_candidates(run, count, at_first_call=None):
    """Flash attention by one pass that has so many candidates besides its heuristic."""
    sizes = [FwdParams(q_blocksize=8 * (i + 1)) for i in range(count + 1)]
    one = Pass(
        run=run,
        features=frozenset(),
        heuristic=lambda *call: sizes[0],
        candidates=lambda *call: sizes,
        first_call_candidates=(
            None if at_first_call is None else lambda *call: [sizes[i] for i in at_first_call]
        ),
    )
    sources = [Source(Platform.PALLAS, Backend.ANY, Implementation(forward=one)), OP.sources[-1]]
    return dataclasses.replace(calls(OP)[0], op=OP.renamed("flash_attention", sources=sources))


class Comparing(Tuner):
    """Notes what it is given to compare, and finds the last one fastest."""

    def __init__(self):
        super().__init__()
        self.compared = []

    def compare(self, inv, choices):
        self.compared.append([choice.params.q_blocksize for choice in choices])
        times = [(choice, 1.0) for choice in choices]
        return Tuned(choices[-1], 1.0, times, [])


@pytest.mark.parametrize(
    ("at_first_call", "compared"),
    [(None, []), ((5, 2), [[8, 48, 24]]), ((5, 4, 3, 2), [[8, 48, 40, 32]]), ((), [])],
    ids=["without a model", "two are close", "four are close", "none is close"],
)
def test_a_first_call_compares_the_heuristic_with_three_others_at_most(at_first_call, compared):
    """Those that a model expects to be close; without a model the heuristic is used."""
    call, comparing = with_candidates(xla.run_forward, 6, at_first_call), Comparing()
    chooser = executor(comparing, []).chooser
    chosen = chooser.choose(call).params.q_blocksize
    assert comparing.compared == compared
    assert chosen == (compared[0][-1] if compared else 8)
    assert chooser.choose(call).params.q_blocksize == chosen  # known by now
    assert len(comparing.compared) == len(compared)


def test_candidates_of_a_first_call_that_fail_or_disagree_are_dropped():
    def run(inputs, spec, params):
        if params.q_blocksize == 16:
            raise RuntimeError("does not compile")
        out, lse = xla.run_forward(inputs, spec, FwdParams(q_blocksize=8, kv_blocksize=8))[0]
        return Outputs(out + (params.q_blocksize == 24), lse), Outputs(out, lse)

    call = with_candidates(run, 3, (1, 2, 3))
    with pytest.warns(TuningWarning, match="dropped 2 of 4.*does not compile.*off by"):
        choice = executor(Tuner(), []).chooser.choose(call)
    assert choice.params.q_blocksize in (8, 32)


EIGHT = FwdParams(q_blocksize=8, kv_blocksize=8)


def faulty_at(size, fault):
    """A forward pass whose output goes through `fault` where its block has this size."""

    def run(inputs, spec, params):
        out, lse = xla.run_forward(inputs, spec, EIGHT)[0]
        out = fault(out) if params.q_blocksize == size else out
        return Outputs(out, lse), Outputs(out, lse)

    return run


def by_first_call(tuner, call):
    return executor(tuner, []).chooser.choose(call).params.q_blocksize


def by_search(tuner, call):
    call = dataclasses.replace(call, platform="pallas")
    tuned = executor(tuner, []).chooser.tune(call)
    assert tuned is not None
    return tuned.best.params.q_blocksize


def test_a_wrong_heuristic_does_not_drop_the_candidates_that_are_right(monkeypatch):
    monkeypatch.setattr(tuner, "_LONG_RUN", float("inf"))
    call = with_candidates(faulty_at(8, lambda out: out + 0.1), 2, (1, 2))
    with pytest.warns(TuningWarning, match=r"dropped 1 of 3 .*pallas q_blocksize=8 \(is off by"):
        assert by_first_call(Tuner(), call) in (16, 24)


def test_a_first_call_that_takes_long_is_compared_with_its_heuristic(monkeypatch):
    """XLA would take much longer still."""
    monkeypatch.setattr(tuner, "_LONG_RUN", 0.0)
    call = with_candidates(faulty_at(8, lambda out: out + 0.1), 2, (1, 2))
    with pytest.warns(TuningWarning, match="dropped 2 of 3"):
        assert by_first_call(Tuner(), call) == 8


@pytest.mark.parametrize("chosen_by", [by_first_call, by_search])
def test_a_candidate_that_gives_other_bits_in_a_second_run_is_dropped(chosen_by):
    runs = itertools.count()

    def unstable(out):
        last_place = jax.ShapeDtypeStruct((), out.dtype)
        return out + jax.pure_callback(lambda: np.float32(1e-6 * (next(runs) % 2)), last_place)

    call = with_candidates(faulty_at(8, unstable), 2, (1, 2))
    with pytest.warns(TuningWarning, match=r"q_blocksize=8 \(gives other bits in a second run"):
        assert chosen_by(Tuner(), call) in (16, 24)


def test_a_candidate_that_is_declared_nondeterministic_may_give_other_bits():
    call = calls(OP)[0]
    source = Source(Platform.PALLAS, Backend.ANY, Implementation())
    run = Pass(
        run=xla.run_forward, features=frozenset(), nondeterministic=lambda *call: FwdParams()
    )
    declared = lambda params: measuring.is_deterministic(call, Choice(source, run, params))
    assert not declared(FwdParams())
    assert declared(EIGHT)
    by_xla = Source(Platform.XLA, Backend.ANY, Implementation())  # which promises nothing
    assert not measuring.is_deterministic(call, Choice(by_xla, run, EIGHT))


class Impatient(Tuner):
    """Waits only a second for candidate 16 when it does one of its steps."""

    def __init__(self, step):
        super().__init__(timeout=60.0)
        self.step = step

    def checked(self, inv, choice, *rest):
        self.size = choice.params.q_blocksize
        self.timeout = 1.0 if (self.step, self.size) == ("checked", 16) else 60.0
        return super().checked(inv, choice, *rest)

    def timed(self, *given):
        self.timeout = 1.0 if (self.step, self.size) == ("timed", 16) else 60.0
        return super().timed(*given)


@pytest.fixture
def hanging():
    """Fault of a candidate that runs so many times, then hangs until the test ends."""
    until = threading.Event()

    def after(runs):
        number = itertools.count()

        def wait(out):
            if next(number) >= runs:
                until.wait(120)
            return out

        return lambda out: jax.pure_callback(wait, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

    yield after
    until.set()
    for thread in threading.enumerate():
        if thread.name == "ejkernel-outside-trace":
            thread.join(60)


HANGS = [(by_first_call, "checked", 0), (by_search, "checked", 0), (by_search, "timed", 2)]


@pytest.mark.parametrize(("chosen_by", "step", "runs"), HANGS)
def test_a_candidate_that_hangs_while_it_runs_is_dropped(hanging, chosen_by, step, runs):
    call = with_candidates(faulty_at(16, hanging(runs)), 2, (1, 2))
    with pytest.warns(TuningWarning, match=r"dropped 1 of 3 .*=16 \(TimeoutError: it did not end"):
        assert chosen_by(Impatient(step), call) in (8, 24)


@pytest.mark.parametrize(("chosen_by", "step", "runs"), HANGS)
def test_nothing_is_measured_behind_a_candidate_that_blocks_the_device(
    hanging, chosen_by, step, runs, monkeypatch
):
    """The best so far is used, or the heuristic; here they are the same."""
    gpu = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|absent")
    monkeypatch.setattr(tuner, "default_device", lambda: gpu)
    traced, fault = [], hanging(runs)

    def run(inputs, spec, params):
        traced.append(params.q_blocksize)
        return faulty_at(16, fault)(inputs, spec, params)

    call = with_candidates(run, 2, (1, 2))
    with pytest.warns(TuningWarning, match=r"=16 \(DeviceBlockedError: .* Nothing else is meas"):
        assert chosen_by(Impatient(step), call) == 8
    assert 24 not in traced


def test_the_line_about_a_comparison_says_how_to_forbid_it(capsys):
    run = lambda i, s, p: xla.run_forward(i, s, FwdParams(q_blocksize=8, kv_blocksize=8))
    call = with_candidates(run, 1, (1,))
    with settings.override(autotune_progress=True):
        executor(Tuner(), []).chooser.choose(call)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ejkernel: comparing 2 configurations of flash_attention")
    assert "EJKERNEL_AUTOTUNE_POLICY=heuristics" in line
    assert "ejkernel.autotune" in line


def test_a_candidate_that_is_wrong_is_never_timed():
    def wrong(inputs, spec, params):
        out, lse = xla.run_forward(inputs, spec, params)[0]
        return Outputs(out + 0.1, lse), Outputs(out + 0.1, lse)

    op = two_ways([], wrong)
    watch = Stopwatch(1.0, 2.0)  # of two; a third would find no time left
    with pytest.warns(TuningWarning, match="dropped 1 of 3 candidates.*triton"):
        tuned = executor(watch, []).chooser.tune(calls(op)[0])
    assert tuned is not None
    assert tuned.best.source.platform is Platform.PALLAS
    assert watch.seconds == []


def test_a_platform_far_behind_is_not_looked_at_closely():
    """Of the first 1.0 and 4.0 seconds; only the faster platform has its others timed."""
    several = [FwdParams(q_blocksize=size) for size in (8, 16, 32)]
    passes = {
        platform: Pass(
            run=xla.run_forward,
            features=frozenset(),
            heuristic=lambda *call: several[0],
            candidates=lambda *call: several,
        )
        for platform in (Platform.PALLAS, Platform.TRITON)
    }
    sources = [
        Source(platform, Backend.ANY, Implementation(forward=one))
        for platform, one in passes.items()
    ]
    call = dataclasses.replace(
        calls(OP)[0], op=OP.renamed("flash_attention", sources=[*sources, OP.sources[-1]])
    )
    call = dataclasses.replace(call, platform=None)
    watch = Stopwatch(1.0, 4.0, 9.0, 0.9, 0.8)
    watch.time_candidate = lambda run, arguments, best: watch.measure(run)
    tuned = executor(watch, []).chooser.tune(call)
    assert tuned is not None
    assert (tuned.best.source.platform, tuned.best.params.q_blocksize) == (Platform.PALLAS, 32)
    assert len(tuned.measurements) == 5
    assert watch.seconds == []


def test_one_platform_alone_is_still_compared_with_xla():
    """In float32, too, of which the platform may know nothing."""

    def wrong(inputs, spec, params):
        assert inputs.query.dtype == jnp.bfloat16
        out, lse = xla.run_forward(inputs, spec, params)[0]
        return Outputs(out + 0.1, lse), Outputs(out + 0.1, lse)

    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), INPUTS)
    call = dataclasses.replace(calls(two_ways([], wrong))[0], inputs=narrow)
    for platform, supported in (("triton", False), ("pallas", True)):
        with (
            pytest.warns(TuningWarning, match="off by")
            if not supported
            else contextlib.nullcontext()
        ):
            tuned = executor(Stopwatch(1.0), []).chooser.tune(
                dataclasses.replace(call, platform=platform)
            )
        assert (tuned is not None) == supported


def test_bits_that_change_are_for_auto_alone():
    """A platform by name, or a user who asks for it, gets the same bits in every run."""
    kinds = {
        deterministic: BwdParams(q_blocksize=64, deterministic=None if deterministic else False)
        for deterministic in (True, False)
    }
    backward = Pass(
        run=xla.run_backward,
        features=frozenset(),
        heuristic=lambda *call: kinds[True],
        nondeterministic=lambda *call: kinds[False],
    )
    source = Source(Platform.PALLAS, Backend.ANY, Implementation(backward=backward))
    call = dataclasses.replace(calls(OP)[1], op=OP.renamed("flash_attention", sources=[source]))
    policy = AutotunePolicy(allow_autotune=False)
    chooser = ConfigSelectorChain(ConfigCache(), policy)
    chosen = lambda call: chooser.choose(call).params.deterministic
    assert chosen(call) is False
    assert chosen(dataclasses.replace(call, platform="pallas")) is None
    key = call.key
    with settings.override(deterministic=True):
        fresh = dataclasses.replace(call)
        assert chosen(fresh) is None
        assert fresh.key != key


def test_backward_passes_are_tuned_without_a_gradient_of_the_log_sum_exp():
    shown = Pass(
        run=lambda inputs, residuals, d_outputs, spec, params: d_outputs, features=frozenset()
    )
    call = calls(OP)[1]
    run = measuring.runner(call, Choice(OP.sources[0], shown, None))
    ones = Outputs(jnp.ones((1, 16, 2, 8)), jnp.ones((1, 2, 16)))
    seen = run(INPUTS, ones, ones)
    assert (seen.out == 1).all()
    assert (seen.lse == 0).all()


def test_documents_that_are_not_known_yet_are_tuned_as_equal_ones(as_a_user_calls):
    ids = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), INPUTS)
    inputs = shapes._replace(mask=Segments(ids, ids, documents=4))  # type: ignore[arg-type]
    call = dataclasses.replace(calls(OP)[0], inputs=inputs)
    (drawn,) = measuring.random_arguments(call, Tuner()._computed, measuring.by_xla)
    assert drawn.mask.q_ids.tolist() == [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4]
    assert drawn.mask.documents == 4


def test_what_was_tuned_over_pages_is_still_a_guess():
    """Else it would run with fewer programs than it was tuned with."""
    h200 = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|any driver")
    table = ShippedTable.for_op("ragged_page_attention_v3")
    for call in named_calls("ragged_page_attention_v3"):
        fields = table.get((h200.fingerprint, *call.key[1:]))
        params = call.op.config.from_dict(fields)
        config = tile_config(call.inputs, call.spec, params, h200)
        known = presets(call.inputs, call.spec, h200)
        assert config[:4] in [preset[:4] for preset in known]


TUNED = ["flash_attention", "grouped_matmul", "ragged_page_attention_v3"]


def named_calls(name):
    """The calls that are tuned for a device, as shapes: nothing of their size is made."""
    subject = subjects.one(name)
    call = lambda x: subject.invocation(x.build(dtype=jnp.bfloat16))
    return [as_shapes(functools.partial(call, x)) for x in subject.workloads if "tune" in x.tags]


@pytest.mark.parametrize("name", TUNED)
def test_the_named_calls_of_models_are_different_calls(name):
    found = named_calls(name)
    assert len({call.key for call in found}) == len(found) >= 7


@pytest.mark.parametrize("name", TUNED)
def test_an_h200_is_shipped_with_an_entry_for_every_named_call(name):
    """What changes a key without tuning anew would leave the table without readers."""
    table, missing = ShippedTable.for_op(name), []
    # Gradients through pages have one implementation, and nothing to choose.
    directions = ("forward", "backward") if name != "ragged_page_attention_v3" else ("forward",)
    for call in named_calls(name):
        for direction in directions:
            _, *rest = dataclasses.replace(call, direction=direction).key
            if table.get(("NVIDIA H200|any driver", *rest)) is None:
                missing.append((call.inputs, direction))
    assert missing == []


def test_a_result_that_is_rounded_to_the_other_side_is_no_wrong_one():
    """One place of the largest number away it passes, two places away it does not."""
    judge = object.__new__(measuring.ResultCheck)
    judge.floor = measuring._EPS
    exact = jnp.array([3.0, 1.0], jnp.float32)
    plain = exact.astype(jnp.bfloat16)
    judge._learn([plain], [exact])
    place = 2.0**-6  # of bfloat16 numbers between 2 and 4
    assert judge.mismatch([plain + jnp.array([place, 0], plain.dtype)]) is None
    # What lies between two numbers is rounded; a place from there is more than one from the truth.
    judge._learn([plain], [exact - jnp.array([0.2 * place, 0])])
    assert judge.mismatch([plain + jnp.array([place, 0], plain.dtype)]) is None
    assert "is off by" in (judge.mismatch([plain + jnp.array([2 * place, 0], plain.dtype)]) or "")
