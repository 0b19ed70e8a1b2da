"""What came of a call in real mode and of the same call in eager mode, and in what they differ."""

from __future__ import annotations

import collections
import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_SEED = 1


@dataclass
class Call:
    """One call: its result, and what is to be seen afterwards.

    Attributes:
        result: what was returned.
        given: the arguments as they are afterwards, by name.
        kept: the module's parameters and buffers afterwards, by name.
        gradients: of the result with respect to leaves among the arguments and to parameters.
        state: random numbers and modes of the process afterwards.
        error: what was raised instead.
    """

    result: Any = None
    given: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    error: Exception | None = None


def called(scope: dict[str, Any], f: Any, form: str, change: str, like: Call | None = None) -> Call:
    """Call `f` with new arguments of a form, after a change of them or of the module ``m`` of the scope.

    Gradients are of those results that require them in `like`: in Thunder more do (docs/tracing.md).
    """
    torch.manual_seed(_SEED)
    leaf = torch.randn(3, 4).requires_grad_(form != "plain")
    given = scope["arguments"](leaf * 1 if form == "result" else leaf)
    exec(change, scope, {"a": given})
    call = Call(given=given)
    modes = _modes()
    try:
        call.result = f(**given)
        call.state = _modes()
        call.gradients = _gradients(call, like or call, [leaf, *scope["m"].parameters()])
    except Exception as e:  # noqa: BLE001 - an outcome
        call.error = e
        call.state = _modes()
    finally:
        _restore(modes)
    call.kept = {**dict(scope["m"].named_parameters()), **dict(scope["m"].named_buffers())}
    call.kept = {k: v.detach().clone() for k, v in call.kept.items()}
    for p in scope["m"].parameters():
        p.grad = None
    return call


def difference(ours: Call, expected: Call, tolerance: float) -> str:
    """What is not the same in both; nothing if all is."""
    compare = functools.partial(_of_trees, tolerance)
    return (
        compare(ours.result, expected.result, "the result")
        or compare(ours.given, expected.given, "the arguments")
        or _of_memory(ours, expected)
        or compare(ours.gradients, expected.gradients, "gradients")
        or compare(ours.kept, expected.kept, "the module")
        or compare(ours.state, expected.state, "the state of the process")
    )


def _modes() -> list[Any]:
    return [
        torch.get_rng_state(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
    ]


def _restore(modes: list[Any]) -> None:
    torch.set_grad_enabled(modes[1])
    torch.set_default_dtype(modes[3])
    torch.set_autocast_enabled("cpu", modes[4])
    torch.set_autocast_dtype("cpu", modes[5])
    torch.use_deterministic_algorithms(modes[6])


def _gradients(call: Call, like: Call, leaves: list[torch.Tensor]) -> list[Any]:
    """With respect to the leaves, of a sum of the results; twice where it is the same tensor twice."""
    found, wanted = (tree_leaves((c.result, c.given)) for c in (call, like))
    results = [
        t for t, u in zip(found, wanted, strict=False) if isinstance(u, torch.Tensor) and u.requires_grad and not u.is_leaf
    ]
    results = [t for t in results if isinstance(t, torch.Tensor)]
    if not results:
        return []
    loss = torch.zeros((), dtype=torch.float64)
    for n, t in enumerate(results):
        loss = loss + (n + 1) * (t.abs() if t.is_complex() else t).double().sin().sum()
    wanted = [t for t in leaves if t.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def _of_trees(tolerance: float, ours: Any, expected: Any, what: str) -> str:
    """In what two trees differ; a class of the one program is that of the other by its name."""
    if type(ours).__name__ != type(expected).__name__:
        return f"{what} is {_shown(ours)} of {type(ours).__name__}, not {_shown(expected)} of {type(expected).__name__}"
    if isinstance(expected, dict):
        if list(ours) != list(expected):
            return f"{what} has {list(ours)}, not {list(expected)}"
        pairs = [(ours[k], expected[k], f"{what}[{k!r}]") for k in expected]
    elif isinstance(expected, list | tuple | set | frozenset | collections.deque):
        if len(ours) != len(expected):
            return f"{what} is {_shown(ours)}, not {_shown(expected)}"
        pairs = [(a, b, f"{what}[{i}]") for i, (a, b) in enumerate(zip(ours, expected, strict=True))]
    elif dataclasses.is_dataclass(expected):
        pairs = [(vars(ours), vars(expected), what)]
    else:
        wrong = _of_leaves(tolerance, ours, expected)
        return f"{what}: {wrong}" if wrong else ""
    return next(filter(None, (_of_trees(tolerance, *pair) for pair in pairs)), "")


def _shown(tree: Any) -> str:
    return " ".join(str(tree).split())[:300]


def _of_leaves(tolerance: float, a: Any, b: Any) -> str:
    if not isinstance(b, torch.Tensor):
        is_same = a == b or (a != a and b != b) or type(a).__module__.startswith("real_")
        return "" if is_same else f"{_shown(a)}, not {_shown(b)}"
    if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
        return f"{type(a).__name__} {a.dtype} {tuple(a.shape)}, not {type(b).__name__} {b.dtype} {tuple(b.shape)}"
    if b.requires_grad is not a.requires_grad:
        return f"requires_grad is {a.requires_grad} for {_shown(b)}"
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    largest = float(b.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() and b.dtype != torch.bool else 1.0
    if not torch.allclose(
        a.detach().double(), b.detach().double(), rtol=tolerance, atol=tolerance * max(largest, 1.0), equal_nan=True
    ):
        return f"{_shown(a.tolist())}, not {_shown(b.tolist())}"
    return ""


def _of_memory(ours: Call, expected: Call) -> str:
    """Which results are arguments, and which share memory with which."""
    found, wanted = _sharing(ours), _sharing(expected)
    for pair in sorted(set(found) | set(wanted)):
        if found.get(pair) != wanted.get(pair):
            return f"{pair[0]} and {pair[1]} are {found.get(pair, 'apart')}, not {wanted.get(pair, 'apart')}"
    return ""


def _sharing(call: Call) -> dict[tuple[str, str], str]:
    named = [(f"result {i}", t) for i, t in enumerate(tree_leaves(call.result))]
    named += [(f"{k} {i}" if i else k, t) for k, v in call.given.items() for i, t in enumerate(tree_leaves(v))]
    tensors = [(n, t) for n, t in named if isinstance(t, torch.Tensor) and t.numel()]
    found = {}
    for i, (n, t) in enumerate(tensors):
        for other, u in tensors[i + 1 :]:
            if t is u:
                found[n, other] = "one"
            elif t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr():
                found[n, other] = "of one memory"
    return found
