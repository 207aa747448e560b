"""Debug mode: a line for each use, nothing when off."""

import inspect
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from ejkernel import settings
from ejkernel.types import MaskInfo, get_debug_mode, set_debug_mode


@pytest.fixture
def debug_mode(capsys):
    set_debug_mode(True)
    assert capsys.readouterr().out == "[MaskInfo Debug] on\n"
    yield
    set_debug_mode(False)


def test_switching():
    assert get_debug_mode() is False
    set_debug_mode(True)
    assert get_debug_mode() is True
    set_debug_mode(True)
    set_debug_mode(False)
    assert get_debug_mode() is False


@pytest.mark.usefixtures("debug_mode")
def test_each_use_prints_one_line(capsys):
    mask = MaskInfo.from_segments(jnp.array([[0, 0, 1]]), is_attn_mask=False)
    mask = mask.apply_causal(offset=1).apply_sliding_window((1, 0))
    mask.attention_mask, mask.batch_size, mask.get_qkv_masks()
    assert capsys.readouterr().out.splitlines() == [
        "[MaskInfo Debug] from_segments(int32[1,3], is_attn_mask=False) -> MaskInfo(1, 3, 3)",
        "[MaskInfo Debug] apply_causal(offset=1) -> MaskInfo(1, 3, 3)",
        "[MaskInfo Debug] apply_sliding_window((1, 0)) -> MaskInfo(1, 3, 3)",
        "[MaskInfo Debug] attention_mask -> bool[1,1,3,3]",
        "[MaskInfo Debug] batch_size -> 1",
        "[MaskInfo Debug] get_qkv_masks() -> (bool[1,3], bool[1,3], bool[1,1,3,3])",
    ]


@pytest.mark.usefixtures("debug_mode")
def test_static_methods_and_failures(capsys):
    MaskInfo.create_chunked_attention_mask(2, 4)
    with pytest.raises(ValueError, match="chunk_size must be positive"):
        MaskInfo.from_random(1, 4).apply_chunked(0)
    MaskInfo.get_empty_sharding()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("(")[0] for line in lines] == [
        "[MaskInfo Debug] create_chunked_attention_mask",
        "[MaskInfo Debug] from_random",
        "[MaskInfo Debug] get_empty_sharding",
    ]


def test_off_leaves_no_trace(capsys):
    public = lambda: {
        name: inspect.getattr_static(MaskInfo, name)
        for name in dir(MaskInfo)
        if not name.startswith("_")
    }
    before = public()
    set_debug_mode(True)
    assert public() != before
    set_debug_mode(False)
    assert public() == before
    capsys.readouterr()
    MaskInfo.from_random(1, 4).apply_causal().attention_mask  # noqa: B018
    assert capsys.readouterr().out == ""


def test_the_environment_sets_the_beginning():
    code = "from ejkernel.types import get_debug_mode; print(get_debug_mode())"
    environment = os.environ | {"EJKERNEL_MASK_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_the_setting_is_not_overridden_for_a_block():
    """It would change nothing: the class was imported before."""
    refused = pytest.raises(ValueError, match=r"read once, .*set_debug_mode\(True\)")
    with refused, settings.override(mask_debug=True):
        pass
