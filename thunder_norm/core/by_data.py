"""What an operation does at the data at hand, where no rule bounds it: its derivative there, inside ``norm_sensitivity("local")``."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.context_variables import setting
from thunder_norm.core import conversions
from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_environment, lift, perturbations_recorded
from thunder_norm.core.kinds import L2Tensor, LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor, is_complex
from thunder_norm.op_names import op_key
from thunder_norm.trees import flat_tensors, map_tensors

# Entries of a Jacobian that is computed whole.
LARGEST = 2**22
# What they return is not made of entries alone, but of memory.
_OF_MEMORY = frozenset(("resize", "resize_as"))


_is_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("thunder_norm_by_data", default=True)


@contextlib.contextmanager
def by_rules_alone() -> Iterator[None]:
    """Inside the block what no rule bounds is refused, whatever the data."""
    with setting(_is_allowed, False):
        yield


def is_allowed() -> bool:
    """Whether what no rule bounds may be taken at the data, outside `by_rules_alone`."""
    return _is_allowed.get()


def found(func: Callable, args: tuple, kwargs: dict, body: Callable, call: Callable[[tuple, dict], Any]) -> Any | None:
    """The result of an operation with the norm it has and the movement its derivative at the data allows; None if that is not to be had.

    With perturbations p_i of its arguments the result moves by at most ``sum_i L_i p_i``, to first order.

    - A function of each entry, with derivative D_i: ``L_i = max |D_i|``, times what it costs to read the norm of i over the
      dimensions of the result's (RMS, over those of the first argument).
    - Anything else: from its Jacobian, of blocks J_or from a group r of entries, over which the norm of i runs, to a group o,
      ``L_i = max_o sum_r |J_or|_2``, in the units of both norms.  Of at most `LARGEST` entries, and not while a program is traced.

    Args:
        func: the operation.
        args: its arguments, normed tensors among them.
        kwargs: the same, by name.
        body: what it does to plain tensors.
        call: does it as one operation of a program, for the result.
    """
    made = _made(func, args, kwargs, body, call)
    if made is None:
        return None
    real, outs = made
    current_environment().note_call(None, SimpleNamespace(fn=found), (args, kwargs), {}, {})
    for out in outs.values():
        current_environment().note(func, out)
    return map_tensors(lambda y: outs.get(id(y), y), real)


def known_of(func: Callable, args: tuple, kwargs: dict, body: Callable, made: Any) -> list[NormedTensor] | None:
    """The results of an operation that has run, as `found` has them; nobody is told."""
    seen = _made(func, args, kwargs, body, lambda *_: made)
    return None if seen is None else [*seen[1].values()]


def _made(
    func: Callable, args: tuple, kwargs: dict, body: Callable, call: Callable[[tuple, dict], Any]
) -> tuple[Any, dict[int, NormedTensor]] | None:
    """What the operation returns, and by identity the normed tensors that stand for that."""
    inputs = [x for x in flat_tensors((args, kwargs)) if isinstance(x, NormedTensor)]
    if not _is_allowed.get() or not is_local(*inputs) or op_key(func) in _OF_MEMORY or any(map(is_complex, inputs)):
        return None
    # in a derivative that torch.func takes batches of derivatives end the process
    if torch._C._current_graph_task_id() != -1:
        return None
    derivatives = _derivatives_of(func)
    if derivatives is None:
        return None
    given = map_tensors(
        lambda t: t if isinstance(t, NormedTensor) or not t.is_floating_point() else lift(t, RMSTensor), (args, kwargs)
    )
    normed = list({id(x): x for x in flat_tensors(given) if isinstance(x, NormedTensor)}.values())
    if not normed or not is_local(*normed):
        return None
    moving = [x for x in normed if x.perturbation_size is not None]
    plain_args, plain_kwargs = map_tensors(lambda x: x.backing if isinstance(x, NormedTensor) else x, given)
    real = call(plain_args, plain_kwargs)
    if (pathwise := _PATHWISE.get(op_key(func))) is not None:
        body = functools.partial(pathwise[1], real.detach())
    results = _with_norms(real)
    if not results or any(y.layout != torch.strided for y in flat_tensors(real)):
        return None
    dims = [_dims(y, inputs or normed) for y in results]
    try:
        constants = derivatives(given, body, moving, dims, sum(y.numel() for y in results)) if moving else [[] for _ in results]
    except RuntimeError:  # torch has no derivative of it
        return None
    if constants is None:
        return None
    return real, {id(y): _wrapped(y, d, moving, c) for y, d, c in zip(results, dims, constants, strict=True)}


def _with_norms(made: Any) -> list[torch.Tensor]:
    """The results that have a norm: numbers, complex ones too."""
    return [y for y in flat_tensors(made) if y.is_floating_point() or y.is_complex()]


def _dims(y: torch.Tensor, inputs: Sequence[NormedTensor]) -> ed.Dims:
    """The dimensions of the result's norm: those of the first argument, where it has them."""
    first = inputs[0].elem_dims
    return first if all(-d <= y.ndim for d in first) else tuple(range(-y.ndim, 0))


def _wrapped(y: torch.Tensor, dims: ed.Dims, moving: Sequence[NormedTensor], constants: Sequence[torch.Tensor]) -> NormedTensor:
    kind = RMSTensor if dims else LinfTensor
    with perturbations_recorded():
        terms = [x.perturbation_size * c for x, c in zip(moving, constants, strict=True) if x.perturbation_size is not None]
        movement = functools.reduce(torch.add, terms) if terms else None
    return kind._wrap(y, kind.of(y.detach(), dims).norm_size.detach(), movement, dims)


@functools.cache
def _has_tag(func: Callable, tag: torch.Tag) -> bool:
    """Whether ATen says so of an operation: that it draws random numbers, that each entry of its result is made from one of each argument."""
    packet = getattr(torch.ops.aten, str(op_key(func)), None)
    return packet is not None and any(tag in getattr(packet, name).tags for name in packet.overloads())


def _standard_gamma(drawn: torch.Tensor, concentration: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Linear in the concentration, with the slopes of what was drawn."""
    a = concentration.detach()
    return torch._standard_gamma_grad(a, drawn.to(a.dtype)) * concentration


def _sample_dirichlet(drawn: torch.Tensor, concentration: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The same: an entry that grows takes from all in proportion."""
    a, x = concentration.detach(), drawn.to(concentration.dtype)
    moved = torch._dirichlet_grad(x, a, a.sum(-1, keepdim=True).expand_as(a)) * concentration
    return moved - x * moved.sum(-1, keepdim=True)


def _derivatives_of(func: Callable) -> Callable | None:
    if (pathwise := _PATHWISE.get(op_key(func))) is not None:
        return pathwise[0]
    if _has_tag(func, torch.Tag.nondeterministic_seeded):  # dropout, say, would draw again
        return _unmoved if str(op_key(func)).endswith("_like") else None
    return _of_entries if _has_tag(func, torch.Tag.pointwise) else _jacobians


def _leaves(given: Any, moving: Sequence[NormedTensor], shape: Sequence[int] | None) -> tuple[Any, list[torch.Tensor]]:
    """The arguments on plain tensors, and those that move as leaves, in double precision and expanded to a shape if there is one."""
    made: dict[int, torch.Tensor] = {}

    def leaf(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, NormedTensor):
            return x
        if id(x) not in made:
            t = x.backing.detach().to(torch.float64)
            t = t if shape is None else t.expand(shape)
            made[id(x)] = t.clone().requires_grad_(any(x is m for m in moving))
        return made[id(x)]

    tree = map_tensors(leaf, given)
    return tree, [made[id(x)] for x in moving]


Derivatives = list[list[torch.Tensor]] | None  # of each result, the constant for each argument that moves


def _unmoved(given: Any, body: Callable, moving: Sequence[NormedTensor], dims: Sequence[ed.Dims], size: int) -> Derivatives:
    """Of random numbers: only the shape of an argument matters."""
    return [[torch.zeros((), dtype=NORM_DTYPE)] * len(moving) for _ in dims]


def _of_entries(given: Any, body: Callable, moving: Sequence[NormedTensor], dims: Sequence[ed.Dims], size: int) -> Derivatives:
    shape = torch.broadcast_shapes(*(t.shape for t in flat_tensors(given)))
    (args, kwargs), leaves = _leaves(given, moving, shape)
    with torch.enable_grad():
        (y,) = flat_tensors(body(*args, **kwargs))
        if y.is_complex() or _move_without_derivative([y], (args, kwargs), body, leaves):
            return None
        slopes = torch.autograd.grad(y.sum(), leaves, allow_unused=True) if y.requires_grad else [None] * len(leaves)
    constants = []
    for x, slope in zip(moving, slopes, strict=True):
        own = ed.nontrivial(x.shape, [d for d in dims[0] if -d <= x.ndim])
        cost = conversions.factor(x, RMSTensor, own)
        if cost is None:
            return None
        largest = torch.zeros((), dtype=NORM_DTYPE) if slope is None else slope.detach().abs().amax().to(NORM_DTYPE)
        constants.append(largest.nan_to_num(nan=math.inf, posinf=math.inf) * cost)
    return [constants]


def _cost_of_length(x: NormedTensor) -> float | None:
    """How many times its norm the length of all entries over its elem_dims may be."""
    length = conversions.factor(x, L2Tensor, x.elem_dims)
    mean = conversions.factor(x, RMSTensor, x.elem_dims) if length is None else None
    return length if mean is None else mean * math.sqrt(x.numel_normed)


def _jacobians(given: Any, body: Callable, moving: Sequence[NormedTensor], dims: Sequence[ed.Dims], size: int) -> Derivatives:
    costs = [c for x in moving if (c := _cost_of_length(x)) is not None]
    is_traced = any(isinstance(t.backing if isinstance(t, NormedTensor) else t, FakeTensor) for t in flat_tensors(given))
    if is_traced or len(costs) < len(moving) or size * sum(x.numel() for x in moving) > LARGEST:
        return None
    (args, kwargs), leaves = _leaves(given, moving, None)
    with torch.enable_grad():
        results = _with_norms(body(*args, **kwargs))
        # a complex number is as far away as both its parts together
        parts = [torch.view_as_real(y) if y.is_complex() else y for y in results]
    if _move_without_derivative(results, (args, kwargs), body, leaves):
        return None
    found = []
    for y, result, over in zip(parts, results, dims, strict=True):
        of_parts = math.sqrt(y.numel() / max(result.numel(), 1))
        inside = over if y is result else (*(d - 1 for d in over), -1)
        rows = _rows(y, leaves) if y.requires_grad and y.numel() else [None] * len(moving)
        constants = [
            torch.zeros(()) if row is None else _norm(row.reshape((*y.shape, *x.shape)), x, y.ndim, inside) * cost * of_parts
            for x, cost, row in zip(moving, costs, rows, strict=True)
        ]
        found.append([c.to(NORM_DTYPE) for c in constants])
    return found


def _move_without_derivative(results: Sequence[torch.Tensor], given: Any, body: Callable, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether results that torch has no derivative of move with the arguments: those of an orthogonal polynomial, not of a histogram."""
    if all(y.requires_grad for y in results):
        return False
    near = {id(x): x.detach() * (1 + 1e-6) + 1e-6 for x in leaves}
    with torch.no_grad():
        args, kwargs = map_tensors(lambda t: near.get(id(t), t), given)
        now = _with_norms(body(*args, **kwargs))
    pairs = zip(results, now, strict=True)
    return any(not y.requires_grad and not torch.equal(y.nan_to_num(), z.nan_to_num()) for y, z in pairs)


# Of what is drawn: the function that has the derivatives of the same draw at other parameters, as torch's own backward has.
_PATHWISE: dict[Any, tuple[Callable, Callable]] = {
    "_standard_gamma": (_of_entries, _standard_gamma),
    "_sample_dirichlet": (_jacobians, _sample_dirichlet),
}


def _rows(y: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The derivative of each entry of a tensor: for each leaf a row for each entry; None of a leaf that it does not depend on."""
    derivative = functools.partial(torch.autograd.grad, y, leaves, retain_graph=True, allow_unused=True)
    count = y.numel()
    together = max(LARGEST // count, 1)
    rows: list[tuple[torch.Tensor | None, ...]] = []
    with _disable_current_modes():  # they are about what the program does
        for start in range(0, count, together):
            places = torch.arange(start, min(start + together, count), device=y.device)
            directions = torch.zeros(len(places), count, dtype=y.dtype, device=y.device)
            directions.scatter_(1, places[:, None], 1.0)
            directions = directions.reshape(-1, *y.shape)
            try:
                rows.append(derivative(directions, is_grads_batched=True))
            except RuntimeError:  # an operation that torch.vmap does not know
                rows += [tuple(None if r is None else r[None] for r in derivative(d)) for d in directions]
    return [None if parts[0] is None else torch.cat(parts) for parts in zip(*rows, strict=True)]  # type: ignore[arg-type]


def _norm(jacobian: torch.Tensor, x: NormedTensor, ndim: int, over: ed.Dims) -> torch.Tensor:
    """``max_o sum_r |J_or|_2``, the result's norm being a mean over `over` and x's a length over its elem_dims."""
    jacobian = jacobian.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    if not jacobian.isfinite().all():
        return torch.tensor(math.inf)
    outputs = [d for d in range(ndim) if d - ndim not in over]
    inside = [d for d in range(ndim) if d - ndim in over]
    groups = [ndim + d for d in range(x.ndim) if d - x.ndim not in x.elem_dims]
    entries = [ndim + d for d in range(x.ndim) if d - x.ndim in x.elem_dims]
    sizes = [math.prod(jacobian.shape[d] for d in part) for part in (outputs, groups, inside, entries)]
    blocks = jacobian.permute((*outputs, *groups, *inside, *entries)).reshape(sizes)
    return torch.linalg.matrix_norm(blocks, 2).sum(1).amax() / math.sqrt(max(sizes[2], 1))
