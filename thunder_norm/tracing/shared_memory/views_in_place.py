"""Operations that make a tensor, in place, another view of its memory: ``x.unsqueeze_(0)``, ``x.t_()``.

What a program holds as x has one shape in a trace.  So all operations so far get another name for it, and x is, from there on, the view of
that.  Where Thunder has several names for one object (what an operation in place returns, ``x.float()`` of floats), each is the view of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.recording import gradients_recorded, scope
from thunder_norm.tracing.shared_memory.views import RETURNING_SELF, SEVERAL
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.interpreter import WrappedValue, do_raise, unwrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op

_VIEWS: dict[str, Callable] = {
    "squeeze_": ltorch.squeeze,
    "swapaxes_": ltorch.transpose,
    "swapdims_": ltorch.transpose,
    "t_": ltorch.t,
    "transpose_": ltorch.transpose,
    "unsqueeze_": ltorch.unsqueeze,
}
NAMES = frozenset(_VIEWS)

_RETURNING_SELF = RETURNING_SELF | frozenset(
    "atleast_1d atleast_2d atleast_3d broadcast_tensors flatten positive torch_type".split()
)
_BY_LAYOUT = frozenset({"broadcast_tensors", "contiguous", "resolve_neg"})
_CONJUGATING = frozenset({"conj", "resolve_conj"})
_PERMUTING = frozenset("T mT movedim moveaxis permute swapaxes swapdims t transpose".split())


@langctx(Languages.TORCH)
def _view_in_place(name: str, obj: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    given, named = tuple(map(unwrap, args)), {k: unwrap(v) for k, v in kwargs.items()}
    trace = get_jit_ctx().computation_trace
    try:
        if not _changes(name, obj.value, given, named):
            return obj
        objects = names_of_one_object(f"{name}() of a tensor", trace.peek_scope(), obj.value)
        _check_made_here(name, trace.scopes, objects)
    except Exception as e:  # noqa: BLE001 - what torch says is the program's to handle
        return do_raise(e)
    for p in objects:
        before = renamed_so_far(p)
        with gradients_recorded(True), scope(trace) as made:  # it keeps its history wherever the program does this
            after = _VIEWS[name](before, *given, **named)
        p._shape, p._ndim = after._shape, after._ndim
        wrap_const(p).attribute_wrappers.clear()  # what the interpreter remembers of it: x.shape
        trace.peek_scope().extend(b.from_bsym_swap_proxies({variableify(after): p}) for b in made)
    return obj


def _changes(name: str, proxy: TensorProxy, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether there is anything to do, by torch, whose errors for wrong arguments come from here."""
    with _disable_current_modes():
        shape = tuple(map(int, proxy.shape))
        like = torch.empty(shape, device="meta")
        before = like.shape, like.stride()
        try:
            getattr(like, name)(*args, **kwargs)
        except AssertionError:  # torch 2.11 asserts of tensors without data what it checks of others
            getattr(torch.empty(shape), name)(*args, **kwargs)
            raise
    return (like.shape, like.stride()) != before


def names_of_one_object(what: str, here: Sequence[BoundSymbol], proxy: TensorProxy) -> list[TensorProxy]:
    """The proxies that are one tensor for the program: `proxy`, and what operations took and returned as it was, but for what is in it.

    Args:
        what: is done with it, for the message.
        here: the operations so far.
        proxy: one of them.

    Raises:
        UnsupportedOpError: nobody knows, as strides say it.
    """
    found = {proxy.name: proxy}
    pairs = [(bsym.sym.name, pair) for bsym in here for pair in _taken_and_returned(bsym)]
    pairs = [(name, pair) for name, pair in pairs if name != "contiguous" or not _is_permuted(here, pair[0])]
    num_before = 0
    while num_before != len(found):
        num_before = len(found)
        for name, pair in pairs:
            if not any(p.name in found for p in pair):
                continue
            if name == "contiguous":
                raise _refused(what, "contiguous() may have returned it as it was")
            found |= {p.name: p for p in pair}
    return list(found.values())


def _check_made_here(name: str, scopes: Sequence[Sequence[BoundSymbol]], objects: Sequence[TensorProxy]) -> None:
    """Refuse what is not made by the program, where it is now."""
    *around, here = scopes
    names, made = {p.name for p in objects}, {p.name for bsym in here for p in bsym.flat_proxy_outs}
    if any(p.history is not None for p in objects) or not names <= made:
        raise _refused(f"{name}() of an input of the function or region, or of a tensor that may be one", _WHY, name)
    if any(p.name in names for bsyms in around for b in bsyms for p in (*b.flat_proxy_args, *b.flat_proxy_outs)):
        raise _refused(f"{name}() of a tensor from around the function or region", _WHY, name)


def _taken_and_returned(bsym: BoundSymbol) -> Sequence[tuple[TensorProxy, TensorProxy]]:
    """What an operation takes and returns as one object, as torch does it."""
    given, returned = bsym.flat_proxy_args, bsym.flat_proxy_outs
    if not given or not returned:
        return ()
    pairs = tuple(zip(given, returned, strict=False)) if bsym.sym.name in SEVERAL else ((given[0], returned[0]),)
    if not all(isinstance(p, TensorProxy) for pair in pairs for p in pair) or (
        len(returned) > 1 and bsym.sym.name not in SEVERAL
    ):
        return ()
    if _is_inplace_op(bsym):
        return pairs
    if bsym.sym.name not in _RETURNING_SELF:
        return ()
    if bsym.sym.name in SEVERAL:
        return [(a, b) for a, b in pairs if a.shape == b.shape]
    return pairs if bsym.sym.name == "contiguous" or _does_nothing(bsym, *pairs[0]) else ()


def keep_histories(bsyms: Sequence[BoundSymbol]) -> None:
    """Let gradients go through what operations handed back as it was, under ``torch.no_grad()`` too: it is the tensor with its history.

    What hangs on how the tensor lies, or on what torch has put off (a sign), is not known here.
    """
    for bsym in bsyms:
        name = bsym.sym.name
        if name not in _RETURNING_SELF - _BY_LAYOUT or (name == "dropout" and not bsym.subsymbols):
            continue
        if bsym.kwargs.get("memory_format") not in (None, torch.preserve_format):
            continue
        for given, returned in _taken_and_returned(bsym):
            if ProxyTag.DETACHED_AUTOGRAD_GRAPH not in given.tags:
                returned.tags.discard(ProxyTag.DETACHED_AUTOGRAD_GRAPH)


def _does_nothing(bsym: BoundSymbol, taken: TensorProxy, returned: TensorProxy) -> bool:
    """Whether an operation that may return its tensor as it is has done so."""
    if not bsym.subsymbols:  # one that Thunder leaves to torch
        is_conjugated = bsym.sym.name in _CONJUGATING and dtypes.is_complex_dtype(taken.dtype)
        return taken.dtype == returned.dtype and not is_conjugated
    return _is_copied_by_name_alone(bsym)


def _is_copied_by_name_alone(bsym: BoundSymbol) -> bool:
    return all(b.sym.id is prims.PrimIDs.SHALLOW_COPY or (b.subsymbols and _is_copied_by_name_alone(b)) for b in bsym.subsymbols)


def _is_permuted(bsyms: Sequence[BoundSymbol], proxy: TensorProxy) -> bool:
    made = next((b for b in bsyms if any(p.name == proxy.name for p in b.flat_proxy_outs)), None)
    return made is not None and made.sym.name in _PERMUTING


def renamed_so_far(proxy: TensorProxy) -> TensorProxy:
    """Another proxy, in the place of one in all operations so far; the program goes on with the old one."""
    ctx = get_jit_ctx()
    trace = ctx.computation_trace
    before = proxy.replace(name=None)
    swap = {variableify(proxy): before}
    here = trace.peek_scope()
    here[:] = [b.from_bsym_swap_proxies(swap) for b in here]
    if (named := ctx._proxy_swapmap.pop(variableify(proxy), None)) is not None:  # what the program has called it so far
        ctx._proxy_swapmap[variableify(before)] = named
    return before


_WHY = "it would be of another shape, or with other strides, for everybody who holds it"


def _refused(what: str, why: str, name: str = "") -> UnsupportedOpError:
    instead = f"x = x.{name[:-1]}(...)" if name else "do it to a tensor of its own, x.clone()"
    return UnsupportedOpError(with_details(what, at=location_of_user(), why=why, instead=instead))


def _register(name: str) -> None:
    for fn in {getattr(torch.Tensor, name), getattr(torch, name, None)} - {None}:
        instead_of(fn)(functools.partial(_view_in_place, name))


for _name in _VIEWS:
    _register(_name)
