"""The values of buffers that a model built on the meta device lacks, where its library says how they are made.

``with torch.device("meta"): model = LlamaForCausalLM(config)`` has no memory for weights, which norms do not look at, and no values of
the tables that its modules compute when they are made: frequencies of rotary embeddings, relative positions, constant scales.  No
checkpoint has these (``persistent=False``), so the libraries that build models on meta in order to load them say how to fill them in:
transformers in ``PreTrainedModel._init_weights``, timm in ``init_non_persistent_buffers``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from thunder_norm.model_state.places import Place, held_instead


def initial_buffers(model: Callable) -> dict[str, torch.Tensor]:
    """The values, on the CPU, of those buffers of `model` on meta that its library can make anew, by their dotted names.

    Nothing of the model is written, read or run but that code, on a copy without data.  What it does not write, or draws at random, has no
    values.
    """
    modules = dict(_lacking(model)) if isinstance(model, nn.Module) else {}
    if not any(_maker(model, path) for path in modules):
        return {}
    first, second = (_made(model, modules, fill) for fill in (0, 1))
    return {name: t for name, t in first.items() if name in second and _is_same(t, second[name])}


def with_initial_buffers(model: Callable) -> AbstractContextManager[None]:
    """Inside, the buffers of `initial_buffers` stand in the places of those without data."""
    return held_instead([(_place(model, name), value) for name, value in initial_buffers(model).items()])


def _place(model: Callable, name: str) -> Place:
    assert isinstance(model, nn.Module), "nothing else has buffers"
    path, _, key = name.rpartition(".")
    return model.get_submodule(path)._buffers, key


def _lacking(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Paths of modules, and the buffers of each that no checkpoint has, and that are on meta."""
    for path, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if (t := module._buffers.get(n)) is not None and t.is_meta]
        if names:
            yield path, names


def _maker(model: nn.Module, path: str) -> Callable[[], object] | None:
    """What makes the buffers of the module at `path`, by its library."""
    module = model.get_submodule(path)
    of_timm = getattr(module, "init_non_persistent_buffers", None)
    if callable(of_timm):
        return of_timm
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return None
    names = path.split(".") if path else []
    around = (model.get_submodule(".".join(names[:i])) for i in range(len(names), -1, -1))
    owner = next((m for m in around if isinstance(m, transformers.PreTrainedModel)), None)
    return None if owner is None else lambda: owner._init_weights(module)


def _made(model: nn.Module, modules: dict[str, list[str]], fill: int) -> dict[str, torch.Tensor]:
    """The buffers of a copy, which were `fill` before they were made."""
    try:
        own = _without_data(model)
    except Exception:  # noqa: BLE001 - something that the model holds cannot be copied
        return {}
    made: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(fill)
        for path, names in modules.items():
            buffers = own.get_submodule(path)._buffers
            for name, t in [(name, buffers[name]) for name in names]:
                assert t is not None, "_lacking has those that are there"
                buffers[name] = torch.full(t.shape, fill, dtype=t.dtype, device="cpu")
            if (make := _maker(own, path)) is None:
                continue
            try:
                make()
            except Exception:  # noqa: BLE001 - code of the library, for a module that has data
                continue
            made |= {f"{path}.{name}" if path else name: t for name in names if (t := buffers.get(name)) is not None}
    return {name: t.detach() for name, t in made.items() if not t.is_meta}


def _without_data(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on meta."""
    memo: dict[int, object] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
