"""Which of torch's own operators run through `WrapperSubclass` in Thunder, and agree with eager.

    python -m tests.op_coverage --write     measure all of them, one by one, and write tests/op_coverage.txt and its page
    python -m tests.op_coverage NAME ...    measure those whose name contains one of the words

The first two sample inputs that torch's operator database has for an operator (CPU, float32) are taken, every tensor in them is
wrapped, and the program runs with gradients enabled, forward.  What eager itself cannot run through the wrapper does not count.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.subclasses import WrapperSubclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests import op_coverage_page
from tests.seeds import seeded
from thunder_norm.audit.op_db import leave_unittest
from thunder_norm.transforms import SubclassTransform
import thunder

LIST = Path(__file__).parent / "op_coverage.txt"
SAMPLES = 2
LARGEST = 20_000  # elements of a sample: larger ones test memory, not meaning

leave_unittest()  # a minute under pytest


class Disagreement(Exception):
    """What the traced program returned is not what eager returns."""


@dataclass(frozen=True, eq=False)
class Case:
    """An operator with one of its sample inputs, tensors apart from the rest."""

    name: str
    function: Callable
    leaves: tuple[Any, ...]
    spec: Any

    def tensors(self) -> list[torch.Tensor]:
        """Fresh wrappers around copies of the sample's tensors."""
        return [WrapperSubclass(v.detach().clone()) for v in self.leaves if isinstance(v, torch.Tensor)]


def op_name(op: Any) -> str:
    """The operator's name with its variant."""
    return f"{op.name}.{op.variant_test_name}".strip(".")


def cases(op: Any, dtype: torch.dtype = torch.float32, samples: int = SAMPLES) -> list[Case]:
    """The first samples of an operator that hold a tensor."""
    torch.manual_seed(seeded(0))
    found = []
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), samples):
        leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        if tensors and sum(t.numel() for t in tensors) <= LARGEST and all(t.layout is torch.strided for t in tensors):
            found.append(Case(op_name(op), op.op, tuple(leaves), spec))
    return found


def run(function: Callable, several: list[Case]) -> tuple[list, list]:
    """What `function` returns for fresh wrappers, under a fixed seed, and the wrappers after the call."""
    tensors = [t for case in several for t in case.tensors()]
    torch.default_generator.manual_seed(seeded(1))  # torch.manual_seed is slow under pytest: it looks at the stack
    with mock.patch.object(common_methods_invocations, "wrapper_set_seed", _without_seed):
        return function(*tensors), tensors


def _without_seed(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The database seeds inside the operators that draw numbers; here it is done outside, as in a program."""
    return function(*args, **kwargs)


def runs_in_eager(case: Case) -> bool:
    """Whether the operator runs through the wrapper in eager, twice with the same result, and returns a tensor at all."""
    try:
        (first,), (second,) = (run(program([case]), [case])[0] for _ in range(2))
        compare(first, second, values="empty" not in case.name)
    except Exception:  # noqa: BLE001 - whatever goes wrong is eager's
        return False
    return any(isinstance(v, torch.Tensor) for v in tree_leaves(first))


def program(several: Iterable[Case]) -> Callable:
    """One function that runs several cases, the numbers and dtypes of their samples written into it as a program has them."""
    constants: dict[str, Any] = {}
    names: dict[str, Any] = {}
    lines, position = [], itertools.count()
    for index, case in enumerate(several):
        names[f"f{index}"] = case.function
        tensors = [f"t[{next(position)}]" for v in case.leaves if isinstance(v, torch.Tensor)]
        lines.append(call_source(f"f{index}", case, tensors, constants))
    return function_of_source(f"def run(*t):\n    return [{', '.join(lines)}]", names, constants)


def call_source(function: str, case: Case, tensors: Iterable[str], constants: dict[str, Any]) -> str:
    """The text of a call of `function` with a case's arguments, `tensors` in place of the tensors, the rest in `constants`."""
    remaining = iter(tensors)
    leaves = [_Tensor(next(remaining)) if isinstance(v, torch.Tensor) else v for v in case.leaves]
    args, kwargs = tree_unflatten(leaves, case.spec)
    parts = [_source(v, constants) for v in args] + [f"{k}={_source(v, constants)}" for k, v in kwargs.items()]
    return f"{function}({', '.join(parts)})"


def function_of_source(text: str, names: dict[str, Any], constants: dict[str, Any]) -> Callable:
    """The function `run` that `text` defines, with the constants written into it, as a program has them."""
    exec(text, names)  # noqa: S102 - our own text
    run = names["run"]
    run.__code__ = _with_constants(run.__code__, constants)
    return run


def _with_constants(code: CodeType, constants: dict[str, Any]) -> CodeType:
    return code.replace(co_consts=tuple(_constant(v, constants) for v in code.co_consts))


@dataclass(frozen=True)
class _Tensor:
    source: str


def _source(value: Any, constants: dict[str, Any]) -> str:
    if isinstance(value, _Tensor):
        return value.source
    if type(value) in (list, tuple):
        inside = "".join(f"{_source(v, constants)}, " for v in value)
        return f"[{inside}]" if type(value) is list else f"({inside})"
    if type(value) is slice:
        return f"slice({', '.join(_source(v, constants) for v in (value.start, value.stop, value.step))})"
    if type(value) is dict:
        return "{" + ", ".join(f"{_source(k, constants)}: {_source(v, constants)}" for k, v in value.items()) + "}"
    key = f"constant {len(constants)}"
    constants[key] = value
    return repr(key)


def _constant(value: Any, constants: dict[str, Any]) -> Any:
    if isinstance(value, str):
        return constants.get(value, value)
    if isinstance(value, CodeType):
        return _with_constants(value, constants)
    return tuple(_constant(v, constants) for v in value) if type(value) is tuple else value


def check(several: list[Case], executors: Any = None) -> None:
    """Run cases as one program with the transform, and compare results and arguments with eager.

    Raises:
        Disagreement: they are different.
        whatever the compilation raises.
    """
    function = program(several)
    check_compiled(thunder.jit(function, transforms=[SubclassTransform()], executors=executors), function, several)


def check_compiled(compiled: Callable, function: Callable, several: list[Case]) -> None:
    """Compare a compiled program with eager: see `check`."""
    expected, expected_tensors = run(function, several)
    results, tensors = run(compiled, several)
    for case, result, want in zip(several, results, expected, strict=True):
        try:
            compare(result, want, values="empty" not in case.name)
        except Disagreement as e:
            raise Disagreement(f"{case.name}: {e}") from e
    compare(tensors, expected_tensors)


def compare(got: Any, want: Any, *, values: bool = True) -> None:
    """Equal types, metadata and (except for uninitialised memory) values, throughout a tree.

    Raises:
        Disagreement: they are not.
    """
    if isinstance(want, torch.Tensor):
        _equal("type", type(got), type(want))
        for what in ("shape", "dtype", "device", "requires_grad"):
            _equal(what, getattr(got, what), getattr(want, what))
        if type(want) is WrapperSubclass:
            return compare(got.a, want.a, values=values)
        if not values:
            return None
        try:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
        except AssertionError as e:
            raise Disagreement(str(e).splitlines()[0]) from e
    elif isinstance(want, list | tuple):
        if type(want).__module__ != "torch.return_types":
            _equal("type", type(got), type(want))
        _equal("length", len(got), len(want))
        for g, w in zip(got, want, strict=True):
            compare(g, w, values=values)
    elif isinstance(want, dict):
        _equal("keys", list(got), list(want))
        for key in want:
            compare(got[key], want[key], values=values)
    elif not (isinstance(want, float) and math.isnan(want) and math.isnan(got)):
        _equal("type", type(got), type(want))
        _equal("value", got, want)


def _equal(what: str, got: Any, want: Any) -> None:
    if got != want:
        raise Disagreement(f"{what} {got}, expected {want}")


def measure(op: Any) -> tuple[str, str]:
    """(verdict, reason) for one operator: "skipped" where eager does not run, "yes" where the traced program agrees."""
    runnable = [case for case in cases(op) if runs_in_eager(case)]
    if not runnable:
        return "skipped", ""
    try:
        for case in runnable:
            check([case])
    except Exception as e:  # noqa: BLE001 - any failure is a result here
        return "no", f"{type(e).__name__}: {str(e).splitlines()[0][:150]}"
    return "yes", ""


def measure_compiled(op: Any) -> str:
    """What torch.compile makes of an operator's samples: that of the first one that fails."""
    for case in (c for c in cases(op) if runs_in_eager(c)):
        function = program([case])
        check_it = functools.partial(check_compiled, function=function, several=[case])
        verdict = op_coverage_page.compiled(function, check_it)
        if verdict != "yes":
            return verdict
    return "yes"


def write(results: dict[str, tuple[str, str]]) -> None:
    """Write the list."""
    counted = {name: r for name, r in results.items() if r[0] != "skipped"}
    agree = sum(verdict == "yes" for verdict, _ in counted.values())
    lines = [f"# {agree} of {len(counted)} operators that run in eager through WrapperSubclass agree under thunder.jit"]
    lines += [f"{name}: {verdict}" + (f"  ({reason})" if reason else "") for name, (verdict, reason) in sorted(counted.items())]
    LIST.write_text("\n".join(lines) + "\n")


def listed(verdict: str) -> list[str]:
    """The names of the operators that the list gives this verdict."""
    rows = (line.split(": ", 1) for line in LIST.read_text().splitlines() if not line.startswith("#"))
    return [name for name, rest in rows if rest.split()[0] == verdict]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    for op in op_db:
        name = op_name(op)
        if op.supports_dtype(torch.float32, "cpu") and (not options.names or any(n in name for n in options.names)):
            start = time.time()
            results[name] = measure(op)
            if results[name][0] == "no" or options.names:
                print(f"{name}: {': '.join(results[name])}  [{time.time() - start:.1f} s]", file=sys.stderr, flush=True)
    counted = [r for r in results.values() if r[0] != "skipped"]
    print(f"{sum(r[0] == 'yes' for r in counted)} of {len(counted)}")
    if options.write:
        write(results)
        ops = {op_name(op): op for op in op_db}
        op_coverage_page.write(results, {name: measure_compiled(ops[name]) for name, r in results.items() if r[0] == "no"})


if __name__ == "__main__":
    main()
