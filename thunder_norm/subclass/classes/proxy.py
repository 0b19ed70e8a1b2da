"""What stands for a wrapper subclass instance while a trace is acquired."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from thunder_norm.subclass.classes import jagged
from thunder_norm.subclass.classes.protocol import outer_metadata
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy


class SubclassProxy(TensorProxy):
    """A proxy whose one field of truth is `fake`: an instance of the user's class over fake inner tensors.

    Type, shape, dtype, context and methods are the fake's own; nothing is copied that could get out of step.  It appears in
    the acquired trace only as the product of (un)flattening and is gone once `boundary.lower` ran.
    """

    def __init__(
        self, fake: torch.Tensor, acquisition: Any, *, name: str | None = None, history: Any = None, tags: set | None = None
    ):
        shape = jagged.sizes_at_hand(fake) if jagged.is_jagged_class(type(fake)) else outer_metadata(fake)[0]
        with torch._C.DisableTorchFunctionSubclass():
            dtype, device = fake.dtype, fake.device
        super().__init__(
            name,
            shape=shape,
            device=devices.to_device(device),
            dtype=dtypes.to_dtype(dtype),
            requires_grad=False,
            history=history,
            tags=tags,
        )
        self.fake = fake
        self._acquisition = weakref.ref(acquisition)

    @property
    def class_of_wrapper(self) -> type:
        """The class that the wrapper has in eager mode."""
        return type(self.fake)

    @property
    def acquisition(self) -> Any:
        """The acquisition this proxy belongs to.

        Raises:
            ReferenceError: it is over.
        """
        acquisition = self._acquisition()
        if acquisition is None or acquisition.is_finished:
            raise ReferenceError("the acquisition of this proxy is over")
        return acquisition

    def replace(self, **changes: Any) -> SubclassProxy:
        """A copy under another name (the interpreter renames proxies after the user's variables)."""
        return SubclassProxy(
            self.fake,
            self._acquisition(),
            name=changes.get("name", self.name),
            history=changes.get("history", self.history),
            tags=changes.get("tags", self.tags),
        )

    @property
    def is_live(self) -> bool:
        """Whether the acquisition this proxy belongs to still runs."""
        acquisition = self._acquisition()
        return acquisition is not None and not acquisition.is_finished

    # What a special method does when C code calls it (set by `interpret`).
    run_special_method: ClassVar[Callable[..., Any]]

    def type_string(self) -> str:
        """Shown in traces: the class, then what a tensor shows."""
        return f"{type(self.fake).__name__} {super().type_string()}"


_SPECIAL_METHODS = (
    "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __bool__ __int__ __float__ __complex__ __index__ __iter__ __getitem__ __setitem__ "
    "__abs__ __neg__ __pos__ __invert__ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ "
    "__truediv__ __rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __pow__ __rpow__ "
    "__ipow__ __matmul__ __rmatmul__ __and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __lshift__ "
    "__rlshift__ __ilshift__ __rshift__ __rrshift__ __irshift__"
).split()


def _special_method(name: str) -> Callable[..., Any]:
    def run(self: SubclassProxy, *args: Any) -> Any:
        return SubclassProxy.run_special_method(name, self, *args)

    run.__name__ = name
    return run


for _name in _SPECIAL_METHODS:
    setattr(SubclassProxy, _name, _special_method(_name))
