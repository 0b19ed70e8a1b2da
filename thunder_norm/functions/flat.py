"""The tensors in nested arguments."""

from __future__ import annotations

from typing import Any

import torch
from thunder.core.proxies import TensorProxy
from torch.utils._pytree import tree_flatten


def flat_tensors(tree: Any, kind: type = torch.Tensor) -> tuple:
    """The tensors in a tree, in order."""
    return tuple(v for v in tree_flatten(tree)[0] if isinstance(v, kind))


def flat_proxies(tree: Any) -> tuple[TensorProxy, ...]:
    """The tensor proxies in a tree, in order."""
    return flat_tensors(tree, TensorProxy)
