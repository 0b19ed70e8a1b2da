"""Where a program rounds, by running it: each operation and its operands, and what of them is no number of the format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.norms.autocast import DEVICES
from thunder_norm.norms.eager_environment import Arithmetic, EagerEnvironment
from thunder_norm.op_names import op_key, op_name
from thunder_norm.report.precision.formats import Format, Formats, added, of_operands, of_result
from thunder_norm.report.precision.overflows import Overflows
from thunder_norm.report.precision.trials import Error, Trials, Tried, is_rounded
from thunder_norm.trees import flat_tensors, map_tensors

# What stops derivatives and not roundings.
_DETACHING = frozenset(("detach", "data", "alias"))
# From the largest error of a rounding to its root mean square, errors being uniform between minus and plus half a spacing.
TYPICAL = 3**-0.5


@dataclass(frozen=True)
class Point:
    """One tensor that is rounded.

    Attributes:
        tensor: as the operation uses it, in the graph of derivatives.
        error: of each entry; 0 where it is a number of the format.
        row: which operation rounds it, by its place in the report.
        source: the tensor of the program that moves by that: a result, an input or a parameter.
        dtype: of the format.
        passed_on: where no norm rule follows `source` (running statistics): results that move by that instead, and each by how much.
    """

    tensor: torch.Tensor
    error: Error
    row: int
    source: torch.Tensor
    dtype: torch.dtype
    passed_on: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


def _name(func: Callable) -> str:
    key = op_key(func)
    return key if isinstance(key, str) else getattr(func, "__name__", str(key))


class _InFormats(Arithmetic):
    """Arithmetic in formats: which operands and results are rounded, and to what.

    The program's own constants count as numbers of every format: what is rounded are inputs, parameters, what is made of them, and results.
    """

    def __init__(self, formats: Formats, inputs: Iterable[torch.Tensor]):
        self.formats = formats
        self._known: dict[int, tuple[torch.Tensor, torch.dtype | None]] = {id(t): (t, None) for t in inputs}

    def _know(self, t: torch.Tensor, form: Format) -> None:
        self._known[id(t)] = t, form.dtype  # kept, so that its id stays its own

    def _know_all(self, result: Any) -> None:
        """These are results, in no format yet."""
        for y in flat_tensors(result):
            self._known.setdefault(id(y), (y, None))

    def _is_constant(self, environment: EagerEnvironment, t: torch.Tensor) -> bool:
        lifting = environment.lifting
        return id(t) not in self._known and lifting.name_of(t) is None and id(t) not in lifting.derived

    def _operand(self, environment: EagerEnvironment, t: torch.Tensor, form: Format) -> bool:
        """Whether an operand is to be rounded to the format of an operation: it may be in that already."""
        if not is_rounded(t) or self._is_constant(environment, t):
            return False
        found = self._known.get(id(t))
        return found is None or found[1] != form.dtype

    def run(self, environment: EagerEnvironment, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operation in its format.

        Raises:
            NormMismatchError: under autocast, which gives operations other dtypes than the program has.
        """
        if any(map(torch.is_autocast_enabled, DEVICES)):
            raise _under_autocast(environment)
        op = _name(func)
        form = self.formats.of(op, environment.module_path[-1])
        plain = added(op, args, kwargs)

        def of(t: torch.Tensor) -> Format | None:
            if form is None:
                return None
            wanted = of_result(form) if t is plain else of_operands(form, op)
            return wanted if self._operand(environment, t, wanted) else None

        return self._run(environment, func, args, kwargs, form, of)

    def _run(self, environment: Any, func: Any, args: tuple, kwargs: dict, form: Format | None, of: Callable) -> Any:
        raise NotImplementedError


class Recorder(_InFormats):
    """Runs a program in the dtypes that it has, with derivatives, and notes what low precision would round.

    Whether an operation's result is a number of its format is tried: a view, a maximum or a lookup of numbers of the format is, a sum is not.
    """

    def __init__(self, formats: Formats, inputs: Iterable[torch.Tensor]):
        super().__init__(formats, inputs)
        self.points: list[Point] = []
        self._of_operands: dict[int, Point] = {}  # by what operations take
        self._moving: dict[int, torch.Tensor] = {}  # kept, so that their ids stay their own
        self._overflows = Overflows()
        self._kept: list[torch.Tensor] = []
        self._used: dict[tuple[int, torch.dtype | None], torch.Tensor] = {}

    def _run(self, environment: Any, func: Any, args: tuple, kwargs: dict, form: Format | None, of: Callable) -> Any:
        row = len(environment.noted)
        with torch.inference_mode(False), torch.enable_grad():
            tried = None if form is None else self._try(func, args, kwargs, of_result(form), of)
            found = self._overflows.through(func, args, kwargs)
            func, args, kwargs = _differentiable(func, args, kwargs)
            used_args, used_kwargs = map_tensors(lambda t: self._use(t, of(t), row), (args, kwargs))
            try:
                result = func(*used_args, **used_kwargs)
            except RuntimeError as e:
                raise _without_derivative(func, environment, e) from e
            if type(result) is tuple:  # where one is made of another, what moves it is not what moves that
                result = tuple(y.view_as(y) if isinstance(y, torch.Tensor) and y.requires_grad else y for y in result)
            if _name(func) in _DETACHING:
                result = used_args[0].view_as(used_args[0])
            if func is _by_statistics:
                self._pass_on(result, *used_args)
            if tried is not None:
                result = _variables(result, tried)
        if form is None or tried is None:
            self._know_all(result)
        else:
            self._note_results(flat_tensors(result), tried, of_result(form), row)
        if any(self._moves(t) for t in flat_tensors((args, kwargs))):
            self._moving.update((id(y), y) for y in flat_tensors(result))
        if found is not None:
            self._overflows.used(args, kwargs, flat_tensors(result), found)
        return result

    def is_absorbed(self, point: Point, results: Sequence[torch.Tensor]) -> bool:
        """Whether entries of a point became infinite, and made no difference to the results of the program (a mask)."""
        return bool(point.error.most.isinf().any()) and self._overflows.are_absorbed(point.source, {id(y) for y in results})

    def _use(self, t: torch.Tensor, form: Format | None, row: int) -> torch.Tensor:
        """An operand as the operation takes it: one tensor for all operations that take it rounded to the same format."""
        if not is_rounded(t) or form is None and t.requires_grad:
            return t
        key = id(t), None if form is None else form.dtype
        if key not in self._used:
            alias = t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
            self._used[key] = alias
            self._kept.append(t)  # its id stays its own
            error = None if form is None else _of_operand(t, form)
            if error is not None and form is not None:
                self._moving[id(t)] = t
                self._of_operands[id(alias)] = point = Point(alias, error, row, t, form.dtype)
                self.points.append(point)
        return self._used[key]

    def _pass_on(
        self, y: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: Any, _: Any, eps: float
    ) -> None:
        """How far the result of a normalization moves by roundings of the statistics that it is given, to first order."""
        with torch.no_grad():
            slope = (var + eps).rsqrt() * (1.0 if weight is None else weight.abs())
            slopes = _of_channels(slope, x), _of_channels(slope / (2 * (var + eps)), x) * (x - _of_channels(mean, x)).abs()
            for t, by in zip((mean, var), slopes, strict=True):
                if (point := self._of_operands.get(id(t))) is not None:
                    point.passed_on.append((y, (by * _of_channels(point.error.most, x)).expand(y.shape)))

    def _moves(self, t: torch.Tensor) -> bool:
        """Whether roundings so far move a tensor, beyond its own rounding to a format."""
        return id(t) in self._moving

    def _try(self, func: Any, args: tuple, kwargs: dict, form: Format, of: Callable) -> list[Tried | None]:
        """How far the results are from exact ones, if the operands are numbers of their formats."""

        def given(t: torch.Tensor) -> Format | None:
            if not is_rounded(t):
                return None
            found = self._known.get(id(t))
            return of(t) or (None if found is None or found[1] is None else Format(found[1]))

        return Trials(func, args, kwargs, form, given, self._moves).results()

    def _note_results(self, results: tuple[torch.Tensor, ...], tried: list[Tried | None], form: Format, row: int) -> None:
        for y, found in zip(results, tried, strict=True):
            if not is_rounded(y) or found is None:
                continue
            self._know(y, form)
            error = found.error(y, form)
            if error is not None:
                self._moving[id(y)] = y
                self.points.append(Point(y, error, row, y, form.dtype))
                self._overflows.begin(y, error.most.isinf())


def _variables(result: Any, tried: Iterable[Tried | None]) -> Any:
    """A result that is rounded though no operand went into it (numbers drawn, a tensor filled): as one that has derivatives."""
    made = {
        id(y): y.detach().requires_grad_().clone()
        for y, found in zip(flat_tensors(result), tried, strict=True)
        if is_rounded(y) and not y.requires_grad and found is not None and (found.may_be.any() or found.beyond.any())
    }
    return map_tensors(lambda y: made.get(id(y), y), result) if made else result


def _under_autocast(environment: EagerEnvironment) -> NormMismatchError:
    return NormMismatchError(
        with_details(
            "precision: a program under autocast",
            at=environment.user_location(),
            why="autocast rounds already: what it does would count as exact",
            instead='the program without autocast, with formats by operation: precision={"linear": torch.bfloat16}, or norm_report '
            "without precision",
        )
    )


def _without_derivative(func: Callable, environment: EagerEnvironment, error: RuntimeError) -> NormMismatchError:
    return NormMismatchError(
        with_details(
            f"precision: {op_name(func)} cannot be recorded with derivatives",
            at=environment.user_location(),
            why=str(error).partition("\n")[0],
            instead="norm_report without precision",
        )
    )


# Where functions of torch take what a batch norm, or an instance norm, is given.
_NORMALIZATIONS: dict[Callable, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    torch.instance_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}


def _differentiable(func: Callable, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
    """The same result, with derivatives in the statistics that a normalization keeps, too, and without writing into them."""
    names = _NORMALIZATIONS.get(func)
    if names is None:
        return func, args, kwargs
    given = {"running_mean": None, "running_var": None, "weight": None, "bias": None, "eps": 1e-5}
    given["training"] = func is F.instance_norm  # what is the default
    given |= {**dict(zip(names, args, strict=False)), **kwargs}
    has_own = given.get("use_input_stats", given["training"])
    x, weight, bias, eps = (given[name] for name in ("input", "weight", "bias", "eps"))
    if not has_own and given["running_mean"] is not None:
        return _by_statistics, (x, given["running_mean"], given["running_var"], weight, bias, eps), {}
    if func in (F.batch_norm, torch.batch_norm):
        return F.batch_norm, (x, None, None, weight, bias, True), {"eps": eps}
    return F.instance_norm, (x, None, None, weight, bias, True), {"eps": eps}


def _by_statistics(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    y = (x - _of_channels(mean, x)) * _of_channels((var + eps).rsqrt(), x)
    y = y if weight is None else y * _of_channels(weight, x)
    return y if bias is None else y + _of_channels(bias, x)


def _of_channels(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number for each channel of x, the second dimension."""
    return t.reshape(-1, *[1] * (x.ndim - 2))


def _of_operand(t: torch.Tensor, form: Format) -> Error | None:
    where = form.rounded(t) != t
    if not where.any():
        return None
    error = torch.where(where, form.half_spacing(t), 0.0)
    return Error(error, error)


class Emulated(_InFormats):
    """Runs a program in its formats: operands and results are rounded to them, sums inside an operation are not."""

    def _run(self, environment: Any, func: Any, args: tuple, kwargs: dict, form: Format | None, of: Callable) -> Any:
        def given(t: torch.Tensor) -> torch.Tensor:
            wanted = of(t)
            return t if wanted is None else wanted.rounded(t)

        given_args, given_kwargs = map_tensors(given, (args, kwargs))
        result = func(*given_args, **given_kwargs)
        if form is None:
            self._know_all(result)
            return result
        return map_tensors(lambda y: self._rounded(y, of_result(form)), result)

    def _rounded(self, y: torch.Tensor, form: Format) -> torch.Tensor:
        if not is_rounded(y):
            return y
        found = form.rounded(y)
        found = y if torch.equal(found, y) else found
        self._know(found, form)
        return found
