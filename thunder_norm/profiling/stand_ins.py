"""Tensors without data that stand for a program's inputs, parameters and buffers, on the device of the real ones.

A tensor on the meta device says nothing about where the program will run, and some programs ask (``torch.autocast`` refuses "meta"): it
stands for one on the GPU if there is one, else on the CPU, or on the device that the caller names.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import ProfileError
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.profiling.memory import Memory
from thunder_norm.trees import flat_tensors


@dataclass
class StandIns:
    """Fakes for tensors: one for each, however often it is met."""

    device: torch.device | None = None
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    _known: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The fake for a tensor, a leaf that requires grad if that does.

        Raises:
            ProfileError: it is sparse, nested or a norm.
        """
        if isinstance(t, FakeTensor) and t.fake_mode is self.mode:
            return t
        found = self._known.get(id(t))
        if found is None:
            found = self._known[id(t)] = (t, self._made(t))
        return found[1]

    def _made(self, t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, NormedTensor) or t.layout is not torch.strided or t.is_nested:
            raise ProfileError(
                f"only programs on plain strided tensors can be profiled, got {type(t).__name__} of layout {t.layout}"
            )
        device = self.device or (_default_device() if t.device.type == "meta" else t.device)
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        if isinstance(t, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=t.requires_grad)
        return fake.requires_grad_(t.requires_grad)

    def of_tree(self, tree: Any) -> Any:
        """A tree with fakes in place of tensors."""
        return tree_map(lambda v: self.of(v) if isinstance(v, torch.Tensor) else v, tree)

    def of_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """A copy of a module with fakes for parameters, buffers, what was computed from such (a pruned weight), and all without data.

        Constants with data are copied: a program may ask for their values.
        """
        held = [t for t in Reachable([module], follows_code=False).tensors if t.grad_fn is not None or t.is_meta]
        memo = {id(t): self.of(t) for t in [*module.parameters(), *module.buffers(), *held]}
        return copy.deepcopy(module, memo)

    def is_needed(self, module: torch.nn.Module | None, tree: Any) -> bool:
        """Whether anything is on the meta device, or a device is asked for that it is not on."""
        tensors = [*flat_tensors(tree)]
        if module is not None:
            tensors += [*module.parameters(), *module.buffers()]
        return any(t.device.type == "meta" or (self.device is not None and t.device.type != self.device.type) for t in tensors)


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def note_inputs(memory: Memory, module: torch.nn.Module | None, tree: Any) -> None:
    """Let a memory know the storages that are there before the program starts."""
    if module is not None:
        for p in module.parameters():
            memory.see(p, "parameter")
        for b in module.buffers():
            memory.see(b, "buffer")
    for t in torch.utils._pytree.tree_leaves(tree):
        if isinstance(t, torch.Tensor):
            memory.see(t, "parameter" if isinstance(t, torch.nn.Parameter) else "input")


@contextlib.contextmanager
def without_gradients_kept(leaves: list[torch.Tensor]) -> Iterator[None]:
    """The gradients of leaves are what they were after the block."""
    before = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    try:
        yield
    finally:
        for t, grad in zip(leaves, before, strict=True):
            t.grad = grad
