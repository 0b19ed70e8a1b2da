"""What is left of a program of calls after each of its steps, and in what two such records differ."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LOW = (torch.bfloat16, torch.float16)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size, slice)


@dataclass
class Seen:
    """A tensor as it was when it was looked at."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    may_require_grad: bool
    is_inference: bool
    value: torch.Tensor | None


def seen(value: Any) -> Any:
    """A value with all that it holds, as it is now."""
    if isinstance(value, torch.Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return "of a transform"  # that an attribute holds it is the end of it
        has_history = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            plain = value.detach()
            held = None if plain.is_meta else plain.resolve_conj().resolve_neg().clone()
            return Seen(
                type(value).__name__,
                value.dtype,
                tuple(value.shape),
                value.device.type,
                value.requires_grad,
                has_history,
                value.is_inference(),
                held,
            )
    if isinstance(value, dict):
        return {"class": type(value).__name__, **{str(k): seen(v) for k, v in value.items()}}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(seen, value)]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, seen(vars(value))]
    return value if isinstance(value, _PLAIN) else type(value).__name__


def modes() -> dict[str, Any]:
    """The modes and the random state of this thread."""
    return {
        "random": hash(bytes(torch.get_rng_state().tolist())),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "functions of subclasses": torch._C._is_torch_function_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "saved tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
    }


def restored() -> None:
    """Modes that a program left are as they were."""
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_autocast_enabled("cpu", False)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def state_of(scope: dict[str, Any]) -> dict[str, Any]:
    """The module with gradients, the inputs, and what the program and its hooks noted."""
    module: nn.Module = scope["m"]
    found = {f"m.{n}": seen(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
    found |= {f"m.{n}.grad": seen(p.grad) for n, p in module.named_parameters()}
    found |= {f"m.{name}": seen(getattr(module, name, "none")) for name in ("count", "kept", "mean", "last", "training", "k")}
    for name in ("x", "y"):
        if isinstance(t := scope[name], torch.Tensor):
            found[name] = seen(t)
            if t.is_leaf and not t.is_inference():
                found[f"{name}.grad"] = seen(t.grad)
    found["log"], found["LOG"] = list(scope["log"]), list(scope["LOG"])
    found["generator"] = hash(bytes(scope["GENERATOR"].get_state().tolist()))
    return found


def difference(found: Any, expected: Any, tolerance: float, place: str = "") -> str:
    """Where two records differ; nothing where they do not."""
    if type(found) is not type(expected):
        if None in (found, expected) and place.endswith(".grad") and _is_zero(found if expected is None else expected):
            return ""  # a gradient of zeros
        return f"{place}: {_shown(found)}, not {_shown(expected)}"
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return f"{place}: {list(found)}, not {list(expected)}"
        pairs = [(found[k], expected[k], f"{place}.{k}") for k in expected]
    elif isinstance(expected, list):
        if len(found) != len(expected):
            return f"{place}: {_shown(found)}, not {_shown(expected)}"
        pairs = [(a, b, f"{place}[{n}]") for n, (a, b) in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, Seen):
        return _of_tensors(found, expected, tolerance, place)
    else:
        is_same = found == expected or (found != found and expected != expected)
        if isinstance(expected, float):
            is_same = is_same or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
        return "" if is_same else f"{place}: {found!r}, not {expected!r}"
    return next(filter(None, (difference(a, b, tolerance, at) for a, b, at in pairs)), "")


def _is_zero(value: Any) -> bool:
    return isinstance(value, Seen) and value.value is not None and not value.value.count_nonzero()


def _shown(value: Any) -> str:
    return " ".join(str(value).split())[:200]


def _of_tensors(a: Seen, b: Seen, tolerance: float, place: str) -> str:
    for name in ("kind", "dtype", "shape", "device", "is_inference"):
        if getattr(a, name) != getattr(b, name):
            return f"{place}: {name} is {getattr(a, name)}, not {getattr(b, name)}"
    # in a program that is differentiated all results require grad, those that no gradient reaches too (docs/tracing.md)
    if a.requires_grad is not b.requires_grad and (b.requires_grad or not a.may_require_grad):
        return f"{place}: requires_grad is {a.requires_grad}"
    if a.value is None or b.value is None:
        return "" if a.value is b.value else f"{place}: one has no value"
    if a.dtype in _LOW:
        tolerance = max(tolerance, 5e-2)
    with torch._C.DisableTorchFunction():
        wide = torch.complex128 if a.value.is_complex() else torch.float64
        u, v = a.value.to(wide), b.value.to(wide)
        largest = float(v.abs().nan_to_num(0.0, 0.0, 0.0).max()) if v.numel() else 1.0
        is_near = torch.allclose(u, v, rtol=tolerance, atol=tolerance * max(largest, 1.0), equal_nan=True)
    return "" if is_near else f"{place}: {_shown(a.value.tolist())}, not {_shown(b.value.tolist())}"
