"""What stands for a wrapper subclass instance while a trace is acquired."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy

from thunder_norm.subclass.protocol import outer_metadata


class SubclassProxy(TensorProxy):
    """A proxy whose one field of truth is `fake`: an instance of the user's class over fake inner tensors.

    Type, shape, dtype, context and methods are the fake's own; nothing is copied that could get out of step.  It appears in
    the acquired trace only as the product of (un)flattening and is gone once `boundary.lower` ran.
    """

    def __init__(self, fake: torch.Tensor, acquisition: Any, *, name: str | None = None, history: Any = None, tags: set | None = None):
        shape, _, _ = outer_metadata(fake)
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

    # Comparisons reach the proxy itself: the interpreter evaluates them natively.
    compare: ClassVar[Callable[[str, SubclassProxy, Any], Any]]

    def __lt__(self, other: Any) -> Any:
        return SubclassProxy.compare("__lt__", self, other)

    def __le__(self, other: Any) -> Any:
        return SubclassProxy.compare("__le__", self, other)

    def __gt__(self, other: Any) -> Any:
        return SubclassProxy.compare("__gt__", self, other)

    def __ge__(self, other: Any) -> Any:
        return SubclassProxy.compare("__ge__", self, other)

    def __eq__(self, other: Any) -> Any:
        return SubclassProxy.compare("__eq__", self, other)

    def __ne__(self, other: Any) -> Any:
        return SubclassProxy.compare("__ne__", self, other)

    __hash__ = TensorProxy.__hash__

    def type_string(self) -> str:
        """Shown in traces: the class, then what a tensor shows."""
        return f"{type(self.fake).__name__} {super().type_string()}"
