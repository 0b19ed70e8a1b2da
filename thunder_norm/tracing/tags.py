"""What is known of tensors of a trace beside Thunder's own tags."""

from __future__ import annotations

from thunder.core.proxies import ProxyTag


class _Tag(ProxyTag):
    """Thunder's has no more than before."""


def _new(name: str) -> _Tag:
    _Tag.register_tag(name)
    return _Tag(name)


STANDS_FOR_GRADIENT = _new("STANDS_FOR_GRADIENT")
OF_ANY_LENGTH = _new("OF_ANY_LENGTH")  # an input that has not one shape in all calls, and so do results
LETS_SEE = _new("LETS_SEE")  # says of each row of a mask of attention whether it lets anything be seen
OF_A_CLASS = _new("OF_A_CLASS")  # an input of a class of a user's that does not dispatch
