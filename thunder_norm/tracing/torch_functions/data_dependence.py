"""The errors for programs whose control flow, shapes or Python values depend on the values of tensors: a trace has none."""

from __future__ import annotations

from thunder_norm.errors import DataDependentError, UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user

# What torch says where a tensor without data is read.
READS_DATA = ("its data is not allocated yet", "numpy() is not supported for tensor subclasses")


def data_dependent(what: str, transform: str | None = None, at: str | None = None, why: str | None = None) -> DataDependentError:
    """The error for a program, or a function under a function transform, that needs to know the value of a tensor.

    Args:
        what: what it was needed for.
        transform: the name of the function transform, if it is one.
        at: the user's line, if it is not the one being interpreted.
        why: why it is not known, if not because values are never asked for.
    """
    at = at or location_of_user()
    if transform is not None:
        return DataDependentError(
            with_details(
                f"the value of a tensor is needed for {what}, in a function under {transform}",
                at=at,
                why="the function is traced once for all values, so no value is known",
                instead="torch.where(condition, a, b) for a condition; compute what depends on values outside and pass it in",
            )
        )
    return DataDependentError(
        with_details(
            f"the value of a tensor is needed for {what}",
            at=at,
            why=why
            or "the program is traced once for all values of its tensors, so none is known; shapes, dtypes and numbers are",
            instead="torch.where(condition, a, b) for a condition; or compute what depends on values outside and pass it in",
        )
    )


def data_dependent_on_wrapper(what: str, why: str = "the value is not known while the trace is acquired") -> UnsupportedOpError:
    """The error for an operation on a wrapper subclass that needs values, or whose result depends on them in shape."""
    return UnsupportedOpError(
        with_details(
            f"data-dependent control flow: {what}",
            at=location_of_user(),
            why=why,
            instead="use torch.where, or compute the condition outside the jitted function",
        )
    )


def data_dependent_on_mask(selected: str | None, why: str, what: str, at: str | None) -> DataDependentError:
    """The error for what needs to know how much a mask selects.

    Args:
        selected: where it did.
        why: its size is not known.
        what: depends on it.
        at: the user's line.
    """
    return DataDependentError(
        with_details(
            f"the value of a tensor is needed for the shape of what a mask selects, which {what} depends on",
            at=at,
            selected=selected,
            why=f"{why}; without a size only operations on each entry or row are known, sums, means and losses, and y[mask] = ... with the same mask",
            instead="torch.where(mask, f(x), y), or torch.where(mask, f(x), 0).sum() for a sum over what is selected",
        )
    )
