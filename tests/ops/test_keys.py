"""Keys depend on all that tells calls apart, and on nothing else."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import keys
from ejkernel.ops.platform import Platform


@dataclasses.dataclass(frozen=True)
class Spec:
    scale: float = 1.0
    window: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class OtherSpec:
    scale: float = 1.0
    window: tuple[int, int] | None = None


DIFFERENT = [
    None,
    0,
    0.0,
    False,
    "0",
    [],
    [0],
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {1: "a"},
    Spec(),
    Spec(window=(4, 0)),
    OtherSpec(),
    jnp.zeros((2, 3)),
    jnp.zeros((3, 2)),
    jnp.zeros((2, 3), jnp.bfloat16),
    np.float32,
    jax.nn.relu,
    jax.nn.gelu,
    Platform.XLA,
    frozenset({"a", "b"}),
    functools.partial(max, 1),
]


def test_values_that_differ_have_different_keys():
    assert len({keys.short_hash(value) for value in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        (jnp.zeros((2, 3)), np.ones((2, 3), np.float32)),
        (jnp.zeros((2, 3)), jax.ShapeDtypeStruct((2, 3), jnp.float32)),
        (Platform.XLA, "xla"),
        ({"x", "y"}, frozenset({"y", "x"})),
        (object(), object()),
        (functools.partial(lambda: 0), functools.partial(lambda: 0)),
    ],
)
def test_values_that_mean_the_same_have_the_same_key(one, other):
    assert keys.short_hash(one) == keys.short_hash(other)


def test_a_key_is_the_same_in_another_process():
    value = "[{'x', 'y', 'z'}, object(), {'b': (1, 2.5), 'a': None}]"
    script = f"from ejkernel.ops import keys; print(keys.short_hash({value}))"
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == keys.short_hash(eval(value))


def test_abstractify_keeps_the_tree_and_forgets_the_values():
    tree = {"x": jnp.ones((2, 3)), "y": [np.ones(4, np.int8), None], "causal": True}
    assert keys.abstractify(tree) == {
        "x": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "y": [jax.ShapeDtypeStruct((4,), jnp.int8), None],
        "causal": True,
    }
    assert jax.jit(lambda x: keys.abstractify(x).shape[0] * x)(jnp.ones(3)).tolist() == [3, 3, 3]


def test_a_bucket_is_the_next_power_of_two():
    for size in range(1, 300):
        assert keys.bucket(size) // 2 < size <= keys.bucket(size)
        assert keys.bucket(size).bit_count() == 1
    with pytest.raises(ValueError, match=r"^bucket: size must not be negative, got -1"):
        keys.bucket(-1)
