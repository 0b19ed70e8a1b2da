"""Gradients of operations that Thunder does not differentiate, or not as torch does, or not in one kernel as torch does.

They are those of programs that Thunder differentiates itself.

Such an operation becomes one of our own, which consists of it, so that executors run it as before, and is differentiated as `grad` would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any

from torch.utils._pytree import tree_leaves

from thunder_norm.functions import kernels
from thunder_norm.functions.opaque import is_opaque
from thunder_norm.functions.programs import (
    flat_program,
    flat_proxies,
    is_complex,
    is_differentiable,
    renewed_program,
    replayed,
    with_a_dimension_between,
)
from thunder_norm.functions.registry import decomposed, decompositions
from thunder_norm.functions.reverse import evaluate_vjp
from thunder_norm.functions.rules import activations
from thunder_norm.functions.rules.dropouts import draws_noise
from thunder_norm.functions.rules.indexing import has_mask
from thunder_norm.functions.rules.reductions import takes_one_of_equals
from thunder_norm.functions.rules.several_indices import are_several
from thunder_norm.subclass.acquiring import fallback
from thunder_norm.subclass.backward.differentiation import has_tape
from thunder_norm.subclass.recording.trace import OperationId
from thunder_norm.tracing import activity
from thunder_norm.tracing.guarding.value_kinds import is_number_of_tensors
from thunder_norm.tracing.locations import at_line_of
from thunder_norm.tracing.recording import print_without_module, scope
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
from thunder_norm.tracing.torch_functions.torch_semantics import clamp
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import NumberProxy, TensorProxy, pyval, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import _get_gradfn_and_executor, augmented_forward_impls
from thunder.extend import FusionExecutor, get_always_executors

_OURS = "thunder_norm.gradient_of."  # ids of symbols that have gradients of ours begin so

_Body = Callable[[BoundSymbol, Sequence[BoundSymbol]], BoundSymbol]
_bodies: dict[Any, _Body] = {}


def differentiated_inside(symbol_id: Any, with_body: _Body) -> None:
    """Register a composite whose gradient is that of the operations inside.

    Args:
        symbol_id: of the composite.
        with_body: ``with_body(bsym, operations)`` is the composite with others, which make the same results.
    """
    activity.differentiated_inside(symbol_id)
    _bodies[symbol_id] = with_body


def with_missing_gradients(trace: TraceCtx, executor: Any, moving: Set[str] | None = None) -> TraceCtx:
    """The same computation, whose operations on complex numbers, and those without a gradient of Thunder's, have gradients of ours.

    Args:
        trace: a computation that Thunder is going to differentiate.
        executor: what the gradients are registered with; of the compilation at hand, so that they live as long.
        moving: the names of what is differentiated; None if that may be anything.
    """
    new = from_trace(trace)
    with tracectx(new):  # executors say what they have a gradient for, and may ask for sizes, a symbol (cuDNN's)
        bsyms = _with_statistics_in_order(trace.bound_symbols, new)
        if bsyms is trace.bound_symbols and not any(_is_concerned(b, moving) or draws_noise(b) for b in bsyms):
            return trace
        used = {p.name for b in bsyms for p in b.flat_proxy_args}
        found = with_gradients(bsyms, executor, new, moving, used)
    new.bound_symbols = found
    return new


def with_gradients(
    bsyms: Sequence[BoundSymbol],
    executor: Any,
    trace: TraceCtx,
    moving: Set[str] | None = None,
    used: Set[str] | None = None,
) -> list[BoundSymbol]:
    """The same operations; those that Thunder would not differentiate right, or not at all, have gradients of ours.

    `trace` knows the names of what is new; of arguments that are not among `moving` there is no gradient, and none is asked for of
    results that are not among `used`.
    """
    found: list[BoundSymbol] = []
    for bsym in bsyms:
        if bsym.sym.id in _bodies:
            found.append(_with_gradients_inside(bsym, executor, trace, moving))
        elif isinstance(bsym.sym.id, OperationId) and has_tape(bsym) is None and draws_noise(bsym):
            found.append(bsym.from_bsym(subsymbols=with_gradients(bsym.subsymbols, executor, trace)))
        elif parts := _parts_of_noise(bsym, trace):
            found += with_gradients(parts, executor, trace)
        elif not _is_concerned(bsym, moving):
            found.append(bsym)
        elif _is_its_argument(bsym):
            found.append(_as_a_tensor_of_its_own(bsym, executor))
        elif (
            isinstance(bsym.sym.id, OperationId) and bsym.subsymbols
        ):  # of a wrapper: what it does to one inner tensor is its own
            found.append(bsym.from_bsym(subsymbols=with_gradients(bsym.subsymbols, executor, trace, moving)))
        elif (joint := _joint_of_kernels(bsym, moving) or _joint_of_others(bsym, moving)) is not None:
            found.append(_with_joint(bsym, joint, executor))
        elif _keeps_statistics(bsym) and (apart := _apart(bsym, trace)) is not None:
            found += _in_one_kernel(bsym, apart, executor, trace, moving) or with_gradients(apart, executor, trace, moving, used)
        elif _asks_for_what_may_be_unused(bsym):
            with tracectx(trace):
                made, outs, taken_away = with_a_dimension_between(flat_proxies(bsym.output))
            found += [_with_gradient(bsym.sym.name, [bsym, *made], outs, executor), *taken_away]
        else:
            found.append(_with_gradient(bsym.sym.name, [bsym], flat_proxies(bsym.output), executor, moving, used))
    return found


def _parts_of_noise(bsym: BoundSymbol, trace: TraceCtx) -> Sequence[BoundSymbol]:
    """What an operation consists of that has to draw as torch does; nothing if it draws nothing, or torch runs it whole."""
    if isinstance(bsym.sym.id, OperationId) or not draws_noise(bsym):
        return ()
    with tracectx(trace), langctx(Languages.TORCH), at_line_of(trace, bsym):
        return decomposed(bsym) or bsym.subsymbols


def has_gradient_of_ours(bsym: BoundSymbol) -> bool:
    """Whether an operation consists of those that `with_gradients` has given a gradient."""
    return isinstance(bsym.sym.id, str) and bsym.sym.id.startswith(_OURS)


def _with_gradients_inside(bsym: BoundSymbol, executor: Any, trace: TraceCtx, moving: Set[str] | None) -> BoundSymbol:
    """A composite with such operations inside; what draws random numbers is its own affair: it may draw them again."""
    if not _is_concerned(bsym, moving):
        return bsym
    inside: list[BoundSymbol] = []
    for b in bsym.subsymbols:
        inside += [b] if _draws_inside(b) else with_gradients([b], executor, trace, moving)
    with tracectx(trace):
        return _bodies[bsym.sym.id](bsym, inside)


def _draws_inside(bsym: BoundSymbol) -> bool:
    return bsym.sym.id not in _bodies and draws_numbers(bsym)


_ASKING_FOR_DTYPES = frozenset({"torch.Tensor.type_as", "torch.Tensor.to"})


def _is_concerned(bsym: BoundSymbol, moving: Set[str] | None = None) -> bool:
    if bsym.sym.id in _NO_OPERATIONS or not any(map(is_differentiable, bsym.flat_proxy_args)):
        return False
    if has_gradient_of_ours(bsym) or activity.has_no_history(bsym):
        return False
    if moving is not None and bsym.sym.id in _ASKING_FOR_DTYPES and bsym.subsymbols:
        given = {p.name for b in bsym.subsymbols for p in b.flat_proxy_args}
        if given.isdisjoint(moving):
            return False  # what moves is asked for its dtype alone: c.type_as(x)
    if bsym.sym.id in _bodies:
        return any(_is_concerned(b, moving) and not _draws_inside(b) for b in bsym.subsymbols)
    if has_tape(bsym) is not None:  # what it hands on has the gradients that torch's autograd has made
        return False
    tensors = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
    is_of_complex = any(map(is_differentiable, bsym.flat_proxy_outs)) and any(map(is_complex, tensors))
    if moving is not None and is_opaque(bsym) and {p.name for p in bsym.flat_proxy_args if is_differentiable(p)} - moving:
        return True  # Thunder asks torch for the gradients of all, and torch may have none of a weight or a target
    if is_of_complex or _lacks_gradient(bsym) or _has_a_gradient_that_fails(bsym) or _has_another_gradient(bsym):
        return True
    if _is_written_without_arguments(bsym) or _is_its_argument(bsym):
        return True
    if bsym.sym.id == ltorch.addmm.id and _get_gradfn_and_executor(bsym)[0] is None:  # Thunder has torch's autograd run it again
        return True
    if bsym.sym.id in _WITH_KERNELS and _runs_kernels(bsym):
        return True
    return _joint_of_kernels(bsym, moving) is not None or _asks_others_for_all(bsym, moving) or _keeps_statistics(bsym)


def _is_written_without_arguments(bsym: BoundSymbol) -> bool:
    """Whether Thunder writes a result without what torch connects it to (``x.repeat(0, 1)``, ``x ** 0``): it would have no history."""
    if not bsym.subsymbols or not str(bsym.sym.id).startswith("torch."):
        return False
    reached = {p.name for p in bsym.flat_proxy_args}
    for sub in bsym.subsymbols:
        if not reached.isdisjoint(p.name for p in sub.flat_proxy_args):
            reached.update(p.name for p in sub.flat_proxy_outs)
    return any(p.name not in reached for p in bsym.flat_proxy_outs if is_differentiable(p))


_VIEWS = frozenset(
    f.id for f in (ltorch.getitem, ltorch.movedim, ltorch.permute, ltorch.reshape, ltorch.transpose, ltorch.view, ltorch.view_as)
) | {ltorch.flip.id}


def _is_its_argument(bsym: BoundSymbol) -> bool:
    """Whether Thunder differentiates what is the argument itself where torch makes a view of it all, or a copy (``flip(())``)."""
    if not isinstance(bsym.output, TensorProxy) or not str(bsym.sym.id).startswith("torch."):
        return False
    parts = [b for b in bsym.subsymbols if b.sym.id is not prims.PrimIDs.SHAPE]
    if not parts:
        return False
    if all(b.sym.id is prims.PrimIDs.SHALLOW_COPY for b in parts):
        return bsym.sym.id in _VIEWS
    return all(b.sym.id is prims.PrimIDs.SHALLOW_COPY or _is_its_argument(b) for b in parts)


def _as_a_tensor_of_its_own(bsym: BoundSymbol, executor: Any) -> BoundSymbol:
    """The operation that torch makes that tensor with; the cotangent is handed on as it is."""
    is_copy = bsym.sym.id == ltorch.flip.id

    def make(a: TensorProxy) -> TensorProxy:
        return prims.clone(a) if is_copy else prims.reshape(a, tuple(a.shape))

    def joint(a: TensorProxy) -> TensorProxy:
        out = make(a)
        prims.put_grad(a, prims.get_grad(out))
        return out

    symbol = _with_rule(bsym.sym.name, make, joint, executor)
    return bsym.from_bsym(sym=symbol, args=(bsym.args[0],), kwargs={}, subsymbols=[bsym])


# Torch has a kernel for the gradient, and for the result, which Thunder takes apart where it differentiates: 10 to 25 calls.
_WITH_KERNELS = frozenset(
    {
        ltorch.gelu.id,
        ltorch.layer_norm.id,
        ltorch.relu.id,
        ltorch.conv1d.id,
        ltorch.conv2d.id,
        ltorch.conv3d.id,
        ltorch.convolution.id,
        prims.PrimIDs.CONVOLUTION,
    }
)
_FUSES_A_LOSS_ALONE = "torchcompile_xentropy"  # an executor in Thunder's default list


def _runs_kernels(bsym: BoundSymbol) -> bool:
    """Whether torch's kernels are to run: no other executor wants the operation, nor makes a kernel of what it is taken apart into."""
    for executor in get_compile_data().executors_list:
        if isinstance(executor, FusionExecutor):
            if executor.name != _FUSES_A_LOSS_ALONE:
                return False
        elif executor not in get_always_executors() and executor.can_execute(bsym):
            return False
    return True


def _joint_of_kernels(bsym: BoundSymbol, moving: Set[str] | None) -> Callable | None:
    is_view = bsym.sym.id == ltorch.diagonal.id  # taken apart it would be a copy, whoever makes one kernel of the parts
    return kernels.joint_of(bsym, moving) if is_view or kernels.has_any(bsym) and _runs_kernels(bsym) else None


def _joint_of_others(bsym: BoundSymbol, moving: Set[str] | None) -> Callable | None:
    return None if moving is None else fallback.joint_of(bsym, moving)


def _asks_others_for_all(bsym: BoundSymbol, moving: Set[str] | None) -> bool:
    """Whether an operator of somebody else is in it, that would be asked for gradients by what does not move."""
    if isinstance(bsym.sym.id, OperationId) and bsym.subsymbols:
        return any(_asks_others_for_all(b, moving) for b in bsym.subsymbols)
    return _joint_of_others(bsym, moving) is not None


def _with_joint(bsym: BoundSymbol, joint: Callable, executor: Any) -> BoundSymbol:
    """An operation that is differentiated by `joint`."""
    return bsym.from_bsym(sym=_with_rule(bsym.sym.name, bsym.sym, joint, executor), subsymbols=[bsym])


def _with_rule(name: str, meta: Callable, joint: Callable, executor: Any) -> Symbol:
    """A symbol that is differentiated by `joint` and else is `meta`."""
    symbol = Symbol(name=name, meta=meta, id=f"{_OURS}{name}.{len(executor.implmap)}", _bind_postprocess=print_without_module)
    executor.register_implementation(symbol, execution_transform=meta, grad_transform=joint)
    return symbol


def _with_statistics_in_order(bsyms: list[BoundSymbol], trace: TraceCtx) -> list[BoundSymbol]:
    """The operations, with batch norms apart from statistics that the program meets again: a fusing executor's rule would write them late."""
    written = [b for b in bsyms if _writes_statistics(b)]
    if not written:
        return bsyms
    met = Counter(name for b in bsyms if b.sym.id not in _NO_OPERATIONS for name in {p.name for p in b.flat_proxy_args})
    again = {id(b) for b in written if any(met[s.args[1].name] > 1 for s in b.subsymbols if s.sym.id is prims.PrimIDs.COPY_)}
    return [part for b in bsyms for part in (_apart(b, trace) or [b] if id(b) in again else [b])] if again else bsyms


def _writes_statistics(bsym: BoundSymbol) -> bool:
    return bsym.sym.id == ltorch.batch_norm.id and any(b.sym.id is prims.PrimIDs.COPY_ for b in bsym.subsymbols)


def _keeps_statistics(bsym: BoundSymbol) -> bool:
    return _writes_statistics(bsym) and _runs_kernels(bsym)


def _in_one_kernel(
    bsym: BoundSymbol, apart: Sequence[BoundSymbol], executor: Any, trace: TraceCtx, moving: Set[str] | None
) -> list[BoundSymbol] | None:
    """A batch norm as one call of torch's kernel, and the copies of what its running statistics become; None if it is not for it."""
    found = kernels.KeepingBatchNorm.of(kernels.wanted(moving), kernels.arguments_of(bsym))
    if found is None:
        return None
    norm, tensors = found
    copies = [b for b in apart if b.sym.id is prims.PrimIDs.COPY_]
    now = {b.args[1].name: b.args[0] for b in copies}  # what the statistics become
    symbol = _with_rule(bsym.sym.name, langctx(Languages.TORCH)(norm), norm.joint, executor)
    with tracectx(trace), at_line_of(trace, bsym):
        whole = symbol.bind(
            *tensors,
            output=(bsym.output, *(now[t.name] for t in tensors[1:3])),
            subsymbols=[b for b in apart if b.sym.id is not prims.PrimIDs.COPY_],
        )
    return [whole, *copies]


def _apart(bsym: BoundSymbol, trace: TraceCtx) -> list[BoundSymbol] | None:
    """A batch norm as what its running statistics become, from the parts of the whole, and the operation without them.

    The result that these parts make is used by nobody.
    """
    with tracectx(trace), langctx(Languages.TORCH), at_line_of(trace, bsym):
        unused = {variableify(bsym.output): TensorProxy(like=bsym.output)}
        with scope(trace) as made:
            out = kernels.batch_norm_apart(kernels.arguments_of(bsym))
    if out is None:
        return None
    parts = [b.from_bsym_swap_proxies(unused) for b in bsym.subsymbols]
    return [*parts, *(b.from_bsym_swap_proxies({variableify(out): bsym.output}) for b in made)]


_NO_OPERATIONS = frozenset(
    {prims.PrimIDs.RETURN, prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UPDATE_ALIASES, prims.PrimIDs.COPY_, prims.PrimIDs.ITEM}
)


def _has_another_gradient(bsym: BoundSymbol) -> bool:
    """Whether Thunder's gradient is not torch's.

    It is NaN for products with a zero, 0 to the power of 0, atan2(0, 0), where exponentials overflow, and of a sign that infinity is
    multiplied by, 0 where clamp meets its bounds and for the minimum of NaN, shared among the entries that are ``x.max(dim)``, and left out for the values of ``index_put``, and for what is rounded, where torch has zeros.  A ``max_pool1d`` becomes a product with
    zeros and ones, where infinite padding is NaN; that of ``zeta`` is one number too few, an error, and that of ``linear`` asks how many rows
    a matrix without columns has.  With that of ``nll_loss`` the loss itself
    is another: of labels that are out of range.
    """
    if bsym.sym.id in activations.IDS:
        return True
    if bsym.sym.id is prims.PrimIDs.COPY_WITH_SETITEM:
        # Thunder takes no entries by a mask, and keeps first dimensions of length 1
        _, index, value = bsym.args
        return isinstance(value, TensorProxy) and (has_mask(index) or value.shape[:1] == (1,))
    if takes_one_of_equals(bsym):
        return True
    if bsym.sym.id == ltorch.getitem.id and are_several(bsym.args[1]):  # of places that are out of range it is another entry's
        return True
    if bsym.sym.id is prims.PrimIDs.POW:
        exponent = bsym.args[1]
        return isinstance(exponent, TensorProxy) or pyval(exponent) == 0
    if bsym.sym.id is prims.PrimIDs.LINEAR:
        return 0 in (bsym.args[0].shape[-1], bsym.output.shape[-1])
    if bsym.sym.id in _WITH_ANOTHER_GRADIENT:
        return True
    return _is_taken_apart(bsym) and any(map(_has_another_gradient, bsym.subsymbols))


_ROUNDING = (prims.PrimIDs.CEIL, prims.PrimIDs.FLOOR, prims.PrimIDs.ROUND, prims.PrimIDs.TRUNC)
_WITH_ANOTHER_GRADIENT = frozenset(
    {
        prims.PrimIDs.PROD,
        prims.PrimIDs.ATAN2,
        prims.PrimIDs.INDEX_PUT,
        prims.PrimIDs.MINIMUM,
        prims.PrimIDs.SIGN,
        prims.PrimIDs.ZETA,
        clamp.id,
        ltorch.max_pool1d.id,
        ltorch.nll_loss.id,
        *_ROUNDING,
    }
)


def _is_taken_apart(bsym: BoundSymbol) -> bool:
    """Whether Thunder differentiates what the operation consists of."""
    return not bsym.sym.is_prim and _get_gradfn_and_executor(bsym)[0] is None


def _has_a_gradient_that_fails(bsym: BoundSymbol) -> bool:
    """Whether Thunder's gradient fails: of several results without dimensions, or of what it had registered for torch to run.

    Of the latter it does for tensors given by name (``pos_weight``) or in a list (``hstack``, which then has no gradient, silently), for
    None among the results (attention without its weights), and for integers without dimensions among them (``cholesky_ex``).  Of what draws
    random numbers (``dropout2d``) it has torch draw others; of what we take apart torch's needs values (``index_fill`` by a tensor).
    """
    if _asks_for_what_may_be_unused(bsym):
        return True
    if not is_opaque(bsym):
        return False
    if draws_numbers(bsym) or decompositions.find(bsym.sym) is not None:
        return True
    in_lists = [a for a in bsym.args if isinstance(a, Sequence) and not isinstance(a, str)]
    if any(map(is_differentiable, flat_proxies((in_lists, bsym.kwargs)))):
        return True
    outs = bsym.output if isinstance(bsym.output, Sequence) else (bsym.output,)
    return any(map(is_differentiable, outs)) and not all(map(is_differentiable, outs))


def _asks_for_what_may_be_unused(bsym: BoundSymbol) -> bool:
    """Whether Thunder's rule asks for the cotangents of several results, one of them without dimensions.

    See `with_a_dimension_between`.
    """
    if not is_opaque(bsym) and bsym.sym.id is not prims.PrimIDs.VAR_MEAN:
        return _is_taken_apart(bsym) and any(map(_asks_for_what_may_be_unused, bsym.subsymbols))
    outs = [p for p in bsym.flat_proxy_outs if is_differentiable(p)]
    return len(outs) > 1 and any(p.ndim == 0 for p in outs)


def _lacks_gradient(bsym: BoundSymbol) -> bool:
    """Whether Thunder's differentiation would come to a primitive that it has no rule for, be it that there is no gradient (isfinite)."""
    if bsym.sym.id in _NO_OPERATIONS or bsym.sym.id in augmented_forward_impls or _get_gradfn_and_executor(bsym)[0] is not None:
        return False
    if not any(map(is_differentiable, bsym.flat_proxy_args)) or not bsym.flat_proxy_outs:
        return False
    return any(map(_lacks_gradient, bsym.subsymbols)) if bsym.subsymbols else bsym.sym.is_prim


def _with_gradient(
    name: str,
    bsyms: Sequence[BoundSymbol],
    outs: Sequence[TensorProxy],
    executor: Any,
    moving: Set[str] | None = None,
    used: Set[str] | None = None,
) -> BoundSymbol:
    """Operations, the first of which uses all that they do, as one with a gradient of ours."""
    given = tree_leaves((bsyms[0].args, bsyms[0].kwargs))
    inputs = list({p.name: p for p in given if isinstance(p, TensorProxy) or is_number_of_tensors(p)}.values())
    program = flat_program(inputs, bsyms, outs)
    wanted = [is_differentiable(p) and (moving is None or p.name in moving) for p in inputs]
    # of a result that nothing uses Thunder would write zeros
    received = [is_differentiable(p) and (used is None or p.name in used) for p in outs]

    @langctx(Languages.TORCH)
    def meta(*args: TensorProxy | NumberProxy) -> tuple[TensorProxy, ...]:
        return replayed(program, args)

    @langctx(Languages.TORCH)
    def joint(*args: TensorProxy | NumberProxy) -> tuple[TensorProxy, ...]:
        results, pullback = evaluate_vjp(renewed_program(program), args, wanted)
        cotangents = [prims.get_grad(r) if is_received else None for r, is_received in zip(results, received, strict=True)]
        for a, g, is_wanted in zip(args, pullback(cotangents), wanted, strict=True):
            if is_wanted:
                prims.put_grad(a, ltorch.zeros_like(a) if g is None else g)
        return results

    symbol = Symbol(name=name, meta=meta, id=f"{_OURS}{name}.{len(executor.implmap)}", _bind_postprocess=print_without_module)
    executor.register_implementation(symbol, execution_transform=meta, grad_transform=joint)
    return bsyms[0].from_bsym(sym=symbol, args=tuple(inputs), kwargs={}, output=tuple(outs), subsymbols=list(bsyms))
