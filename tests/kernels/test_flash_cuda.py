"""Flash attention by cuDNN: what is put around it is right, it lowers anywhere, it says what not.

Without a GPU the two calls of cuDNN are computed by a stand-in; with one, by cuDNN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cases import Case
from conformance.oracle import assert_as_good_as_rounding
from kernels import cudnn_stand_in
from kernels import flash_gpu_programs as programs

from ejkernel import settings
from ejkernel.cli.oracle import Truth, with_dtype, with_gradients
from ejkernel.errors import UnsupportedError
from ejkernel.kernels.common import mosaic_gpu
from ejkernel.kernels.flash_attention import OP, cudnn, reference, xla
from ejkernel.kernels.flash_attention.cudnn import primitives
from ejkernel.kernels.flash_attention.inputs import Inputs, Spec
from ejkernel.kernels.flash_attention.workloads import WORKLOADS
from ejkernel.modules import flash_attention
from ejkernel.ops import default_executor, differentiable, executor
from ejkernel.ops.executor import Request
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.platform import Device, Platform
from ejkernel.types.rules import Band, Everything, KeyLength, QueryLength, Segments

H200 = Device("gpu", "NVIDIA H200", (9, 0), "NVIDIA H200|absent")
A100 = Device("gpu", "NVIDIA A100", (8, 0), "NVIDIA A100|absent")
SOURCE = next(source for source in OP.sources if source.platform is Platform.CUDA)
CASES = {x.name: Case(OP, SOURCE, x) for x in WORKLOADS if "test" in x.tags}
SERVED = {
    "plain",
    "one_head_for_all",
    "heads_of_their_own",
    "value_dim",
    "odd_lengths",
    "scale",
    "causal",
    "causal_odd",
    "decode",
    "bias",
    "sinks",
    "sinks_heads",
    "window_pair",
}


QUICK = {"value_dim", "bias", "sinks_heads", "window_pair"}  # the others are slow, being many


def served():
    return [
        pytest.param(CASES[name], id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in sorted(SERVED)
    ]


@pytest.fixture
def stand_in(monkeypatch):
    """cuDNN computed on the CPU."""
    monkeypatch.setattr(primitives, "call_forward", cudnn_stand_in.forward)
    monkeypatch.setattr(primitives, "call_backward", cudnn_stand_in.backward)


def by_cuda(spec, forward=cudnn.run_forward):
    """Inputs to outputs, differentiable, by the two passes and nobody's choice."""
    passes = differentiable.Passes(
        lambda inputs: forward(inputs, spec, None)[0],
        lambda inputs: forward(inputs, spec, None),
        lambda inputs, saved, d_out: cudnn.run_backward(inputs, saved, d_out, spec, None),
    )
    return functools.partial(differentiable.apply, differentiable.DerivativeRule.of(OP, passes))


def draw(
    *,
    batch=2,
    queries=24,
    keys=None,
    heads=4,
    kv_heads=2,
    dim=16,
    value_dim=None,
    mask=None,
    seed=0,
    **more,
):
    """Inputs in bfloat16; `more` holds arrays, or functions from a random key to arrays."""
    keys, value_dim = keys or queries, value_dim or dim
    shapes = [(queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim)]
    first, *others = jax.random.split(jax.random.key(seed), 4)
    arrays = [
        jax.random.normal(key, (batch, *shape), jnp.bfloat16)
        for key, shape in zip(others, shapes, strict=True)
    ]
    inputs = Inputs(*arrays, mask=mask or Everything())
    return inputs._replace(**{n: x(first) if callable(x) else x for n, x in more.items()})


def packed(*lengths, documents=0, tokens=None):
    ids = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)])
    ids = np.pad(ids, (0, (tokens or ids.size) - ids.size), constant_values=-1)
    ids = jnp.asarray(ids[None], jnp.int32)
    return Segments(ids, ids, documents=len(lengths) if documents == 0 else documents)


SPEC = Spec(softmax_scale=0.25)
MASKS = {
    "window": Band(-6, 0),
    "window_by_two": Band(-5, 30) & Band(None, 0),
    "causal_everything": Band(None, 23) & Band(-23, None),
    "key_lengths": KeyLength(jnp.array([17, 5])),
    "key_length": KeyLength(9) & Band(None, 0),
    "query_lengths": QueryLength(jnp.array([3, 24])) & KeyLength(jnp.array([24, 10])),
    "nothing_to_see": KeyLength(jnp.array([0, 24])) & QueryLength(jnp.array([20, 0])),
    "packed": packed(10, 3, 11),
    "packed_causal": packed(10, 3, 11) & Band(None, 0),
    "packed_padding": packed(7, 0, 9, documents=8, tokens=24) & Band(None, 0),
}


FOREIGN = ("window", "query_lengths", "nothing_to_see", "packed_padding")


def sinks_of_heads(key):
    return jax.random.normal(key, (4, 1), jnp.bfloat16)


def assert_right(run, dtype=jnp.bfloat16, **drawn):
    """Values and gradients of `run` are as near the truth as rounding to `dtype` allows."""
    wide = lambda seed: with_dtype(draw(seed=seed, **drawn), jnp.float32)
    truth = Truth(lambda seed: Invocation(OP, wide(seed), SPEC, H200))
    outputs, gradients = with_gradients(run)(with_dtype(draw(**drawn), dtype))
    for i, deviation in enumerate(truth.of_values(outputs, dtype)):
        assert deviation.fine, f"output {i} is off by {deviation}"
    for i, deviation in enumerate(truth.of_gradients(gradients, dtype)):
        assert deviation.fine, f"gradient {i} is off by {deviation}"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", served())
def test_values_and_gradients_are_those_of_the_reference(case, dtype, stand_in):
    call = case.call(dtype)
    outputs, gradients = with_gradients(by_cuda(call.spec))(call.inputs)
    assert_as_good_as_rounding(case, dtype, "values", outputs)
    assert_as_good_as_rounding(case, dtype, "gradients", gradients)


def test_the_workloads_that_it_takes_are_these_and_no_others():
    taken = set()
    for name, case in CASES.items():
        call = case.call(jnp.bfloat16)
        passes = SOURCE.load().forward, SOURCE.load().backward
        reasons = [one.refusal(call.inputs, call.spec, H200) for one in passes]  # pyright: ignore
        assert all(reason is None or not reason.endswith(".") for reason in reasons)
        if reasons == [None, None]:
            taken.add(name)
    assert taken == SERVED


@pytest.mark.parametrize(
    "sinks", [pytest.param(None, marks=pytest.mark.slow), sinks_of_heads], ids=["none", "sinks"]
)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_that_it_takes_mean_what_they_say(mask, sinks, stand_in):
    assert cudnn.why_not_backward(draw(mask=mask, sinks=sinks), SPEC, H200) is None
    assert_right(by_cuda(SPEC), mask=mask, sinks=sinks)


def bias_of(*shape, blind):
    """A bias; where `blind`, one row of it hides every key."""

    def make(key):
        bias = jax.random.normal(key, (*shape, 24, 24), jnp.bfloat16)
        return bias.at[..., 5, :].set(-jnp.inf) if blind else bias

    return make


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_a_bias_may_be_shared_by_rows_and_heads(shape, stand_in):
    assert_right(by_cuda(SPEC), bias=bias_of(*shape, blind=True), mask=Band(None, 0))


@pytest.mark.parametrize("mask", [MASKS[x] for x in FOREIGN], ids=FOREIGN)
def test_the_backward_pass_takes_the_forward_pass_of_another(mask, stand_in):
    assert_right(by_cuda(SPEC, xla.run_forward), mask=mask, sinks=sinks_of_heads)


def test_a_gradient_of_the_log_sum_exp_alone_is_found_in_any_size(stand_in):
    """One that float16 could not hold, where the output has no gradient at all."""
    inputs = jax.tree.map(lambda x: x.astype(jnp.float16), draw())
    of_lse = lambda run: jax.grad(lambda q: 1e5 * run(inputs._replace(query=q)).lse[:, :, 3].sum())
    got = of_lse(by_cuda(SPEC))(inputs.query * 0.01)
    right = of_lse(lambda x: reference.forward(x, SPEC))(inputs.query * 0.01)
    np.testing.assert_allclose(got, right, rtol=0.01, atol=0.01 * np.abs(right).max())


def test_a_log_sum_exp_that_nobody_uses_costs_nothing(stand_in):
    inputs = draw()

    def loss(used, inputs):
        out, lse = by_cuda(SPEC)(inputs)
        return (out.sum() + (lse**2).sum() if used else out.sum()).astype(jnp.float32)

    compiled = lambda used: (
        jax.jit(jax.grad(functools.partial(loss, used), allow_int=True))
        .lower(inputs)
        .compile()
        .as_text()
        or ""
    )
    assert "conditional(" in compiled(True)
    assert "conditional(" not in compiled(False)


@pytest.mark.parametrize("mask", [None, *MASKS.values()], ids=["none", *MASKS])
def test_it_lowers_for_a_gpu_that_is_not_here(mask):
    inputs = draw(mask=mask)
    text = (
        jax.jit(with_gradients(by_cuda(SPEC)))
        .trace(inputs)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "__cudnn$fmhaSoftmax" in text
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert "callback" not in text


def test_packed_documents_are_those_of_cumulative_lengths(stand_in):
    """Under jit too, where only their number is known."""
    inputs = draw(batch=1, queries=40)
    cum = jnp.array([0, 9, 30, 36])
    seen = []

    def call(cum):
        function = functools.partial(flash_attention, cum_seqlens_q=cum, causal=True)
        call = default_executor().invocation(function, *inputs[:3])
        assert cudnn.why_not(call.inputs, call.spec, H200) is None
        seen.append(call.inputs.mask.parts()[0].documents)
        return by_cuda(call.spec)(call.inputs)

    with_mask = flash_attention(*inputs[:3], cum_seqlens_q=cum, causal=True, return_lse=True)
    for outputs in (call(cum), jax.jit(call)(cum)):
        np.testing.assert_allclose(outputs.lse, with_mask[1], rtol=1e-5)
        got, known = (np.asarray(x, np.float32) for x in (outputs.out, with_mask[0]))
        # Each is rounded twice, its weights and itself.
        roundings = 4 * float(jnp.finfo(outputs.out.dtype).eps) / 2
        np.testing.assert_allclose(got, known, rtol=0, atol=roundings * np.abs(known).max())
    assert set(seen) == {4}


REFUSED = [
    (draw(mask=Band(None, 3)), "without offset"),
    (draw(mask=Band(-4, 4)), "windows that end at the query"),
    (draw(mask=Band(None, jnp.array([0, 3]))), "needs causal offsets and windows that are numbers"),
    (
        draw(mask=Segments(jnp.zeros((1, 24), jnp.int32), jnp.zeros((1, 24), jnp.int32))),
        "packed documents of cum_seqlens_q only",
    ),
    (draw(mask=packed(24) & KeyLength(3)), "lengths with packed documents"),
    (draw(mask=packed(10, 14) & Band(-3, 0)), "a window without lengths"),
    (draw(mask=Band(-3, 0) & KeyLength(3)), "a window without lengths"),
    (draw(keys=12, mask=Band(-3, 0)), "as many queries as keys"),
    (draw(queries=1), "more than one query and one key"),
    (draw(dim=12), "multiple of 8 up to 256, got 12"),
    (draw(dim=264), "multiple of 8 up to 256, got 264"),
    (draw(bias=jnp.zeros((1, 4, 1, 24), jnp.bfloat16)), "a bias for every query and key"),
    (draw(bias=jnp.zeros((1, 4, 24, 24), jnp.float32)), "needs bfloat16 or float16 alone"),
    (draw(mask=packed(24, documents=2**21)), "bytes of log-sum-exps"),
]


@pytest.mark.parametrize(("inputs", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_refusal_says_what_is_missing(inputs, words):
    assert words in (cudnn.why_not(inputs, SPEC, H200) or "")


def test_older_gpus_take_less():
    assert "up to 128" in (cudnn.why_not(draw(dim=192), SPEC, A100) or "")
    assert "Hopper" in (cudnn.why_not(draw(mask=packed(24)), SPEC, A100) or "")
    assert cudnn.why_not(draw(), SPEC, A100) is None
    volta = Device("gpu", "NVIDIA V100", (7, 0), "NVIDIA V100|absent")
    assert "8.0" in (cudnn.why_not(draw(), SPEC, volta) or "")


def test_odd_lengths_have_no_gradient_of_a_bias():
    inputs = draw(queries=23, bias=jnp.zeros((1, 4, 23, 23), jnp.bfloat16))
    assert cudnn.why_not(inputs, SPEC, H200) is None
    assert "even numbers" in (cudnn.why_not_backward(inputs, SPEC, H200) or "")


def test_a_backward_that_differs_from_run_to_run_can_be_forbidden():
    assert cudnn.why_not_backward(draw(), SPEC, H200) is None
    with settings.override(deterministic=True):
        assert cudnn.why_not(draw(), SPEC, H200) is None
        assert "EJKERNEL_DETERMINISTIC forbids" in (
            cudnn.why_not_backward(draw(), SPEC, H200) or ""
        )


def test_a_jax_without_the_private_operations_is_refused(monkeypatch):
    private = primitives._private()
    monkeypatch.delattr(private, "_dot_product_attention_bwd_p")
    primitives._why_not_jax.cache_clear()
    try:
        assert "does not know cuDNN in JAX" in (cudnn.why_not(draw(), SPEC, H200) or "")
    finally:
        primitives._why_not_jax.cache_clear()


def test_a_jax_whose_operations_take_other_arguments_is_refused(monkeypatch):
    monkeypatch.setattr(
        primitives._private(),
        "_dot_product_attention_fwd_cuda_lowering",
        lambda ctx, q, k, v, bias, a, b, c, d, e, f, *, scale, colour: None,
    )
    for cached in (primitives._why_not_jax, primitives._unused):
        cached.cache_clear()
    try:
        assert "colour" in (cudnn.why_not(draw(), SPEC, H200) or "")
    finally:
        for cached in (primitives._why_not_jax, primitives._unused):
            cached.cache_clear()


def test_off_a_gpu_the_platform_is_refused():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        flash_attention(*draw()[:3], platform="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [None, sinks_of_heads])
@pytest.mark.parametrize("mask", [None, *MASKS.values()], ids=["none", *MASKS])
@pytest.mark.parametrize("foreign", [False, True], ids=["own", "foreign"])
def test_cudnn_does_what_its_stand_in_does(mask, sinks, foreign):
    """Both passes of its own, then its backward pass behind the forward pass of XLA."""
    run = by_cuda(SPEC, xla.run_forward if foreign else cudnn.run_forward)
    assert_right(jax.jit(run), mask=mask, sinks=sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_cudnn_finds_the_gradient_of_a_shared_bias(shape, blind):
    assert_right(jax.jit(by_cuda(SPEC)), bias=bias_of(*shape, blind=blind), mask=Band(None, 0))


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (192, 128), (256, 256), (96, 96)])
def test_cudnn_takes_these_head_dims(dim, value_dim):
    run = lambda inputs: executor.run(OP, inputs, SPEC, Request(platform="cuda"))
    assert_right(run, queries=160, dim=dim, value_dim=value_dim, mask=Band(None, 0))


@pytest.mark.gpu
def test_vmap_joins_the_batch_on_a_gpu():
    inputs = draw(mask=Band(None, 0))
    run = with_gradients(lambda x: executor.run(OP, x, SPEC, Request(platform="cuda")))
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), inputs)
    together = jax.vmap(run)(stacked)
    for i in range(2):
        alone = run(jax.tree.map(lambda x, i=i: x[i], stacked))
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(a[i], b)


def test_the_backward_of_wide_heads_is_left_to_cudnn(monkeypatch):
    """Forward by Pallas, backward by whoever is faster; without cuDNN, by Pallas again."""
    inputs, spec = programs.call(head_dim=128, mask=Band(None, 0))
    narrow, _ = programs.call(head_dim=64, mask=Band(None, 0))
    monkeypatch.setattr(mosaic_gpu.versions, "why_missing", lambda interpreted=False: None)
    monkeypatch.setattr(primitives, "why_missing", lambda device: None)

    def platforms(direction, inputs):
        supported, _ = OP.supporting(direction, inputs, spec, programs.H200, None)
        return [source.platform.value for source, _ in supported][:2]

    assert platforms("forward", inputs) == ["pallas", "cuda"]
    assert platforms("backward", inputs) == ["cuda", "pallas"]
    assert platforms("backward", narrow) == ["pallas", "cuda"]
    monkeypatch.setattr(primitives, "why_missing", lambda device: "is missing")
    assert platforms("backward", inputs)[0] == "pallas"
