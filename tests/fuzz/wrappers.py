"""Random programs with wrapper subclasses against eager PyTorch: values, types, metadata, gradients and what these hold inside.

A program is text: a function or a module of one to six statements, drawn so that eager mode can run it.  It is run in eager mode and
under `thunder.jit` with a `SubclassTransform`, twice with other values, of which the second call must be served from the cache.
"""

from __future__ import annotations

import dataclasses
import random as randomness
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
import torch
import torch.nn.functional as F  # noqa: N812 - as the programs call it
from torch import nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm.transforms import SubclassTransform

from .program import Outcome, outcome_of
from .wrapper_classes import BlockQuantised, Dual, Interval, LowRank, Masked

NAMES = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "TwoTensor": TwoTensor,
    "WrapperSubclass": WrapperSubclass,
    "Masked": Masked,
    "Dual": Dual,
    "Interval": Interval,
    "LowRank": LowRank,
    "BlockQuantised": BlockQuantised,
}
HEADER = """\
import torch, thunder
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor
from tests.fuzz.wrapper_classes import BlockQuantised, Dual, Interval, LowRank, Masked
from tests.fuzz.wrappers import given, show
from thunder_norm.transforms import SubclassTransform
"""

# How an instance is made from plain tensors {a} (and {b}) of the program's shape.
CONSTRUCTORS = {
    "TwoTensor": "TwoTensor({a}, {b})",
    "WrapperSubclass": "WrapperSubclass({a})",
    "Masked": "Masked({a}, {b} > -0.5)",
    "Dual": "Dual({a}, {b})",
    "Interval": "Interval({a}, {a} + {b}.abs())",
    "LowRank": "LowRank({a}[:, :2], {b}[:, 1:3])",
    "BlockQuantised": "BlockQuantised.of({a})",
}
INNER = {
    "TwoTensor": ("a", "b"),
    "WrapperSubclass": ("a",),
    "Masked": ("values_", "mask"),
    "Dual": ("primal", "tangent"),
    "Interval": ("low", "high"),
    "LowRank": ("left",),
    "BlockQuantised": ("codes", "scales"),
}

# {a} and {b} are values of the program, {x} an input, {p} a plain tensor, {c} a number; {v} is what the statement is to define.
STATEMENTS = {
    "elementwise": """
        {a}.sin() | torch.cos({a}) | torch.exp({a} * 0.3) | torch.tanh({a}) | {a}.sigmoid() | torch.relu({a}) | F.gelu({a})
        {a}.abs() | {a} ** 2 | {a} * {c} | {a} + {c} | {c} - {a} | {a} / {c} | -{a} | torch.sqrt({a} * {a} + 1) | F.silu({a})
        F.softplus({a}) | torch.clamp({a}, -0.5, 0.5) | F.leaky_relu({a}, 0.1) | torch.log1p({a}.abs()) | torch.erf({a})
        torch.softmax({a}, -1) | F.log_softmax({a}, 0) | F.layer_norm({a}, {a}.shape[-1:]) | torch.cumsum({a}, -1) | {a}.round()
        {a}.detach() | torch.square({a}) | {a}.clone() | torch.sign({a}) | torch.rsqrt({a}.abs() + 1) | {a} % 2 | F.elu({a})
    """,
    "binary": """
        {a} + {b} | {a} * {b} | {a} - {b} | {a} / ({b}.abs() + 1) | torch.maximum({a}, {b}) | torch.minimum({a}, {b})
        torch.add({a}, {b}, alpha=2) | {a}.sub({b}, alpha=0.5) | torch.lerp({a}, {b}, 0.3) | torch.addcmul({a}, {b}, {b})
        {a} * {p} | {p} + {a} | {p} - {a} | F.mse_loss({a}, {b}) | torch.hypot({a}, {b}) | torch.atan2({a}, {b}.abs() + 1)
    """,
    "reductions": """
        {a}.sum() | {a}.mean() | {a}.sum(-1) | {a}.sum(0, keepdim=True) | {a}.mean(-1) | {a}.amax(-1) | {a}.max() | {a}.std(-1)
        {a}.var(0) | {a}.norm() | torch.logsumexp({a}, -1) | {a}.prod(-1) | {a}.argmax(-1) | {a}.mean((0, -1)) | {a}.min(-1).values
        torch.linalg.vector_norm({a}, dim=-1) | {a}.max(0)[0] | {a}.square().sum().sqrt()
    """,
    "matmul": """
        {a} @ {b} | {a} @ {b}.t() | F.linear({a}, {b}) | torch.mm({a}.t(), {b}) | torch.einsum("ij,kj->ik", {a}, {b}) | {p} @ {a}
        torch.addmm({b}, {a}, {a}) | {a} @ {p} | F.linear({p}, {a}) | torch.bmm({a}[None], {b}[None]) | torch.matmul({a}, {b}[0])
        torch.outer({a}[0], {b}[0]) | torch.dot({a}[0], {b}[0]) | F.linear({a}, {b}, {p}[0])
    """,
    "views": """
        {a}.t() | {a}.transpose(0, -1) | {a}.reshape(-1) | {a}.view(-1, 2) | {a}[0] | {a}[:, :2] | {a}[..., -1] | {a}[1:] | {a}.unsqueeze(0)
        {a}.squeeze() | {a}.flatten() | {a}.expand(2, *{a}.shape) | {a}[None] | {a}.contiguous() | {a}.flip(0) | {a}.T | {a}.mT
        {a}.repeat(2, 1) | {a}.index_select(0, torch.tensor([1, 0])) | {a}[torch.tensor([1, 0])] | {a}.roll(1, 0) | {a}[::2]
        {a}.permute(1, 0) | {a}.narrow(0, 0, 2) | {a}.diagonal() | {a}.tril() | F.pad({a}, (1, 0)) | {a}.view_as({b})
        {a}.gather(-1, torch.zeros_like({a}, dtype=torch.int64)) | {a}.reshape(2, -1).t().contiguous()
    """,
    "in-place on what was computed": """
        ({a} * 1).mul_(0.5) | {a}.clone().add_({b}) | {a}.clone().sub_({c}) | {a}.sin().relu_() | {a}.clone().clamp_(-0.5, 0.5)
        {v} = {a} * 2; {v} += {b} | {v} = {a}.clone(); {v}.mul_({b}); {v} = {v} + {a} | {a}.clone().fill_(0.5) | {a}.exp().div_(2)
        {a}.clone().copy_({b}) | {a}.clone().zero_() | {v} = torch.zeros_like({a}); {v}.add_({a}) | {a}.clone().neg_()
    """,
    "in-place on inputs": "{x}.mul_(0.5) | {x}.add_({b}) | {x}.sub_({c}) | {x}.copy_({b}) | {v} = {x}; {v} += 1 | {x}.neg_()",
    "comparisons": """
        {a} > 0 | {a} > {b} | torch.where({a} > 0, {a}, {a} * 0.1) | torch.where({a} > {b}, {a}, {b}) | {a}.masked_fill({a} > 0.5, 0.25)
        ({a} > 0).to({a}.dtype) | {a} * ({a} > 0) | {a}.eq({b}) | torch.where({p} > 0, {a}, 0.5) | ({a} <= {b}).any() | {a}.isfinite()
    """,
    "joining": """
        torch.cat([{a}, {b}]) | torch.stack([{a}, {b}]) | torch.cat([{a}, {a}], -1) | {a}.chunk(2)[1] | {a}.split(1)[0] | torch.cat([{a}, {p}])
        torch.unbind({a})[0] | torch.stack([{a}, {b}], -1) | torch.cat({a}.split(1), 1) | torch.stack(list({a})) | torch.vstack(({a}, {b}))
    """,
    "dtypes": """
        {a}.to(torch.float32) | {a}.double() | {a}.float() | {a}.type(torch.float64) | {a}.to({b}.dtype) | {a}.to(torch.int64) | {a}.to({b})
        {a}.to(torch.float32) * {b} | {a}.half().double() | {a}.bool()
    """,
    "construction": " | ".join(form.format(a="{p}", b="({p} * 2)") for form in CONSTRUCTORS.values())
    + " | "
    + " | ".join(form.format(a="{p}.sin()", b="{p}") + " * {c}" for form in CONSTRUCTORS.values()),
    "inside": "{inner} | {inner} * 2 | {inner}.sum() | {w}.dense() | {w}.dense() * {c} | torch.sin({inner}) + {w}",
    "Python": """
        {a} * {a}.shape[0] | {a} if type({a}) is TwoTensor else -{a} | {a} * 2 if {a}.ndim == 2 else {a} | {a} * (1 if {a}.requires_grad else 3)
        sum([{a}, {b}]) | {a} * len({a}) | {a} if isinstance({a}, (Masked, Dual)) else {a} + 1 | [r * 2 for r in {a}][0] | {a} + {a}.numel()
        {a} * {a}.stride(0) | {a} if {a}.dtype == torch.float64 else {a}.double() | {a} * 2 if {a}.is_contiguous() else {a} * 3
    """,
    "regions": """
        with torch.no_grad(): {v} = {a} * 2 | with torch.no_grad(): {v} = {a}.clone().mul_(3)
        with torch.enable_grad(): {v} = {a} * {b} | {v} = torch.utils.checkpoint.checkpoint(lambda t: t.sin() * t, {a}, use_reentrant=False)
    """,
}
WEIGHTS = {"elementwise": 6, "binary": 6, "reductions": 3, "matmul": 4, "views": 5, "construction": 1, "joining": 2}
TEMPLATES = {
    kind: [t.strip() for line in text.strip().splitlines() for t in line.split(" | ")] for kind, text in STATEMENTS.items()
}


@dataclass(frozen=True)
class Input:
    """An argument of the function, or a parameter of the module: an expression that makes it."""

    name: str
    expression: str
    requires_grad: bool
    is_parameter: bool = False


@dataclass(frozen=True)
class Statement:
    """``target = text``, or the lines of `text` if they define it themselves."""

    target: str
    text: str
    kind: str

    def lines(self) -> list[str]:
        """Python."""
        if re.search(rf"\b{self.target} \+?= ", self.text):
            if self.text.startswith("with "):
                head, body = self.text.split(": ", 1)
                return [head + ":", "    " + body]
            return self.text.split("; ")
        return [f"{self.target} = {self.text}"]


@dataclass(frozen=True)
class WrapperProgram:
    """A function of wrappers and plain tensors, or a module of such parameters."""

    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    result: str
    seed: int
    tangent: float | None  # the gradients of the results are this; None: the function returns a loss

    # -- text ---------------------------------------------------------------------------------------------------------

    def code(self) -> str:
        """The function ``f``, or the module ``M``."""
        arguments = [i.name for i in self.inputs if not i.is_parameter]
        body = [line for s in self.statements for line in s.lines()]
        if self.tangent is None:
            body.append(f"out = {self.result}")
            body.append("return sum(t.sum() for t in (out if type(out) is tuple else (out,)))")
        else:
            body.append(f"return {self.result}")
        parameters = [i for i in self.inputs if i.is_parameter]
        if not parameters:
            return f"def f({', '.join(arguments)}):\n" + textwrap.indent("\n".join(body), "    ")
        unpack = [f"{p.name} = self.{p.name}" for p in parameters]
        init = ["super().__init__()"]
        init += [f"self.{p.name} = nn.Parameter({p.name}, requires_grad={p.requires_grad})" for p in parameters]
        return (
            f"class M(nn.Module):\n    def __init__(self, {', '.join(p.name for p in parameters)}):\n"
            + textwrap.indent("\n".join(init), "        ")
            + f"\n    def forward(self, {', '.join(arguments)}):\n"
            + textwrap.indent("\n".join([*unpack, *body]), "        ")
        )

    def source(self) -> str:
        inputs = ", ".join(f"{i.name!r}: ({i.expression!r}, {i.requires_grad}, {i.is_parameter})" for i in self.inputs)
        return (
            f"{HEADER}\n{self.code()}\n\n"
            f"for name, jit in (('eager', lambda f: f), ('ours', lambda f: thunder.jit(f, transforms=[SubclassTransform()]))):\n"
            f"    show(name, *given({{{inputs}}}, {self.seed}, globals(), jit), {self.tangent})\n"
        )

    def labels(self) -> Sequence[str]:
        classes = {name for name in CONSTRUCTORS if re.search(rf"\b{name}\b", self.code() + str(self.inputs))}
        return [*dict.fromkeys(s.kind for s in self.statements), *sorted(classes)]

    # -- running ------------------------------------------------------------------------------------------------------

    def _given(self, seed: int, names: dict[str, Any], jit: Callable) -> tuple[Callable, list, list]:
        return given({i.name: (i.expression, i.requires_grad, i.is_parameter) for i in self.inputs}, seed, names, jit)

    def _names(self) -> dict[str, Any]:
        names = dict(NAMES)
        exec(self.code(), names)  # noqa: S102 - a program of ours
        return names

    def eager(self) -> Ran:
        """What eager mode gives."""
        return ran(*self._given(self.seed, self._names(), lambda f: f), self.tangent)

    def run(self) -> Outcome:
        names = self._names()
        compiled: list[Any] = []

        def jit(f: Callable) -> Callable:
            if not compiled:
                compiled.append(thunder.jit(f, transforms=[SubclassTransform()]))
            return compiled[0]

        for seed in (self.seed, self.seed + 1):
            try:
                want = ran(*self._given(seed, names, lambda f: f), self.tangent)
            except Exception as e:  # noqa: BLE001 - whatever eager mode says
                return Outcome("no oracle", f"{type(e).__name__}: {e}")
            if compiled and any(i.is_parameter for i in self.inputs):
                break  # a module has parameters of its own
            try:
                got = ran(*self._given(seed, names, jit), self.tangent)
            except Exception as e:  # noqa: BLE001 - every end of a program is a result
                return outcome_of(e)
            different = next(differences(got, want), None)
            if different is not None:
                return Outcome("wrong", f"{'first' if seed == self.seed else 'second'} call: {different}")
        if thunder.cache_misses(compiled[0]) != 1:
            return Outcome("wrong", f"{thunder.cache_misses(compiled[0])} traces for two calls")
        return Outcome("right")

    # -- shrinking ----------------------------------------------------------------------------------------------------

    def smaller(self) -> Iterable[WrapperProgram]:
        names = [*(s.target for s in self.statements), *(i.name for i in self.inputs)]
        for name in names:
            if self.result != name:
                yield self._needed(result=name)
        for i, statement in enumerate(self.statements):
            for name in dict.fromkeys(re.findall(r"\b[vxpw]\d+\b", statement.text)):
                if name != statement.target:
                    rest = [
                        dataclasses.replace(s, text=_renamed(s.text, statement.target, name)) for s in self.statements[i + 1 :]
                    ]
                    yield self._needed(
                        statements=(*self.statements[:i], *rest), result=_renamed(self.result, statement.target, name)
                    )
        for i, given_ in enumerate(self.inputs):
            for change in ({"requires_grad": False}, {"is_parameter": False}):
                if any(getattr(given_, k) != v for k, v in change.items()):
                    yield self._needed(inputs=(*self.inputs[:i], dataclasses.replace(given_, **change), *self.inputs[i + 1 :]))
        if self.tangent != 1.0:
            yield dataclasses.replace(self, tangent=1.0)

    def _needed(self, **changes: Any) -> WrapperProgram:
        """The changed program without what its result does not need."""
        program = dataclasses.replace(self, **changes)
        text = program.result
        kept: list[Statement] = []
        for s in reversed(program.statements):
            if re.search(rf"\b{s.target}\b", text):
                kept.insert(0, s)
                text += " " + s.text
        inputs = tuple(i for i in program.inputs if re.search(rf"\b{i.name}\b", text))
        return dataclasses.replace(program, statements=tuple(kept), inputs=inputs)


def _renamed(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\b", new, text)


# -- what a run gives -------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """Results, the inputs afterwards, and their gradients."""

    result: Any
    inputs: list[Any]
    gradients: list[Any]


def given(
    inputs: dict[str, tuple[str, bool, bool]], seed: int, names: dict[str, Any], jit: Callable
) -> tuple[Callable, list, list]:
    """The compiled function or module, its arguments, and the tensors that get gradients."""
    torch.manual_seed(seed)
    made = {name: eval(expression, names) for name, (expression, _, _) in inputs.items()}  # noqa: S307
    arguments = []
    for name, (_, requires_grad, is_parameter) in inputs.items():
        if not is_parameter:
            arguments.append(made[name].requires_grad_() if requires_grad else made[name])
    if not any(is_parameter for _, _, is_parameter in inputs.values()):
        return jit(names["f"]), arguments, arguments
    module = names["M"](**{name: made[name] for name, (_, _, is_parameter) in inputs.items() if is_parameter})
    return jit(module), arguments, [*arguments, *module.parameters()]


def ran(function: Callable, arguments: list, tensors: list, tangent: float | None) -> Ran:
    """Call, and go backwards if anything requires grad."""
    result = function(*arguments)
    if tangent is None:
        outputs, cotangents = [result], [None]
    else:
        outputs = list({id(t): t for t in _tensors(result)}.values())
        cotangents = [torch.full_like(t.detach(), tangent) if t.requires_grad else None for t in outputs]
    pairs = [(t, c) for t, c in zip(outputs, cotangents, strict=True) if isinstance(t, torch.Tensor) and t.requires_grad]
    if pairs and any(t.requires_grad for t in tensors):
        torch.autograd.backward([t for t, _ in pairs], [c for _, c in pairs])
    return Ran(result, tensors, [t.grad for t in tensors])


def show(name: str, function: Callable, arguments: list, tensors: list, tangent: float | None) -> None:
    """Print what a run gives."""
    try:
        found = ran(function, arguments, tensors, tangent)
        print(name, "result", found.result, "\n   gradients", found.gradients, "\n   inputs", found.inputs)
    except Exception as e:  # noqa: BLE001 - shown beside the other
        print(name, f"{type(e).__name__}: {e}")


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def differences(got: Any, want: Any, path: str = "") -> Iterator[str]:
    """Where the two are not the same, types and metadata included."""
    if isinstance(want, Ran):
        for name in ("result", "gradients", "inputs"):
            yield from differences(getattr(got, name), getattr(want, name), name)
    elif type(got) is not type(want):
        yield f"{path} is a {type(got).__name__} instead of a {type(want).__name__}"
    elif isinstance(want, list | tuple | dict):
        if len(got) != len(want):
            yield f"{path} has {len(got)} entries instead of {len(want)}"
        pairs = [(k, got.get(k), v) for k, v in want.items()] if isinstance(want, dict) else zip(range(len(want)), got, want)  # noqa: B905
        for key, g, w in pairs:
            yield from differences(g, w, f"{path}[{key!r}]")
    elif isinstance(want, torch.Tensor):
        yield from _tensor_differences(got, want, path)
    elif got != want:
        yield f"{path} is {got!r} instead of {want!r}"


def _tensor_differences(got: torch.Tensor, want: torch.Tensor, path: str) -> Iterator[str]:
    is_plain = not hasattr(want, "__tensor_flatten__")
    for name in ("shape", "dtype", "device", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            yield f"{path}.{name} is {getattr(got, name)} instead of {getattr(want, name)}"
            return
    if got.stride() != want.stride() and not is_plain:  # what Thunder computes it lays out as it likes
        yield f"{path}.stride() is {got.stride()} instead of {want.stride()}"
    if not is_plain:
        names, context = want.__tensor_flatten__()
        own_names, own_context = got.__tensor_flatten__()
        yield from differences([*own_names, own_context], [*names, context], path + ".__tensor_flatten__()")
        for name in names:
            yield from differences(getattr(got, name), getattr(want, name), f"{path}.{name}")
    elif not _is_close(got, want):
        yield f"{path} is {got.tolist()} instead of {want.tolist()}"


def _is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not want.is_floating_point():
        return torch.equal(got, want)
    unit = torch.finfo(want.dtype).eps * 1e4
    scale = want.abs().nan_to_num(0, 0, 0).amax().item() if want.numel() else 0.0
    return torch.allclose(got, want, rtol=unit, atol=unit * max(scale, 1e-3), equal_nan=True)


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw(random: randomness.Random) -> WrapperProgram:
    """A program that eager mode can run."""
    for _ in range(50):
        program = _drawn(random)
        for attempt in (program, _without_gradients(program)):
            try:
                attempt.eager()
            except Exception:  # noqa: BLE001, S112 - whatever eager mode says: not a program
                continue
            return attempt
    raise AssertionError("no program that eager mode can run")


def _without_gradients(program: WrapperProgram) -> WrapperProgram:
    inputs = tuple(dataclasses.replace(i, requires_grad=False) for i in program.inputs)
    return dataclasses.replace(program, inputs=inputs, tangent=1.0)


def _drawn(random: randomness.Random) -> WrapperProgram:
    shape = random.choice([(4, 4), (4, 4), (2, 4), (3, 4)])
    dtype = random.choice(["torch.float64", "torch.float64", "torch.float64", "torch.float32"])
    tensor = f"torch.randn({shape[0]}, {shape[1]}, dtype={dtype})"
    has_gradients = random.random() < 0.65
    has_parameters = random.random() < 0.3
    classes = random.choices(list(CONSTRUCTORS), k=random.choice([1, 1, 1, 2]))
    inputs = []
    for i in range(random.randint(1, 3)):
        expression = tensor
        if i == 0 or random.random() < 0.6:
            expression = CONSTRUCTORS[random.choice(classes)].format(a=tensor, b=tensor)
            if random.random() < 0.08 and "TwoTensor" in classes:  # one in another
                expression = f"TwoTensor({expression}, {CONSTRUCTORS[classes[0]].format(a=tensor, b=tensor)})"
        is_parameter = has_parameters and random.random() < 0.6
        requires_grad = has_gradients and random.random() < 0.8
        inputs.append(Input(f"{'p' if is_parameter else 'x'}{i}", expression, requires_grad, is_parameter))
    if random.random() < 0.5:
        inputs.append(Input(f"x{len(inputs)}", tensor, has_gradients and random.random() < 0.5))
    seed = random.randrange(10**6)
    torch.manual_seed(seed)
    values = {i.name: eval(i.expression, dict(NAMES)).requires_grad_(i.requires_grad) for i in inputs}  # noqa: S307
    statements: list[Statement] = []
    for n in range(random.randint(1, 6)):
        statement = _statement(random, f"v{n}", values, inputs)
        if statement is not None:
            statements.append(statement)
    return WrapperProgram(
        tuple(inputs),
        tuple(statements),
        _result(random, values, statements),
        seed,
        random.choice([1.0, 0.5, None] if has_gradients else [1.0]),
    )


def _statement(random: randomness.Random, target: str, values: dict[str, Any], inputs: Sequence[Input]) -> Statement | None:
    kinds = list(TEMPLATES)
    for _ in range(40):
        kind = random.choices(kinds, [WEIGHTS.get(k, 1) for k in kinds])[0]
        recent = list(values)[-3:] if random.random() < 0.6 else list(values)
        plain = [k for k, v in values.items() if type(v) is torch.Tensor and v.is_floating_point()]
        wrappers = [k for k, v in values.items() if type(v).__name__ in INNER]
        template = random.choice(TEMPLATES[kind])
        if ("{p}" in template and not plain) or (("{w}" in template or "{inner}" in template) and not wrappers):
            continue
        wrapper = random.choice(wrappers) if wrappers else ""
        text = template.format(
            a=random.choice(recent),
            b=random.choice(list(values)),
            x=random.choice(inputs).name,
            # a wrapper made of tensors that require grad has gradients here, and none in eager mode: on purpose
            p=_constant(random.choice(plain), values, kind) if plain else "",
            w=wrapper,
            inner=f"{wrapper}.{random.choice(INNER[type(values[wrapper]).__name__])}" if wrapper else "",
            c=random.choice(["2", "0.5", "-1.5", "3"]),
            v=target,
        )
        statement = Statement(target, text, kind)
        names = dict(NAMES) | values
        try:
            exec("\n".join(statement.lines()), names)  # noqa: S102
        except Exception:  # noqa: BLE001, S112 - not for values like these
            continue
        made = names[target]
        if isinstance(made, torch.Tensor) and made.numel() <= 256 and all(_is_sane(v) for v in (made, *values.values())):
            values[target] = made
            return statement
    return None


def _constant(name: str, values: dict[str, Any], kind: str) -> str:
    return f"{name}.detach()" if kind == "construction" and values[name].requires_grad else name


def _is_sane(t: torch.Tensor) -> bool:
    if hasattr(t, "__tensor_flatten__"):
        return all(_is_sane(getattr(t, name)) for name in t.__tensor_flatten__()[0])
    return not t.is_floating_point() or bool((t.isfinite() & (t.abs() < 1e6)).all())


def _result(random: randomness.Random, values: dict[str, Any], statements: Sequence[Statement]) -> str:
    last = statements[-1].target if statements else next(iter(values))
    other = random.choice(list(values))
    return random.choice(
        [
            last,
            last,
            last,
            f"({last}, {other})",
            f"[{other}, {last}]",
            f"{{'a': {last}, 'b': ({other}, 3)}}",
            f"({last}, {last}.shape[0], None)",
        ]
    )
