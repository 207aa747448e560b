"""The TPU kernels of gated linear attention: forward, the states between chunks, backward."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.gla_attention.inputs import Inputs, Outputs, Spec
from ejkernel.kernels.gla_attention.pallas_tpu import recurrence_step as tpu_recurrence_step
from ejkernel.kernels.gla_attention.pallas_tpu.call import Call, Operand, Result, Size

Refs = Mapping[str, Any]


def forward(inputs: Inputs, spec: Spec, size: Size, vmem: int) -> Outputs:
    """Output of every token, state after every sequence."""
    call = Call(inputs, spec, size, vmem=vmem)
    operands = {"query": call.of_tokens(inputs.query)} | call.common_operands()
    if inputs.initial_state is not None:
        operands["initial"] = call.of_states(inputs.initial_state)
    shape = (*operands["query"].array.shape[:3], call.columns)
    results = {
        "out": Result(shape, inputs.query.dtype, call.spec_of_tokens(shape)),
        "state": call.states_result(),
    }
    done = call.run(_forward, operands, results)
    state = _visited(inputs, jnp.swapaxes(done["state"], 3, 4), inputs.initial_state)
    return Outputs(call.collect(done["out"]), state)


def backward(inputs: Inputs, d_outputs: Outputs, spec: Spec, size: Size, vmem: int) -> Inputs:
    """Gradients, shaped like the inputs; None where there is none."""
    entered = _states(inputs, spec, size, vmem)
    call = Call(inputs, spec, size, vmem=vmem, backwards=True)
    operands = {"query": call.of_tokens(inputs.query)} | call.common_operands()
    results = {
        f"d_{name}": call.result_like(operands[name], getattr(inputs, name).dtype)
        for name in ("query", "key", "value")
    }
    if call.decays is not None:
        results["d_decays"] = call.result_like(operands["decays"], call.decays.dtype)
    if inputs.gv is not None:
        results["d_value_decays"] = call.result_like(operands["value_decays"], inputs.gv.dtype)
    results["d_initial"] = call.states_result()
    operands["entered"] = Operand(entered, call.spec_of_chunks(entered.shape))
    operands["d_out"] = call.of_tokens(d_outputs.out.astype(inputs.query.dtype))
    operands["d_state"] = call.of_states(d_outputs.state.astype(jnp.float32))
    done = call.run(_backward, operands, results)

    d_decays = d_gamma = None
    if call.decays is not None:
        shape = (call.batch, call.heads, -1, call.decays.shape[3])
        d_decays = call.collect(done["d_decays"].reshape(shape))
        d_gamma = d_decays.sum((1, 3))
    d_initial = _visited(inputs, jnp.swapaxes(done["d_initial"], 3, 4), d_outputs.state)
    gradients = Inputs(
        *(call.collect(done[name]) for name in ("d_query", "d_key", "d_value")),
        gate=None if inputs.gate is None else d_decays,
        g_gamma=None if inputs.g_gamma is None else d_gamma,
        gv=None if inputs.gv is None else call.collect(done["d_value_decays"]),
        initial_state=None if inputs.initial_state is None else d_initial,
    )
    given = inputs._replace(cu_seqlens=None)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), gradients, given)


def _states(inputs: Inputs, spec: Spec, size: Size, vmem: int) -> jax.Array:
    """[b, k, c, v, h]: the state before every chunk."""
    call = Call(inputs, spec, size, vmem=vmem)
    operands = call.common_operands()
    if inputs.initial_state is not None:
        operands["initial"] = call.of_states(inputs.initial_state)
    shape = (call.batch, call.heads, call.chunks, call.columns, call.width)
    result = Result(shape, jnp.float32, call.spec_of_chunks(shape))
    return call.run(_advance, operands, {"entered": result})["entered"]


def _visited(inputs: Inputs, states: jax.Array, otherwise: jax.Array | None) -> jax.Array:
    """The states of all sequences: those that have no token are in no chunk."""
    if inputs.cu_seqlens is None:
        return states
    empty = (jnp.diff(inputs.cu_seqlens, axis=1) == 0)[:, :, None, None, None]
    return jnp.where(empty, 0.0 if otherwise is None else otherwise, states)


def _enter(call: Call, refs: Refs, first: Any, name: str) -> None:
    """Begin a sequence with the state of this name."""

    @pl.when(first)
    def _():
        scratch = refs["scratch"]
        given = refs.get(name)
        scratch[...] = jnp.zeros_like(scratch) if given is None else given[...].astype(jnp.float32)


def _leave(call: Call, refs: Refs, last: Any, name: str) -> None:
    @pl.when(last)
    def _():
        refs[name][...] = refs["scratch"][...]


def _forward(call: Call, refs: Refs, scalars: tuple) -> None:
    first, last = call.ends(scalars)
    _enter(call, refs, first, "initial")

    def visit(head: Any) -> None:
        fades = call.fades(refs, head)
        out, refs["scratch"][head] = tpu_recurrence_step.forward(
            call.chunk_of(refs, head), *fades, refs["scratch"][head]
        )
        call.write_rows(refs["out"], head, out)

    call.over_heads(visit)
    _leave(call, refs, last, "state")


def _advance(call: Call, refs: Refs, scalars: tuple) -> None:
    first, _ = call.ends(scalars)
    _enter(call, refs, first, "initial")
    refs["entered"][...] = refs["scratch"][...]

    def visit(head: Any) -> None:
        fades = call.fades(refs, head)
        state = refs["scratch"][head]
        refs["scratch"][head] = tpu_recurrence_step.advance(
            call.chunk_of(refs, head), *fades, state
        )

    call.over_heads(visit)


def _backward(call: Call, refs: Refs, scalars: tuple) -> None:
    first, last = call.ends(scalars)
    _enter(call, refs, first, "d_state")

    def visit(head: Any) -> None:
        gradients = tpu_recurrence_step.backward(
            call.chunk_of(refs, head),
            *call.fades(refs, head),
            refs["entered"][head],
            call.rows_of(refs["d_out"], head),
            refs["scratch"][head],
        )
        refs["scratch"][head] = gradients.state
        d_query, d_key, d_value = gradients.chunk
        call.write_rows(refs["d_query"], head, d_query * call.spec.softmax_scale)
        parts = {
            "d_key": d_key,
            "d_value": d_value,
            "d_decays": gradients.decays,
            "d_value_decays": gradients.value_decays,
        }
        for name, part in parts.items():
            if part is not None:
                refs[name][head] = part.astype(refs[name].dtype)

    call.over_heads(visit)
    _leave(call, refs, last, "d_initial")
