"""The exceptions of thunder_norm, in one place.

Every error of ours is a `ThunderNormError`.  Those that describe a wrong *type* of thing also derive from the builtin a
Python user would expect (``TypeError``, ``ValueError``, ``KeyError``, ``NotImplementedError``), so that either can be caught.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class ThunderNormError(Exception):
    """Base class of all errors raised by thunder_norm."""


class MissingNormRuleError(ThunderNormError, NotImplementedError):
    """An operation met a NormedTensor and no registered norm rule matches its arguments."""


class NormMismatchError(ThunderNormError, ValueError):
    """Kinds, elem_dims, shapes, sizes or names of normed tensors do not fit what an operation or a norm map needs."""


class JumpError(NormMismatchError):
    """How far a result moves is asked of an operation that jumps: there is no bound, at no data."""


class NormMapKeyError(NormMismatchError, KeyError):
    """A parameter or buffer name is unknown to the model or missing from a mapping."""

    # KeyError.__str__ shows the repr of its argument, which would garble a message of several lines.
    __str__ = Exception.__str__


class GradientError(ThunderNormError, ValueError):
    """A gradient that an optimizer cannot use: missing, sparse, or with entries that are not finite.  Nothing was changed."""


class UnsupportedSubclassError(ThunderNormError, TypeError):
    """A tensor subclass cannot be interpreted: it breaks the wrapper subclass protocol, or uses it in a way we refuse."""


class UnsupportedOpError(ThunderNormError, NotImplementedError):
    """An operation on a wrapper subclass cannot be represented in a trace (in-place on an alias, data dependent, ...)."""


class InnerDerivativeError(UnsupportedOpError):
    """A program differentiates a function of wrappers: of NormedTensors operations have rules, and not the derivatives that torch takes of them."""


class TransformError(ThunderNormError, ValueError):
    """Arguments of a function transform do not fit: in_dims, argnums, shapes of tangents, a loss that is no scalar, ..."""


class TransformTypeError(ThunderNormError, TypeError):
    """A function transform was given the wrong type of thing: integers to differentiate, a result that is no tensor, ..."""


class InnerDerivativeTypeError(TransformTypeError, InnerDerivativeError):
    """A function that is differentiated returns a wrapper that says something of its inner tensor, which does not hold for the derivative."""


class InnerDerivativeNormError(NormMismatchError, InnerDerivativeError):
    """A NormedTensor meets a part of a derivative, which autograd makes of a program and no rule says anything of."""


class InnerDerivativeTransformError(TransformError, InnerDerivativeError):
    """A function of wrappers is differentiated by torch, which derives the whole of each, and here what is inside would be."""


class MissingTransformRuleError(ThunderNormError, NotImplementedError):
    """An operation has no rule for a function transform, and none can be derived for it."""


class WrongDerivativeError(TransformError, AssertionError):
    """A derivative is not the one that differences of the function's values show."""


class DataDependentError(ThunderNormError, RuntimeError):
    """A program, or a transformed function, needs the value of a tensor while it is traced: a branch on it, ``item()``, ..."""


class EscapeError(ThunderNormError, RuntimeError):
    """A tensor without data (fake, proxy, meta) would have left in a result, a gradient or an attribute of the user's module."""


class CheckpointError(ThunderNormError, ValueError):
    """What to checkpoint cannot be found, or no choice of it keeps to the memory budget."""


class TransformLevelError(ThunderNormError, TypeError):
    """A value of one function transform is used where that transform is not in effect."""


class UnsoundRuleError(ThunderNormError, AssertionError):
    """A search found inputs for which a norm rule claims too little.

    Attributes:
        audit: all that the search found.
    """

    def __init__(self, message: str, audit: object = None):
        super().__init__(message)
        self.audit = audit


class LooseRuleError(UnsoundRuleError):
    """A search found nothing near what a norm rule claims, although the rule says that it is attained."""


class ProfileError(ThunderNormError, ValueError):
    """A program cannot be profiled as asked for, or a rule for profiles is registered twice or for nothing that can be called."""


class CompilerError(ThunderNormError, RuntimeError):
    """An executor cannot compile a part of a program: a compiler is missing, or fails."""


class SavedFileError(ThunderNormError, ValueError):
    """A norm map or report cannot be saved, or a file is none of ours, damaged, of a newer format, or names what is not known."""


class VersionError(ThunderNormError, ImportError):
    """The installed torch or lightning-thunder is one that thunder_norm cannot work with."""


class UntestedVersionWarning(UserWarning):
    """The installed torch or lightning-thunder is outside the tested range."""


class VanishingTargetWarning(UserWarning):
    """Steps in the modular norm hardly move some parameters, or do not at all."""


class DivergenceWarning(UserWarning):
    """What a training monitor sees is not finite, or grows as it does before a run diverges."""


class DeadWeightWarning(UserWarning):
    """A training monitor sees a parameter whose gradient stays 0 while others have one."""


class NothingWrittenWarning(UserWarning):
    """A program sets ``.data`` of a wrapper subclass, which changes nothing inside of it, in eager mode as in a trace."""


class WrittenOnceWarning(UserWarning):
    """A checkpointed region writes into what was there before: a trace does it once, eager mode again in the backward."""


class AcquiredAnewWarning(UserWarning):
    """No call can use the trace of another: a jitted program draws Python's or NumPy's random numbers, reads a clock, or has ever new sizes."""


class RunByPythonWarning(UserWarning):
    """A call of a jitted program that writes into objects was run by Python: its trace raised something that the program does not raise."""


class MissingBoundsWarning(UserWarning):
    """A training monitor has no bounds on activations: a norm map of the model, or norms of its parameters, cannot be derived."""


def with_details(headline: str, **details: object) -> str:
    """Format an error message: a headline, then one aligned line per detail.

    >>> print(with_details("no norm rule for torch.linalg.qr", at="model.py:41", to_add_one="see CONTRIBUTING.md"))
    no norm rule for torch.linalg.qr
      at          model.py:41
      to add one  see CONTRIBUTING.md
    """
    present = {name.replace("_", " "): value for name, value in details.items() if value is not None}
    width = max((len(name) for name in present), default=0)
    indent = "\n" + " " * (width + 4)
    lines = [f"  {name:<{width}}  {indent.join(str(value).splitlines())}" for name, value in present.items()]
    return "\n".join([headline, *lines])


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from or while that was handled, and so on.

    Each once: one that is raised again while what carried it is handled has that as its context, which is the cause's cause.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def some_of(names: Sequence[str], most: int = 4) -> str:
    """The first of many names.

    >>> print(some_of(["a", "b", "c", "d", "e", "f"]))
    a, b, c, d and 2 more
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
