"""The errors for changes in place that a program which is differentiated or transformed cannot follow."""

from __future__ import annotations

from thunder_norm.errors import TransformError, UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of
from thunder.core.symbol import BoundSymbol


def without_history(
    writer: BoundSymbol, what: str, why: str = "what is written into an input has no derivative here"
) -> UnsupportedOpError:
    """The backward could not follow a change that autograd records."""
    instead = "use the out-of-place operation, or clone the input first"
    return UnsupportedOpError(_message(writer, f"in-place {writer.sym.name} on {what}", why, instead))


def of_others(writer: BoundSymbol) -> TransformError:
    """It changes what the program did not make."""
    headline = f"{writer.sym.name} changes in place a tensor that the transformed function did not make"
    why = "the transformed function must leave its arguments and the tensors around it alone"
    return TransformError(_message(writer, headline, why, _OUT_OF_PLACE))


def unclear(writer: BoundSymbol, view: BoundSymbol) -> TransformError:
    """It changes a tensor that may be a view, or have one."""
    headline = (
        f"{writer.sym.name} changes in place a tensor that may share memory with another: {view.sym.name} returned one of them"
    )
    why = "whether the change is one of both depends on strides, which a program that is differentiated or transformed does not know"
    return TransformError(_message(writer, headline, why, _OUT_OF_PLACE))


def read_of_before(writer: BoundSymbol, view: BoundSymbol) -> TransformError:
    """A view is read that has a gradient, of what was detached in place since."""
    headline = f"a result of {view.sym.name} is used after the tensor that it is a view of was detached in place"
    why = "it has a gradient, and what it is a view of has none any more"
    return TransformError(_message(writer, headline, why, "x = x.detach() in place of x.detach_(), or take the view again"))


_OUT_OF_PLACE = "use the operation that returns a new tensor, or clone first"


def _message(writer: BoundSymbol, headline: str, why: str, instead: str) -> str:
    return with_details(headline, at=location_of(writer), why=why, instead=instead)
