"""Mode "typical" against samples of Gaussians, mode "modula" against the recursion of Modula, written out here."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder_norm.rules as rules
from tests.core.typical_samples import BY_FUNCTION, BY_OPERATION, INHERITED, Sampled
from tests.seeds import LONG, seeded
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, norm_mode, sensitivities, with_perturbation
from thunder_norm.core.registry import registered_ops
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
DRAWS = 100_000 if LONG else 50_000


# -- mode typical: what the rules claim is what independent Gaussians have ---------------------------------------------------


def typical_operations() -> list[str]:
    registered = registered_ops().items()
    return [getattr(key, "__name__", str(key)) for key, op in registered if any(rule.mode == "typical" for rule in op.rules)]


def sampled(key: str) -> list[Sampled]:
    """How to call an operation with a rule for the mode."""
    if key in BY_OPERATION:
        return BY_OPERATION[key]
    op = registered_ops()[key].body
    if "_polynomial_" in key:
        return [Sampled(lambda x: op(x, 2), sizes=((0.3,), (1.0,))), Sampled(lambda x: op(x, 3), sizes=((0.7,),))]
    return [Sampled(op)]


def functions_that_ask_for_the_mode() -> set[str]:
    """``module.function`` of all functions of the rules in whose source the mode "typical" is asked for."""
    found = set()
    for path, module in [(p, m) for p, m in sys.modules.items() if p.startswith(f"{rules.__name__}.")]:
        name = path.rpartition(".")[2]
        for f in vars(module).values():
            if inspect.isfunction(f) and f.__module__ == module.__name__ and "current_mode() " in inspect.getsource(f):
                source = inspect.getsource(f)
                if '= "typical"' in source.replace("mode=", ""):
                    found.add(f"{name}.{f.__name__}")
    return found


CASES = [(key, case) for key in typical_operations() for case in sampled(key)]
CASES += [
    (key, case)
    for table in (BY_FUNCTION, {k: [v] for k, v in INHERITED.items()})
    for key, cases in table.items()
    for case in cases
]


def test_every_rule_that_knows_the_mode_is_sampled():
    assert functions_that_ask_for_the_mode() == set(BY_FUNCTION)
    assert set(BY_OPERATION) <= set(typical_operations()) and len(typical_operations()) > 30


def root_mean_square(t: torch.Tensor) -> tuple[float, float]:
    """It, and its relative standard error: entries of one draw (a row) may depend on each other."""
    energies = t.square().reshape(DRAWS, -1).mean(1) if t.numel() % DRAWS == 0 else t.square().reshape(-1)
    mean = energies.mean().item()
    return math.sqrt(mean), energies.std().item() / math.sqrt(DRAWS) / (2 * mean) if mean else 0.0


@pytest.mark.parametrize("key, case", CASES, ids=[f"{key}-{i}" for i, (key, _) in enumerate(CASES)])
def test_typical_sizes_are_those_of_gaussians(key, case):
    generator = torch.Generator().manual_seed(seeded(0))  # of its own: operations draw numbers as well
    for sizes in case.sizes:
        inputs = [
            n * torch.randn(DRAWS, *shape, dtype=D, generator=generator) for shape, n in zip(case.shapes, sizes, strict=False)
        ]

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            torch.manual_seed(seeded(1))  # the same mask before and after a move
            return case.call(*tensors)

        def claimed(moving: int | None, sizes=sizes, inputs=inputs) -> NormedTensor:
            with norm_mode("typical"):
                given = zip(case.kinds, sizes, inputs, strict=False)
                return case.call(*(
                    kind(n, backing=t[:2], perturbation_size=float(i == moving) if moving is not None else None)
                    for i, (kind, n, t) in enumerate(given)
                ))  # fmt: skip

        size, error = root_mean_square(run(inputs))
        assert claimed(None).norm_size.item() == pytest.approx(size, rel=6 * error + case.off)
        for slot in case.slots if case.moves else ():
            step = 1e-6 * sizes[slot] * torch.randn(inputs[slot].shape, dtype=D, generator=generator)
            ahead, behind = (run([t + s * step if i == slot else t for i, t in enumerate(inputs)]) for s in (1, -1))
            gain, error = root_mean_square((ahead - behind) / (2e-6 * sizes[slot]))
            assert claimed(slot).perturbation_size.item() == pytest.approx(gain, rel=6 * error + case.off)


def test_a_linear_layer_keeps_the_aligned_value():
    """Not the gain of independent inputs, which a semi-orthogonal matrix has: trained features align with it."""
    with norm_mode("typical"):
        weight = RMSToRMSTensor(1.0, backing=torch.zeros(4, 16))
        assert F.linear(RMSTensor(2.0, backing=torch.zeros(3, 16)), weight).norm_size.item() == pytest.approx(2.0)


# -- mode modula: the recursion of Modula ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recursion:
    """A module of Modula: its mass, its sensitivity, and how a target for it becomes targets of its parameters."""

    mass: float
    sensitivity: float
    targets: Callable[[float], dict[str, float]]


def atom(name: str) -> Recursion:
    return Recursion(1.0, 1.0, lambda target: {name: target})


def bond(sensitivity: float = 1.0) -> Recursion:
    return Recursion(0.0, sensitivity, lambda target: {})


def chain(first: Recursion, *others: Recursion) -> Recursion:
    """First, then the others on its result."""
    for then in others:
        first = _composite(first, then)
    return first


def _composite(m0: Recursion, m1: Recursion) -> Recursion:
    mass = m0.mass + m1.mass

    def targets(target: float) -> dict[str, float]:
        if mass == 0:
            return {}
        return m0.targets(target * m0.mass / mass / m1.sensitivity) | m1.targets(target * m1.mass / mass)

    return Recursion(mass, m0.sensitivity * m1.sensitivity, targets)


def together(*several: Recursion) -> Recursion:
    """All on the same input; results are summed or taken by a bond of several arguments."""
    mass = sum(m.mass for m in several)

    def targets(target: float) -> dict[str, float]:
        return {k: v for m in several if m.mass for k, v in m.targets(target * m.mass / mass).items()}

    return Recursion(mass, sum(m.sensitivity for m in several), targets)


def tared(module: Recursion, mass: float) -> Recursion:
    return Recursion(mass, module.sensitivity, module.targets)


def residual(block: Recursion, share: float) -> Recursion:
    return together(bond(1 - share), chain(block, bond(share)))


class Residual(nn.Module):
    """(1 - s) x + s f(x)."""

    def __init__(self, block: nn.Module, share: float):
        super().__init__()
        self.block, self.share = block, share

    def forward(self, x):
        return (1 - self.share) * x + self.share * self.block(x)


class Attention(nn.Module):
    """Modula's: scores divided by the width of a head, the result by 3."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (m(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.heads / width)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width) / 3)


class Gelu(nn.Module):
    """Modula's: divided by its largest slope."""

    def forward(self, x):
        return F.gelu(x) / 1.1289


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))[:-1]


def plain_norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, elementwise_affine=False)


def attention_recursion(prefix: str = "") -> Recursion:
    qkv = together(*(atom(f"{prefix}{name}.weight") for name in "qkv"))
    return chain(qkv, bond(), bond(1 / 3), atom(f"{prefix}out.weight"))


def gpt(blocks: int, width: int = 8) -> nn.Sequential:
    share = 1 / (2 * blocks)
    layers: list[nn.Module] = [nn.Embedding(11, width)]
    for _ in range(blocks):
        layers.append(Residual(nn.Sequential(plain_norm(width), Attention(width, 2)), share))
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        layers.append(Residual(nn.Sequential(plain_norm(width), up, Gelu(), down), share))
    return nn.Sequential(*layers, plain_norm(width), nn.Linear(width, 11, bias=False))


def gpt_recursion(blocks: int) -> Recursion:
    share = 1 / (2 * blocks)
    layers = []
    for i in range(1, 2 * blocks, 2):
        layers.append(residual(chain(bond(), attention_recursion(f"{i}.block.1.")), share))
        layers.append(residual(chain(bond(), atom(f"{i + 1}.block.1.weight"), bond(), atom(f"{i + 1}.block.3.weight")), share))
    head = chain(bond(), atom(f"{2 * blocks + 2}.weight"))
    return chain(tared(atom("0.weight"), 1.0), tared(chain(*layers), 5.0), tared(head, 1.0))


def stack(depth: int) -> tuple[nn.Module, Recursion]:
    model = nn.Sequential(*(Residual(mlp(6, 9, 6), 1 / depth) for _ in range(depth)))
    parts = [chain(atom(f"{i}.block.0.weight"), bond(), atom(f"{i}.block.2.weight")) for i in range(depth)]
    return model, chain(*(residual(part, 1 / depth) for part in parts))


def features(*shape: int) -> NormedTensor:
    return RMSTensor(1.0, backing=torch.randn(shape))


TOKENS = torch.tensor([[3, 1, 4], [1, 5, 9]])
ATOMS = [atom(f"{2 * i}.weight") for i in range(3)]
MODELS = {
    "MLP": (mlp(784, 256, 256, 10), chain(ATOMS[0], bond(), ATOMS[1], bond(), ATOMS[2]), features(4, 784)),
    "residual blocks": (*stack(4), features(2, 6)),
    "attention": (Attention(8, 2), attention_recursion(), features(2, 3, 8)),
    **{f"GPT of {n} blocks": (gpt(n), gpt_recursion(n), TOKENS) for n in (1, 2, 5)},
}
# What modula itself prints (norm_rules.md, section 7), by the end of a parameter's name.
PRINTED = {
    "MLP": {"weight": 1 / 3},
    "attention": {"q.weight": 0.75, "k.weight": 0.75, "v.weight": 0.75, "out.weight": 0.25},
}
GPT = {"0.weight": 0.142857, "q.weight": 0.714286, "k.weight": 0.714286, "v.weight": 0.714286, "out.weight": 0.238095}
GPT |= {"block.1.weight": 0.238095, "block.3.weight": 0.238095}


def our_sensitivities(model: nn.Module, x: torch.Tensor) -> dict[str, float]:
    """Of the output to every parameter, all of norm 1."""
    out, seen = run_eagerly(model, (x,), {}, policy="unit", mode="modula", perturbed=True)
    found = sensitivities(out, seen.lifted)
    assert set(found) == {name for name, _ in model.named_parameters()}
    return {name: s.item() for name, s in found.items()}


def masses(recursion: Recursion, names: list[str], blocks: int = 0) -> dict[str, float]:
    """The mass of each parameter: 1, in a GPT's blocks 5 altogether."""
    inside = 5 / (6 * blocks) if blocks else 1.0
    found = {name: inside if ".block." in name or not blocks else 1.0 for name in names}
    assert sum(found.values()) == pytest.approx(recursion.mass)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_targets_are_those_of_modulas_recursion(name):
    model, recursion, x = MODELS[name]
    expected = recursion.targets(1.0)
    found = our_sensitivities(model, x)
    mass = masses(recursion, list(found), int(name.split()[2]) if "GPT" in name else 0)
    targets = {k: mass[k] / recursion.mass / s for k, s in found.items()}
    assert targets.keys() == expected.keys()
    for parameter, target in targets.items():
        assert target == pytest.approx(expected[parameter], rel=1e-12), parameter
    printed = GPT if "GPT" in name else PRINTED.get(name, {})
    for end, number in printed.items():
        matching = [t for k, t in targets.items() if k.endswith(end) and (not end[0].isdigit() or k == end)]
        assert matching and all(t == pytest.approx(number, abs=1e-3) for t in matching), end
    if "GPT" in name:
        assert targets[list(targets)[-1]] == pytest.approx(0.142857, abs=1e-3)


def test_traces_in_mode_modula_have_the_same_sensitivities():
    model, _, x = MODELS["residual blocks"]
    leaves = {k: with_perturbation(RMSToRMSTensor(1.0)) for k, _ in model.named_parameters()}
    out = thunder.jit(model, transforms=[NormTransform(parameters=leaves, mode="modula")])(x)
    found = sensitivities(out, leaves)
    expected = our_sensitivities(model, x)
    assert {k: s.item() for k, s in found.items()} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("c", [-2.0, 0.5])
def test_every_size_is_1_and_scales_are_taken_by_their_modulus(c):
    with norm_mode("modula"):
        out = c * RMSTensor(1.0, backing=torch.zeros(2, 4), perturbation_size=1.0)
        assert out.norm_size.item() == 1.0 and out.perturbation_size.item() == abs(c)
        assert (out + out).perturbation_size.item() == 2 * abs(c)
        assert LinfTensor(1.0, backing=torch.zeros(3), perturbation_size=1.0).relu().norm_size.item() == 1.0
