"""Where the cases of a rule come from: arguments of its operation that torch's own tests use, or that its annotations allow.

Each tensor in a normed slot of the rule becomes a ball, of a kind that the slot takes, over several choices of elem_dims and with
norms of several magnitudes.  Everything else stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import sys
import unittest.mock
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.audit.cases import Case
from thunder_norm.audit.op_db import outside_of_unittest
from thunder_norm.audit.placed import SETTINGS, Places, Sample, balls_of, case_of, normed_leaves, places_of
from thunder_norm.core.context import Environment, environment
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import NormedOp, NormRule, _on_by_default
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.op_names import op_key
from thunder_norm.rules.layout.complex_numbers import view_as_complex, view_as_real

# The search differentiates an operation hundreds of times.
_MOST_ELEMENTS = 800
_MOST_CALLS = 30


def samples_of(op: NormedOp) -> Iterator[Sample]:
    """Calls of `op`.

    Torch's samples if it has some, or the calls of an aten operation that torch's functions make for theirs; then tensors in the
    places that its rules' annotations name.
    """
    if isinstance(op.key, str):
        for info in _op_infos().get(op.key, ()):
            for sample in _sample_inputs(info, _MOST_CALLS):
                yield Sample(info.op, (sample.input, *sample.args), sample.kwargs)
        if op.key not in _op_infos():
            yield from _aten_calls().get(op.key, ())
    for rule in op.rules:
        yield from _by_annotation(op, rule)


def _sample_inputs(info: Any, count: int) -> list[Any]:
    """Torch's first samples for an operator, seeded: the same on every call."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), outside_of_unittest():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        return list(itertools.islice(info.sample_inputs("cpu", torch.float64), count))


@functools.cache
def _op_infos() -> dict[str, list]:
    """Torch's operator database by our names, operators in float64 on the CPU only."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError:  # it needs expecttest, which torch does not bring
        return {}
    infos: dict[str, list] = {}
    for info in op_db:
        if info.name.startswith("sparse") or not info.supports_dtype(torch.float64, "cpu"):
            continue
        for key in {op_key(info.op), info.name.rpartition(".")[2]}:
            if isinstance(key, str):
                infos.setdefault(key, []).append(info)
    return infos


class _Calls(TorchDispatchMode):
    """Keeps the calls of aten operations."""

    def __init__(self, calls: dict[str, list[Sample]]):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        known = self.calls.setdefault(op_key(func), [])
        if not func._schema.is_mutable and len(known) < _MOST_CALLS:
            known.append(Sample(func, args, kwargs))
        return func(*args, **kwargs)


@functools.cache
def _aten_calls() -> dict[str, list[Sample]]:
    """The aten operations that torch's operators become on their samples, by our names."""
    calls: dict[str, list[Sample]] = {}
    for info in {id(i): i for infos in _op_infos().values() for i in infos}.values():
        for sample in _sample_inputs(info, 3):
            with warnings.catch_warnings(), _Calls(calls):
                warnings.simplefilter("ignore")
                try:
                    info.op(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # noqa: BLE001 - some samples are for another device
                    continue
    return calls


def _by_annotation(op: NormedOp, rule: NormRule) -> Iterator[Sample]:
    """Tensors in the rule's tensor slots, matrices first; nothing where another argument has no default."""
    fn = op.body if isinstance(op.key, str) else op
    for shape in ((3, 4), (4, 4), (4,), (2, 3, 4), (2, 3, 4, 4)):
        generator = torch.Generator().manual_seed(0)
        args = {}
        for name, parameter in rule.signature.parameters.items():
            slot = rule.slots[name]
            tensor = torch.randn(shape, dtype=torch.float64, generator=generator)
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if slot.kinds or slot.accepts_plain:
                args[name] = [tensor, tensor * 0.5] if slot.is_list else tensor
            elif slot.accepts_number and parameter.default is inspect.Parameter.empty:
                args[name] = 0.5
            elif parameter.default is inspect.Parameter.empty:
                return
        sample = Sample(fn, tuple(args.values()), {})
        try:
            sample.call()
        except Exception:  # noqa: BLE001 - an operation may refuse a shape with any error
            continue
        yield sample


# -- cases ------------------------------------------------------------------------------------------------------------------


class RuleLog(Environment):
    """Remembers which rules ran."""

    def __init__(self):
        self.rules: list[NormRule] = []

    def note_call(self, op: Any, rule: Any, call: tuple[tuple, dict], given: dict[str, Any], prepared: dict[str, Any]) -> None:
        self.rules.append(rule)


class _Asked(Exception):
    """The rule that an operation is about to run."""

    def __init__(self, rule: NormRule):
        self.rule = rule


class _FirstRule(RuleLog):
    """Stops where the first rule of an operation would run."""

    def __init__(self, op: NormedOp):
        super().__init__()
        self.op = op

    def note_call(self, op: Any, rule: Any, call: tuple[tuple, dict], given: dict[str, Any], prepared: dict[str, Any]) -> None:
        super().note_call(op, rule, call, given, prepared)
        if op is self.op and len(self.rules) == 1:
            raise _Asked(rule)


def rules_run(case: Case) -> tuple[NormRule, ...]:
    """The rules that a case's call runs, in order; none if its result has no norm.

    Raises:
        ThunderNormError: there is none that fits, or it refuses.
    """
    log = RuleLog()
    out = _called(case, log)
    return tuple(log.rules) if isinstance(out, NormedTensor) else ()


def _called(case: Case, log: RuleLog) -> Any:
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(b.shape, dtype=torch.float64, generator=generator) for b in case.balls]
    with environment(log):
        return case.call(*(b.normed(b.point(p, b.norm_size)) for b, p in zip(case.balls, points, strict=True)))


def rule_of(case: Case) -> NormRule | None:
    """The rule whose claim a case tries: the only one that runs, or the last one if it states the bound of all together.

    Complex tensors come to it as real ones, which says the same of them: that does not count.
    """
    rules = rules_run(case)
    rules = [r for r in rules if r.fn not in (view_as_complex, view_as_real)] or list(rules[-1:])
    return rules[-1] if len(rules) == 1 or rules and rules[-1].when is not None else None


def cases_of(op: NormedOp, rule: NormRule, count: int) -> list[Case]:
    """At most `count` cases in which this rule of `op` runs, and no other."""
    # a rule that others go before, always, is run although they would be
    for is_forced in (False, True) if rule.when is None else (False,):
        found = list(itertools.islice(_cases_that_run(op, rule, is_forced), count))
        if found:
            return found
    return []


def _cases_that_run(op: NormedOp, rule: NormRule, is_forced: bool) -> Iterator[Case]:
    """All cases in which this rule of `op` runs, and no other; with `is_forced` also where others go before it."""
    samples = _usable_samples(op, *map(id, op.rules))
    known = _rules_known(op, *map(id, op.rules))
    places: dict[int, Places | None] = {}
    # another setting with each sample, then again with other pairs: few cases are as different as possible
    for offset in range(len(SETTINGS)):
        for i, sample in enumerate(copy.copy(samples)):  # which looks for no more of them than are asked for
            if i not in places:
                places[i] = places_of(op, rule, sample)
            if (of := places[i]) is None or (balls := balls_of(of, (i + offset) % len(SETTINGS), i)) is None:
                continue
            # no rule looks at a size: in a trace there is none to see
            norms = tuple((b.kind, b.elem_dims) for b in balls)
            for output in of.outputs:
                given = (i, of.positions, norms, output, id(rule) if is_forced else None)
                case = case_of(op, rule, of, balls, output, i, is_forced)
                if known.tries(rule, given, case, op_key(sample.fn) == op.key):
                    yield case


@functools.lru_cache(maxsize=16)  # the rules of one operation are tried one after the other
def _usable_samples(op: NormedOp, *rules: int) -> Iterator[Sample]:
    """The samples of an operation that has these rules which a search can run; copies of the iterator look for each once."""
    return itertools.tee(filter(_is_usable, samples_of(op)), 1)[0]


class _Known:
    """Which rule runs for what is given to an operation, as far as one of its rules was tried with it."""

    def __init__(self, op: NormedOp):
        self.op = op
        self._first: dict[Hashable, NormRule | None] = {}
        self._of: dict[Hashable, NormRule | None] = {}

    def tries(self, rule: NormRule, given: Hashable, case: Case, is_operation: bool) -> bool:
        """Whether a case tries what a rule claims.

        Where it calls the operation itself, one that begins with another rule is not run to its end.
        """
        if is_operation:
            if given not in self._first:
                self._first[given] = _unless_refused(functools.partial(_first_rule, self.op), case)
            if self._first[given] not in (rule, None):
                return False
        if given not in self._of:
            self._of[given] = _unless_refused(rule_of, case)
        return self._of[given] is rule


@functools.lru_cache(maxsize=16)
def _rules_known(op: NormedOp, *rules: int) -> _Known:
    """What is known of an operation that has these rules."""
    return _Known(op)


def runs_without_norm(op: NormedOp, rule: NormRule) -> str:
    """Why a rule has no cases, if there is a good reason: "" otherwise."""
    for sample in samples_of(op):
        bound = rule.bind(sample.args, sample.kwargs, _on_by_default(op.key))
        if isinstance(bound, str) or not any(s.kinds for s in rule.slots.values()):
            continue
        if _is_random(sample):
            return "random"
        leaves = {id(leaf) for leaf, _ in normed_leaves(rule, bound)}
        args, kwargs = tree_map(lambda v, ours=leaves: _lifted(v) if id(v) in ours else v, (sample.args, sample.kwargs))
        log = RuleLog()
        try:
            with environment(log):
                out = sample.fn(*args, **kwargs)
        except Exception:  # noqa: BLE001 - torch's own samples of errors
            continue
        if log.rules == [rule] and not any(isinstance(v, NormedTensor) for v in tree_flatten(out)[0]):
            return "the result has no norm"
    return ""


def _lifted(t: torch.Tensor) -> NormedTensor:
    return RMSTensor.of(t, (-1,) if t.ndim else ())


def _is_random(sample: Sample) -> bool:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _unseeded():
        warnings.simplefilter("ignore")
        before = torch.get_rng_state()
        try:
            sample.call()
        except Exception:  # noqa: BLE001 - torch's own samples of errors
            return False
        return not torch.equal(before, torch.get_rng_state())


@contextlib.contextmanager
def _unseeded() -> Iterator[None]:
    """Inside the block torch's operator database does not fix the seed of random operators."""
    database = sys.modules.get("torch.testing._internal.common_methods_invocations")
    if database is None:
        yield
        return
    with unittest.mock.patch.object(database, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs)):
        yield


def _is_usable(sample: Sample) -> bool:
    """Whether a search can run it: small, real, and the same each time."""
    leaves = [v for v in tree_flatten((sample.args, sample.kwargs))[0] if isinstance(v, torch.Tensor)]
    if any(v.numel() > _MOST_ELEMENTS or v.numel() == 0 or v.is_complex() for v in leaves if v.is_floating_point()):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sample.call()
        except Exception:  # noqa: BLE001 - whatever torch says about a sample of its own
            return False
    return not _is_random(sample)


def _first_rule(op: NormedOp, case: Case) -> NormRule | None:
    """The rule that a case runs first, if it is one of this operation."""
    try:
        _called(case, _FirstRule(op))
    except _Asked as asked:
        return asked.rule
    return None


def _unless_refused(find: Callable[[Case], NormRule | None], case: Case) -> NormRule | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return find(case)
    except ThunderNormError:
        return None
    except Exception:  # noqa: BLE001 - torch refuses the operation on these shapes or dtypes
        return None
