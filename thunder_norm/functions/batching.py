"""Batching: a program for one sample as a program for many, without a loop.

``evaluate_vmap`` walks a flat program and emits each operation once, for all samples.  A value either has a batch dimension, and then
always as its first, or is the same for all samples; what does not depend on a batched value is emitted as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from thunder_norm.errors import DataDependentError, TransformError, with_details
from thunder_norm.functions.opaque import derived, is_whole, operation_of
from thunder_norm.functions.programs import Values, detach, flat_proxies, is_bookkeeping, is_detached, outputs_of
from thunder_norm.functions.registry import batching_rules, decomposed, drawing_rules, missing_rule
from thunder_norm.scalars import is_count
from thunder_norm.tracing.locations import at_line_of, location_of
from thunder_norm.tracing.torch_functions.random_numbers import draws
import thunder.torch as ltorch
from thunder import clang
from thunder.core import prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx

Randomness = Literal["error", "different", "same"]
Draws = dict[str, Any]  # what was drawn once for all samples, and what draws it, by the names of the program's proxies

# What draws numbers, and at which place among its arguments their shape is.
_DRAWS = {prims.PrimIDs.UNIFORM: 0, prims.PrimIDs.UNIFORM_PHILOX: 0, prims.PrimIDs.RANDN: 0, prims.PrimIDs.RANDINT: 2}

# What reads a value out of a tensor.
_READS_VALUES = frozenset({prims.PrimIDs.ITEM})


def check_batches(name: str, randomness: Any, chunk_size: Any) -> None:
    """Refuse options that say nothing of how a transform called `name` batches.

    Raises:
        TransformError: one does not.
    """
    if randomness not in get_args(Randomness):
        raise TransformError(
            with_details(f"{name}: randomness is {randomness!r}", expected=" or ".join(map(repr, get_args(Randomness))))
        )
    if chunk_size is not None and not is_count(chunk_size):
        raise TransformError(with_details(f"{name}: chunk_size is {chunk_size!r}", expected="None or a positive int"))


@langctx(Languages.TORCH)
def evaluate_vmap(
    trace: TraceCtx,
    args: Sequence[Any],
    in_dims: Sequence[int | None],
    axis_size: int,
    randomness: Randomness = "error",
    draws: Draws | None = None,
) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
    """The results of a flat program for `axis_size` samples at once, and the batch dimension of each (None: same for all).

    For a program f of x and w with ``in_dims = (1, None)``, result i along the returned dimension is ``f(x[:, i], w)``.

    Args:
        trace: the program, for one sample.
        args: one value for each of ``trace.args``, with the batch dimension.
        in_dims: where each has it, not negative; None where it has none.
        axis_size: the number of samples.
        randomness: what a random operation does: raise ("error"), draw for each sample ("different"), or once for all ("same").
        draws: kept from one call to the next where several make up one batch: "same" is then the same in all of them.

    Raises:
        TransformError: a random operation and ``randomness="error"``, or a rule that returns something of a wrong shape.
        DataDependentError: the program reads a number out of a batched tensor.
        MissingTransformRuleError: an operation has no rule, no decomposition and no implementation in torch.
    """
    program = _Program(axis_size, randomness, {} if draws is None else draws)
    for p, value, dim in zip(trace.args, args, in_dims, strict=True):
        program.values[p] = value if not dim else ltorch.movedim(value, dim, 0)
        if dim is not None:
            program.batched.add(p.name)
    program.run(trace.bound_symbols)
    results = outputs_of(trace)
    return tuple(program.values.read(results)), tuple(map(program.dim_of, results))


def evaluate_in_chunks(
    trace: TraceCtx,
    args: Sequence[Any],
    in_dims: Sequence[int | None],
    axis_size: int,
    randomness: Randomness,
    chunk_size: int | None,
) -> tuple[Sequence[Any], Sequence[int | None]]:
    """As `evaluate_vmap`, some samples at a time: it needs less memory, and gives the same."""
    chunk = chunk_size or axis_size
    if chunk >= axis_size:
        return evaluate_vmap(trace, args, in_dims, axis_size, randomness)
    draws: Draws = {}
    parts = []
    for begin in range(0, axis_size, chunk):
        size = min(chunk, axis_size - begin)
        given = [
            v if d is None else clang.slice_in_dim(v, begin, begin + size, dim=d) for v, d in zip(args, in_dims, strict=True)
        ]
        parts.append(evaluate_vmap(trace, given, in_dims, size, randomness, draws))
    out_dims = parts[0][1]
    columns = zip(*(outs for outs, _ in parts), strict=True)
    return [c[0] if d is None else ltorch.cat(list(c), d) for c, d in zip(columns, out_dims, strict=True)], out_dims


class _Program:
    """The values of a program's proxies while it runs, and which of them have a batch dimension."""

    def __init__(self, axis_size: int, randomness: Randomness, draws: Draws) -> None:
        self.axis_size = axis_size
        self.randomness = randomness
        self.draws = draws
        self.values = Values()
        self.batched: set[str] = set()

    def dim_of(self, value: Any) -> int | None:
        """0 if the value of a proxy has a batch dimension, None otherwise."""
        return 0 if isinstance(value, Proxy) and value.name in self.batched else None

    def dims_of(self, tree: Any) -> Any:
        """`dim_of` throughout lists and tuples."""
        return tuple(map(self.dims_of, tree)) if isinstance(tree, list | tuple) else self.dim_of(tree)

    def run(self, bsyms: Sequence[BoundSymbol]) -> None:
        for bsym in bsyms:
            if is_bookkeeping(bsym) or (bsym.flat_proxy_outs and all(p in self.values for p in bsym.flat_proxy_outs)):
                continue
            if _is_random(bsym):
                with at_line_of(get_tracectx(), bsym):
                    self._draw(bsym)
            elif not self._is_batched(bsym):
                self.values.copy(bsym)
            elif not bsym.flat_proxy_outs and not _has_effect(bsym):
                continue  # it says something of the shape of one sample, which is written in the program as it is
            else:
                with at_line_of(get_tracectx(), bsym):
                    self._batch(bsym)
            if is_detached(bsym):
                self._detach(bsym)

    def _detach(self, bsym: BoundSymbol) -> None:
        """Have a reverse mode around the vmap take the results for constants; not what was given, where they are nothing else."""
        given = {v.name for v in map(self.values.get, bsym.flat_proxy_args) if isinstance(v, Proxy)}
        for p in bsym.flat_proxy_outs:
            value = self.values.get(p)
            if isinstance(value, TensorProxy):
                self.values[p] = prims.shallow_copy(value) if value.name in given else value
                detach(self.values.get(p))

    def _is_batched(self, bsym: BoundSymbol) -> bool:
        return any(p.name in self.batched for p in bsym.flat_proxy_args)

    def _batch(self, bsym: BoundSymbol) -> None:
        if bsym.sym.id is prims.PrimIDs.SHAPE:
            for p, size in zip(tree_flatten(bsym.output)[0], bsym.args[0].shape, strict=True):
                if isinstance(p, Proxy):
                    self.values[p] = size
        elif not self._apply_rule(bsym):
            if (parts := decomposed(bsym)) is not None:
                self.run(parts)
            elif bsym.subsymbols and not is_whole(bsym):
                self.run(bsym.subsymbols)
            else:
                self._batch_opaque(bsym)

    def _apply_rule(self, bsym: BoundSymbol) -> bool:
        """Whether there is a rule that has done it."""
        rule = batching_rules.find(bsym.sym)
        if rule is None or any(p.name in self.batched for p in flat_proxies(bsym.kwargs)):
            return False
        scope = get_tracectx().peek_scope()
        begin = len(scope)
        found = rule(self.axis_size, self.dims_of(bsym.args), *self.values.read(bsym.args), **self.values.read(bsym.kwargs))
        if found is NotImplemented:
            del scope[begin:]
            return False
        out, dims = found
        self._bind(bsym, tree_flatten(out)[0], dims)
        return True

    def _bind(self, bsym: BoundSymbol, results: Sequence[Any], dims: int | None | Sequence[int | None]) -> None:
        outputs = tree_flatten(bsym.output)[0]
        each = list(dims) if isinstance(dims, tuple | list) else [dims] * len(results)
        if not len(outputs) == len(results) == len(each):
            self._refuse_rule(
                bsym, returned=f"{len(results)} results, {len(each)} dimensions", expected=f"{len(outputs)} results"
            )
        for p, value, dim in zip(outputs, results, each, strict=True):
            if not isinstance(p, TensorProxy):
                continue
            if dim is not None:
                value = ltorch.movedim(value, dim, 0) if dim else value
                self.batched.add(p.name)
            wanted = tuple(p.shape) if dim is None else (self.axis_size, *p.shape)
            if tuple(value.shape) != wanted or value.dtype != p.dtype:
                self._refuse_rule(
                    bsym,
                    returned=f"a tensor of shape {tuple(value.shape)} and {value.dtype}, batch dimension {dim}",
                    expected=f"shape {wanted} and {p.dtype} once the batch dimension is the first",
                )
            self.values[p] = value

    def _refuse_rule(self, bsym: BoundSymbol, **details: str) -> None:
        raise TransformError(
            with_details(
                f"the batching rule of {bsym.sym.id} returned something else than it should", **details, at=location_of(bsym)
            )
        )

    def _batch_opaque(self, bsym: BoundSymbol) -> None:
        """Let torch batch an operation that nothing is known of."""
        operation = None if bsym.sym.id in _READS_VALUES else operation_of(bsym)
        outputs = flat_proxies(bsym.output)
        if not outputs and (operation is None or not operation.is_effect):
            raise DataDependentError(
                with_details(
                    f"{bsym.sym.name} reads a number out of a tensor that is different for each sample of vmap",
                    at=location_of(bsym),
                    instead="compute with tensors throughout, or pass what the number depends on with in_dims None",
                )
            )
        if operation is None:
            raise missing_rule(bsym, "batching")
        dims = tuple(map(self.dim_of, flat_proxies((bsym.args, bsym.kwargs))))
        args, kwargs = self.values.read(bsym.args), self.values.read(bsym.kwargs)
        results = derived("vmap", operation)(self.axis_size, self.randomness, dims, args, kwargs)
        for p, value in zip(outputs, results, strict=True):
            self.values[p] = value
            self.batched.add(p.name)

    def _draw(self, bsym: BoundSymbol) -> None:
        if self.randomness == "error":
            raise TransformError(
                with_details(
                    f"vmap met the random operation {bsym.sym.name}, and was not told what it should do",
                    at=location_of(bsym),
                    instead='vmap(..., randomness="different") draws for each sample, randomness="same" once for all',
                )
            )
        is_batched = self._is_batched(bsym)
        if self.randomness == "same" and is_batched and bsym.sym.name in _BY_VALUES:
            raise TransformError(
                with_details(
                    f'{bsym.sym.name} draws by values that are others for each sample, under vmap(..., randomness="same")',
                    at=location_of(bsym),
                    instead='randomness="different", or noise that is drawn for a tensor: mean + std * torch.randn_like(mean)',
                )
            )
        if (rule := drawing_rules.find(bsym.sym)) is not None:
            self._draw_by(rule, bsym)
        elif (parts := self._parts(bsym)) is not None:
            self.run(parts)
        elif self.randomness == "same" and _is_like_a_tensor(bsym):
            self._draw_like_a_sample(bsym)
        elif self.randomness == "same" and not is_batched:
            self._draw_once(bsym)
        elif bsym.subsymbols:
            self.run(bsym.subsymbols)
        elif bsym.sym.id in _DRAWS:
            args, place = list(self.values.read(bsym.args)), _DRAWS[bsym.sym.id]
            args[place] = (self.axis_size, *args[place])
            drawn = bsym.sym(*args, **self.values.read(bsym.kwargs))
            self._bind(bsym, [drawn], 0)
        elif self.randomness == "different" and self._apply_rule(bsym):
            return
        elif self.randomness == "same" or is_batched or flat_proxies((bsym.args, bsym.kwargs)):
            self._batch_opaque(bsym)
        else:
            self._draw_from_nothing(bsym)

    def _parts(self, bsym: BoundSymbol) -> list[BoundSymbol] | None:
        """What it consists of, under the same names in all chunks of a batch."""
        key = f"parts of {bsym.flat_proxy_outs[0].name}" if bsym.flat_proxy_outs else ""
        if key not in self.draws:
            self.draws[key] = decomposed(bsym)
        return self.draws[key]

    def _draw_by(self, rule: Callable, bsym: BoundSymbol) -> None:
        (p,) = flat_proxies(bsym.output)
        if self.randomness == "same" and p.name in self.draws:
            self.values[p] = self.draws[p.name]
            return
        size = None if self.randomness == "same" else self.axis_size
        drawn = rule(size, self.dim_of(bsym.args[0]), *self.values.read(bsym.args))
        self._bind(bsym, [drawn], None if size is None else 0)
        self.draws[p.name] = drawn

    def _draw_like_a_sample(self, bsym: BoundSymbol) -> None:
        (like,) = flat_proxies((bsym.args, bsym.kwargs))
        value = self.values.get(like)
        if self.dim_of(like) is not None and not all(p.name in self.draws for p in flat_proxies(bsym.output)):
            self.values[like] = value[0]
        self._draw_once(bsym)
        self.values[like] = value

    def _draw_once(self, bsym: BoundSymbol) -> None:
        outputs = flat_proxies(bsym.output)
        if all(p.name in self.draws for p in outputs):
            for p in outputs:
                self.values[p] = self.draws[p.name]
        else:
            self.values.copy(bsym)
            self.draws.update((p.name, self.values.get(p)) for p in outputs)

    def _draw_from_nothing(self, bsym: BoundSymbol) -> None:
        """One operation for each sample, of those that take no tensor whose batch dimension could say how many, nor a size."""
        place = _place_of_size(bsym)
        if place is not None:  # in one, as torch draws them: from 16 numbers on they are others than so many draws have
            args = [*bsym.args[:place], (self.axis_size, *bsym.args[place]), *bsym.args[place + 1 :]]
            self._bind(bsym, tree_flatten(bsym.sym(*args, **bsym.kwargs))[0], 0)
            return
        drawn = [tree_flatten(bsym.sym(*bsym.args, **bsym.kwargs))[0] for _ in range(self.axis_size)]
        self._bind(bsym, [ltorch.stack(list(values), 0) for values in zip(*drawn, strict=True)], 0)


# Whose numbers hang on values of their arguments: there are no same numbers for samples that have others, and torch refuses them.
_BY_VALUES = frozenset("_sample_dirichlet _standard_gamma bernoulli binomial multinomial normal poisson".split())


def _place_of_size(bsym: BoundSymbol) -> int | None:
    """Which argument of an operation that draws is the size of its result; None where there is none."""
    (p, *others) = flat_proxies(bsym.output)
    sizes = [i for i, a in enumerate(bsym.args) if isinstance(a, list | tuple) and tuple(a) == tuple(p.shape)]
    return sizes[0] if len(sizes) == 1 and not others else None


def _has_effect(bsym: BoundSymbol) -> bool:
    return prims.OpTags.DONT_DCE in (bsym.sym.tags or ()) or any(map(_has_effect, bsym.subsymbols))


@functools.cache
def _is_random_symbol(symbol: Any) -> bool:
    return prims.OpTags.RANDOM_OP in (symbol.tags or ())


def _is_like_a_tensor(bsym: BoundSymbol) -> bool:
    """Whether it draws numbers in the shape of a tensor, of whose values they do not depend: ``torch.rand_like``."""
    return re.search(r"rand(n|int)?_like", bsym.sym.name) is not None and len(flat_proxies((bsym.args, bsym.kwargs))) == 1


def _is_random(bsym: BoundSymbol) -> bool:
    """Whether an operation, or one it consists of, draws numbers."""
    if bsym.subsymbols:
        return any(map(_is_random, bsym.subsymbols))
    if _is_random_symbol(bsym.sym) or draws(bsym):
        return True
    operation = operation_of(bsym) if prims.OpTags.AUTO_REGISTERED in (bsym.sym.tags or ()) else None
    return operation is not None and operation.is_random


# -- what batching rules have in common --------------------------------------------------------------------------------
#
# A batch dimension, where there is one, is the first.


def sample_shape(value: TensorProxy, dim: int | None) -> tuple[int, ...]:
    """The shape of a value for one sample."""
    return tuple(value.shape) if dim is None else tuple(value.shape[1:])


def sample_ndim(value: TensorProxy, dim: int | None) -> int:
    """The rank of a value for one sample."""
    return value.ndim - (dim is not None)


def with_batch(axis_size: int, value: TensorProxy, dim: int | None) -> TensorProxy:
    """The value with a batch dimension, expanded if it has none."""
    return value if dim is not None else to_sample_shape(axis_size, value, dim, tuple(value.shape))


def to_sample_shape(axis_size: int, value: TensorProxy, dim: int | None, shape: Sequence[int]) -> TensorProxy:
    """The value with a batch dimension, and broadcast to `shape` for each sample, as torch broadcasts."""
    wanted = (axis_size, *shape)
    own = sample_shape(value, dim)
    if dim is not None and own == tuple(shape):
        return value
    begin = 1 + len(shape) - len(own)
    kept = ([0] if dim is not None else []) + list(range(begin, len(wanted)))
    return prims.broadcast_in_dim(value, wanted, tuple(kept))


def with_sample_ndim(value: TensorProxy, dim: int | None, ndim: int) -> TensorProxy:
    """A batched value with dimensions of size 1 put in, so that it broadcasts per sample with others of rank `ndim`."""
    missing = ndim - sample_ndim(value, dim)
    if dim is None or missing <= 0:
        return value
    return ltorch.reshape(value, (value.shape[0], *(1,) * missing, *value.shape[1:]))


def canonical(index: int, ndim: int) -> int:
    """A dimension of one sample, not negative."""
    return int(index) + ndim if index < 0 else int(index)


def shifted(index: int, ndim: int) -> int:
    """A dimension of one sample of rank `ndim`, as a dimension of the batch."""
    return canonical(index, ndim) + 1


def tensors_of(in_dims: Sequence[Any], args: Sequence[Any]) -> list[tuple[TensorProxy, int | None]]:
    """The tensors among arguments, with their batch dimensions."""
    return [(a, d) for a, d in zip(args, in_dims, strict=True) if isinstance(a, TensorProxy)]
