"""The largest attention logit of each head, as a program computes it: what goes into the softmax, scaled and masked.

Calls of `scaled_dot_product_attention` are seen as they are; of attention that is written out, a softmax over the last dimension, or an
exponential, of what a product of two activations became by scaling, masking, capping and reshaping.  A number that is taken away from
each row (its largest, the logarithm of its sum) changes no softmax, and does not count.  A product with a parameter is none of these.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from thunder_norm.core import bodies
from thunder_norm.trees import flat_tensors

# Names of functions, methods and operators, without the underscores around them.
_PRODUCTS = frozenset({"matmul", "rmatmul", "bmm", "baddbmm", "einsum"})
_ARITHMETIC = frozenset({"mul", "add", "sub", "div", "truediv"})
_BETWEEN = (  # what may be between a product and its softmax
    _ARITHMETIC
    | {prefix + name for name in _ARITHMETIC for prefix in "ri"}
    | {"multiply", "divide", "true_divide", "subtract", "masked_fill", "where", "nan_to_num", "minimum", "maximum"}
    | {"tanh", "clamp", "clip", "clamp_min", "clamp_max", "to", "type", "type_as", "float", "half", "bfloat16", "double"}
    | {
        "clone",
        "contiguous",
        "view",
        "reshape",
        "view_as",
        "reshape_as",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "expand",
    }
)
_OF_WEIGHTS = _BETWEEN | {"t", "transpose", "permute", "movedim", "swapaxes", "get", "getitem"}  # "get": W.T, W.mT
_CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double", "clone", "contiguous"})
_ENTRIES = 1 << 24  # logits that are made at once


class AttentionLogits(TorchFunctionMode):
    """Watches a program's attention while it is active; changes nothing.

    Args:
        note: called with the largest logits, one for each head, at every attention.
    """

    def __init__(self, note: Callable[[torch.Tensor], None]):
        super().__init__()
        self._note = note
        self._products: Any = WeakIdKeyDictionary()  # with the logits that each was before it was shifted, if so
        self._weights: Any = WeakIdKeyDictionary()
        self._heads: int | None = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            body = bodies.python_body(func)
            assert body is not None
            with self._of_heads(args, kwargs), self:
                return body(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._noted(sdpa_logits, *args, **kwargs)
        elif getattr(func, "__name__", "") == "softmax":
            self._see_softmax(*args, **kwargs)
        elif getattr(func, "__name__", "").strip("_") == "exp" and args:
            self._see_softmax(args[0], -1)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._follow(func, args, kwargs, result)
        return result

    @contextlib.contextmanager
    def _of_heads(self, args: tuple, kwargs: dict) -> Iterator[None]:
        """Inside torch's own multi-head attention, whose heads are in the batch dimension of its products."""
        self._heads = args[4] if len(args) > 4 else kwargs["num_heads"]
        try:
            yield
        finally:
            self._heads = None

    def _see_softmax(self, input: torch.Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        if input in self._products and dim is not None and dim % input.ndim == input.ndim - 1:
            logits = self._products[input]
            self._noted(_per_head, input if logits is None else logits, self._heads)

    def _noted(self, largest: Callable[..., torch.Tensor], query: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if query.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(query):  # of the latter no values are known
            return
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            self._note(largest(query, *args, **kwargs))

    def _follow(self, func: Callable, args: tuple, kwargs: dict, result: torch.Tensor) -> None:
        """Remember results that are products of activations, or made of one; and those made of weights alone."""
        name = getattr(func, "__name__", "").strip("_")
        tensors = flat_tensors((args, kwargs))
        if name in _OF_WEIGHTS and tensors and all(map(self._is_weight, tensors)):
            self._weights[result] = True
        elif name in _PRODUCTS:
            if result.ndim >= 3 and len(tensors) > 1 and not any(map(self._is_weight, tensors[-2:])):
                self._products[result] = None
        elif name in _BETWEEN and any(t in self._products and t.shape[-1:] == result.shape[-1:] for t in tensors):
            self._follow_product(name, tensors, result)

    def _follow_product(self, name: str, tensors: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """What a product became; of one whose rows were shifted the logits are known as long as nothing else is done to it."""
        logits = next((t for t in map(self._products.get, tensors) if t is not None), None)
        is_shift = name in ("sub", "isub") and len(tensors) == 2 and tensors[1].shape[-1:] == (1,) != result.shape[-1:]
        if is_shift and result is not tensors[0]:
            self._products[result] = tensors[0].detach() if logits is None else logits
        elif is_shift or logits is not None and name not in _CASTS:
            self._products.pop(result, None)
        else:
            self._products[result] = logits

    def _is_weight(self, t: torch.Tensor) -> bool:
        return isinstance(t, torch.nn.Parameter) or t in self._weights


def _per_head(logits: torch.Tensor, heads: int | None) -> torch.Tensor:
    """The largest of logits [..., heads, queries, keys]; of three dimensions only torch's own attention says how many heads there are."""
    if heads is not None and logits.ndim == 3:
        logits = logits.unflatten(0, (-1, heads))
    if logits.ndim < 4:
        return logits.amax().reshape(1)
    return logits.movedim(-3, 0).flatten(1).amax(-1)


def sdpa_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The largest logit of each head, ``max(scale q k^T + mask)`` over the pairs that the mask allows.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`.  A head all of whose pairs are masked has -inf.  Of tensors of fewer than four dimensions there is one number.
    """
    query, key = (t.float() if t.dtype.itemsize < 4 else t for t in (query, key))
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    length, keys = query.shape[-2], key.shape[-2]
    mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril() if is_causal else attn_mask
    rows = max(1, _ENTRIES * length // max(1, query[..., 0].numel() * keys))
    found = []
    for first in range(0, length, rows):
        logits = scale * (query[..., first : first + rows, :] @ key.mT)
        if mask is not None:
            some = mask if mask.shape[-2] == 1 else mask[..., first : first + rows, :]
            logits = logits.masked_fill(~some, -math.inf) if mask.dtype is torch.bool else logits + some
        found.append(_per_head(logits, None))
    return torch.stack(found).amax(0)
