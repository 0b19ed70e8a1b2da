"""What a transformed program can do without, so that it reads as one would write it by hand.

One pass forwards resolves each operation to the proxy it equals, if there is one: copies, conversions to the same dtype, ``x * 1``,
``x + 0``, what was computed before.  Tensors that hold one number (the cotangent of a loss is one) stay numbers until something needs
the tensor.  One pass backwards drops what nothing uses.

The backward of an operation that consists of several is one operation: ``layer_norm_backward``.  It is written as one bound symbol
whose parts are the operations of the backward, so executors and further transforms look inside and readers need not.  What it needs of
the forward's inside it computes again from the operation's arguments and results, as torch's own formulas do; where that would be
costly, or would draw numbers, the operation is taken apart instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from numbers import Number
from typing import Any, NamedTuple

from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.functions.programs import anew, flat_program, is_differentiable, is_like, replayed, without_dead_code
from thunder_norm.tracing.recording import print_without_module, scope
from thunder_norm.tracing.torch_functions.random_numbers import draws
from thunder_norm.tracing.torch_functions.type_promotion import filling
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, Symbol, has_tags
from thunder.core.trace import get_tracectx

Ids = prims.PrimIDs

_COPIES = frozenset({Ids.SHALLOW_COPY})
_PRODUCTS = (Ids.MATMUL, ltorch.matmul.id)  # of two matrices, of more rows
_VIEWS_OF_UNIFORM = frozenset(
    {Ids.BROADCAST_IN_DIM, Ids.RESHAPE, Ids.SQUEEZE, Ids.TRANSPOSE, Ids.SLICE, Ids.CONVERT_ELEMENT_TYPE}
)


class BackwardId(NamedTuple):
    """The id of the backward of an operation, see `grouped`."""

    operation: Any
    shape: tuple  # which arguments get gradients, which results are used

    def __str__(self) -> str:
        return f"{self.operation}_backward"


def tidied(bsyms: Sequence[BoundSymbol], result: Any) -> tuple[list[BoundSymbol], Any]:
    """The operations that `result` needs, without those that do nothing or do something again, and `result` after that."""
    read = Counter(p.name for p in tree_flatten(result)[0] if isinstance(p, Proxy))
    tidy = _Tidy(read + Counter(p.name for b in bsyms for p in b.flat_proxy_args))
    for b in bsyms:
        tidy.add(b)
    result = tree_map(tidy.resolved, result)
    needed = {p.name for p in tree_flatten(result)[0] if isinstance(p, Proxy)}
    return without_dead_code(tidy.kept, needed), result


class _Tidy:
    def __init__(self, uses: Counter[str]) -> None:
        self.uses = uses
        self.kept: list[BoundSymbol] = []
        self.swaps: dict[Variable, Proxy] = {}
        self.uniform: dict[str, Number] = {}  # tensors that hold one number everywhere
        self.made: dict[Hashable, BoundSymbol] = {}
        self.maker: dict[str, BoundSymbol] = {}

    def resolved(self, v: Any) -> Any:
        """What a value is called now."""
        while isinstance(v, Proxy) and variableify(v) in self.swaps:
            v = self.swaps[variableify(v)]
        return v

    def add(self, b: BoundSymbol) -> None:
        b = b.from_bsym_swap_proxies(self.swaps, skip_output=True)
        if _is_effect(b):
            self._keep(b)
            return
        if isinstance(b.sym.id, BackwardId) and any(isinstance(a, Proxy) and a.name in self.uniform for a in b.args):
            for part in b.subsymbols:
                self.add(part)
            return
        inside = self._with_numbers(core(b))
        same = self._equal_to(inside)
        if same is not None and _may_stand_for(same, inside.output):
            self.swaps[variableify(inside.output)] = same
            return
        number = self._uniform_value(inside)
        if number is not None:
            self.uniform[inside.output.name] = number
        simpler = self._simpler(core(b), inside)
        if simpler is not None:
            b = simpler
        key = _key(core(b))
        before = self.made.get(key) if key is not None else None
        if before is not None and _same_outputs(before, b):
            for old, new in zip(b.flat_proxy_outs, before.flat_proxy_outs, strict=True):
                self.swaps[variableify(old)] = new
            return
        if key is not None:
            self.made[key] = b
        self._keep(b)

    def _with_numbers(self, b: BoundSymbol) -> BoundSymbol:
        """Arithmetic with a broadcast tensor that holds one number, as arithmetic with the number."""
        *before, last = b.subsymbols or [b]
        is_arithmetic = last.sym.id in (Ids.MUL, Ids.ADD, Ids.SUB, Ids.DIV) and _same_proxies(last.output, b.output)
        if not before or not is_arithmetic or not all(s.sym.id is Ids.BROADCAST_IN_DIM for s in before):
            return b
        numbers = {s.output.name: self.uniform.get(s.args[0].name) for s in before}
        if any(n is None for n in numbers.values()):
            return b
        args = [numbers.get(a.name, a) if isinstance(a, Proxy) else a for a in last.args]
        return last.from_bsym(args=tuple(args))

    def _keep(self, b: BoundSymbol) -> None:
        self.kept.append(b)
        for p in b.flat_proxy_outs:
            self.maker.setdefault(p.name, b)

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _number(self, v: Any) -> Number | None:
        if isinstance(v, Proxy):
            return self.uniform.get(v.name)
        return v if isinstance(v, int | float) and not isinstance(v, bool) else None

    def _uniform_value(self, b: BoundSymbol) -> Number | None:
        out = b.output
        if not isinstance(out, TensorProxy):
            return None
        if b.sym.id is Ids.FULL:
            return _held(b.args[1], out.dtype)
        if b.sym.id in _VIEWS_OF_UNIFORM and isinstance(b.args[0], TensorProxy):
            return _held(self.uniform.get(b.args[0].name), out.dtype)
        operation = _ARITHMETIC.get(b.sym.id)
        numbers = [self._number(a) for a in b.args]
        if operation is not None and dtypes.is_float_dtype(out.dtype) and all(n is not None for n in numbers):
            try:
                return _held(operation(*numbers), out.dtype)
            except ArithmeticError:
                return None
        return None

    # -- what an operation equals -------------------------------------------------------------------------------------

    def _equal_to(self, b: BoundSymbol) -> TensorProxy | None:
        """The proxy that has the value an operation computes, if there is one."""
        if b.sym.id in _COPIES:
            return b.args[0]
        if b.sym.id in (Ids.BROADCAST_IN_DIM, Ids.RESHAPE, Ids.CONVERT_ELEMENT_TYPE, Ids.TRANSPOSE):
            return self._view(b)
        if b.sym.id in (Ids.MUL, Ids.ADD):
            for value, other in (b.args, b.args[::-1]):
                if isinstance(other, TensorProxy) and _is_neutral(b.sym.id, self._number(value), other):
                    return other
        if b.sym.id is Ids.SUB and _is_neutral(Ids.SUB, self._number(b.args[1]), b.output):
            return b.args[0]
        if b.sym.id in (Ids.DIV, Ids.POW) and self._number(b.args[1]) == 1:
            return b.args[0]
        if b.sym.id is Ids.NEG:
            before = self.maker.get(b.args[0].name)
            if before is not None and core(before).sym.id is Ids.NEG:
                return core(before).args[0]
        return None

    def _view(self, b: BoundSymbol) -> TensorProxy | None:
        a = b.args[0]
        before = self.maker.get(a.name)
        source = None if before is None else core(before)
        if b.sym.id is Ids.TRANSPOSE:
            if tuple(b.args[1]) == tuple(range(a.ndim)):
                return a
            if source is not None and source.sym.id is Ids.TRANSPOSE:
                first, second = source.args[1], b.args[1]
                if [first[i] for i in second] == list(range(a.ndim)):
                    return source.args[0]
            return None
        if is_like(a, b.output):
            return a
        if b.sym.id is Ids.RESHAPE and source is not None and source.sym.id is Ids.RESHAPE and is_like(source.args[0], b.output):
            return source.args[0]
        return None

    # -- shorter ways to write it -------------------------------------------------------------------------------------

    def _simpler(self, whole: BoundSymbol, b: BoundSymbol) -> BoundSymbol | None:
        """The same operation with a number in place of a tensor that holds one number; a broadcast that repeats nothing as such."""
        if whole.sym.id is Ids.BROADCAST_IN_DIM:
            return _as_unsqueeze(whole)
        if whole.sym.id is Ids.RESHAPE:
            return self._as_product(whole)
        if b.sym.id not in (Ids.MUL, Ids.ADD, Ids.SUB, Ids.DIV) or not isinstance(b.output, TensorProxy):
            return None
        left, right = b.args
        for value, other, is_left in ((left, right, True), (right, left, False)):
            number = self._number(value)
            if number is None or not isinstance(other, TensorProxy) or self._number(other) is not None:
                continue
            if (not isinstance(value, TensorProxy) and b is whole) or not is_like(other, b.output):
                continue
            if is_left and b.sym.id is Ids.MUL:
                return _recorded(b, ltorch.mul, other, number)
            if is_left and b.sym.id is Ids.ADD:
                return _recorded(b, ltorch.add, other, number)
            if not is_left:
                function = {Ids.MUL: ltorch.mul, Ids.ADD: ltorch.add, Ids.SUB: ltorch.sub, Ids.DIV: ltorch.true_divide}[b.sym.id]
                return _recorded(b, function, other, number)
        return None

    def _as_product(self, b: BoundSymbol) -> BoundSymbol | None:
        """A matrix times rows that each were a tensor of their own, between two reshapes: they are the rows of one tensor."""
        product = self.maker.get(b.args[0].name)
        if product is None or core(product).sym.id not in _PRODUCTS or self.uses[b.args[0].name] > 1:
            return None
        rows, matrix = core(product).args
        reshape = self.maker.get(rows.name)
        if reshape is None or core(reshape).sym.id is not Ids.RESHAPE or matrix.ndim != 2:
            return None
        a = core(reshape).args[0]
        if a.ndim < 2 or tuple(rows.shape) != (*a.shape[:-1], 1, a.shape[-1]):
            return None
        return _recorded(b, ltorch.matmul, a, matrix)


def _held(value: Any, dtype: dtypes.dtype) -> Number | None:
    """The number that a tensor of a dtype holds, which is filled with a value; None where that is no number, or an error of torch's."""
    if not isinstance(value, int | float) or isinstance(value, bool) or dtypes.is_boolean_dtype(dtype):
        return None
    try:
        return filling(value, dtype)
    except RuntimeError:
        return None


def _is_neutral(operation: prims.PrimIDs, number: Number | None, other: TensorProxy) -> bool:
    """Whether a number beside a tensor is the one that changes nothing: of zeros it keeps the sign."""
    if operation is Ids.MUL or number != 0 or not dtypes.is_inexact_dtype(other.dtype):
        return number == (1 if operation is Ids.MUL else 0)
    return math.copysign(1, number) == (1 if operation is Ids.SUB else -1)


def _as_unsqueeze(b: BoundSymbol) -> BoundSymbol | None:
    """A broadcast that only puts in one dimension of size 1, which executors would otherwise write as two operations."""
    a, _, dims = b.args
    added = [d for d in range(b.output.ndim) if d not in dims]
    if len(added) != 1 or a.numel != b.output.numel or b.output.shape[added[0]] != 1:
        return None
    return _recorded(b, ltorch.unsqueeze, a, added[0])


_ARITHMETIC: dict[Any, Callable] = {
    Ids.MUL: lambda a, b: a * b,
    Ids.ADD: lambda a, b: a + b,
    Ids.SUB: lambda a, b: a - b,
    Ids.DIV: lambda a, b: a / b,
    Ids.NEG: lambda a: -a,
}


def core(b: BoundSymbol) -> BoundSymbol:
    """The one operation that a composite consists of, if it does nothing else: ``prims.mul`` for ``torch.mul``."""
    while b.subsymbols:
        parts = without_dead_code(b.subsymbols, {p.name for p in b.flat_proxy_outs}) if len(b.subsymbols) > 1 else b.subsymbols
        if len(parts) != 1 or not _same_proxies(parts[0].output, b.output):
            break
        b = parts[0]
    if len(b.subsymbols) > 1 and isinstance(b.output, TensorProxy):
        # a chain of copies around one operation, as in a sum whose dtype is that of its argument
        real = [core(s) for s in b.subsymbols]
        if all(s.sym.id in _COPIES for s in real):
            source: Any = b.output
            by_output = {s.output.name: s.args[0] for s in real}
            while isinstance(source, Proxy) and source.name in by_output:
                source = by_output[source.name]
            return prims.shallow_copy.bind(source, output=b.output)
    return b


def _same_proxies(a: Any, b: Any) -> bool:
    return isinstance(a, Proxy) and isinstance(b, Proxy) and a.name == b.name


def _is_effect(b: BoundSymbol) -> bool:
    """Whether it is done once for each time it stands in the program, and even where nobody has its results."""
    is_kept = not b.flat_proxy_outs or has_tags(b, {prims.OpTags.DONT_DCE}) or draws(b)
    return is_kept or any(_is_effect(s) for s in b.subsymbols)


def _may_stand_for(p: Any, out: Any) -> bool:
    """Whether uses of `out` may become uses of `p`: they look the same to a program, and to reverse mode."""
    if not isinstance(p, TensorProxy) or not isinstance(out, TensorProxy) or not is_like(p, out):
        return False
    return (ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags) == (ProxyTag.DETACHED_AUTOGRAD_GRAPH in out.tags)


def _same_outputs(a: BoundSymbol, b: BoundSymbol) -> bool:
    pairs = list(zip(a.flat_outs, b.flat_outs, strict=False))
    return len(a.flat_outs) == len(b.flat_outs) and all(_may_stand_for(p, q) for p, q in pairs)


def _key(b: BoundSymbol) -> Hashable | None:
    """Equal for operations that compute the same."""
    try:
        key = (b.sym.id or b.sym.name, _tree_key(b.args), _tree_key(b.kwargs))
        hash(key)
    except TypeError:
        return None
    return key


def _tree_key(tree: Any) -> Hashable:
    leaves, spec = tree_flatten(tree)
    return str(spec), tuple((type(v).__name__, v.name) if isinstance(v, Proxy) else _number_key(v) for v in leaves)


def _number_key(v: Any) -> Hashable:
    if isinstance(v, float) and math.isnan(v):
        return "nan"
    return type(v).__name__, math.copysign(1, v) if isinstance(v, float) else 0, v


def _recorded(b: BoundSymbol, function: Callable, *args: Any) -> BoundSymbol | None:
    """`function` of `args` as a bound symbol that makes the output of `b`."""
    with scope(get_tracectx()) as written:
        out = function(*args)
    if len(written) != 1 or not is_like(out, b.output):
        return None
    new = written[0].from_bsym_swap_proxies({variableify(out): b.output})
    return new.from_bsym(source_filename=b.source_filename, source_positions=b.source_positions)


# -- backwards as one operation -----------------------------------------------------------------------------------------


Ids = prims.PrimIDs

_COSTLY = frozenset({Ids.MATMUL, Ids.LINEAR, Ids.CONVOLUTION, Ids.SORT, Ids.TOPK, Ids.EMBEDDING})


class Grouped(NamedTuple):
    """One operation for a backward: ``backward(*cotangents)`` writes it and returns the gradients of `inputs`."""

    inputs: tuple[TensorProxy, ...]
    backward: Callable[..., Sequence[TensorProxy]]


def grouped(
    bsym: BoundSymbol,
    forward: Sequence[BoundSymbol],
    pull: Callable[[Sequence[TensorProxy]], Sequence[TensorProxy | None]],
    inputs: Sequence[TensorProxy],
    threshold: int,
) -> Grouped | None:
    """The backward of `bsym` as one operation; None if it is better taken apart.

    Args:
        bsym: the operation.
        forward: what its rules write for the forward.
        pull: writes the gradients of `inputs` for cotangents of the differentiable results.
        inputs: the arguments that get a gradient.
        threshold: how many operations are worth one of their own.
    """
    outs = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
    known = {o.name for o in outs}
    again = [b for b in forward if not {p.name for p in b.flat_proxy_outs} <= known]
    if any(_must_not_run_again(b) for b in again):
        return None
    cotangents = anew(filter(is_differentiable, outs))
    with scope(get_tracectx()) as written:
        written.extend(again)
        gradients = pull(cotangents)
        kept, gradients = tidied(written, tuple(gradients))
    if len(kept) <= threshold:
        return None
    made = {p.name for b in kept for p in b.flat_proxy_outs}
    used = {p.name for b in kept for p in b.flat_proxy_args} | {g.name for g in gradients if g is not None}
    saved = tuple(o for o in outs if o.name in used)
    given = {p.name for p in (*cotangents, *saved, *bsym.flat_proxy_args)}
    if used - made - given:
        return None
    mask = tuple(g is not None for g in gradients), tuple(o.name in used for o in outs)
    symbol = _symbol(bsym, mask, kept, ((*cotangents, *saved, *bsym.args), bsym.kwargs), gradients)

    def backward(*received: TensorProxy) -> Sequence[TensorProxy]:
        results = symbol(*received, *saved, *bsym.args, **bsym.kwargs)
        return results if isinstance(results, tuple) else (results,)

    return Grouped(tuple(p for p, g in zip(inputs, gradients, strict=True) if g is not None), backward)


def _symbol(bsym: BoundSymbol, mask: tuple, kept: Sequence[BoundSymbol], arguments: tuple, gradients: Sequence[Any]) -> Symbol:
    formal = [p for p in tree_flatten(arguments)[0] if isinstance(p, Proxy)]
    program = flat_program(formal, kept, [g for g in gradients if g is not None])

    def meta(*args: Any, **kwargs: Any) -> Any:
        actual = [p for p in tree_flatten((args, kwargs))[0] if isinstance(p, Proxy)]
        results = replayed(program, actual)
        return results if len(results) > 1 else results[0]

    name = f"{bsym.sym.name}_backward"
    return Symbol(name=name, meta=meta, id=BackwardId(bsym.sym.id or bsym.sym.name, mask), _bind_postprocess=print_without_module)


def _must_not_run_again(b: BoundSymbol) -> bool:
    if b.sym.id in _COSTLY or has_tags(b, {prims.OpTags.DONT_DCE}) or draws(b):
        return True
    if not b.subsymbols and not b.sym.is_prim:
        return True
    if b.sym.is_prim and not isinstance(b.sym.id, prims.PrimIDs):
        return True
    return any(_must_not_run_again(s) for s in b.subsymbols)
