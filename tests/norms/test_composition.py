"""Random programs: bounds hold, sensitivities are sums over paths, eager and traced agree, real mode is untouched.

Every program is drawn from a fixed seed; THUNDER_NORM_LONG=1 draws many more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.program_forms import FORMS, LOSSES
from tests.programs import Program, grown, programs
from tests.seeds import LONG, seeded
from thunder_norm import NormedTensor, RMSTensor, build_norm_map, sensitivities, with_perturbation
from thunder_norm.audit import lmo, norm, project
from thunder_norm.core.registry import registered_ops
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
TINY = 1e-100  # what the oracle's norm of a tensor of zeros is at most
TRACED = tuple(form for form in FORMS if form.is_traced)


def examples(count: int, long: int) -> Callable:
    """That many programs, or `long` of them; shrinking a program is cheap, explaining one is not."""
    return settings(
        max_examples=long if LONG else count,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


# -- by hand: the program step by step, each value a normed tensor of its own ---------------------------------------------


def alone(x: NormedTensor, moves: float | None) -> NormedTensor:
    """The same claim about x with nothing known of where it comes from, moving by that much."""
    moving = None if moves is None else torch.tensor(moves, dtype=D)
    return type(x)._wrap(x.backing, x.norm_size.detach().clone(), moving, x.elem_dims)


def normed_values(program: Program, points: list[torch.Tensor]) -> dict[str, Any]:
    """All values of a program by name, each step run alone."""
    values: dict[str, Any] = {**program.plain}
    values |= {b.name: x for b, x in zip(program.balls, program.normed(points, [None] * len(points)), strict=True)}
    for step in program.steps:
        values[step.target] = step.run(
            *(alone(v, None) if isinstance(v, NormedTensor) else v for v in map(values.get, step.operands))
        )
    return values


def edges(program: Program, values: dict[str, Any]) -> list[tuple[str, str, float]]:
    """(operand, target, Lipschitz constant) of every slot: the step alone, moved in that slot only, by 1."""
    found = []
    for step in program.steps:
        for slot, name in enumerate(step.operands):
            if not isinstance(values[name], NormedTensor):
                continue
            given_ = [values[n] for n in step.operands]
            given_ = [alone(v, 1.0 if i == slot else None) if isinstance(v, NormedTensor) else v for i, v in enumerate(given_)]
            out = step.run(*given_)
            found.append((name, step.target, 0.0 if out.perturbation_size is None else out.perturbation_size.item()))
    return found


def over_paths(arrows: list[tuple[str, str, float]], source: str, target: str) -> float:
    """The sum over all paths from `source` to `target` of the products of their constants."""
    if source == target:
        return 1.0
    return sum(constant * over_paths(arrows, end, target) for start, end, constant in arrows if start == source)


def sensitivities_of(program: Program, inputs: list[NormedTensor], run: Callable) -> list[float]:
    """What the library says for each input."""
    leaves = [with_perturbation(alone(x, None)) for x in inputs]
    return [s.item() for s in sensitivities(run(*leaves), leaves)]


def run_without_knowledge(program: Program, inputs: list[NormedTensor]) -> NormedTensor:
    """The program on normed tensors that do not know where they come from, perturbations connected."""
    values: dict[str, Any] = {**program.plain, **{b.name: x for b, x in zip(program.balls, inputs, strict=True)}}

    def forgetful(x: Any) -> Any:
        if not isinstance(x, NormedTensor):
            return x
        return type(x)._wrap(x.backing, x.norm_size.clone(), x.perturbation_size, x.elem_dims)

    for step in program.steps:
        values[step.target] = step.run(*map(forgetful, map(values.get, step.operands)))
    return values[program.steps[-1].target]


# -- sensitivities are sums over paths -------------------------------------------------------------------------------------


@examples(60, 5000)
@given(programs())
def test_sensitivities_are_sums_over_paths(program):
    points = program.points(0, torch.Generator().manual_seed(seeded(0)))
    arrows = edges(program, normed_values(program, points))
    inputs = program.normed(points, [None] * len(points))
    claimed = sensitivities_of(program, inputs, lambda *leaves: run_without_knowledge(program, list(leaves)))
    by_hand = [over_paths(arrows, b.name, program.steps[-1].target) for b in program.balls]
    assert claimed == pytest.approx(by_hand, rel=1e-12, abs=1e-300)


# -- the bounds hold -------------------------------------------------------------------------------------------------------


class Claims:
    """What the library says of a program, and how exact float64 can be about it."""

    def __init__(self, program: Program, points: list[torch.Tensor]):
        inputs = program.normed(points, [None] * len(points))
        self.out = program(*inputs)
        self.sensitivity = sensitivities_of(program, inputs, program)
        values = normed_values(program, points)
        arrows = edges(program, values)
        target = program.steps[-1].target
        # each value is rounded to about eps of its size, entry by entry, and that goes on to the output
        sizes = {n: v.norm_size.item() * (v.numel() + 10) for n, v in values.items() if isinstance(v, NormedTensor)}
        self.rounding = 4e-16 * sum(size * over_paths(arrows, name, target) for name, size in sizes.items())

    def norm(self, t: torch.Tensor) -> torch.Tensor:
        """The norm of an output."""
        return norm(type(self.out), t, self.out.elem_dims)


def ascend(f: Callable, points: list[torch.Tensor], move: Callable, steps: int) -> float:
    """The largest f on a few Frank-Wolfe steps: `move(points, gradients, gamma)` goes towards the corner that gradients name."""
    best = 0.0
    for gamma in (*([1.0] * (steps - 1)), 0.3, None):
        leaves = [p.detach().requires_grad_() for p in points]
        value = f(leaves)
        best = max(best, value.item())
        if gamma is None or not value.requires_grad:
            break
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        points = move(
            points, [torch.zeros_like(p) if g is None else torch.nan_to_num(g) for p, g in zip(points, grads, strict=True)], gamma
        )
    return best


def towards(ball, x: torch.Tensor, g: torch.Tensor, gamma: float, radius: float) -> torch.Tensor:
    """x a step towards the point of the ball where g is largest; where g is 0 it stays."""
    if not g.abs().max() > 0:
        return x
    return project(ball.kind, (1 - gamma) * x + gamma * radius * lmo(ball.kind, g, ball.dims), ball.dims, radius)


@examples(50, 5000)
@given(programs())
def test_values_stay_within_the_bound(program):
    generator = torch.Generator().manual_seed(seeded(0))
    claims = Claims(program, program.points(0, generator))
    bound = claims.out.norm_size.item()
    run = program.function()
    plain = list(program.plain.values())

    def size(points):
        return claims.norm(run(*points, *plain))

    def move(points, grads, gamma):
        return [towards(b, x, g, gamma, b.norm_size) for b, x, g in zip(program.balls, points, grads, strict=True)]

    for which in range(8):
        found = ascend(size, program.points(which, generator), move, steps=3)
        assert found <= bound * (1 + 1e-9) + claims.rounding + TINY, f"{found} > {bound}"


@examples(40, 5000)
@given(programs())
def test_moves_stay_within_the_sensitivities(program):
    """|f(X + U) - f(X)| <= sum_i S_i |U_i| for X and X + U in the balls: Lemma 1, at any distance."""
    generator = torch.Generator().manual_seed(seeded(0))
    claims = Claims(program, program.points(0, generator))
    run, plain, count = program.function(), list(program.plain.values()), len(program.balls)
    for which in range(10):
        distance = (1e-5, 1e-3, 0.5)[which % 3]
        moving = [True] * count if which < 4 else [i == which % count for i in range(count)]
        inner = [b.norm_size * (1 - distance * m) for b, m in zip(program.balls, moving, strict=True)]
        radii = [b.norm_size * distance * m for b, m in zip(program.balls, moving, strict=True)]
        allowed = sum(s * r for s, r in zip(claims.sensitivity, radii, strict=True))
        # many constants are largest near zero
        shrink = (1.0, 1e-2, 0.3, 1.0)[which % 4]
        points = [
            p * (r / b.norm_size * shrink) for p, r, b in zip(program.points(which, generator), inner, program.balls, strict=True)
        ]
        moves = [
            p * (r / b.norm_size) for p, r, b in zip(program.points(which + 3, generator), radii, program.balls, strict=True)
        ]

        def gap(leaves):
            xs, us = leaves[:count], leaves[count:]
            return claims.norm(run(*(x + u for x, u in zip(xs, us, strict=True)), *plain) - run(*xs, *plain))

        def move(leaves, grads, gamma, inner=inner, radii=radii):
            return [
                towards(b, x, g, gamma, r) if r else x
                for b, x, g, r in zip((*program.balls, *program.balls), leaves, grads, (*inner, *radii), strict=True)
            ]

        found = ascend(gap, [*points, *moves], move, steps=4)
        assert found <= allowed * (1 + 1e-9) + 2 * claims.rounding + TINY, f"{found} > {allowed}, S = {claims.sensitivity}"


# -- eager, traced and mapped agree, real mode is untouched ----------------------------------------------------------------


def assert_same(a: Any, b: Any) -> None:
    """Two results of one program: the same kind and sizes, up to the rounding of formulas that a trace writes as other operations."""
    assert type(a) is type(b) and a.elem_dims == b.elem_dims and a.shape == b.shape
    for ours, theirs in ((a.norm_size, b.norm_size), (a.perturbation_size, b.perturbation_size)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-200, msg=lambda m: f"{m}\n{a}, {b}")


@examples(10, 400)
@given(programs(TRACED, most=8))
def test_traces_and_norm_maps_agree_with_eager(program):
    points = program.points(0, torch.Generator().manual_seed(seeded(0)))
    inputs, plain = program.normed(points, [0.125 * (i + 1) for i in range(len(points))]), program.plain.values()
    expected = program(*inputs)
    traced = thunder.jit(program.function(), transforms=[NormTransform()])(*inputs, *plain)
    assert_same(traced, expected)
    torch.testing.assert_close(traced.backing, expected.backing)
    norm_map = build_norm_map(program.function(), *points, *plain)
    assert_same(norm_map(*inputs, *plain), expected)


def bound_symbols(jitted: Callable) -> list[list[tuple]]:
    """Name, arguments and results of every operation of every trace of the last compilation, tensors numbered as they come in a trace."""
    traces = list({id(t): t for t in thunder.last_traces(jitted)}.values())
    return [_numbered(t.bound_symbols) for t in traces]


def _numbered(bsyms: list) -> list[tuple]:
    numbers: dict[str, int] = {}
    found = []
    for b in bsyms:
        names = (
            [numbers.setdefault(p.name, len(numbers)) for p in proxies] for proxies in (b.flat_proxy_args, b.flat_proxy_outs)
        )
        found.append((b.sym.id, b.sym.name, *names))
    return found


def outcome(jitted: Callable, arguments: list[Any]) -> Any:
    """The result, or the error Thunder raises, whatever it is: it has no gradient of some operations, a wrong one of others."""
    try:
        return jitted(*arguments)
    except Exception as e:  # noqa: BLE001 - the same one without us
        return f"{type(e).__name__}: {str(e).partition(' bsym=')[0]}"


_AS_TORCH = {"normalize", "vector_norm", "mse_loss", "lerp", "addcmul"}  # Thunder's are others than torch's, ours are torch's


@examples(6, 200)
@given(programs(TRACED, most=8))
def test_real_mode_is_what_thunder_makes_without_us(program):
    points = [p.requires_grad_() for p in program.points(0, torch.Generator().manual_seed(seeded(0)))]
    with_us, without = thunder.jit(program.function(), transforms=[NormTransform()]), thunder.jit(program.function())
    result, expected = (outcome(jitted, [*points, *program.plain.values()]) for jitted in (with_us, without))
    if isinstance(expected, str):  # with us it may have a gradient that Thunder lacks, and then meet the next one
        if not isinstance(result, str):
            torch.testing.assert_close(result, program.function()(*points, *program.plain.values()))
        return
    assert type(result) is type(expected)
    traces = bound_symbols(with_us)
    # those that torch has kernels for, and those whose gradients are NaN in Thunder, or fail
    if any(str(i).startswith("thunder_norm.") for t in traces for i, *_ in t):
        torch.testing.assert_close(result, program.function()(*points, *program.plain.values()), equal_nan=True)
        return
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    if not _AS_TORCH & {step.form.name for step in program.steps}:
        assert traces == bound_symbols(without)


# -- the programs themselves -----------------------------------------------------------------------------------------------


def test_programs_write_every_operation_and_share_values():
    """What the tests above would say nothing of if the generator never wrote it: most of it within 200 programs."""
    missing, kinds, lengths, shared = {f.name for f in (*FORMS, *LOSSES)}, Counter(), Counter(), 0
    many = len(missing)
    for seed in range(200):
        program = grown(seed, 2 + seed % 11)
        missing -= {step.form.name for step in program.steps}
        lengths[len(program.steps)] += 1
        shared += max(Counter(name for step in program.steps for name in step.operands).values()) > 1
        kinds.update(ball.kind.__name__ for ball in program.balls)
    assert len(missing) < many / 4, missing
    assert min(lengths) >= 2 and sum(n for length, n in lengths.items() if length >= 8) > 20
    assert shared > 75 and len(kinds) == 6
    likelier = (*FORMS, *10 * tuple(f for f in FORMS if f.name in missing))  # the rest soon, where they are drawn more often
    for seed in range(200, 600):
        if not missing:
            break
        missing -= {step.form.name for step in grown(seed, 2 + seed % 11, likelier).steps}
    assert not missing


@pytest.mark.parametrize("size, slope", [(0.9, 1.0), (1.0, 0.9)], ids=["value", "sensitivity"])
def test_a_wrong_rule_is_found(monkeypatch, size, slope):
    """The tests above fail with a rule that claims a tenth too little."""
    op = registered_ops()["relu"]
    right = op.rules[0]

    def wrong(input: RMSTensor) -> RMSTensor:
        return RMSTensor(input.norm_size * size, elem_dims=input.elem_dims, sensitivity={"input": slope})

    monkeypatch.setattr(op, "rules", [replace(right, fn=wrong)])
    forms = FORMS[:1] * 3 + tuple(f for f in FORMS if f.name in ("reshape", "{0} * -0.7", "flip"))
    test = test_values_stay_within_the_bound if size < 1 else test_moves_stay_within_the_sensitivities
    with pytest.raises(AssertionError):
        for seed in range(20):
            test.hypothesis.inner_test(grown(seed, 3, forms))
