"""Calls of torch's functions that stand in a trace: tried out without data, and transformed by ``torch.func`` when they run."""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from thunder_norm.context_variables import setting
from thunder_norm.functions.programs import flat_proxies, is_differentiable
from thunder_norm.functions.pulled_back import nothing_transforms, pulled_back
from thunder_norm.subclass.acquiring.aliasing import is_expanded, lies_once
from thunder_norm.tracing.torch_functions.fake_norms import PositiveDims, quiet
from thunder_norm.tracing.translation import for_torch
from thunder_norm.trees import flat_tensors, map_tensors
from thunder.core import devices
from thunder.core.proxies import TensorProxy

# -- what a call returns, and what it does to its arguments, found by running it without data ---------------------------


# They look at values, to check them or in ways that the shapes they return do not depend on: run on ones instead of without data.
_LOOKS_AT_VALUES = frozenset(
    {
        torch.quantile,
        torch.nanquantile,
        torch.Tensor.quantile,
        torch.Tensor.nanquantile,
        torch.cov,
        torch.corrcoef,
        torch.combinations,
        torch.istft,
        torch.Tensor.istft,
        torch.nn.functional.gaussian_nll_loss,
    }
)

# So does this one, in a way that its shapes do depend on: run on random numbers, of full rank, which it is to be given as well.
_NEEDS_FULL_RANK = frozenset({torch.linalg.lstsq})

_POSITION = "_thunder_norm_position"


class Trial(NamedTuple):
    """A call on tensors that stand for proxies.

    Attributes:
        result: what it returned, in tensors without data.
        changed: positions, among the tensors of the arguments, of those that it changed in place.
        views: results that share memory with an argument: positions of both.  Arguments that were changed are no results.
    """

    result: Any
    changed: tuple[int, ...]
    views: tuple[tuple[int, int], ...]

    @property
    def outs(self) -> list[torch.Tensor]:
        """The tensors of the result that are no arguments changed in place."""
        return [t for t in flat_tensors(self.result) if position_of(t) not in self.changed]


def position_of(t: torch.Tensor) -> int | None:
    """Which argument a tensor of a trial is."""
    return getattr(t, _POSITION, None)


def try_out(function: Callable, args: tuple, kwargs: dict) -> Trial:
    """Call a torch function with proxies in its arguments.

    Raises:
        DataDependentOutputException, DynamicOutputShapeException: it needs values.
        whatever torch raises for these arguments.
    """
    make = _values_for(function)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if make is torch.empty else contextlib.nullcontext()
    with mode, PositiveDims(), torch.no_grad(), quiet():
        given, tensors = _samples((args, kwargs), make)
        before = [t._version for t in tensors]
        result = function(*given[0], **given[1])
    return _tried(result, tensors, before)


def _tried(result: Any, tensors: Sequence[torch.Tensor], before: Sequence[int]) -> Trial:
    changed = tuple(i for i, t in enumerate(tensors) if t._version != before[i])
    trial = Trial(result, changed, ())
    views = []
    for i, out in enumerate(trial.outs):
        for k, t in enumerate(tensors):
            if k not in changed and out.untyped_storage()._cdata == t.untyped_storage()._cdata:
                views.append((i, k))
    return trial._replace(views=tuple(views))


def views_in_cpp(function: Callable, args: tuple, kwargs: dict) -> tuple[tuple[int, int], ...] | None:
    """`Trial.views` of a function of torch's that is written in C++, where tensors of the device "meta" tell; None where they do not.

    They know no device, and of values nothing, and a call of theirs is not seen by Python: it takes a twentieth of the time.
    """
    if _values_for(function) is not torch.empty or any(map(_names_a_device, tree_leaves((args, kwargs)))):
        return None
    try:
        with _disable_current_modes(), torch.no_grad():
            given, tensors = _samples((args, kwargs), _on_meta)
            before = [t._version for t in tensors]
            return _tried(function(*given[0], **given[1]), tensors, before).views
    except Exception:  # noqa: BLE001 - what it is shows where the device is known
        return None


def _names_a_device(value: Any) -> bool:
    return isinstance(value, str | torch.device | devices.Device)


def _on_meta(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _values_for(function: Callable) -> Callable:
    """What makes the tensors that a function is tried on."""
    if function in _LOOKS_AT_VALUES:
        return torch.ones
    return _random if function in _NEEDS_FULL_RANK else torch.empty


def _random(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    generator = torch.Generator(options["device"]).manual_seed(0)  # the user's is not to move
    return torch.randn(shape, generator=generator, **options)


def _samples(tree: Any, make: Callable) -> tuple[Any, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []

    def sample(v: Any) -> Any:
        if not isinstance(v, TensorProxy):
            return for_torch(v)
        t = make(tuple(v.shape), dtype=for_torch(v.dtype), device=for_torch(v.device))
        setattr(t, _POSITION, len(tensors))
        tensors.append(t)
        return t

    return tree_map(sample, tree), tensors


# -- transformed by torch.func: run_*(run, ...) takes and returns tensors, meta_*(meta, ...) proxies --------------------


# Whether what runs is being differentiated.
_is_differentiated: contextvars.ContextVar[bool] = contextvars.ContextVar("is_differentiated", default=False)


class Forward(enum.Enum):
    """What torch's forward mode of an operation is worth.

    The tangents of ``torch.linalg.solve``, det, slogdet and others use factors that forward mode takes for constants: torch's own
    derivatives of its forward mode, in either direction, are wrong for them, and so is its forward mode in a batch of batches.  That of
    ``torch.triangular_solve`` pushes the half of the matrix that the operation does not read, and that of ``torch.cholesky_inverse`` is
    another function's.  Reverse mode is right for all of them.
    """

    RIGHT = "right"
    WRONG_INSIDE = "wrong where it is differentiated, and in a batch of batches"
    WRONG = "wrong"

    @staticmethod
    def of(name: str) -> Forward:
        """That of the operation of a name: ``linalg_solve``, ``torch_linalg_solve``, ``_linalg_slogdet``."""
        name = name.removeprefix("torch_").removeprefix("_").removeprefix("linalg_")
        if name in ("triangular_solve", "cholesky_inverse"):
            return Forward.WRONG
        return Forward.WRONG_INSIDE if name in _WITH_FACTORS else Forward.RIGHT


_WITH_FACTORS = frozenset("cholesky_solve det logdet lu_solve slogdet solve solve_ex solve_triangular tensorsolve".split())

# How many batches what runs is in.
_num_batches: contextvars.ContextVar[int] = contextvars.ContextVar("num_batches", default=0)


# Their annotations do not say that what they return depends on has_aux.
_jvp: Any = torch.func.jvp
_vjp: Any = torch.func.vjp


def _is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def meta_jvp(meta: Callable, args: tuple, kwargs: dict, tangents: Sequence[TensorProxy | None]) -> tuple[TensorProxy, ...]:
    """The proxies of what `run_jvp` returns."""
    results = flat_proxies(meta(*args, **kwargs))
    return *results, *(TensorProxy(like=p) for p in results if is_differentiable(p))


def run_jvp(
    run: Callable, args: tuple, kwargs: dict, tangents: Sequence[torch.Tensor | None], forward: Forward
) -> tuple[torch.Tensor, ...]:
    """All results, then the tangents of the floating ones; `tangents` has one, or None, for each tensor in (args, kwargs)."""
    varying = tuple(i for i, t in enumerate(tangents) if t is not None)
    function, points = _function_of(run, (args, kwargs), varying)
    is_inside = _is_differentiated.get() or _num_batches.get() >= 2
    is_backwards = forward is Forward.WRONG or (forward is Forward.WRONG_INSIDE and is_inside)
    results, pushed = _push(function, points, tuple(tangents[i] for i in varying), is_backwards)
    return *results, *pushed


def _function_of(
    run: Callable, arguments: tuple[tuple, dict], varying: Sequence[int]
) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    """`run` as a function of the tensors at some positions, and these tensors; it returns (its floating results, all its results)."""
    tensors = flat_tensors(arguments)

    def function(*values: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        given = list(tensors)
        for i, v in zip(varying, values, strict=True):
            given[i] = v
        remaining = iter(given)
        args, kwargs = map_tensors(lambda t: next(remaining), arguments)
        results = flat_tensors(run(*args, **kwargs))
        return tuple(t for t in results if _is_float(t)), results

    return function, tuple(tensors[i] for i in varying)


def _push(function: Callable, points: tuple, directions: tuple, is_backwards: bool) -> tuple[tuple, tuple]:
    """Results and tangents; by two reverse modes where torch has no forward mode, or where that is wrong.

    Others go forwards: reverse over reverse of logcumsumexp is NaN, and for directions that leave the symmetric matrices the two modes
    of cholesky differ.

    Programs run with gradients disabled, under which some of torch's formulas for gradients (``linalg_det_backward``,
    ``linalg_solve_backward``) choose variants that cannot be differentiated: of a function that is a gradient they would be.
    """
    with torch.enable_grad():
        first, second = (_push_backwards, _push_forwards) if is_backwards else (_push_forwards, _push_backwards)
        try:
            return first(function, points, directions)
        except (NotImplementedError, RuntimeError) as e:
            try:
                return second(function, points, directions)
            except (NotImplementedError, RuntimeError):
                raise e from None


def _push_forwards(function: Callable, points: tuple, directions: tuple) -> tuple[tuple, tuple]:
    # torch lays a direction out as its point lies, and cannot write into one element several times
    points = tuple([t.contiguous() if is_expanded(t) or not lies_once(t) else t for t in points])
    with setting(_is_differentiated, True):
        _, pushed, results = _jvp(function, points, directions, has_aux=True)
    return results, pushed


def _push_backwards(function: Callable, points: tuple, directions: tuple) -> tuple[tuple, tuple]:
    with setting(_is_differentiated, True):
        floating, pull, results = _vjp(function, *points, has_aux=True)
    _, push = _vjp(pull, tuple(torch.zeros_like(t) for t in floating))
    return results, push(directions)[0]


def meta_vjp(
    meta: Callable, args: tuple, kwargs: dict, cotangents: Sequence[TensorProxy | None], wanted: Sequence[bool]
) -> tuple[TensorProxy, ...]:
    """The proxies of what `run_vjp` returns."""
    inputs = [p for p in flat_proxies((args, kwargs)) if is_differentiable(p)]
    return tuple(TensorProxy(like=p) for p, w in zip(inputs, wanted, strict=True) if w)


def run_vjp(
    run: Callable, args: tuple, kwargs: dict, cotangents: Sequence[torch.Tensor | None], wanted: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Gradients of the floating tensors in (args, kwargs) that are wanted; `cotangents` has one, or None, for each floating result.

    Results without a cotangent are left out: torch's formulas for the eigenvectors give NaN for zeros where those of the eigenvalues
    alone are finite.
    """
    floating = [i for i, t in enumerate(flat_tensors((args, kwargs))) if _is_float(t)]
    varying = tuple(i for i, w in zip(floating, wanted, strict=True) if w)
    function, points = _function_of(run, (args, kwargs), varying)

    def used(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t for t, g in zip(function(*values)[0], cotangents, strict=True) if g is not None)

    received = tuple(g for g in cotangents if g is not None)
    is_alone = not _is_differentiated.get() and nothing_transforms((args, kwargs, received))
    # see `_push`: the other variants are wrong in a batch of batches as well
    with torch.enable_grad(), setting(_is_differentiated, True):
        if is_alone:
            with contextlib.suppress(RuntimeError):  # in some arguments, `pos_weight`, torch.func alone differentiates
                return pulled_back(used, points, received)
        _, pull = _vjp(used, *points)
        return pull(received)


def meta_vmap(
    meta: Callable, axis_size: int, randomness: str, in_dims: Sequence[int | None], args: tuple, kwargs: dict
) -> tuple[TensorProxy, ...]:
    """The proxies of what `run_vmap` returns."""
    leaves, spec = tree_flatten((args, kwargs))
    dims = iter(in_dims)
    samples = [_sample(v, next(dims)) if isinstance(v, TensorProxy) else v for v in leaves]
    sample_args, sample_kwargs = tree_unflatten(samples, spec)
    results = flat_proxies(meta(*sample_args, **sample_kwargs))
    return tuple(TensorProxy(like=p, shape=(axis_size, *p.shape)) for p in results)


def _sample(p: TensorProxy, dim: int | None) -> TensorProxy:
    return p if dim is None else TensorProxy(like=p, shape=(*p.shape[:dim], *p.shape[dim + 1 :]))


def run_vmap(
    run: Callable, axis_size: int, randomness: str, in_dims: Sequence[int | None], args: tuple, kwargs: dict
) -> tuple[torch.Tensor, ...]:
    """All results, with the batch dimension first; `in_dims` has one, or None, for each tensor in (args, kwargs).

    One sample after the other where torch has no batching rule.
    """
    batched = tuple(i for i, d in enumerate(in_dims) if d is not None)
    function, values = _function_of(run, (args, kwargs), batched)
    dims = tuple(in_dims[i] for i in batched)
    token = _num_batches.set(_num_batches.get() + 1)
    samples = torch.empty(axis_size, 0)  # says how many there are, where numbers are drawn for each of what is the same for all

    def of_sample(_: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = function(*values)[1]
        if batched or any(map(torch._C._functorch.is_batchedtensor, results)):
            return results
        raise RuntimeError("torch has drawn once for all samples")

    try:
        return torch.func.vmap(of_sample, (0, *dims), randomness=randomness)(samples, *values)
    except RuntimeError as e:
        if "random operation" in str(e) or "support same randomness" in str(e):
            raise
    finally:
        _num_batches.reset(token)
    if axis_size == 0:  # of any sample, for the shapes
        sample = function(*(v.new_zeros((*v.shape[:d], *v.shape[d + 1 :])) for v, d in zip(values, dims, strict=True)))[1]
        return tuple(t.new_empty((0, *t.shape)) for t in sample)
    results = [function(*(v.select(d, i) for v, d in zip(values, dims, strict=True)))[1] for i in range(axis_size)]
    return tuple(torch.stack(column) for column in zip(*results, strict=True))
