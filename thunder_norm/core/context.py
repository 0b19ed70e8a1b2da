"""What surrounds a norm rule while it runs: the mode, and how real operations are run and plain tensors lifted."""

from __future__ import annotations

import contextlib
import contextvars
import typing
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.context_variables import setting
from thunder_norm.core.ranges import Range
from thunder_norm.core.tensors import NormedTensor, describe, has_norm
from thunder_norm.errors import InnerDerivativeError, NormMismatchError, with_details

T = TypeVar("T")
Mode = Literal["bound", "typical", "modula"]
MODES: tuple[Mode, ...] = typing.get_args(Mode)

_mode: contextvars.ContextVar[Mode] = contextvars.ContextVar("thunder_norm_mode", default="bound")


@contextlib.contextmanager
def norm_mode(mode: Mode) -> Iterator[None]:
    """Use the rules of `mode` inside the block: "bound" (sound), "typical" (expected sizes) or "modula" (its conventions).

    Raises:
        NormMismatchError: there is no such mode.
    """
    with setting(_mode, check_mode(mode)):
        yield


def check_mode(mode: str) -> Mode:
    """`mode` itself, or an error that names the modes there are."""
    if mode not in MODES:
        raise NormMismatchError(f"mode must be one of {MODES}, got {mode!r}")
    return mode


def current_mode() -> Mode:
    """The mode of the enclosing `norm_mode` block."""
    return _mode.get()


Sensitivity = Literal["global", "local", "composed", "within"]
SENSITIVITIES: tuple[Sensitivity, ...] = typing.get_args(Sensitivity)
# Those of perturbations that go through the matrices at hand.
COMPOSED: tuple[Sensitivity, ...] = ("composed", "within")

_sensitivity: contextvars.ContextVar[Sensitivity] = contextvars.ContextVar("thunder_norm_sensitivity", default="global")

_search_steps: contextvars.ContextVar[int] = contextvars.ContextVar("thunder_norm_search_steps", default=2)


@contextlib.contextmanager
def norm_sensitivity(sensitivity: Sensitivity, *, search_steps: int | None = None) -> Iterator[None]:
    """Sensitivities inside the block: "global", for all tensors of the inputs' norms, "local", at the data at hand, "composed" or "within".

    A local one is valid to first order: for perturbations so small that the data they start from decides.  Rules that are far
    better there use it (normalizations, softmax, attention); the others have one constant for both.

    A composed one holds for all inputs and movements of any size as a global one does, and does not multiply the operations' constants:
    perturbations stay in ellipsoids that are taken through matrices as they are (`thunder_norm.core.composed`); a matrix that is a
    NormedTensor stands for all of its norm, also if it does not move.

    "within" is composed, for inputs that are within their perturbation_size of the data at hand (`with_perturbation(x, radius)`), and their
    norm_size: an activation has only the slopes that each entry may meet there, and a relu that cannot switch is linear.

    Args:
        sensitivity: which.
        search_steps: how long a composed one and "within" search for the multipliers of an activation's ellipsoid, after a first guess in
            closed form; with 0 it is that.  Any number is sound.  Without one it is that of the block around this one, 2 outside of all; so
            ``norm_sensitivity("global", search_steps=0)`` around a `LipschitzMargin` or `norm_report` says it for what they do.

    Raises:
        NormMismatchError: there is no such choice, or no such number of steps.
    """
    search_steps = current_search_steps() if search_steps is None else search_steps
    if isinstance(search_steps, bool) or not isinstance(search_steps, int) or search_steps < 0:
        raise NormMismatchError(f"search_steps must be a number of steps, 0 or more, got {search_steps!r}")
    with setting(_sensitivity, check_sensitivity(sensitivity)), setting(_search_steps, search_steps):
        yield


def current_search_steps() -> int:
    """That of the enclosing `norm_sensitivity` block."""
    return _search_steps.get()


def check_sensitivity(sensitivity: str) -> Sensitivity:
    """`sensitivity` itself, or an error that names the choices there are."""
    if sensitivity not in SENSITIVITIES:
        raise NormMismatchError(f"sensitivity must be one of {SENSITIVITIES}, got {sensitivity!r}")
    return sensitivity


def not_composed(sensitivity: str, of: str) -> Sensitivity:
    """`sensitivity` as `check_sensitivity` has it, of something without the matrices that "composed" takes perturbations through.

    Raises:
        NormMismatchError: it is one of these, or there is no such choice.
    """
    if sensitivity in COMPOSED:
        raise NormMismatchError(
            f'sensitivity "{sensitivity}" is not for {of}: it takes perturbations through the matrices at hand, in PyTorch without Thunder; '
            f'use norm_sensitivity("{sensitivity}") around the model itself, or norm_report'
        )
    return check_sensitivity(sensitivity)


def current_sensitivity() -> Sensitivity:
    """The choice of the enclosing `norm_sensitivity` block."""
    return _sensitivity.get()


# Whether autograd records the program at hand, where norm arithmetic is recorded in any case; None outside of that.
_records_program: contextvars.ContextVar[bool | None] = contextvars.ContextVar("thunder_norm_records_program", default=None)


class perturbations_recorded:  # noqa: N801 - used as a function; a generator takes five times as long to enter, in each call of a norm map
    """Autograd records what happens to perturbations inside the block, whatever the program does around it.

    A perturbation bounds how far a tensor moves, and it moves as far under `torch.no_grad`: only derivatives stop there.  So
    neither that nor `torch.inference_mode` concerns the arithmetic of perturbations.  Hooks for saved tensors
    (`torch.utils.checkpoint` has some) get none of its numbers: they would be computed again, outside of what surrounds it now.
    """

    def __enter__(self) -> None:
        self._outer = _records_program.set(torch.is_grad_enabled()) if _records_program.get() is None else None
        self._left = None
        if not torch.is_grad_enabled() or _top_hooks(True) is not None:
            self._left = contextlib.ExitStack()
            self._enter(self._left)

    def _enter(self, stack: contextlib.ExitStack) -> None:
        if not torch.is_grad_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
        if _top_hooks(True) is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))

    def __exit__(self, *_: object) -> None:
        if self._left is not None:
            self._left.close()
        if self._outer is not None:
            _records_program.reset(self._outer)


_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _same(t: T) -> T:
    return t


def records_program() -> bool:
    """Whether derivatives of the program at hand are recorded: not under its own `torch.no_grad`."""
    found = _records_program.get()
    return torch.is_grad_enabled() if found is None else found


def measured(kind: type[NormedTensor], t: torch.Tensor, elem_dims: tuple[int, ...] | None) -> NormedTensor:
    """`t` with its exact norm, differentiable in it if the program at hand is."""
    # where a mode watches operations, torch computes singular vectors with the values, at several times the price
    unwatched = contextlib.nullcontext() if type(t) not in _PLAIN else _disable_current_modes()
    with torch.set_grad_enabled(records_program()), unwatched:
        return kind.of(t, elem_dims)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Environment:
    """What surrounds a rule while it runs; tracing replaces it to record ops and to lift parameters its own way."""

    def run_real(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operation on plain tensors."""
        return func(*args, **kwargs)

    def run_operation(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one that is the program's own, not one that a rule asks something by."""
        return self.run_real(func, args, kwargs)

    def run_body(self, body: Callable, args: tuple, kwargs: dict) -> Any:
        """Run what an operation of ours does to plain tensors, a program of operations, which a trace takes apart."""
        return body(*args, **kwargs)

    def lift(self, t: torch.Tensor, kind: type[NormedTensor], elem_dims: tuple[int, ...] | None) -> NormedTensor:
        """The normed tensor that stands for the plain tensor `t`: with its exact norm."""
        return measured(kind, t, elem_dims)

    def values_of(self, t: torch.Tensor) -> torch.Tensor:
        """A plain tensor with its values, if it is one without (on meta) and they are known."""
        return t

    def place_of(self, t: torch.Tensor) -> tuple[Hashable, torch.Tensor]:
        """Which memory with which values a plain tensor of integers is in, and a tensor that lies there as it does."""
        return (t.untyped_storage()._cdata, t._version), t

    def writes_into(self, t: torch.Tensor) -> int:
        """How often the program has written into the memory of a plain tensor so far."""
        return 0 if t.is_inference() else t._version

    def range_of(self, t: torch.Tensor) -> Range | None:
        """Between which numbers the entries of a plain tensor are, where that is known without looking at them."""
        return None

    def largest_without_values(self, t: torch.Tensor) -> float | None:
        """The largest modulus that entries of a plain tensor may have, where there are no values to measure; None where there are."""
        return None

    def is_constant(self, t: torch.Tensor) -> bool:
        """Whether the values of a plain tensor are those of the program, and not of a parameter whose norm alone counts."""
        return not isinstance(t, torch.nn.Parameter)

    def counts_by_values(self, t: torch.Tensor) -> bool:
        """Whether claims may look at the values of a plain tensor: a constant's, and those a buffer has in this run."""
        return self.is_constant(t)

    def moves(self, t: torch.Tensor) -> bool:
        """Whether the norm of a plain tensor is not that of its values, or moves: a parameter's, or that of what was made from some."""
        return False

    def is_measured(self, t: torch.Tensor) -> bool:
        """Whether the norm of a plain tensor is that of its values."""
        return True

    def note_call(self, op: Any, rule: Any, call: tuple[tuple, dict], given: dict[str, Any], prepared: dict[str, Any]) -> None:
        """Called before a rule runs, with the call's arguments, and those by name: as they were given, as the rule gets them."""

    def note(self, func: Callable, out: NormedTensor) -> None:
        """Called with each normed result of an operation."""

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Around operations that nobody is told of: more is found of what was noted by them."""
        return contextlib.nullcontext()

    def note_moved(self, before: torch.Tensor | None, now: torch.Tensor | None) -> None:
        """Called when of results that were noted it is found how far they move, by another tensor than before."""

    def inside_function(self) -> contextlib.AbstractContextManager[Any]:
        """Around the Python body of a torch function on NormedTensors, whose calls find their rules."""
        return contextlib.nullcontext()

    def inside_operation(self) -> contextlib.AbstractContextManager[Any]:
        """Around a torch function on NormedTensors that torch's C++ code decomposes."""
        return contextlib.nullcontext()

    def lets_change(self, t: torch.Tensor, func: Callable) -> bool:
        """Whether `func` may change a plain tensor in place by normed ones: where somebody knows, for as long as its norm matters."""
        return False

    def user_location(self) -> str | None:
        """File, line and text of the user's call, where the traceback alone does not show it."""
        return None


_environment: contextvars.ContextVar[Environment] = contextvars.ContextVar("thunder_norm_environment", default=Environment())


@contextlib.contextmanager
def environment(env: Environment) -> Iterator[None]:
    """Run rules in `env` inside the block."""
    with setting(_environment, env):
        yield


def norm_counts(v: Any) -> bool:
    """Whether `v` is a tensor of which its norm counts, not its values: a normed one, a parameter that moves, or what was made from some."""
    return isinstance(v, NormedTensor) or (isinstance(v, torch.Tensor) and has_norm(v) and current_environment().moves(v))


def run_real(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run `func` on plain tensors as one operation (a trace records it as such)."""
    return _environment.get().run_real(func, args, kwargs)


def run_operation(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The same, for an operation that the program has itself."""
    return _environment.get().run_operation(func, args, kwargs)


def lift(t: torch.Tensor, kind: type[NormedTensor], elem_dims: Sequence[int] | None = None) -> NormedTensor:
    """A plain tensor as a normed one: constants by their exact norm, parameters as the transform in use says.

    Raises:
        InnerDerivativeError: a function that torch.func transforms derives it, or takes it apart.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise InnerDerivativeError(
            with_details(
                f"a NormedTensor meets a {describe(t)} of a function under grad, vmap or jvp of torch.func",
                at=current_environment().user_location(),
                why="torch transforms values alone: what it takes apart or derives has norms of its own, and no rule says them",
                instead="leave the transformed function out of the call with norms",
            )
        )
    environment = _environment.get()
    lifted = environment.lift(t, kind, None if elem_dims is None else tuple(elem_dims))
    if current_sensitivity() == "within":  # nothing else asks
        lifted._is_constant = lifted.backing is t and environment.is_constant(t)
    return lifted


@contextlib.contextmanager
def inside_operation_of_ones_own() -> Iterator[None]:
    """Modes that take over a program's calls for norms do not see those of one operation's rule and body."""
    taken = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    kept = [mode for mode in reversed(taken) if not getattr(mode, "is_of_environment", False)]
    for mode in kept:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in reversed(taken):
            _push_mode(mode)


def values_of(t: torch.Tensor) -> torch.Tensor:
    """A constant of the program with its values, for rules that look at them: on meta they are known only here."""
    return _environment.get().values_of(t)


def current_environment() -> Environment:
    """What surrounds the rules that run now."""
    return _environment.get()
