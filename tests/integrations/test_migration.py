"""The migration table of docs/integrations.md: its names exist, and splash attention agrees."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from docs import documents
from ejkernel import MaskInfo, flash_attention

PAGE = (documents.ROOT / "docs" / "integrations.md").read_text()
TABLE = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.partition("## Migration")[2].splitlines()
    if line.startswith("|")
]
COLUMNS = {re.sub(r"[`¹²³]", "", name): index for index, name in enumerate(TABLE[0])}


def names(*functions):
    return {name for function in functions for name in inspect.signature(function).parameters}


KNOWN = {
    "jax.nn": names(jax.nn.dot_product_attention),
    "cuDNN in JAX": names(cudnn.dot_product_attention),
    "splash attention": {
        *names(splash.make_splash_mha.func, splash._splash_attention),
        *names(splash_masks.CausalMask, splash_masks.LocalMask),
        *splash.SegmentIds._fields,
        *("CausalMask", "LocalMask", "SegmentIds", "make_splash_mqa"),
        *("jax.vmap", "heads", "queries", "keys"),
    },
    "ejkernel.flash_attention": {
        *names(flash_attention),
        *("MaskInfo.from_segments", "mask.apply_kv_lengths", "EJKERNEL_DETERMINISTIC"),
        *("mask", "q", "kv", "lengths", "sinks", "heads"),
    },
}
SHAPES = {"H", "w", "left", "right"}


def written(cell):
    """The names in the code of a cell; words in quotes are values."""
    code = " ".join(re.findall(r"`([^`]+)`", cell))
    return set(re.findall(r"[A-Za-z_][\w.]*", re.sub(r'"\w+"', "", code)))


def test_the_table_has_a_cell_for_every_library():
    assert [*COLUMNS][1:] == [
        "jax.nn",
        "cuDNN in JAX",
        "tokamax 0.0.12",
        "splash attention",
        "FlashAttention 2",
        "ejkernel.flash_attention",
    ]
    assert {len(row) for row in TABLE} == {7}
    assert len(TABLE) > 15


@pytest.mark.parametrize("library", KNOWN)
def test_the_names_of_the_table_exist(library):
    used = set().union(*(written(row[COLUMNS[library]]) for row in TABLE[2:]))
    assert used - KNOWN[library] - SHAPES == set()


@pytest.mark.parametrize("library", ["jax.nn", "ejkernel.flash_attention"])
def test_the_table_has_every_argument(library):
    """Also those that are new."""
    used = set().union(*(written(row[COLUMNS[library]]) for row in TABLE[2:]))
    ours = {"cfg", "mesh", "in_specs", "out_specs"}
    function = {"jax.nn": jax.nn.dot_product_attention}.get(library, flash_attention)
    assert names(function) - used - ours == set()


def test_the_implementations_of_the_table_are_those_of_jax():
    (row,) = (row for row in TABLE if row[0] == "implementation")
    parameter = inspect.signature(jax.nn.dot_product_attention).parameters["implementation"]
    quoted = lambda text: set(re.findall(r"[\"'](\w+)[\"']", text))
    assert quoted(row[COLUMNS["jax.nn"]]) == quoted(str(parameter.annotation))


def test_splash_attention_gives_the_same():
    """Layout, scale, offset, window, segments, soft cap, sinks and log-sum-exp, as in the table."""
    query, key, value = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(4, 128, 64), (2, 256, 64), (2, 256, 64)])
    )
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    ids = jnp.arange(128) // 64, jnp.arange(256) // 128
    mask = splash_masks.LocalMask((128, 256), (90, 20), 64)
    mask = mask & splash_masks.CausalMask((128, 256), 70)
    kernel = splash.make_splash_mha(
        splash_masks.MultiHeadMask([mask] * 4),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=15.0,
        save_residuals=True,
        interpret=True,
    )
    theirs, (their_lse,) = kernel(query * 64**-0.5, key, value, splash.SegmentIds(*ids))
    info = MaskInfo.from_segments(ids[0][None], ids[1][None])
    call = functools.partial(
        flash_attention,
        *(x.swapaxes(0, 1)[None] for x in (query, key, value)),
        mask_info=info.apply_sliding_window((90, 20), offset=64),
        causal=True,
        causal_offset=70,
        logits_soft_cap=15.0,
    )
    ours, lse = call(return_lse=True)
    np.testing.assert_allclose(ours[0].swapaxes(0, 1), theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse[0], their_lse, rtol=1e-5, atol=1e-5)
    theirs, _ = kernel(query * 64**-0.5, key, value, splash.SegmentIds(*ids), sinks)
    ours = call(softmax_aux=sinks[:, None])
    np.testing.assert_allclose(ours[0].swapaxes(0, 1), theirs, rtol=1e-5, atol=1e-5)
