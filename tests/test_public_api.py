"""The public surface is what is promised, no less and no more."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ejkernel
import ejkernel.modules
import ejkernel.ops
import ejkernel.types
from ejkernel.kernels import OPS
from ejkernel.ops.module import NAMES_ELSEWHERE

DOCS = Path(__file__).parents[1] / "docs"

TOP_LEVEL = {
    *OPS,
    "Backend",
    "MaskInfo",
    "Platform",
    "__version__",
    "autotune",
    "dot_product_attention",
    "kernel_registry",
}
TOP_LEVEL_MODULES = {
    "errors",
    "integrations",
    "modules",
    "ops",
    "parallel",
    "settings",
    "types",
}
TYPES = {"MaskInfo", "get_debug_mode", "set_debug_mode"}
OPS_SURFACE = {
    "AutotunePolicy",
    "BwdParams",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "FwdParams",
    "Invocation",
    "Kernel",
    "PersistentCache",
    "Tuner",
    "autotune_recorded",
    "device_fingerprint",
    "get_invocations",
    "overlay_cache",
    "policy_override",
    "record_invocations",
}
PARALLEL = {"Dispatched", "ExpertPlan", "combine", "dispatch"}
MASK_HELPERS = {
    "attention_mask_to_qkv_cu_seqlens",
    "cu_seqlens_to_mask",
    "mask_to_segment_ids",
    "qkv_cu_seqlens_to_attention_mask",
    "qkv_cu_seqlens_to_qkv_masks",
    "qkv_masks_to_cu_seqlens",
    "segment_ids_to_mask",
    "segment_ids_to_qkv_masks",
    "MaskSharding",
}

EXECUTION = "platform, cfg, mesh, in_specs, out_specs"
SOFTMAX_ATTENTION = (
    "query, key, value, bias, cum_seqlens_q, cum_seqlens_k, softmax_aux, *, mask_info, "
    "attention_mask, softmax_scale, causal, causal_offset=0, sliding_window, logits_soft_cap, "
    "dropout_prob=0.0, dropout_seed, return_lse"
)
PAGED_OPTIONS = (
    "softmax_aux, softmax_scale, sliding_window, logits_soft_cap, kv_layout='NHD', "
    "k_scale, v_scale, return_lse"
)
# Class, arrays without a default, and parameters of each operation in order.
# A name without a default has False where it is a flag, and None otherwise.
SIGNATURES = {
    "blocksparse_attention": (
        "BlockSparseAttention",
        3,
        "query, key, value, softmax_aux, bias, *, block_mask, block_size=64, layout='bshd', "
        "mask_info, attention_mask, mask_builder, causal, sliding_window, chunk_size, "
        "softmax_scale, logits_soft_cap, axis_name",
    ),
    "flash_attention": ("FlashAttention", 3, SOFTMAX_ATTENTION),
    "gla_attention": (
        "GLAttention",
        3,
        "query, key, value, gate, g_gamma, initial_state, cu_seqlens, *, softmax_scale, reverse, "
        "return_state, axis_name",
    ),
    "grouped_matmul": (
        "GroupedMatmul",
        2,
        "inputs, weights, group_ids, group_offset, existing_out, *, group_sizes, transpose_rhs, "
        "preferred_element_type",
    ),
    "lightning_attention": (
        "LightningAttention",
        3,
        "query, key, value, decay, initial_state, cu_seqlens, *, g_gamma, layer_idx, num_layers, "
        "softmax_scale, reverse, return_state, axis_name",
    ),
    "mean_pooling": ("MeanPooling", 1, "x, attention_mask, *, cu_seqlens"),
    "native_sparse_attention": (
        "NativeSparseAttention",
        3,
        "query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts=16, cu_seqlens, *, "
        "block_size=64, sliding_window, softmax_scale, return_block_indices, axis_name",
    ),
    "page_attention": (
        "PageAttention",
        5,
        f"query, key_cache, value_cache, context_lens, block_tables, *, {PAGED_OPTIONS}, axis_name",
    ),
    "ragged_page_attention_v2": (
        "RaggedPageAttentionv2",
        6,
        "query, kv_pages, context_lens, block_tables, query_start_loc, num_seqs, *, "
        f"{PAGED_OPTIONS}",
    ),
    "ragged_page_attention_v3": (
        "RaggedPageAttentionv3",
        6,
        "query, key_pages, value_pages, cu_seqlens_q, cu_seqlens_k, page_indices, *, "
        f"{PAGED_OPTIONS}, axis_name",
    ),
    "ragged_page_attention_v3_update": (
        "RaggedPageAttentionv3Update",
        8,
        "query, key, value, key_pages, value_pages, cu_seqlens_q, cu_seqlens_k, page_indices, *, "
        f"{PAGED_OPTIONS}",
    ),
    "recurrent_attention": (
        "RecurrentAttention",
        3,
        "query, key, value, gate, g_gamma, gv, state, cu_seqlens, *, softmax_scale, reverse, "
        "axis_name",
    ),
    "ring_attention": (
        "RingAttention",
        3,
        "query, key, value, bias, softmax_aux, *, axis_name, mask_info, attention_mask, "
        "softmax_scale, causal, causal_offset=0, sliding_window, chunk_size, logits_soft_cap, "
        "dropout_prob=0.0, dropout_seed, placement='contiguous', method='auto'",
    ),
    "scaled_dot_product_attention": ("ScaledDotProductAttention", 3, SOFTMAX_ATTENTION),
}
FLAGS = {"causal", "return_block_indices", "return_lse", "return_state", "reverse", "transpose_rhs"}


def _public(module):
    """The names that a module offers: what it re-exports, modules and private names left out."""
    names = getattr(module, "__all__", dir(module))
    return {n for n in names if n[0] != "_" and not inspect.ismodule(getattr(module, n))}


def _promised(op):
    """(name, keyword-only, default) of each parameter, from the table."""
    _, required, parameters = SIGNATURES[op]
    names, _, options = parameters.partition(", *, ")
    keyword_only = options.split(", ") + EXECUTION.split(", ")
    for index, entry in enumerate([*names.split(", "), *keyword_only]):
        name, _, default = entry.partition("=")
        if index < required:
            value = inspect.Parameter.empty
        elif default:
            value = ast.literal_eval(default)
        else:
            value = False if name in FLAGS else None
        yield name, index >= len(names.split(", ")), value


@pytest.mark.parametrize("op", OPS)
def test_parameters_are_the_promised_ones(op):
    parameters = inspect.signature(getattr(ejkernel.modules, op)).parameters.values()
    written = [(p.name, p.kind is p.KEYWORD_ONLY, p.default) for p in parameters]
    assert written == list(_promised(op))


@pytest.mark.parametrize("name", sorted(_public(ejkernel.modules)))
def test_modules_have_no_positional_only_parameters(name):
    parameters = inspect.signature(getattr(ejkernel.modules, name)).parameters.values()
    assert not [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]


@pytest.mark.parametrize("op", OPS)
def test_functions_take_no_catch_all(op):
    parameters = inspect.signature(getattr(ejkernel.modules, op)).parameters.values()
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def test_modules_hold_each_operation_its_class_and_its_configuration():
    classes = {SIGNATURES[op][0] for op in OPS}
    assert _public(ejkernel.modules) == {*OPS, *classes, *(f"{name}Config" for name in classes)}


def test_every_operation_is_registered_under_its_name():
    assert set(OPS) <= set(ejkernel.kernel_registry.list_algorithms())


@pytest.mark.parametrize("op", OPS)
def test_every_operation_has_a_page_that_calls_it(op):
    pages = list(DOCS.rglob(f"{op}.md"))
    assert len(pages) == 1
    assert f"{op}(" in pages[0].read_text()


@pytest.mark.parametrize("op", OPS)
def test_the_docstring_of_an_operation_names_its_parameters_and_shows_a_call(op):
    """Its own docstring, or that of the operation it points to."""
    own = getattr(ejkernel.modules, op).__doc__
    pointed = [getattr(ejkernel.modules, name).__doc__ for name in OPS if f"`{name}`" in own]
    assert [name for name, _, _ in _promised(op) if name not in "".join([own, *pointed])] == []
    assert re.search(rf">>> .*\b{op}\(", own)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("ejkernel", TOP_LEVEL),
        ("ejkernel.ops", OPS_SURFACE),
        ("ejkernel.parallel", PARALLEL),
        ("ejkernel.types", TYPES),
        ("ejkernel.types.mask", MASK_HELPERS),
    ],
)
def test_promised_names_are_there(module, names):
    found = importlib.import_module(module)
    assert [name for name in sorted(names) if not hasattr(found, name)] == []


def test_the_package_lists_what_it_offers_and_nothing_else():
    assert {*ejkernel.__all__} == {*dir(ejkernel)} == TOP_LEVEL | TOP_LEVEL_MODULES
    with pytest.raises(AttributeError, match="module 'ejkernel' has no attribute 'flash'"):
        ejkernel.flash  # noqa: B018


@pytest.mark.parametrize("op", OPS)
def test_the_package_offers_every_operation(op):
    assert getattr(ejkernel, op) is getattr(ejkernel.modules, op)


def test_modules_are_attributes_of_the_package():
    code = "import ejkernel; print(*(getattr(ejkernel, x).__name__ for x in {names}))"
    code = code.format(names=sorted(TOP_LEVEL_MODULES))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"ejkernel.{name}" for name in sorted(TOP_LEVEL_MODULES)]


def test_a_type_checker_sees_what_the_package_offers():
    """The imports under TYPE_CHECKING name everything, each from where it is found at run time."""
    tree = ast.parse(Path(ejkernel.__file__).read_text())
    (block,) = (x for x in tree.body if isinstance(x, ast.If))
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert {*seen, "__version__"} == {*ejkernel.__all__}
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(ejkernel, name)


def test_integrations_are_loaded_when_they_are_used():
    assert dir(ejkernel.integrations) == ["equinox", "flax", "jax_nn"]
    assert ejkernel.integrations.jax_nn.dot_product_attention is ejkernel.dot_product_attention
    with pytest.raises(AttributeError, match="has no attribute 'haiku'"):
        ejkernel.integrations.haiku  # noqa: B018


def test_types_offer_nothing_else():
    assert _public(ejkernel.types) == TYPES


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert ejkernel.__version__ == version("ejkernel")


@pytest.mark.parametrize("op", OPS)
def test_an_operation_has_a_source_of_its_own(op):
    source = inspect.getsource(getattr(ejkernel.modules, op))
    assert re.search(rf"^def {op}\(", source, re.MULTILINE)
    assert inspect.getdoc(getattr(ejkernel.modules, op)) is not None
    assert getattr(ejkernel.modules, op).__module__ == f"ejkernel.kernels.{op}.api"


@pytest.mark.parametrize("op", OPS)
def test_the_class_of_an_operation_has_its_signature(op):
    function = getattr(ejkernel.modules, op)
    kind = getattr(ejkernel.modules, SIGNATURES[op][0])
    assert inspect.signature(kind()) == inspect.signature(function)
    _, *parameters = inspect.signature(kind.__call__).parameters.values()
    assert parameters == list(inspect.signature(function).parameters.values())
    assert kind.config is getattr(ejkernel.modules, f"{kind.__name__}Config")


# What other libraries call an argument, what it is called here, and in which operations.
_SOFTMAX = ("flash_attention", "scaled_dot_product_attention", "ring_attention")
_SOFTMAX += ("blocksparse_attention",)
_PAGED = ("page_attention", "ragged_page_attention_v2", "ragged_page_attention_v3")
_LINEAR = ("gla_attention", "lightning_attention", "recurrent_attention")
ELSEWHERE = [
    ("is_causal", "causal", _SOFTMAX),
    ("scale", "softmax_scale", (*_SOFTMAX, *_PAGED, *_LINEAR, "native_sparse_attention")),
    ("sm_scale", "softmax_scale", (*_SOFTMAX, *_PAGED)),
    ("mask", "attention_mask", (*_SOFTMAX, "mean_pooling")),
    ("attn_mask", "attention_mask", (*_SOFTMAX, "mean_pooling")),
    ("segment_ids", "mask_info", _SOFTMAX),
    ("query_seq_lengths", "mask_info", _SOFTMAX),
    ("attn_bias", "bias", _SOFTMAX),
    ("window_size", "sliding_window", (*_SOFTMAX, *_PAGED, "native_sparse_attention")),
    ("local_window_size", "sliding_window", (*_SOFTMAX, *_PAGED)),
    ("softcap", "logits_soft_cap", (*_SOFTMAX, *_PAGED)),
    ("attn_logits_soft_cap", "logits_soft_cap", (*_SOFTMAX, *_PAGED)),
    ("dropout_p", "dropout_prob", _SOFTMAX[:2]),
    ("dropout_rate", "dropout_prob", _SOFTMAX[:2]),
    ("dropout_rng", "dropout_seed", _SOFTMAX[:2]),
    ("cu_seqlens_q", "cum_seqlens_q", _SOFTMAX[:2]),
    ("cu_seqlens_k", "cum_seqlens_k", _SOFTMAX[:2]),
    ("cu_seqlens_q", "query_start_loc", ("ragged_page_attention_v2",)),
    ("cu_seqlens_q", "cu_seqlens", (*_LINEAR, "mean_pooling", "native_sparse_attention")),
    ("cum_seqlens_q", "cu_seqlens_q", ("ragged_page_attention_v3",)),
    ("sinks", "softmax_aux", (*_SOFTMAX, *_PAGED)),
    ("q", "query", (*_SOFTMAX, *_PAGED, *_LINEAR, "native_sparse_attention")),
    ("k", "key", (*_SOFTMAX, *_LINEAR)),
    ("v", "value", (*_SOFTMAX, *_LINEAR)),
    ("k_pages", "key_pages", ("ragged_page_attention_v3", "ragged_page_attention_v3_update")),
    ("k_pages", "key_cache", ("page_attention",)),
    ("lengths", "context_lens", ("page_attention",)),
    ("page_table", "block_tables", ("page_attention", "ragged_page_attention_v2")),
    ("return_residual", "return_lse", (*_SOFTMAX[:2], *_PAGED)),
    ("implementation", "platform", tuple(SIGNATURES)),
    ("deterministic", "cfg", _SOFTMAX),
    ("output_final_state", "return_state", _LINEAR[:2]),
    ("lhs", "inputs", ("grouped_matmul",)),
    ("softmax_scal", "softmax_scale", _SOFTMAX),  # misspelt
]


@pytest.mark.parametrize(
    ("op", "given", "nearest"),
    [(op, given, nearest) for given, nearest, ops in ELSEWHERE for op in ops],
)
def test_an_unknown_argument_gets_the_nearest_name(op, given, nearest):
    with pytest.raises(
        TypeError, match=f"^{op}: unknown argument '{given}'; the nearest is '{nearest}'"
    ):
        getattr(ejkernel.modules, op)(**{given: 1})


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_names_of_other_libraries_lead_to_arguments_that_exist(name):
    arguments = {op: set(inspect.signature(getattr(ejkernel.modules, op)).parameters) for op in OPS}
    for here in NAMES_ELSEWHERE[name]:
        lacking = [op for op in OPS if here in arguments[op] and name not in arguments[op]]
        assert lacking, f"no operation has {here} and lacks {name}"


def test_an_unknown_argument_that_resembles_none_gets_the_list():
    with pytest.raises(TypeError, match=r"^mean_pooling: unknown argument 'zzz'; it has x, "):
        ejkernel.modules.mean_pooling(1, zzz=1)


@pytest.mark.parametrize(
    ("op", "flag"),
    [
        (op, flag)
        for op in OPS
        for flag in ("return_lse", "return_state", "return_block_indices")
        if flag in SIGNATURES[op][2]
    ],
)
def test_the_type_of_a_result_follows_from_its_flag(op, flag):
    """The overloads have the parameters of the function, and of its flag one value each."""
    path = Path(inspect.getsourcefile(inspect.unwrap(getattr(ejkernel.modules, op))))
    named = [x for x in ast.parse(path.read_text()).body if getattr(x, "name", None) == op]
    *overloads, function = ([ast.unparse(x.args), ast.unparse(x.returns)] for x in named)
    off, on = (parameters for parameters, _ in overloads)
    assert off.replace(f"{flag}: Literal[False]=False", f"{flag}: Literal[True]") == on
    assert off.replace(f"{flag}: Literal[False]", f"{flag}: bool") == function[0]
    assert " | ".join(result for _, result in overloads) == function[1]
