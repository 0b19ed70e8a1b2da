"""The operations of a program that is differentiated, as what its backward uses of them needs them to be; see `differentiation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from thunder_norm.subclass.acquiring.fallback import fallback
from thunder_norm.subclass.acquiring.lengths import Lengths, is_symbolic
from thunder_norm.subclass.recording.record import Recorded
from thunder_norm.subclass.recording.trace import OperationId
from thunder_norm.trees import map_tensors
import thunder.torch as ltorch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol


def with_copies(names: set[str], bsyms: Sequence[BoundSymbol]) -> set[str]:
    """These names, those of their shallow copies and of what they are such copies of: the same tensors when the program runs."""
    copies = list(_shallow_copies(bsyms))
    found = set(names)
    while more := {name for pair in copies if not found.isdisjoint(pair) for name in pair} - found:
        found |= more
    return found


def _shallow_copies(bsyms: Sequence[BoundSymbol]) -> Iterator[tuple[str, str]]:
    for bsym in bsyms:
        if bsym.sym.id == prims.PrimIDs.SHALLOW_COPY:
            yield bsym.args[0].name, bsym.output.name
        yield from _shallow_copies(bsym.subsymbols)


def computed_from(names: set[str], bsyms: Sequence[BoundSymbol]) -> set[str]:
    """These names and those of all that is computed from them, inside of composites too."""
    found = set(names)
    for bsym in bsyms:
        if any(p.name in found for p in bsym.flat_proxy_args):
            found |= computed_from(found, bsym.subsymbols) | (
                {p.name for p in bsym.flat_proxy_outs} if not bsym.subsymbols else set()
            )
    return found


def with_outputs(bsyms: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Composites that return everything made inside them which later operations use."""
    used: set[str] = set()
    found = []
    for bsym in reversed(bsyms):
        if isinstance(bsym.sym.id, OperationId):
            made = {p.name: p for sub in bsym.subsymbols for p in sub.flat_proxy_outs}
            own = {p.name for p in bsym.flat_proxy_outs}
            more = tuple(p for name, p in made.items() if name in used and name not in own)
            if more:
                bsym = bsym.from_bsym(output=(*bsym.flat_proxy_outs, *more))
        used.update(p.name for p in bsym.flat_proxy_args)
        found.append(bsym)
    return found[::-1]


def with_plain_sums(log: Sequence[Recorded], needed: Container[int]) -> list[Recorded]:
    """Sums whose dimensions are kept for a view to drop them, which torch's autograd makes of each broadcast bias, without both.

    The view would be an operation more, and a gradient in the memory of a tensor that others may have.  `needed` are the identities of
    what is used outside of `log`.
    """
    used = Counter(id(t) for r in log for t in r.inputs)
    sums = {id(r.outputs[0]): r for r in log if r.func is _aten.sum.dim_IntList and r.args[2:] == (True,)}
    found, replaced = [], set()
    for r in log:
        made = sums.get(id(r.inputs[0])) if r.func is _aten.view.default else None
        if made is not None and used[i := id(made.outputs[0])] == 1 and i not in needed and _drops(made, r.outputs[0]):
            replaced.add(id(made))
            r = replace(made, args=made.args[:2], outputs=r.outputs, result=r.result)
        found.append(r)
    return [r for r in found if id(r) not in replaced]


def _drops(kept: Recorded, viewed: torch.Tensor) -> bool:
    """Whether a view of a sum has the dimensions that are left."""
    shape, dims = kept.args[0].shape, kept.args[1]
    return bool(dims) and tuple(viewed.shape) == tuple(
        n for i, n in enumerate(shape) if i not in dims and i - len(shape) not in dims
    )


_aten = torch.ops.aten


def own(p: TensorProxy) -> TensorProxy:
    """A tensor of its own in the same memory: an argument handed back as it is would come out without its gradient."""
    return fallback(torch.ops.aten.alias.default, (True,))(p)[0]


def encoded(gradient: TensorProxy, carried: torch.Tensor) -> TensorProxy:
    """The gradient of a result as its backward takes it: that of a plain complex one comes as complex numbers."""
    if gradient.ndim == carried.ndim:
        return gradient
    resolved = fallback(torch.ops.aten.resolve_conj.default, (True,))(gradient)[0]
    return fallback(torch.ops.aten.view_as_real.default, (True,))(resolved)[0]


def carrier(fake: torch.Tensor, lengths: Lengths, env: Mapping[int, TensorProxy]) -> TensorProxy:
    """A tensor without data that autograd hands on for a gradient like `fake`; `env` has what is known by the identity of fakes."""
    device, dtype = devices.to_device(fake.device), dtypes.to_dtype(fake.dtype)
    zero = ltorch.full((), 0, device=device, dtype=dtype)
    if not is_symbolic(fake):
        return ltorch.expand(zero, tuple(fake.shape))
    function, (shape,), of = lengths.late(torch.ops.aten.expand.default, (list(fake.shape),), {})
    return fallback(function, (True,))(zero, shape, **map_tensors(lambda t: env[id(t)], of))[0]
