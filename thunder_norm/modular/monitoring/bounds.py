"""Bounds on what each module of a model returns, at the norms that its parameters and inputs have now: a norm map with many outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thunder_norm.core.tensors import NormedTensor, describe
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular.monitoring.forwards import Kinds, norm_without_trace, output_names, own_pre_hooks
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.maps.norm_map import NormMap, build_norm_map

_MOST = 4  # norm maps: a model has one for each combination of hooks and of modules in training that it is seen in


class LayerBounds:
    """The norm map of a model whose outputs are those of all of its modules.

    Args:
        model: the plain module.
        args: example arguments: bounds hold for arguments of these shapes.
        kwargs: the same, by name.
        inputs: the same arguments as NormedTensors, which say in which norms they are measured.

    Raises:
        Exception: whatever acquiring the norm map raises.
    """

    def __init__(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any], inputs: tuple[tuple, dict]):
        self._model = model
        self._example, self._structure = _flat(args, kwargs)
        self._norms = [_spec(x) for x in _flat(*inputs)[0]]
        self._maps: dict[tuple[Any, ...], NormMap] = {}
        leaves = [1.0 if spec is not None else x for x, spec in zip(self._example, self._norms, strict=True)]
        self.kinds: Kinds = {name: NormSpec(type(y), y.elem_dims) for name, y in self._outputs(leaves)}

    def misfit(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Why there are no bounds for these arguments; None if there are."""
        leaves, structure = _flat(args, kwargs)
        if structure != self._structure:
            return "the arguments have another structure than the example"
        for x, example in zip(leaves, self._example, strict=True):
            if isinstance(example, torch.Tensor):
                if not isinstance(x, torch.Tensor) or x.shape != example.shape:
                    return f"{describe(x)} came where the example has shape {list(example.shape)}"
            elif x is not example and x != example:
                return f"{x!r} came where the example has {example!r}"
        if self._program() not in self._maps and len(self._maps) >= _MOST:
            return f"more than {_MOST} combinations of hooks, and of modules in training mode"
        return None

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, float]:
        """The bound on each output, by name, for arguments that fit; each module's largest, if it is called several times."""
        leaves, _ = _flat(args, kwargs)
        sizes = [x if spec is None else norm_without_trace(spec, x) for x, spec in zip(leaves, self._norms, strict=True)]
        found: dict[str, float] = {}
        for name, y in self._outputs(sizes):
            found[name] = max(found.get(name, 0.0), y.norm_size.item())
        return found

    def _program(self) -> tuple[Any, ...]:
        """What is another program when it changes: which modules are in training, and their hooks."""
        return tuple((m.training, *m._forward_hooks, *own_pre_hooks(m)) for m in self._model.modules())

    def _outputs(self, leaves: list[Any]) -> list[tuple[str, NormedTensor]]:
        """The norms of what modules return, in the order in which they do."""
        key = self._program()
        if key not in self._maps:
            args, kwargs = tree_unflatten(self._example, self._structure)
            self._maps[key] = build_norm_map(_Layers(self._model), *args, parameters="measured", **kwargs)
        norm_map = self._maps[key]
        normed = [
            x if spec is None else spec.kind(x, elem_dims=spec.elem_dims) for x, spec in zip(leaves, self._norms, strict=True)
        ]
        args, kwargs = tree_unflatten([x.detach() if _is_data(x) else x for x in normed], self._structure)
        with torch.no_grad(), _watched(norm_map.model):
            results = norm_map(*args, **kwargs)
        return [(name, y) for path, result in results for name, y in output_names(path, result) if isinstance(y, NormedTensor)]


class _Layers(torch.nn.Module):
    """A model that returns what all of its modules return, with their paths."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.seen: list[tuple[str, Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        self.seen.clear()
        self.model(*args, **kwargs)
        return list(self.seen)


@contextlib.contextmanager
def _watched(layers: Any) -> Iterator[None]:
    """Hooks that note results, for as long as a norm map may be acquired: a trace cannot put them there."""
    handles = [m.register_forward_hook(_noting(layers.seen, path)) for path, m in layers.model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noting(seen: list[tuple[str, Any]], path: str) -> Callable[..., None]:
    def note(module: torch.nn.Module, args: Any, result: Any) -> None:
        # as it is now: the program may change it in place (`nn.ReLU(inplace=True)`)
        seen.append((path, tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, result)))

    return note


def _flat(args: tuple, kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Arguments as leaves, those by name in alphabetical order."""
    return tree_flatten((tuple(args), dict(sorted(kwargs.items()))))


def _spec(x: Any) -> NormSpec | None:
    if isinstance(x, NormedTensor):
        if x.elem_dims is None:
            raise NormMismatchError(f"an example argument needs a shape: {describe(x)}")
        return NormSpec(type(x), x.elem_dims)
    return None


def _is_data(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, NormedTensor)


def as_arguments(example: Any) -> tuple[tuple, dict[str, Any]]:
    """What an example stands for: a tuple of arguments, a mapping of arguments by name, or one argument."""
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return example, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example,), {}


def plain_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The same without NormedTensors: their backings."""
    return tree_map(lambda x: x.backing if isinstance(x, NormedTensor) else x, (args, kwargs))
