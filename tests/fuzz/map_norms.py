"""What has to hold for norm maps, reports and sensitivities of a random module."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thunder_norm import NormedTensor, NormVector, build_norm_map, load_norm_map, norm_report, normed, sensitivities
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.report.norm_report import load_norm_report
from thunder_norm.transforms import NormTransform
import thunder

from .map_models import Case, module_on_meta, normed_leaves, on_meta
from .plain_modules import Wrong, is_floating, norm_of

SAME = 1e-5  # of two ways to compute the same norm


def equal_sizes(case: Case) -> None:
    """A map is the eager run and the jitted normed call, however sizes are given, on data and without; twice."""
    model, (args, kwargs) = case.build(), case.arguments()
    norms, norm_args = case.normed(unfinalized=True), case.normed()
    given = _given(case)
    expected = _eager(case, model, norm_args, policy=given)
    before = [copy.copy(p.norm_size) for p in given.values()]
    with case.untouched("a norm map", model, args, kwargs):
        made = build_norm_map(model, *args, **kwargs)
        found = made(*norms[0], normed_state_dict=given, **norms[1])
        again = made(*norms[0], normed_state_dict=given, **norms[1])
    if any(p.norm_size is not b and not torch.equal(p.norm_size, b) for p, b in zip(given.values(), before, strict=True)):
        raise Wrong("the sizes that were given are others afterwards")
    _same("a norm map", found, expected)
    _same("a second call", again, found, 1e-12)
    _shapes(case, found)
    if given:
        vector = NormVector(given)
        _same("a NormVector", made(*norms[0], normed_state_dict=vector, **norms[1]), found, 1e-9)
        by_policy = build_norm_map(model, *args, parameters=given, **kwargs)
        _same("parameters=sizes", by_policy(*norms[0], **norms[1]), found, 1e-9)
    for policy in ("measured", "unit"):
        by_word = build_norm_map(model, *args, parameters=policy, **kwargs)(*norms[0], **norms[1])
        _same(f"parameters={policy!r}", by_word, _eager(case, model, norm_args, policy=policy, otherwise=policy))


def jitted_call(case: Case) -> None:
    """A map is the jitted program called on norms."""
    model, (args, kwargs) = case.build(), case.arguments()
    norms, norm_args = case.normed(unfinalized=True), case.normed()
    given = _given(case)
    found = build_norm_map(model, *args, parameters=given, **kwargs)(*norms[0], **norms[1])
    jm = thunder.jit(case.build(), transforms=[NormTransform(parameters=given)])
    with case.program.base._defaults(case.program.base.seed + 2):
        called = normed(jm)(*norm_args[0], **norm_args[1])
    _same("a norm map beside the jitted call", found, called)


def without_data(case: Case) -> None:
    """On the meta device a map is what it is on a real one."""
    model, (args, kwargs) = case.build(), case.arguments()
    norms, given = case.normed(unfinalized=True), _given(case)
    expected = build_norm_map(model, *args, **kwargs)(*norms[0], normed_state_dict=given, **norms[1])
    empty = module_on_meta(case.build())
    with case.untouched("a norm map on meta", empty):
        found = build_norm_map(empty, *on_meta(args), **on_meta(kwargs))(*norms[0], normed_state_dict=given, **norms[1])
    _same("on the meta device", found, expected)


def dynamic(case: Case) -> None:
    """A map with a dynamic first dimension is a fresh one at each size of it."""
    model, (args, kwargs) = case.build(), case.arguments()
    leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    if not all(t.ndim for t in leaves) or len({t.shape[0] for t in leaves}) > 1:
        return
    dims = _of_tensors((args, kwargs), {0: "batch"})
    names = list(dims[1])
    shapes: Any = dims[0] if not names else dims[1] if not args else None
    if shapes is None:
        return
    made = build_norm_map(model, *args, dynamic_shapes=shapes, **kwargs)
    for size in (leaves[0].shape[0], 5, 1):
        other = _resized((args, kwargs), size)
        try:
            case.call(case.build(), *other)
        except Exception:  # noqa: BLE001 - torch has no program of that size
            continue
        norm_args = _resized(case.normed(), size)
        with contextlib.suppress(NormMismatchError):  # what an argument stands for need not be of that size
            fresh = build_norm_map(case.build(), *other[0], **other[1])(*norm_args[0], **norm_args[1])
            _same(f"at a first dimension of {size}", made(*norm_args[0], **norm_args[1]), fresh)


def kept(case: Case) -> None:
    """What is saved, pickled and copied is the same map; of a copy the model's changes are none."""
    model, (args, kwargs) = case.build(), case.arguments()
    norms, given = case.normed(unfinalized=True), _given(case)
    made = build_norm_map(model, *args, **kwargs)
    calls: list[dict[str, Any]] = [{}, {"normed_state_dict": given}]
    first = [made(*norms[0], **more, **norms[1]) for more in calls]
    others: dict[str, Any] = {"a copy": copy.copy(made)}
    with contextlib.suppress(Exception):  # a model that Python does not copy
        copy.deepcopy(model)
        others["a deep copy"] = copy.deepcopy(made)
    if _pickles(model):
        others["a pickled one"] = pickle.loads(pickle.dumps(made))  # noqa: S301 - of ours
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map"
        made.save(path)
        others["a loaded one"] = load_norm_map(path)
        others["a loaded one with a model"] = load_norm_map(path, case.build())
    for what, other in others.items():
        for more, expected in zip(calls, first, strict=True):
            _same(what, other(*norms[0], **more, **norms[1]), expected, 1e-9)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    fresh = build_norm_map(model, *args, **kwargs)(*norms[0], **norms[1])
    _same("after the weights have changed", made(*norms[0], **norms[1]), fresh, 1e-9)
    for what in others.keys() & {"a deep copy", "a pickled one", "a loaded one"}:
        _same(f"{what}, after the weights have changed", others[what](*norms[0], **norms[1]), first[0], 1e-9)


def changed_model(case: Case) -> None:
    """A map sees other parameters in place of the model's, and says what a new map says."""
    model, (args, kwargs) = case.build(), case.arguments()
    norms = case.normed(unfinalized=True)
    made = build_norm_map(model, *args, **kwargs)
    made(*norms[0], **norms[1])
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach() * -2, requires_grad=p.requires_grad))
    fresh = build_norm_map(model, *args, **kwargs)(*norms[0], **norms[1])
    _same("with other parameters", made(*norms[0], **norms[1]), fresh, 1e-9)


def derivatives(case: Case) -> None:
    """Gradients of sizes are differences of values, and no size gets smaller when another grows."""
    model, (args, kwargs) = case.build(), case.arguments()
    given = _given(case)
    made = build_norm_map(model, *args, **kwargs)
    norms = [x for x in tree_flatten(case.normed(unfinalized=True))[0] if isinstance(x, NormedTensor)]
    sizes = [x.norm_size for x in norms] + [p.norm_size for p in given.values()]
    if not sizes:
        return
    point = torch.stack([s.detach().double() for s in sizes]).clamp(min=1e-6)
    generator = torch.Generator().manual_seed(case.program.base.seed)

    def at(values: torch.Tensor) -> torch.Tensor:
        entries = iter(values.unbind())
        position = iter(norms)

        def of(x: torch.Tensor) -> Any:
            if not (x.is_floating_point() and x.ndim and case._norms[0] is not None):
                return x.detach()
            like = next(position)
            return type(like)(next(entries), elem_dims=like.elem_dims)

        a, k = case.arguments(of)
        state = {name: type(p)(next(entries), elem_dims=p.elem_dims) for name, p in given.items()}
        return torch.stack([y.norm_size for y in normed_leaves(made(*a, normed_state_dict=state, **k))])

    point.requires_grad_()
    here = at(point)
    if not here.isfinite().all() or not here.requires_grad:
        return
    weights = torch.rand(here.shape, generator=generator, dtype=torch.float64) / here.detach().abs().clamp(min=1e-300)
    (gradient,) = torch.autograd.grad((weights * here).sum(), point)
    direction = torch.randn(point.shape, generator=generator, dtype=torch.float64) * point.detach()
    claimed = (gradient * direction).sum().item()
    slopes = []
    for step in (1e-5, 1e-6):
        with torch.no_grad():
            up, down = ((weights * at((point + s * direction).detach())).sum().item() for s in (step, -step))
        middle = (weights * here.detach()).sum().item()
        slopes += [(up - middle) / step, (middle - down) / step]
    size = (gradient * direction).abs().sum().item() + 1
    low, high = min(slopes), max(slopes)
    if not low - 1e-3 * size <= claimed <= high + 1e-3 * size:
        raise Wrong(f"the gradient of sizes is {claimed:.8g} along a direction, differences say {low:.8g} to {high:.8g}")
    with torch.no_grad():
        larger = at((point * (1 + torch.rand(point.shape, generator=generator, dtype=torch.float64))).detach())
    if (larger < here.detach() * (1 - 1e-9) - 1e-300).any():
        raise Wrong(f"larger sizes give smaller ones: {larger.tolist()}, before {here.tolist()}")


def moved(case: Case) -> None:
    """Sensitivities are what perturbation sizes are made of, in maps as in eager runs."""
    model, (args, kwargs) = case.build(), case.arguments()
    found = []
    for is_map in (True, False):
        given = {
            name: type(p)(p.norm_size, elem_dims=p.elem_dims, perturbation_size=torch.ones((), dtype=torch.float64, requires_grad=True))
            for name, p in _given(case).items()
        }  # fmt: skip
        norms = case.normed(unfinalized=is_map, moving=True)
        if is_map:
            result = build_norm_map(model, *args, **kwargs)(*norms[0], normed_state_dict=given, **norms[1])
        else:
            result = _eager(case, model, norms, policy=given)
        leaves = [*(x for x in tree_flatten(norms)[0] if isinstance(x, NormedTensor)), *given.values()]
        if not leaves or not normed_leaves(result):
            return
        s = torch.stack(sensitivities(result, leaves))
        total = sum(y.perturbation_size.item() for y in normed_leaves(result) if y.perturbation_size is not None)
        if not _close(s.sum().item(), total, 1e-6):
            raise Wrong(f"sensitivities add up to {s.sum().item():.8g}, all perturbations of 1 to {total:.8g}")
        found.append((result, s))
    (by_map, ours), (eagerly, theirs) = found
    _same("with perturbations", by_map, eagerly)
    if not all(_close(a, b, SAME) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)):
        raise Wrong(f"sensitivities of a map {ours.tolist()}, eagerly {theirs.tolist()}")


def report(case: Case) -> None:
    """A report changes nothing, is the same twice, and what it says of parameters is so; it prints, and is in files what it is."""
    model, (args, kwargs) = case.build(), case.normed()
    random = Random(case.program.base.seed)
    scope: dict[str, Any] = random.choice(
        [{}, {}, {"sensitivity": "global"}, {"sensitivity": "local"}, {"radius": 0.1}, {"radius": 0.0}, {"per": -1}]
    )
    jm = thunder.jit(model, transforms=[NormTransform()])
    with case.untouched("norm_report", model, args, kwargs):
        first = norm_report(jm, *args, **scope, **kwargs)
        second = norm_report(jm, *args, **scope, **kwargs)
    _looked_at(first, second)
    slack = case.close if case.program.base.dtype != "float64" else 1e-8
    for row in first.rows:
        if row.tightness is not None and not (row.tightness <= 1 + slack or math.isnan(row.tightness)):
            raise Wrong(f"report, {scope}: {row.op} of {row.module!r} has tightness {row.tightness:.6g}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, row in first.parameters.items():
        p = tensors.get(name)
        if row.actual is not None and p is not None and tuple(p.shape) == row.shape:
            actual = norm_of(_like(row), p)
            if not _close(row.actual, actual, 1e-3 if p.dtype is torch.bfloat16 else SAME):
                raise Wrong(f"report: {name} has norm {actual:.6g}, {row.actual:.6g} is said")


def report_of_map(case: Case) -> None:
    """The report of a norm map has the sizes of its call."""
    model, (args, kwargs) = case.build(), case.arguments()
    norms = case.normed(unfinalized=True)
    made = build_norm_map(model, *args, **kwargs)
    found = made(*norms[0], **norms[1])
    with case.untouched("norm_report of a map", model, args, kwargs):
        first, second = norm_report(made), norm_report(made, *norms[0], **norms[1])
    _looked_at(first, second)
    sizes = {r.norm_size for r in first.rows}
    for y in normed_leaves(found):
        is_input = any(y.norm_size.item() == x.norm_size.item() for x in normed_leaves(norms))
        if (
            first.rows
            and not is_input
            and not any(_close(y.norm_size.item(), s, SAME) for s in sizes | {r.norm_size for r in first.parameters.values()})
        ):
            raise Wrong(f"a result of size {y.norm_size.item():.8g} is no row's of the report: {sorted(sizes)}")


def _looked_at(first: Any, second: Any) -> None:
    if repr(first.rows) != repr(second.rows):
        pairs = [(a, b) for a, b in zip(first.rows, second.rows, strict=False) if repr(a) != repr(b)]
        raise Wrong(f"two reports differ: {pairs[:1] or (len(first.rows), len(second.rows))}")
    if not str(first) or not first.table(width=60) or not repr(first):
        raise Wrong("a report prints nothing")
    first.explain()
    if len(first.to_dataframe()) != len(first.rows):
        raise Wrong("the frame has another number of rows")
    comparison = first.compare(second)
    if (
        any(not (d.change == 1 or math.isnan(d.change)) for d in comparison.sorted())
        or comparison.only_before
        or comparison.only_after
    ):
        raise Wrong(f"a report compared with itself: {comparison}")
    if len(comparison.operations) != len(first.rows):
        raise Wrong(f"{len(comparison.operations)} operations are compared of {len(first.rows)}")
    str(comparison)
    comparison.to_dataframe()
    with tempfile.TemporaryDirectory() as folder:
        first.save(Path(folder) / "report")
        loaded = load_norm_report(Path(folder) / "report")
    for what, other in (("from a file", loaded), ("that is pickled", pickle.loads(pickle.dumps(first)))):  # noqa: S301 - of ours
        if repr(other.rows) != repr(first.rows) or str(other) != str(first):
            pairs = [(a, b) for a, b in zip(first.rows, other.rows, strict=True) if repr(a) != repr(b)]
            raise Wrong(f"a report {what} is another: {pairs[:1]}")


CHECKS: dict[str, Callable[[Case], None]] = {
    "equal sizes": equal_sizes,
    "jitted call": jitted_call,
    "without data": without_data,
    "dynamic": dynamic,
    "kept": kept,
    "changed model": changed_model,
    "derivatives": derivatives,
    "moved": moved,
    "report": report,
    "report of a map": report_of_map,
}


# -- helpers -----------------------------------------------------------------------------------------------------------------


def _eager(case: Case, model: nn.Module, norms: tuple[tuple, dict], **how: Any) -> Any:
    with case.program.base._defaults(case.program.base.seed + 2), case.untouched("an eager run", case.build()):
        return run_eagerly(copy.deepcopy(model), *norms, mode="bound", **{"otherwise": "required", **how})[0]


def _given(case: Case) -> dict[str, NormedTensor]:
    """A size for each parameter that the program uses, about as large as it is."""
    random = Random(case.program.base.seed)
    norms = case.normed()
    with case.program.base._defaults(case.program.base.seed + 2):
        lifted = run_eagerly(case.build(), *norms, policy="measured", mode="bound", perturbed=True)[1].lifted
    return {
        name: type(p)((p.norm_size.detach() + 0.01) * random.choice([0.5, 1.0, 2.0]), elem_dims=p.elem_dims)
        for name, p in lifted.items()
    }


def _same(what: str, found: Any, expected: Any, close: float = SAME) -> None:
    ours, theirs = tree_flatten(found), tree_flatten(expected)
    if ours[1] != theirs[1]:
        raise Wrong(f"{what}: the result is {ours[1]}, not {theirs[1]}")
    for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if type(a) is not type(b) and (isinstance(a, NormedTensor) or isinstance(b, NormedTensor)):
            raise Wrong(f"{what}: result {i} is {a!r}, not {b!r}")
        if isinstance(a, NormedTensor):
            if a.elem_dims != b.elem_dims or a.shape != b.shape or a.dtype != b.dtype:
                raise Wrong(f"{what}: result {i} is {a!r}, not {b!r}")
            if not _close(a.norm_size.item(), b.norm_size.item(), close):
                raise Wrong(f"{what}: result {i} has size {a.norm_size.item():.10g}, not {b.norm_size.item():.10g}")
        elif isinstance(a, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Wrong(f"{what}: result {i} is {a!r}, not {b!r}")
        elif a != b:
            raise Wrong(f"{what}: result {i} is {a!r}, not {b!r}")


def _shapes(case: Case, found: Any) -> None:
    leaves, structure = tree_flatten(found)
    if structure != case.structure:
        raise Wrong(f"a map's result is {structure}, the module's {case.structure}")
    for i, (y, t) in enumerate(zip(leaves, case.leaves, strict=True)):
        if isinstance(t, torch.Tensor) and (tuple(y.shape) != tuple(t.shape) or y.dtype != t.dtype):
            raise Wrong(f"a map's result {i} is {y.dtype} {list(y.shape)}, the module's {t.dtype} {list(t.shape)}")
        if not isinstance(t, torch.Tensor) and y != t:
            raise Wrong(f"a map's result {i} is {y!r}, the module's {t!r}")


def _close(a: float, b: float, close: float) -> bool:
    return math.isclose(a, b, rel_tol=close, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))


def _like(row: Any) -> Any:
    import thunder_norm

    return getattr(thunder_norm, row.kind)(1.0, elem_dims=row.elem_dims)


def _of_tensors(tree: Any, entry: Any) -> Any:
    """The same structure with an entry for each tensor and None for the rest."""
    if isinstance(tree, torch.Tensor):
        return entry
    if isinstance(tree, dict):
        return {k: _of_tensors(v, entry) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(_of_tensors(v, entry) for v in tree)
    return None


def _resized(tree: Any, size: int) -> Any:
    def of(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, NormedTensor):
            return type(t)(t.norm_size, elem_dims=t.elem_dims, backing=of(t.backing))
        return torch.cat([t.detach()] * (size // max(len(t), 1) + 1))[:size]

    from torch.utils._pytree import tree_map

    return tree_map(lambda v: of(v) if isinstance(v, torch.Tensor) else v, tree)


def _pickles(model: nn.Module) -> bool:
    try:
        pickle.loads(pickle.dumps(model))  # noqa: S301 - of ours
    except Exception:  # noqa: BLE001 - Python's own affair
        return False
    return True


def _floating(tree: Any) -> Iterator[torch.Tensor]:
    return (t for t in tree_flatten(tree)[0] if is_floating(t))
