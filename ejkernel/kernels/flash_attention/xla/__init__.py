"""Flash attention anywhere XLA runs: blocks in loops, memory linear in the sequence length."""

import math
from typing import TypeVar

from ejkernel.kernels.flash_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.flash_attention.xla.backward import backward
from ejkernel.kernels.flash_attention.xla.forward import forward
from ejkernel.ops.config import BwdParams, FwdParams
from ejkernel.ops.implementation import ALL_FEATURES, Implementation, Pass
from ejkernel.types import rules
from ejkernel.types.rules import And, Band, Chunks, Everything, Or, Rule

Blocks = tuple[int, int]  # queries, keys
_Params = TypeVar("_Params", FwdParams, BwdParams)


def run_forward(inputs: Inputs, spec: Spec, params: FwdParams | None) -> tuple[Outputs, Outputs]:
    """Outputs, which are also the residuals."""
    outputs = forward(inputs, spec, *block_sizes(params, heuristic_forward(inputs, spec)))
    return outputs, outputs


def run_backward(
    inputs: Inputs,
    residuals: Outputs,
    d_outputs: Outputs,
    spec: Spec,
    params: BwdParams | None,
) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    blocks = block_sizes(params, heuristic_backward(inputs, spec))
    return backward(inputs, residuals, d_outputs, spec, *blocks)


def block_sizes(params: FwdParams | BwdParams | None, default: Blocks) -> Blocks:
    """The block sizes that were asked for, the others by default."""
    if params is None:
        return default
    return params.q_blocksize or default[0], params.kv_blocksize or default[1]


def heuristic_forward(inputs: Inputs, spec: Spec) -> Blocks:
    """Block sizes of the forward pass, from shapes and what is static of the mask."""
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    block_q, block_k = _targets(inputs)
    if grain := _grain(inputs.mask or Everything()):
        # Blocks of the mask must not be cut in two, nor meet their neighbours in one tile.
        return min(q_len, _aligned(grain[0], block_q)), min(kv_len, _aligned(grain[1], block_k))
    return _balanced(q_len, block_q), _balanced(kv_len, block_k)


def heuristic_backward(inputs: Inputs, spec: Spec) -> Blocks:
    """Block sizes of the backward pass: those of the forward pass."""
    return heuristic_forward(inputs, spec)


def candidates_forward(inputs: Inputs, spec: Spec) -> list[Blocks]:
    """Block sizes worth timing."""
    q_len, kv_len = inputs.query.shape[1], inputs.key.shape[1]
    sizes = ((128, 128), (256, 256), (256, 512), (512, 512), (512, 1024))
    pairs = [(_balanced(q_len, q), _balanced(kv_len, k)) for q, k in sizes]
    if _grain(inputs.mask or Everything()):
        pairs.append(heuristic_forward(inputs, spec))
    return list(dict.fromkeys(pairs))


candidates_backward = candidates_forward


def _targets(inputs: Inputs) -> Blocks:
    """About how large blocks should be.

    Large enough that each tile keeps every core busy, small enough that little of it is masked.
    """
    rule = inputs.mask or Everything()
    q_len, q_heads = inputs.query.shape[1:3]
    if q_len <= 16:  # few rows: the keys are read once, in few steps
        return q_len, 2048
    if width := _width(rule):
        block = 128 if width <= 128 else 256
        return block, block
    if rule.heads > 1 or q_heads == 1:
        return 512, 1024
    return 256, 512


def _width(rule: Rule) -> int | None:
    """How many keys in a row a query can see at most, where that is static."""
    low, high, size = _reach(rule)
    if low is not None and high is not None:
        size = high - low + 1 if size is None else min(size, high - low + 1)
    return size


def _reach(rule: Rule) -> tuple[int | None, int | None, int | None]:
    """Static bounds of k - q, and the static size of chunks."""
    if isinstance(rule, Band):
        static = lambda bound: bound if isinstance(bound, int) else None
        return static(rule.low), static(rule.high), None
    if isinstance(rule, Chunks):
        return None, None, rule.size if isinstance(rule.size, int) else None
    if isinstance(rule, And):
        lows, highs, sizes = zip(*map(_reach, rule.rules), strict=True)
        known = lambda values: [value for value in values if value is not None]
        return (
            max(known(lows), default=None),
            min(known(highs), default=None),
            min(known(sizes), default=None),
        )
    return None, None, None


def _grain(rule: Rule) -> Blocks | None:
    """The blocks in which a mask, or a part of it, is given: the smallest where there are more."""
    if isinstance(rule, rules.Blocks):
        return rule.block_q, rule.block_k
    if isinstance(rule, And | Or):
        return min(filter(None, map(_grain, rule.rules)), key=math.prod, default=None)
    return None


def _aligned(grain: int, target: int) -> int:
    """A block near `target` that divides the blocks of a mask, or joins them if they are tiny."""
    if grain < 16:
        return grain * -(-16 // grain)
    if grain <= target:
        return grain
    divisor = max(n for n in range(1, target + 1) if grain % n == 0)
    return divisor if divisor >= target // 4 else target


def _balanced(length: int, target: int) -> int:
    """A block near `target` that cuts `length` into equal parts, with little padding."""
    blocks = -(-length // target)
    block = -(-length // blocks)
    return block if blocks == 1 else -(-block // 16) * 16


def _params(kind: type[_Params], blocks: Blocks) -> _Params:
    return kind(q_blocksize=blocks[0], kv_blocksize=blocks[1])


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=run_forward,
        features=ALL_FEATURES,
        heuristic=lambda inputs, spec, device: _params(FwdParams, heuristic_forward(inputs, spec)),
        candidates=lambda inputs, spec, device: [
            _params(FwdParams, blocks) for blocks in candidates_forward(inputs, spec)
        ],
    ),
    backward=Pass(
        run=run_backward,
        features=ALL_FEATURES,
        heuristic=lambda inputs, spec, device: _params(BwdParams, heuristic_backward(inputs, spec)),
        candidates=lambda inputs, spec, device: [
            _params(BwdParams, blocks) for blocks in candidates_backward(inputs, spec)
        ],
    ),
)
