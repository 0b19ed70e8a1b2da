"""``torch.autograd.grad`` in a program that is being traced: of the operations that it has written so far, the backward is written.

Torch walks back the graph of what has run.  While a trace is acquired nothing has, but the trace says what will have.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.functions.batching import evaluate_vmap, with_batch
from thunder_norm.functions.calls import write_operations
from thunder_norm.functions.interpreted import active_level, as_it_is, value_of
from thunder_norm.functions.programs import anew, described, detach, is_complex, is_differentiable, program_of
from thunder_norm.functions.reverse import pullback_of
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.interpreting.interception import current_acquisition
from thunder_norm.subclass.interpreting.operations import operation_of
from thunder_norm.subclass.interpreting.refusals import refuse_derivative
from thunder_norm.subclass.recording.trace import UNFLATTEN
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.locations import location_of_user
import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, do_raise
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op

_OPTIONS = ("retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched", "materialize_grads")
_DEFAULTS = {"create_graph": False, "only_inputs": True, "is_grads_batched": False, "materialize_grads": False}


@lookasides.instead_of(torch.autograd.grad)
def _grad(outputs: WrappedValue, inputs: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for ``torch.autograd.grad(outputs, inputs, grad_outputs, ...)``."""
    given = dict(zip(("grad_outputs", *_OPTIONS), args, strict=False)) | kwargs
    values = {name: value_of(v, as_it_is) for name, v in (("outputs", outputs), ("inputs", inputs), *given.items())}
    of = {name: _listed(values.get(name)) for name in ("outputs", "inputs", "grad_outputs")}
    acquisition = current_acquisition()
    if acquisition is None or active_level() is not None:
        return refuse_derivative(acquisition)
    meets_wrapper = any(isinstance(v, SubclassProxy) for listed in of.values() for v in listed)
    if meets_wrapper and acquisition.has_own_formulas:
        return refuse_derivative(acquisition)
    if meets_wrapper and not (torch.is_grad_enabled() or acquisition.autograd.is_from_the_first):
        return _from_the_first(acquisition)  # in a call without autograd it is not known which of them require grad
    if acquisition.autograd.is_running:
        return _of_followed(acquisition)(outputs, inputs, *args, **kwargs)
    options = {name: values.get(name, _DEFAULTS.get(name)) for name in _OPTIONS}
    try:
        cotangents = _checked(of, options, acquisition)
    except (RuntimeError, ValueError, UnsupportedOpError) as e:
        return do_raise(e)
    scopes = get_jit_ctx().computation_trace.scopes
    is_replaced = bool(acquisition.fakes.replaced)  # some names of the program mean what was written into them
    named = [tuple(acquisition.fakes.also_named(v)) for v in of["inputs"]]  # tied parameters have a name in each of their places
    sources = list(itertools.chain(*named))
    is_written = is_replaced or _goes_another_way(itertools.chain(*scopes), sources)
    if meets_wrapper or is_written:  # a cotangent may be a wrapper
        acquisition.fakes.misses_memory = acquisition.fakes.misses_memory or is_written
        return _from_the_first(acquisition)
    options["create_graph"] = options["create_graph"] and is_grad_enabled()
    names = tuple(values["inputs"]) if isinstance(values["inputs"], dict) else None

    def written() -> Any:
        found = _written(of["outputs"], named, cotangents, options)
        return found if names is None else dict(zip(names, found, strict=True))

    return write_operations(written, inputs)


def _of_followed(acquisition: Acquisition) -> Callable:
    """What to call where torch's autograd follows the program on fakes, as there are wrappers: it is one more operation of theirs."""
    if any(not acquisition.is_input(t) for t in acquisition.autograd.sources.values()):
        return lambda *_, **__: _from_the_first(acquisition)
    return operation_of(acquisition, torch.autograd.grad)


def _from_the_first(acquisition: Acquisition) -> Any:
    """Have the program acquired again, with torch's autograd from its first operation on, unless a region of it is at hand."""
    autograd = acquisition.autograd
    is_region = acquisition.num_levels or acquisition.is_transformed or len(get_jit_ctx().computation_trace.scopes) > 1
    autograd.is_asked = autograd.is_asked or not (is_region or autograd.is_from_the_first)
    return refuse_derivative(acquisition)


def _listed(value: Any) -> Sequence[Any]:
    """Tensors, of a dict its values, as torch takes them since 2.15."""
    if isinstance(value, dict):
        value = value.values()
    return () if value is None else (value,) if isinstance(value, TensorProxy) else tuple(value)


def _checked(of: dict[str, Sequence[Any]], options: dict[str, Any], acquisition: Any) -> list[TensorProxy | None]:
    """The cotangents of the outputs, None for those of one entry, with the errors of torch."""
    if not options["only_inputs"]:
        raise ValueError("only_inputs argument is deprecated and is ignored now (defaults to True)")
    if options["allow_unused"] is False and options["materialize_grads"]:
        raise ValueError(
            "Expected allow_unused to be True or not passed when materialize_grads=True, but got: allow_unused=False."
        )
    if not of["inputs"]:
        raise RuntimeError("`inputs` argument to `grad()` cannot be empty.")
    if not all(isinstance(v, TensorProxy) for v in (*of["outputs"], *of["inputs"])):
        raise _refused("torch.autograd.grad of what is no tensor", "tensors, or tuples and lists of them")
    cotangents = list(of["grad_outputs"]) or [None] * len(of["outputs"])
    if len(cotangents) < len(of["outputs"]):
        raise RuntimeError(f"got {len(of['outputs'])} tensors and {len(cotangents)} gradients")
    for i, (out, ct) in enumerate(zip(of["outputs"], cotangents, strict=False)):
        if not acquisition.autograd.requires_grad(out):
            raise RuntimeError(f"element {i} of tensors does not require grad and does not have a grad_fn")
        if ct is None and out.numel != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if ct is None and is_complex(out):
            raise RuntimeError("grad can be implicitly created only for real scalar outputs but got " + described(out))
        if ct is None and options["is_grads_batched"]:
            raise ValueError("is_grads_batched=True with an output that has no grad_output: there is no batch of it")
        given = () if ct is None else tuple(ct.shape)[1:] if options["is_grads_batched"] else tuple(ct.shape)
        if ct is not None and (given != tuple(out.shape) or (options["is_grads_batched"] and not ct.ndim)):
            said = f"grad_output[{i}] has a shape of {tuple(ct.shape)} and output[{i}] has a shape of {tuple(out.shape)}."
            of_batch = "If `is_grads_batched=True`, we interpret the first dimension of each grad_output as the batch dimension: "
            raise RuntimeError(of_batch + said if options["is_grads_batched"] else "Mismatch in shape: " + said)
        if ct is not None and is_complex(ct) != is_complex(out):
            raise RuntimeError("For complex Tensors, both grad_output and output are required to have the same dtype.")
    if not all(acquisition.autograd.requires_grad(v) for v in of["inputs"]):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    return cotangents


def _written(
    outputs: Sequence[TensorProxy],
    inputs: Sequence[Sequence[TensorProxy]],
    given: Sequence[TensorProxy | None],
    options: dict[str, Any],
) -> tuple[TensorProxy | None, ...]:
    """Gradients for inputs, of each with all its names."""
    sources = list({p.name: p for p in itertools.chain(*inputs)}.values())
    pullback = pullback_of(get_jit_ctx().computation_trace.scopes[:-1], sources, outputs)
    cotangents = [
        ltorch.ones_like(v) if ct is None else ltorch.to(ct, dtypes.to_torch_dtype(v.dtype))
        for v, ct in zip(outputs, given, strict=False)
    ]
    of_names = _pulled_back_in_batch(pullback, outputs, cotangents) if options["is_grads_batched"] else pullback(cotangents)
    by_name = {p.name: gradient for p, gradient in zip(sources, of_names, strict=True) if gradient is not None}
    parts = [[by_name[p.name] for p in named if p.name in by_name] for named in inputs]
    found = [functools.reduce(ltorch.add, those) if those else None for those in parts]
    for i, gradient in enumerate(found):
        if gradient is not None:
            continue
        if options["materialize_grads"]:
            found[i] = ltorch.zeros_like(inputs[i][0])
        elif not options["allow_unused"]:
            raise RuntimeError(
                f"The differentiated Tensor at index {i} appears to not have been used in the graph. Set allow_unused=True if this is the "
                "desired behavior."
            )
    if not options["create_graph"]:
        detach(found)
    return tuple(found)


def _pulled_back_in_batch(
    pullback: Callable, outputs: Sequence[TensorProxy], cotangents: Sequence[TensorProxy]
) -> list[TensorProxy | None]:
    is_found: list[bool] = []

    def back(*of_one: TensorProxy) -> list[TensorProxy]:
        gradients = pullback(of_one)
        is_found[:] = [g is not None for g in gradients]
        return [g for g in gradients if g is not None]

    program = program_of(back, anew(outputs))
    size, given = cotangents[0].shape[0], [*cotangents, *program.args[len(outputs) :]]
    in_dims = [0] * len(outputs) + [None] * (len(given) - len(outputs))
    found, out_dims = evaluate_vmap(program, given, in_dims, size, "same")
    batches = iter([with_batch(size, g, d) for g, d in zip(found, out_dims, strict=True)])
    return [next(batches) if is_there else None for is_there in is_found]


def _goes_another_way(operations: Iterable[BoundSymbol], inputs: Sequence[TensorProxy]) -> bool:
    """Whether wrappers, or writes into tensors, are on the way from the inputs: the program's tensors are known by what they were made as."""
    reached = {v.name for v in inputs}
    for bsym in operations:
        if any(p.name in reached for p in bsym.flat_proxy_args):
            if bsym.sym.id == UNFLATTEN.id or _is_inplace_op(bsym):
                return True
            reached.update(p.name for p in bsym.flat_proxy_outs if is_differentiable(p))
    return False


def _refused(what: str, instead: str) -> UnsupportedOpError:
    return UnsupportedOpError(with_details(f"{what} inside a traced program", at=location_of_user(), instead=instead))
