"""Why a program has no norm map."""

from __future__ import annotations

import warnings

from thunder_norm.errors import AcquiredAnewWarning, NormMismatchError, UnsupportedOpError, with_details


def depends_on_data(what: str, tensor: str) -> NormMismatchError:
    """The error for a norm that is a function of values, which a call does not have."""
    return NormMismatchError(
        with_details(
            f"the norm of an output depends on {what}",
            tensor=tensor,
            instead="give a NormedTensor for it (as an argument or in normed_state_dict), or real data",
        )
    )


def is_another_in_each_call() -> UnsupportedOpError:
    """The error for a program that draws Python's random numbers, say: its trace is for one call."""
    return UnsupportedOpError(
        with_details(
            "a norm map of a program that calls what returns something else each time",
            why="its trace serves one call; the AcquiredAnewWarning names the function and the line",
            instead="draw with torch (torch.rand), or give the number as an argument",
        )
    )


def warn_of_many(kept: int) -> None:
    """Say that a norm map was acquired for ever other values of its arguments, of which it keeps the programs of so many."""
    warnings.warn(
        with_details(
            f"the model asks for values of its arguments, which were others in {kept} calls: further ones are acquired anew",
            why="a norm map has a program for each answer that the model was given",
            instead="torch.where(condition, a, b), or an operation on the tensor itself",
        ),
        AcquiredAnewWarning,
        stacklevel=4,
    )
