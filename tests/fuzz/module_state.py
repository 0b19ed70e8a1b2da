"""What a module holds: to see whether somebody changed it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from thunder_norm import NormedTensor


def state(model: nn.Module, *, identity: bool = True) -> dict[str, Any]:
    """Parameters, buffers and attributes of all modules by name, as values that can be compared.

    With `identity` bit for bit, and also which objects they are; without, to rounding, as a rule may compute in another order, and a
    NormedTensor counts as the tensor that it is a norm of.
    """
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                found |= {f"{path}.{k}": _value(v, identity, ()) for k, v in value.items()}
            elif name == "_modules":
                found[f"{path}._modules"] = tuple((k, id(v) if identity else type(v).__name__) for k, v in value.items())
            elif name.endswith("_hooks") and not identity:
                found[f"{path}.{name}"] = len(value)  # the keys are numbers that are not used again
            else:
                found[f"{path}.{name}"] = _value(value, identity, ())
    return found


class _Rounded:
    """The entries of a tensor, equal to what differs by rounding."""

    def __init__(self, entries: torch.Tensor) -> None:
        self.entries = entries

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Rounded):
            return False
        try:
            torch.testing.assert_close(self.entries, other.entries, equal_nan=True)
        except AssertionError:
            return False
        return True


def _value(x: Any, identity: bool, above: tuple[int, ...]) -> Any:
    if isinstance(x, NormedTensor) and not identity:
        x = x.backing
    if isinstance(x, torch.Tensor):
        data = x.detach().clone().contiguous() if _has_data(x) else None
        bits = data if data is None else data.reshape(-1).view(torch.uint8).numpy().tobytes() if identity else _Rounded(data)
        kind = torch.Tensor if type(x) is nn.Parameter and not identity else type(x)
        grad = None if not x.is_leaf or x.grad is None else _value(x.grad, identity, ())
        return (kind, x.dtype, tuple(x.shape), bits, id(x) if identity else None, x.requires_grad if identity else None, grad)
    if id(x) in above:
        return "itself"
    if isinstance(x, dict):
        return type(x), tuple(
            (k if isinstance(k, str | int) else id(k), _value(v, identity, (*above, id(x)))) for k, v in x.items()
        )
    if isinstance(x, list | tuple | set):
        return type(x), tuple(_value(v, identity, (*above, id(x))) for v in x)
    if isinstance(x, bool | int | float | str | None | torch.dtype | torch.device):
        return x
    return id(x) if identity else type(x).__name__


def _has_data(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and type(x) in (torch.Tensor, nn.Parameter, nn.Buffer) and not x.is_quantized and x.numel() > 0


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what differs."""
    return [k for k in {**before, **after} if before.get(k, "missing") != after.get(k, "missing")]


def random_state() -> tuple:
    """Of the generators that modules draw from."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate()
