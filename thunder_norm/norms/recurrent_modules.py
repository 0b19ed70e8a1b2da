"""Recurrent modules in traced programs: `nn.LSTM`, `nn.GRU` and `nn.RNN` read their weights by name.

They keep a list of them for cuDNN, `_flat_weights`, and write it anew when a weight is another object, as every one is in a trace.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

from thunder_norm.tracing import lookasides
from thunder.core.interpreter import WrappedValue, _interpret_call


class _Named:
    """A recurrent module whose list of weights is made of its attributes; everything else is the module's."""

    def __init__(self, module: nn.RNNBase):
        self._module = module
        self._flat_weights = [getattr(module, name) for name in module._flat_weights_names]

    def _update_flat_weights(self) -> None:
        """The list is up to date."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self._module), name, None)
        return types.MethodType(found, self) if isinstance(found, types.FunctionType) else getattr(self._module, name)


def _register(kind: type[nn.RNNBase]) -> None:
    original = kind.forward
    # the same code under another identity: interpreting it does not lead here again
    forward = types.FunctionType(original.__code__, original.__globals__, original.__name__, original.__defaults__)

    def run(module: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        return forward(_Named(module), input, hx)

    @lookasides.instead_of(original)
    def _forward(module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        return _interpret_call(run, module, *args, **kwargs)


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    _register(_kind)
