"""What prologues and epilogues call beyond Thunder's own operations: guards, taking wrappers apart, putting them together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.model_state import escapes
from thunder_norm.model_state.escapes import check_inner
from thunder_norm.subclass.acquiring.tape import Tape
from thunder_norm.subclass.backward.differentiation import Joint
from thunder_norm.subclass.backward.followed import is_handed_back
from thunder_norm.subclass.backward.gradients import detached
from thunder_norm.subclass.backward.made_leaves import with_own_history
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.guarding.bindable import bindable, executor
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol


def _operator(name: str, fn: Callable, meta: Callable, *, keep: bool = False) -> Any:
    tags = (prims.OpTags.DONT_DCE,) if keep else None
    return executor.register_operator(name, meta=meta, fn=fn, tags=tags)


def check_plain_tensors(*tensors: torch.Tensor) -> None:
    """Guard: none of the inputs traced as plain tensors is a wrapper (Thunder's own check accepts any subclass)."""
    if _PLAIN.issuperset(map(type, tensors)):
        return
    for t in tensors:
        if type(t) not in _PLAIN and not isinstance(t, torch._subclasses.FakeTensor):
            _check_not_wrapper(t)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _check_not_wrapper(t: torch.Tensor) -> None:
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise GuardError(f"expected a plain tensor, got {type(t).__name__}")


check_plain = _operator("check_plain_tensors", check_plain_tensors, lambda *tensors: None, keep=True)


def check_results(*results: TensorProxy) -> BoundSymbol:
    """``check_results(t3, t4)``: no tensor without data leaves; see `escapes`."""
    return _check_results(*results, output=None)


def flatten_operator(spec: WrapperSpec) -> Callable:
    """``(x_a, x_b) = flatten_TwoTensor_0(x)``: the guard on everything static about x, then its inner tensors."""

    def flatten(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not spec.matches(x):
            raise GuardError(f"expected {spec}, got {type(x).__name__}")
        return spec.leaves(x)

    return bindable(f"flatten_{spec.cls.__name__}", flatten)


def unflatten_operator(
    fake: torch.Tensor, joint: Joint | None, tape: Tape | None = None, *, starts_in_program: bool = False
) -> Callable:
    """``y = unflatten_TwoTensor_1(t0, t1)``: the wrapper around inner results; carriers of its gradient may follow these.

    After those come the inputs that the tape is given, if there is one.  Of a wrapper with a history that `starts_in_program` this is made anew.
    """
    spec = WrapperSpec.of(fake)
    result = None if joint is None else joint.result_of(fake)
    keeps_history = [
        joint is not None and (joint.result_of(t) is not None or is_handed_back(joint.acquisition, t)) for t in spec.leaves(fake)
    ]

    def build(leaves: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if result is not None:
            return result.close(spec, leaves, tape)
        if joint is not None:
            leaves = tuple([t if keeps else detached(t) for t, keeps in zip(leaves, keeps_history, strict=True)])
        if starts_in_program:
            return with_own_history(functools.partial(spec.build, leaves), is_leaf=is_leaf)
        return spec.build(leaves)

    with torch._C.DisableTorchFunctionSubclass():
        is_leaf = fake.is_leaf
    num_own = spec.num_leaves
    are_at_one_place = num_own > 1 and len({t.storage_offset() for t in spec.leaves(fake)}) == 1

    def unflatten(*leaves: torch.Tensor) -> torch.Tensor:
        if are_at_one_place and len({t.storage_offset() for t in leaves[:num_own]}) > 1:
            leaves = (*map(_at_the_start, leaves[:num_own]), *leaves[num_own:])
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # the generated epilogue runs under no_grad; inner results keep their history
        try:
            built = build(leaves)
        finally:
            torch._C._set_grad_enabled(before)
        check_inner(built, spec.names, "the result")
        return built

    return bindable(f"unflatten_{spec.cls.__name__}", unflatten)


def _at_the_start(t: torch.Tensor) -> torch.Tensor:
    """An inner tensor with a storage of its own if others have: one that lies in the memory of an input, where they were copied out of it."""
    with torch.enable_grad():
        return t.clone() if t.storage_offset() else t


def wrap_output(proxy: SubclassProxy, leaves: Sequence[TensorProxy], wrap: Callable[..., torch.Tensor]) -> BoundSymbol:
    """An epilogue operation that makes the wrapper `proxy` from `leaves` in another way than its class does."""

    def with_history(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return wrap(*tensors)

    return bindable(f"wrap_{type(proxy.fake).__name__}", with_history)(*leaves, output=proxy)


_check_results = bindable("check_results", escapes.check_results)
