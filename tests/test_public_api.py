"""The public surface is what is promised, no less and no more."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import ejkernel
import ejkernel.modules
import ejkernel.ops
import ejkernel.types
from ejkernel.kernels import OPS

DOCS = Path(__file__).parents[1] / "docs"

TOP_LEVEL = {"Backend", "Platform", "kernel_registry"}
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
        "softmax_scale, logits_soft_cap",
    ),
    "flash_attention": ("FlashAttention", 3, SOFTMAX_ATTENTION),
    "gla_attention": (
        "GLAttention",
        3,
        "query, key, value, gate, g_gamma, initial_state, cu_seqlens, *, softmax_scale, reverse, "
        "return_state",
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
        "softmax_scale, reverse, return_state",
    ),
    "mean_pooling": ("MeanPooling", 1, "x, attention_mask, *, cu_seqlens"),
    "native_sparse_attention": (
        "NativeSparseAttention",
        3,
        "query, key, value, g_cmp, g_slc, g_swa, block_indices, block_counts=16, cu_seqlens, *, "
        "block_size=64, sliding_window, softmax_scale, return_block_indices",
    ),
    "page_attention": (
        "PageAttention",
        5,
        f"query, key_cache, value_cache, context_lens, block_tables, *, {PAGED_OPTIONS}",
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
        f"{PAGED_OPTIONS}",
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
        "query, key, value, gate, g_gamma, gv, state, cu_seqlens, *, softmax_scale, reverse",
    ),
    "ring_attention": (
        "RingAttention",
        3,
        "query, key, value, bias, softmax_aux, *, axis_name, mask_info, attention_mask, "
        "softmax_scale, causal, causal_offset=0, sliding_window, chunk_size, logits_soft_cap",
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
        ("ejkernel.types", TYPES),
        ("ejkernel.types.mask", MASK_HELPERS),
    ],
)
def test_promised_names_are_there(module, names):
    found = importlib.import_module(module)
    assert [name for name in sorted(names) if not hasattr(found, name)] == []


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


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("is_causal", "causal"),
        ("scale", "softmax_scale"),
        ("mask", "attention_mask"),
        ("segment_ids", "mask_info"),
        ("softmax_scal", "softmax_scale"),
    ],
)
def test_an_unknown_argument_gets_the_nearest_name(given, nearest):
    with pytest.raises(
        TypeError, match=f"^flash_attention: unknown argument '{given}'; the nearest is '{nearest}'"
    ):
        ejkernel.modules.flash_attention(1, 1, 1, **{given: 1})


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
