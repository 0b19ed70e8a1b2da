"""Autocast around a call, which a program was traced for and does not run under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thunder.core import dtypes

_is_enabled, _set_enabled, _dtype = torch.is_autocast_enabled, torch.set_autocast_enabled, torch.get_autocast_dtype


class Precision(NamedTuple):
    """What of autocast Thunder has a program for: of the devices that it knows autocast of."""

    on_cpu: bool
    on_cuda: bool
    cpu_dtype: torch.dtype
    cuda_dtype: torch.dtype

    @property
    def is_lowered(self) -> bool:
        """Whether it is on."""
        return self.on_cpu or self.on_cuda

    def in_thunder(self) -> dict[str, Any]:
        """What ``thunder.jit`` notes of it (``get_computation_and_inputs``: autocast related operations)."""
        if not self.is_lowered:
            return {"is_autocast_enabled": False}
        on_cpu, on_cuda = (str(dtypes.to_dtype(d)) for d in (self.cpu_dtype, self.cuda_dtype))
        return {
            "is_autocast_enabled": True,
            "autocast_config_torch_enabled": self.on_cuda,
            "autocast_config_torch_cpu_enabled": self.on_cpu,
            "autocast_gpu_dtype": on_cuda,
            "autocast_cpu_dtype": on_cpu,
            "autocast_thunder_dtype": on_cpu if self.on_cpu else on_cuda,
        }

    def left_out(self, fn: Callable) -> Callable:
        """`fn` in full precision, for calls in which it is as here."""
        if not self.is_lowered:
            return fn
        on_cpu, on_cuda = self.on_cpu, self.on_cuda

        def in_full(*args: Any) -> Any:
            _set_enabled("cpu", False)
            _set_enabled("cuda", False)
            try:
                return fn(*args)
            finally:
                _set_enabled("cpu", on_cpu)
                _set_enabled("cuda", on_cuda)

        return in_full


def precision_of_now() -> Precision:
    """That of the thread, asked in each call."""
    return Precision(_is_enabled("cpu"), _is_enabled("cuda"), _dtype("cpu"), _dtype("cuda"))
