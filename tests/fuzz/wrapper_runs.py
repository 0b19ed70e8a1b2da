"""What a run of a program on wrappers gives, and how two runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# -- what a run gives -------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """Results, the inputs afterwards, and their gradients."""

    result: Any
    inputs: list[Any]
    gradients: list[Any]


def given(
    inputs: dict[str, tuple[str, bool, bool]], seed: int, names: dict[str, Any], jit: Callable
) -> tuple[Callable, list, list]:
    """The compiled function or module, its arguments, and the tensors that get gradients."""
    torch.manual_seed(seed)
    made = {name: eval(expression, names) for name, (expression, _, _) in inputs.items()}  # noqa: S307
    arguments = []
    for name, (_, requires_grad, is_parameter) in inputs.items():
        if not is_parameter:
            arguments.append(made[name].requires_grad_() if requires_grad else made[name])
    if not any(is_parameter for _, _, is_parameter in inputs.values()):
        return jit(names["f"]), arguments, arguments
    module = names["M"](**{name: made[name] for name, (_, _, is_parameter) in inputs.items() if is_parameter})
    return jit(module), arguments, [*arguments, *module.parameters()]


def ran(function: Callable, arguments: list, tensors: list, tangent: float | None) -> Ran:
    """Call, and go backwards if anything requires grad."""
    result = function(*arguments)
    if tangent is None:
        outputs, cotangents = [result], [None]
    else:
        outputs = list({id(t): t for t in _tensors(result)}.values())
        # to the cotangent of an input torch adds what it gets from the program as one gradient, and one part after the other in eager mode:
        # sums of classes that round, or that are no sums, depend on it
        outputs = [t for t in outputs if not any(t is x for x in tensors)] or outputs
        cotangents = [torch.full_like(t.detach(), tangent) if t.requires_grad else None for t in outputs]
    pairs = [(t, c) for t, c in zip(outputs, cotangents, strict=True) if isinstance(t, torch.Tensor) and t.requires_grad]
    if pairs and any(t.requires_grad for t in tensors):
        torch.autograd.backward([t for t, _ in pairs], [c for _, c in pairs])
    return Ran(result, tensors, [t.grad for t in tensors])


def show(name: str, function: Callable, arguments: list, tensors: list, tangent: float | None) -> None:
    """Print what a run gives."""
    try:
        found = ran(function, arguments, tensors, tangent)
        print(name, "result", found.result, "\n   gradients", found.gradients, "\n   inputs", found.inputs)
    except Exception as e:  # noqa: BLE001 - shown beside the other
        print(name, f"{type(e).__name__}: {e}")


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def differences(got: Any, want: Any, path: str = "") -> Iterator[str]:
    """Where the two are not the same, types and metadata included."""
    if isinstance(want, Ran):
        for name in ("result", "gradients", "inputs"):
            yield from differences(getattr(got, name), getattr(want, name), name)
    elif type(got) is not type(want):
        yield f"{path} is a {type(got).__name__} instead of a {type(want).__name__}"
    elif isinstance(want, list | tuple | dict):
        if len(got) != len(want):
            yield f"{path} has {len(got)} entries instead of {len(want)}"
        pairs = [(k, got.get(k), v) for k, v in want.items()] if isinstance(want, dict) else zip(range(len(want)), got, want)  # noqa: B905
        for key, g, w in pairs:
            yield from differences(g, w, f"{path}[{key!r}]")
    elif isinstance(want, torch.Tensor):
        yield from _tensor_differences(got, want, path)
    elif got != want:
        yield f"{path} is {got!r} instead of {want!r}"


def _tensor_differences(got: torch.Tensor, want: torch.Tensor, path: str) -> Iterator[str]:
    is_plain = not hasattr(want, "__tensor_flatten__")
    for name in ("shape", "dtype", "device", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            yield f"{path}.{name} is {getattr(got, name)} instead of {getattr(want, name)}"
            return
    if got.stride() != want.stride() and not is_plain:  # what Thunder computes it lays out as it likes
        yield f"{path}.stride() is {got.stride()} instead of {want.stride()}"
    if not is_plain:
        names, context = want.__tensor_flatten__()
        own_names, own_context = got.__tensor_flatten__()
        yield from differences([*own_names, own_context], [*names, context], path + ".__tensor_flatten__()")
        for name in names:
            yield from differences(getattr(got, name), getattr(want, name), f"{path}.{name}")
    elif not _is_close(got, want):
        yield f"{path} is {got.tolist()} instead of {want.tolist()}"


def _is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not want.is_floating_point():
        return torch.equal(got, want)
    unit = torch.finfo(want.dtype).eps * 1e4
    scale = want.abs().nan_to_num(0, 0, 0).amax().item() if want.numel() else 0.0
    return torch.allclose(got, want, rtol=unit, atol=unit * max(scale, 1e-3), equal_nan=True)
