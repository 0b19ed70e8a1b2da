"""The right derivative of a random program: what several independent opinions agree on, and how far a result is from it."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import linecache
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves

from .level_writing import Writing, is_inexact
from .oracles import DIFFERENCES, EVALUATIONS, OTHER_ORDER, TORCH, Outermost
from .program import Outcome
from .writing import Redraw

Pair = collections.namedtuple("Pair", ["first", "second"])
_NAMES = {"torch": torch, "F": F, "math": math, "functools": functools, "Pair": Pair}
_LARGEST = 1e6
_numbers = itertools.count()


def executed(lines: Sequence[str], transforms: dict[str, Any], own_arguments: Writing | None = None) -> dict[str, Any]:
    """The names after running the statements; their text is known to tracebacks and to errors that quote it."""
    text = "\n".join(lines) + "\n"
    filename = f"<fuzz {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    names: dict[str, Any] = _NAMES | transforms | {"__name__": "fuzz_program"}
    try:
        exec(compile(text, filename, "exec"), names)  # noqa: S102 - our own text
    finally:
        del linecache.cache[filename]
    return names


_OPINIONS: dict[str, Callable[[], dict]] = {
    "the other order": lambda: OTHER_ORDER,
    "differences of the other order": lambda: Outermost(OTHER_ORDER),
    "differences of torch.func": lambda: Outermost(TORCH),
    "differences of differences": lambda: DIFFERENCES,
}
# Pairs of opinions, what both say is right, and how well differences can agree
_INDEPENDENT = (
    ("torch.func", "the other order", 1e-6),
    ("torch.func", "differences of the other order", 1e-4),
    ("the other order", "differences of torch.func", 1e-4),
    ("torch.func", "differences of differences", 1e-3),
    ("the other order", "differences of differences", 1e-3),
)


_SECONDS_OF_AN_OPINION = 40  # for what hangs; what only takes long has a number of evaluations


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError in what takes longer; only in the main thread, as signals are."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Truth:
    """What a program has to return: what `torch.func` says, and where it is doubted what two opinions agree about."""

    def __init__(self, data: list[str], lines: list[str], dtype: str):
        self.data, self.lines, self.reason = data, lines, ""
        self.is_single = dtype == "torch.float32" or any("float32" in t or ".float()" in t for t in (*data, *lines))
        self.given = [*data, *lines]
        self.first = self._asked("torch.func", TORCH)
        self.rounded = self.first
        if self.is_single:
            self.data, self.lines = in_double(data), in_double(lines)
            self.first = self._asked("torch.func", TORCH)
        self._opinions: dict[str, Any] = {"torch.func": self.first}

    @property
    def is_known(self) -> bool:
        """Whether some oracle has an answer."""
        return self.first is not None or self._agreed() is not None

    def _asked(self, name: str, transforms: dict[str, Any], text: list[str] | None = None) -> Any:
        EVALUATIONS.restart()
        try:
            with _at_most(_SECONDS_OF_AN_OPINION):
                return executed(text or [*self.data, *self.lines], transforms)["result"]
        except Exception as e:  # noqa: BLE001 - it does not know
            self.reason += f"{name}: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:120]}; "
            return None

    def _opinion(self, name: str) -> Any:
        if name not in self._opinions:
            self._opinions[name] = self._asked(name, _OPINIONS[name]())
        return self._opinions[name]

    def _agreed(self) -> Any:
        """What two opinions say that have no formula in common."""
        for first, second, tolerance in _INDEPENDENT:
            a, b = self._opinion(first), self._opinion(second)
            if a is not None and b is not None and difference(b, a, tolerance, dtypes=False) is None:
                return a
        return None

    def verdict(self, found: Any) -> Outcome:
        """Whether what we return is right."""
        if self.first is not None:
            problem = difference(found, self.first, self._tolerance(), dtypes=not self.is_single)
            if problem is None and self._has_dtypes(found):
                return Outcome("right")
        truth = self._agreed()
        if truth is None:
            return Outcome("no oracle", "no two oracles agree")
        problem = difference(found, truth, max(self._tolerance(), 1e-6 if truth is not self.first else 0), dtypes=False)
        if truth is self.first and problem is None:  # only the dtypes of single precision differ
            problem = difference(found, self.rounded, math.inf)
        is_right = problem is None or self._differences_say(found, truth)
        return Outcome("right", "torch.func is wrong") if is_right else Outcome("wrong", str(problem))

    def _has_dtypes(self, found: Any) -> bool:
        """Whether a program in single precision returns the dtypes that one of torch's orders of differentiation returns.

        A tangent of ``torch.func.jvp`` is in double precision where a scalar in single precision was multiplied by a number.
        """
        if not self.is_single or self.rounded is None or difference(found, self.rounded, math.inf) is None:
            return True
        other = self._asked("the other order, in single precision", OTHER_ORDER, self.given)
        return other is not None and difference(found, other, math.inf) is None

    def _differences_say(self, found: Any, truth: Any) -> bool:
        """Whether differences of values agree with us much better than with torch: its formulas may be wrong in both orders.

        They are for second derivatives of layer_norm.
        """
        values = self._opinion("differences of differences")
        if values is None or difference(found, values, 1e-3, dtypes=False) is not None:
            return False
        return 10 * _farthest(found, values) < _farthest(truth, values)

    def _tolerance(self) -> float:
        if not self.is_single:
            return 1e-7
        if self.rounded is None or self.first is None:
            return 1e-2
        errors = zip(tree_leaves(self.rounded), tree_leaves(self.first), strict=True)
        return 2e-4 + 20 * max((_distance(a, b) for a, b in errors), default=0.0)


def in_double(lines: list[str]) -> list[str]:
    return [line.replace("float32", "float64").replace(".float()", ".double()") for line in lines]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to 1 and to the largest entry."""
    if not a.numel():
        return 0.0
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.detach().to(kind), b.detach().to(kind)
    return ((a - b).abs().max() / max(1.0, b.abs().max().item())).item()


def _farthest(found: Any, wanted: Any) -> float:
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=False)
    return max((_distance(a, b) for a, b in pairs if isinstance(b, torch.Tensor)), default=0.0)


def difference(found: Any, wanted: Any, tolerance: float, dtypes: bool = True) -> str | None:
    """How one tree of tensors differs from another, or None."""
    leaves, spec = tree_flatten(found)
    expected, expected_spec = tree_flatten(wanted)
    if spec != expected_spec:
        return f"structure {spec}, expected {expected_spec}"
    for i, (v, e) in enumerate(zip(leaves, expected, strict=True)):
        if not isinstance(e, torch.Tensor):
            if v != e:
                return f"{v!r}, expected {e!r}"
            continue
        if not isinstance(v, torch.Tensor):
            return f"a {type(v).__name__} at leaf {i}, expected a tensor"
        if type(v) not in (torch.Tensor, torch.nn.Parameter) or v.device != e.device:
            return f"a {type(v).__name__} on {v.device} at leaf {i}"
        if v.shape != e.shape:
            return f"shape {tuple(v.shape)} at leaf {i}, expected {tuple(e.shape)}"
        if dtypes and v.dtype != e.dtype:
            return f"{v.dtype} at leaf {i}, expected {e.dtype}"
        if tolerance < math.inf and not _distance(v, e) <= tolerance:
            return f"leaf {i} is off by {_distance(v, e):.2g} of its size: {_shown(v)}, expected {_shown(e)}"
    return None


def _shown(t: torch.Tensor) -> str:
    return str(t.detach().flatten()[:4].tolist())


def check_fit(tree: Any) -> None:
    """Refuse what is not finite, huge, or made of anything but tensors.

    Raises:
        Redraw: it is.
    """
    for v in tree_leaves(tree):
        if not isinstance(v, torch.Tensor) or v.numel() > 2000:
            raise Redraw
        if is_inexact(v) and v.numel() and not v.detach().abs().max() < _LARGEST:
            raise Redraw
