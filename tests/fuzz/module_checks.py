"""What has to hold for a module with norms, against the module itself in plain PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thunder_norm import NormedTensor, build_norm_map, norm_report, normed
from thunder_norm.modular import ModularNorm
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.transforms import NormTransform
import thunder

from .module_state import changed, random_state, state
from .program import BAD, Outcome, outcome_of

if TYPE_CHECKING:
    from .modules import ModuleProgram
from .plain_modules import Plain, Wrong, compare, is_floating, norm_of

STEPS = (1e-3, 0.3)
# Of entries that are chosen by comparing others the choice counts as fixed: only small steps leave it what it is.
SMALL_STEPS, CHOOSING = (1e-7, 1e-9), {"TopGate", "PoolAndUnpool"}
# Where a parameter moves the result and has no gradient: that nothing moves can then be because all cancels.
CUT = {"NoGrad", "NoGradDecorated", "InferenceRegion", "Detached", "StopGradient", "StraightThrough", "GradAgain"}


def outcome(program: ModuleProgram) -> Outcome:
    """The worst of what the checks found."""
    try:
        plain = Plain(program)
    except Exception as e:  # noqa: BLE001 - whatever it is, there is nothing to compare with
        return Outcome("no oracle", f"{type(e).__name__}: {e}")
    found = []
    for name, check in CHECKS.items():
        if name in EXTRA and name not in program.extra:
            continue
        try:
            check(plain)
        except Wrong as e:
            found.append(Outcome("wrong", f"{name}: {e}"))
        except Exception as e:  # noqa: BLE001 - every end of a program is a result
            of = outcome_of(e)
            found.append(Outcome(of.kind, f"{of.detail.partition(':')[0]} in {name}: {of.detail.partition(':')[2].strip()}"))
    for kind in (*BAD, "refused"):
        for o in found:
            if o.kind == kind:
                return o
    return Outcome("right")


def direct(plain: Plain) -> None:
    """The module called with normed inputs, no more: values, bounds, and what it holds afterwards."""
    program = plain.program
    model = program.build()
    inputs = plain.inputs()
    if not any(isinstance(x, NormedTensor) for x in inputs):
        return
    compare(plain, program.call(model, *inputs), "called with normed inputs")
    difference = changed(plain.state, state(model, identity=False))
    if difference:
        raise Wrong(f"afterwards the module holds something else than after a plain call: {difference[:3]}")


def measured(plain: Plain) -> None:
    """With measured parameters: bounds and values; with these norms given: nothing moves more than is claimed."""
    program = plain.program
    model = program.build()
    inputs = plain.inputs()
    with program._defaults(program.seed + 2):
        result, found = run_eagerly(model, tuple(inputs), {}, policy="measured", mode="bound", perturbed=True)
    compare(plain, result, "measured")
    if program.dtype != "float64" or plain.gradients is None:
        return
    generator = torch.Generator().manual_seed(program.seed)
    if program.training and "nn.RReLU" in program.labels():
        return  # it draws a slope for each negative entry: another sign shifts the slopes of all that follow
    small_is_along = program.seed % 2 == 0
    steps = SMALL_STEPS if CHOOSING & set(program.labels()) else STEPS
    for step, along_gradient in zip(steps, (small_is_along, not small_is_along), strict=True):
        _check_movement(plain, model, inputs, found.lifted, step, along_gradient, generator)


def _check_movement(
    plain: Plain,
    model: nn.Module,
    inputs: list[Any],
    lifted: dict[str, NormedTensor],
    step: float,
    along_gradient: bool,
    generator: torch.Generator,
) -> None:
    program = plain.program

    def away(t: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        if along_gradient and gradient is not None and gradient.abs().sum() > 0:
            direction = gradient.to_dense() if gradient.layout != torch.strided else gradient
        else:
            direction = torch.randn(t.shape, generator=generator, dtype=t.dtype)
        # as large as the tensor is, times the step
        return step * direction / direction.square().mean().sqrt() * (t.square().mean().sqrt() + 0.1) if t.numel() else direction

    def given(like: NormedTensor, here: torch.Tensor, moved: torch.Tensor) -> NormedTensor:
        size = max(norm_of(like, here), norm_of(like, moved)) * (1 + 1e-12)
        distance = norm_of(like, moved - here) * (1 + 1e-12)
        return type(like)(size, backing=here, elem_dims=like.elem_dims, perturbation_size=distance)

    parameters = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point()}
    there = {name: p + away(p, (plain.gradients or {}).get(name)) for name, p in parameters.items()}
    policy = {name: given(lifted[name], p, there[name]) for name, p in parameters.items() if name in lifted}
    policy = {
        name: type(p)(p.norm_size, elem_dims=p.elem_dims, perturbation_size=p.perturbation_size) for name, p in policy.items()
    }
    moved = [x.backing + away(x.backing, None) if isinstance(x, NormedTensor) else x for x in inputs]
    args = [given(x, x.backing, m) if isinstance(x, NormedTensor) else x for x, m in zip(inputs, moved, strict=True)]
    fresh = program.build()
    with program._defaults(program.seed + 2):
        result, _ = run_eagerly(fresh, tuple(args), {}, policy=policy, mode="bound")
    here, elsewhere = plain.results, plain.at(there, moved)
    how = f"given norms, a step of {step:g} {'along the gradient' if along_gradient else 'anywhere'}"
    compare(plain, result, how)
    for i, y in enumerate(tree_flatten(result)[0]):
        if not isinstance(y, NormedTensor):
            continue
        a, b = here[i], elsewhere[i]
        claim = 0.0 if y.perturbation_size is None else y.perturbation_size.item()
        distance = norm_of(y, b - a)
        if not (distance <= claim * (1 + 1e-6) + 1e-9 * (1 + norm_of(y, a)) or math.isnan(distance)):
            raise Wrong(f"{how}: result {i} moves by {distance:.6g}, the claim is {claim:.6g}")
        if not norm_of(y, b) <= y.norm_size.item() * (1 + 1e-6) + 1e-9:
            raise Wrong(f"{how}: result {i} has norm {norm_of(y, b):.6g} there, the bound is {y.norm_size.item():.6g}")


def reached(plain: Plain) -> None:
    """Parameters have a sensitivity where they have a gradient, or where moving them moves the result; nothing is changed."""
    program = plain.program
    model, args = program.build(), program.arguments()
    before, random = state(model), random_state()
    try:
        found = ModularNorm(model, *args).sensitivities
    finally:
        _check_untouched(model, before, random, "ModularNorm")
    _check_reached(plain, found, "ModularNorm")


def _check_untouched(model: nn.Module, before: dict, random: Any, what: str) -> None:
    difference = changed(before, state(model))
    if difference:
        raise Wrong(f"{what} changed the module: {difference[:3]}")
    if random_state() != random:
        raise Wrong(f"{what} drew random numbers that are not given back")


def _check_reached(plain: Plain, found: dict[str, float], what: str) -> None:
    if plain.gradients is None:
        return
    # a reentrant checkpoint whose inputs do not require grad has none for what is inside, which may cancel in the result all the same
    is_cut = bool(CUT & set(plain.program.labels())) or "reentrant=True" in plain.program.expression
    for name, s in found.items():
        gradient = plain.gradients.get(name)
        has_gradient = gradient is not None and gradient.to_dense().abs().sum() > plain.slack
        if has_gradient and not s > 0 and _moves(plain, name):
            raise Wrong(f"{what}: {name} has a gradient in torch, and counts as unreached")
        if gradient is None and s > 0 and not is_cut and name in plain.gradients and not _moves(plain, name):
            raise Wrong(f"{what}: {name} has no gradient in torch and moves nothing, its sensitivity is {s:.3g}")


def _moves(plain: Plain, name: str) -> bool:
    """Whether the result depends on a parameter's values, here or elsewhere nearby; in double precision, lest rounding moves it."""
    with contextlib.suppress(Exception):  # a program may be possible in its own precision alone
        plain = Plain(dataclasses.replace(plain.program, dtype="float64"))
    p = dict(plain.program.build().named_parameters())[name].detach()
    generator = torch.Generator().manual_seed(plain.program.seed)
    for scale in (0.1, 1.0, 10.0):
        moved = p + scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for a, b in zip(plain.results, plain.at({name: moved}, []), strict=True):
            if is_floating(a) and not torch.allclose(a, b, rtol=plain.slack * 10, atol=plain.slack):
                return True
    return False


def unit(plain: Plain) -> None:
    """With parameters of norm 1 the bounds do not depend on what the parameters are."""
    program = plain.program
    bounds, inputs = [], plain.inputs()
    other = 7.0 if program.seed % 2 else None
    for scale in (1.0, other):
        model = program.build()
        generator = torch.Generator().manual_seed(program.seed)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) if scale is None else scale * p)
        with program._defaults(program.seed + 2):
            result, _ = run_eagerly(model, tuple(inputs), {}, policy="unit", mode="bound", otherwise="unit")
        bounds.append([y.norm_size.item() for y in tree_flatten(result)[0] if isinstance(y, NormedTensor)])
    if not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(*bounds, strict=True)):
        how = "others" if other is None else f"times {other:g}"
        raise Wrong(f"unit bounds {bounds[0]} become {bounds[1]} with weights {how}")


def report(plain: Plain) -> None:
    """A report leaves everything as it was, and finds the bounds of a call."""
    program = plain.program
    model = program.build()
    inputs = plain.inputs()
    before, random = state(model), random_state()
    jm = thunder.jit(model, transforms=[NormTransform()])
    try:
        rows = norm_report(jm, *inputs).rows
    finally:
        _check_untouched(model, before, random, "norm_report")
    for row in rows:
        if row.tightness is not None and not (row.tightness <= 1 + plain.slack * 10 or math.isnan(row.tightness)):
            raise Wrong(f"report: {row.op} of {row.module!r} has tightness {row.tightness:.6g}")


def modes(plain: Plain) -> None:
    """The other modes run, and reach the same parameters."""
    program = plain.program
    for mode in ("typical", "modula"):
        model, args = program.build(), program.arguments()
        before, random = state(model), random_state()
        try:
            found = ModularNorm(model, *args, mode=mode).sensitivities
        finally:
            _check_untouched(model, before, random, f"ModularNorm in mode {mode}")
        _check_reached(plain, found, f"mode {mode}")


def nan(plain: Plain) -> None:
    """A result with NaN has no finite bound, whatever was NaN; nor an infinite one.

    (Infinite entries that cancel are another matter: scores of -inf are what masks are made of, and their softmax is bounded.)
    """
    program = plain.program
    generator = torch.Generator().manual_seed(program.seed)
    model = program.build()
    names = [name for name, p in model.named_parameters() if p.is_floating_point() and p.numel()]
    inputs = plain.inputs()
    floating = [i for i, x in enumerate(inputs) if isinstance(x, NormedTensor)]
    which = int(torch.randint(len(names) + len(floating), (), generator=generator)) if names or floating else 0
    value = (math.nan, math.nan, math.inf)[int(torch.randint(3, (), generator=generator))]
    parameters, args = {}, program.arguments()
    if which < len(names):
        p = dict(model.named_parameters())[names[which]].detach().clone(memory_format=torch.contiguous_format)
        p.view(-1)[-1] = value
        parameters[names[which]] = p
    elif floating:
        args[floating[which - len(names)]].view(-1)[-1] = value
    try:
        expected = plain.at(parameters, args)
    except Exception:  # noqa: BLE001 - torch itself refuses such values
        return
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in parameters:
                p.copy_(parameters[name])
    args = [type(x).of(a, x.elem_dims) if isinstance(x, NormedTensor) else a for x, a in zip(inputs, args, strict=True)]
    with program._defaults(program.seed + 2):
        result, _ = run_eagerly(model, tuple(args), {}, policy="measured", mode="bound")
    for i, (y, e) in enumerate(zip(tree_flatten(result)[0], expected, strict=True)):
        if isinstance(y, NormedTensor) and y.norm_size.isfinite() and (e.isnan() if math.isnan(value) else e.isinf()).any():
            where = names[which] if which < len(names) else f"input {which - len(names)}"
            raise Wrong(f"with {value} in {where} result {i} is not finite, its bound is {y.norm_size.item():.6g}")


def norm_map(plain: Plain) -> None:
    """The norm map is the eager run on norms alone, and changes nothing."""
    program = plain.program
    model, args = program.build(), program.arguments()
    inputs = plain.inputs()
    if not _thunder_runs(plain):
        return
    for policy in ("unit", "measured"):
        with program._defaults(program.seed + 2):
            result, _ = run_eagerly(program.build(), tuple(inputs), {}, policy=policy, mode="bound", otherwise=policy)
        expected = [y.norm_size.item() for y in tree_flatten(result)[0] if isinstance(y, NormedTensor)]
        before, random = state(model), random_state()
        try:
            found = build_norm_map(model, *args, parameters=policy)(
                *(type(x)(x.norm_size, elem_dims=x.elem_dims) if isinstance(x, NormedTensor) else x for x in inputs)
            )
        finally:
            _check_untouched(model, before, random, "build_norm_map")
        sizes = [y.norm_size.item() for y in tree_flatten(found)[0] if isinstance(y, NormedTensor)]
        if len(sizes) != len(expected) or not all(
            math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in zip(sizes, expected, strict=True)
        ):
            raise Wrong(f"norm map, {policy}: {sizes}, eagerly {expected}")


def jitted(plain: Plain) -> None:
    """Jitted: real mode is the module, normed mode what it is eagerly; afterwards the module holds what a plain call leaves."""
    program = plain.program
    if not _thunder_runs(plain):
        return
    is_random = _is_random(plain)
    model = program.build()
    inputs = plain.inputs()
    jm = thunder.jit(model, transforms=[NormTransform()])
    real = tree_flatten(program.call(jm, *program.arguments()))[0]
    for a, b in zip(plain.results, real, strict=True):
        if isinstance(a, torch.Tensor) and not is_random and not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
            raise Wrong("real mode has other values")
    model = program.build()
    jm = thunder.jit(model, transforms=[NormTransform()])
    result = program.call(normed(jm), *inputs)
    if not is_random:
        compare(plain, result, "jitted")
        difference = [k for k in changed(plain.state, state(model, identity=False)) if not k.endswith("training")]
        if difference:
            raise Wrong(f"after a jitted normed call the module holds something else than after a plain one: {difference[:3]}")
    again = program.call(jm, *program.arguments())
    if any(isinstance(t, NormedTensor) for t in tree_flatten(again)[0]):
        raise Wrong("a plain call after a normed one gives norms")


def _thunder_runs(plain: Plain) -> bool:
    """Whether Thunder alone runs the module: if not, there is nothing to compare with."""
    program = plain.program
    try:
        program.call(thunder.jit(program.build()), *program.arguments())
    except Exception:  # noqa: BLE001 - Thunder's own affair
        return False
    return True


def _is_random(plain: Plain) -> bool:
    program = plain.program
    with program._defaults(program.seed + 3):
        other = tree_flatten(program.build()(*program.arguments()))[0]
    model = program.build()
    with program._defaults(program.seed + 4):
        other = tree_flatten(model(*program.arguments()))[0]
    return not all(torch.equal(a, b) for a, b in zip(plain.results, other, strict=True) if isinstance(a, torch.Tensor))


EXTRA = ("report", "modes", "nan", "map", "jit")
CHECKS: dict[str, Callable[[Plain], None]] = {
    "called": direct,
    "measured": measured,
    "reached": reached,
    "unit": unit,
    "report": report,
    "modes": modes,
    "nan": nan,
    "map": norm_map,
    "jit": jitted,
}
