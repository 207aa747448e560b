"""No fault of a file of tuned configurations crashes a program or loses what is written later."""

import json
import random
import warnings

import pytest

from ejkernel.errors import CacheWarning
from ejkernel.ops.config import FwdParams
from ejkernel.ops.persistent import PersistentCache

A, B = (("NVIDIA H200|cuda 13000", "scale@v1", call) for call in ("a", "b"))

# Each makes of a file that held one entry another one, by chance.


def _truncated(text, chance):
    return text[: chance.randrange(len(text))]


def _with_other_bytes(text, chance):
    changed = bytearray(text)
    for _ in range(chance.randrange(1, 5)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _nested(text, chance):
    depth = chance.choice([10, 100, 480, 900, 5000, 100_000])
    value = b"[" * depth + b"]" * depth
    return chance.choice([value, text.replace(b"64", value)])


def _with_another_number(text, chance):
    numbers = [b"1e400", b"-1e400", b"9" * 5000, b"9" * 400, b"NaN", b"Infinity", b"null", b'"x"']
    return text.replace(b"64", chance.choice(numbers))


def _with_other_devices(text, chance):
    table = json.loads(text)
    names = {"../../etc": {"__import__('os').abort()": {"$(kill 0)": "__import__('os').abort()"}}}
    others = [None, 3, [1], "x", {"a": 3}, {"a": {"b": [1]}}, {"a": {"b": {"c": None}}}, names]
    return json.dumps(table | {"devices": chance.choice(others)}).encode()


def _with_other_fields(text, chance):
    names = [b"__class__", b"block\\u0000", b"../block", b"a" * 10_000]
    return text.replace(b"block", chance.choice(names))


def _of_other_bytes(text, chance):
    return chance.choice([b"", text * 2, text.decode().encode("utf-16"), b"\0" * 4096, b"null"])


@pytest.mark.parametrize(
    "fault",
    [
        _truncated,
        _with_other_bytes,
        _nested,
        _with_another_number,
        _with_other_devices,
        _with_other_fields,
        _of_other_bytes,
    ],
)
def test_no_fault_of_a_file_crashes_a_program_or_loses_what_is_written_after_it(tmp_path, fault):
    for number in range(150):
        path = tmp_path / str(number) / "scale.json"
        PersistentCache("scale", path, FwdParams).put(A, FwdParams(q_blocksize=64))
        chance = random.Random(number)
        path.write_bytes(fault(path.read_bytes(), chance))
        with warnings.catch_warnings(category=CacheWarning, action="ignore"):
            cache = PersistentCache("scale", path, FwdParams)
            assert isinstance(cache.get(A), FwdParams | None)
            cache.items()
            cache.put(B, FwdParams(q_blocksize=32))
            for reader in (cache, PersistentCache("scale", path, FwdParams)):
                assert reader.get(B) == FwdParams(q_blocksize=32)
        assert {x.name.split(".corrupt")[0] for x in path.parent.iterdir()} <= {
            "scale.json",
            "scale.json.lock",
        }
