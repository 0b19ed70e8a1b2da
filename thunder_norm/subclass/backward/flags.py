"""Whether a tensor requires grad, changed by the program: ``x.requires_grad_()`` and ``x.detach_()``.

A trace is made for what its inputs require, and what its results do is what autograd makes of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.classes.protocol import outer_metadata
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.recording import gradients_recorded
from thunder_norm.tracing.shared_memory.aliases import is_detached, is_view, is_written
import thunder.torch as ltorch
from thunder.core.interpreter import WrappedValue, do_raise
from thunder.core.proxies import TensorProxy

_FLAGS = (torch.Tensor.requires_grad_, torch.Tensor.detach_)


def is_set(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether `fn` was about the flag of a wrapper, or of a plain input, and that is now what it is to be.

    It was so before, or a history starts at a wrapper that the program has made.

    Raises:
        UnsupportedOpError: an input is to have another flag.
        RuntimeError: as in eager mode, of a tensor with a history.
    """
    if fn not in _FLAGS or not args or not isinstance(args[0], TensorProxy):
        return False
    proxy = args[0]
    given = acquisition.fakes.real_input(proxy)
    wanted = fn is torch.Tensor.requires_grad_ and bool(kwargs.get("requires_grad", args[1] if len(args) > 1 else True))
    if isinstance(proxy, SubclassProxy):
        has = acquisition.autograd.requires_grad(proxy) if given is None else outer_metadata(given)[2]
    else:
        flag = acquisition.fakes.flag_given(proxy)
        if given is None and flag is None:
            return False
        given, has = (proxy, flag) if given is None else (given, given.requires_grad)
    if wanted == has:
        return True
    if given is None and fn is torch.Tensor.detach_:
        return False
    if given is None and has:
        raise RuntimeError("you can only change requires_grad flags of leaf variables.")
    if given is None and wanted and isinstance(proxy, SubclassProxy) and acquisition.starts_history(proxy.fake):
        return True
    call = "detach_()" if fn is torch.Tensor.detach_ else f"requires_grad_({wanted})"
    kind = type(proxy.fake).__name__ if isinstance(proxy, SubclassProxy) else "plain tensor"
    whose = "of a tensor made in the program" if given is None else "of an input of the jitted function"
    raise UnsupportedOpError(
        with_details(
            f"{call} {whose}, a {kind} for which it is {has}",
            at=location_of_user(),
            why="what is differentiated is known before the program runs",
            instead="call it before the jitted function, or on the result"
            if given is None
            else "call it before the jitted function",
        )
    )


def detached_in_place(acquisition: Acquisition | None, obj: WrappedValue) -> WrappedValue | Any:
    """Called for ``t.detach_()`` of a plain tensor: what is read of it from now on has no gradient.

    Thunder knows no such change of a tensor; a write into it of what it holds, detached, is one.
    """
    given = acquisition.fakes.real_input(obj.value) if acquisition is not None else None
    if given is not None and given.requires_grad and (given.is_leaf or (acquisition is not None and acquisition.has_wrappers)):
        return do_raise(
            UnsupportedOpError(
                with_details(
                    "detach_() of an input of the jitted function that requires grad",
                    at=location_of_user(),
                    why="what is differentiated is known before the program runs",
                    instead="call it before the jitted function, or use detach()",
                )
            )
        )
    was_detached = is_detached(obj.value)
    if not is_written(obj.value) and (was_detached or (given is not None and not given.requires_grad)):
        return obj
    if (is_view(obj.value) and not was_detached) or (given is not None and given._is_view()):
        return do_raise(RuntimeError("Can't detach views in-place. Use detach() instead."))
    with gradients_recorded(True):  # of this write there are none, wherever the program makes it
        ltorch.copy_(obj.value, ltorch.detach(obj.value))
    if acquisition is not None:
        acquisition.autograd.detached(obj.value)
    return obj
