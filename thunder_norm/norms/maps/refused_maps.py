"""Why a program has no norm map."""

from __future__ import annotations

from thunder_norm.errors import NormMismatchError, UnsupportedOpError, with_details


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
