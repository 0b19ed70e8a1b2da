"""Where eager mode has a gradient, of zeros perhaps, there is one; and results that have none do not require grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from tests.op_coverage import Case, cases, op_name, program
from tests.seeds import crossed, seeded
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, vjp
import thunder

ROUNDING: dict[str, Callable] = {
    "floor": lambda x: x.floor(),
    "ceil": lambda x: torch.ceil(x) * 2,
    "round": lambda x: x.round().sum(),
    "round to decimals": lambda x: torch.round(x, decimals=1),
    "trunc": lambda x: torch.trunc(x),
    "fix": lambda x: torch.fix(x),
    "sign": lambda x: x.sign(),
    "division": lambda x: torch.div(x, 2.0, rounding_mode="floor") + torch.div(x, 2.0, rounding_mode="trunc"),
    "copysign": lambda x: torch.copysign(torch.ones_like(x), x),
    "within": lambda x: x * x.floor() - x.detach(),
}


def wrapped(x: torch.Tensor) -> torch.Tensor:
    return TwoTensor(x, x.clone()).requires_grad_()


MAKERS: dict[str, Callable] = {"plain": lambda x: x.clone().requires_grad_(), "wrapper": wrapped}


def gradient(f: Callable, x: torch.Tensor) -> Any:
    result = f(x)
    if result.requires_grad:
        result.backward(torch.ones_like(result))
    return result.requires_grad, None if x.grad is None else getattr(x.grad, "a", x.grad)


@pytest.mark.parametrize(("kind", "transform"), crossed(MAKERS, [SubclassTransform, NormTransform]))
def test_what_is_rounded_has_a_gradient_of_zeros(kind: str, transform: type) -> None:
    data = torch.tensor([0.3, -1.7, 2.5])
    for name, f in ROUNDING.items():
        found = gradient(thunder.jit(f, transforms=[transform()]), MAKERS[kind](data))
        expected = gradient(f, MAKERS[kind](data))
        assert expected[1] is not None and found[0] is expected[0], name
        torch.testing.assert_close(found[1], expected[1], msg=lambda m, name=name: f"{name}: {m}")


def test_function_transforms_have_it_too() -> None:
    x = torch.tensor([0.3, -1.7])
    for name, f in ROUNDING.items():
        expected = torch.func.grad(lambda x, f=f: f(x).sum())(x)
        torch.testing.assert_close(grad(lambda x, f=f: f(x).sum())(x), expected, msg=name)
        torch.testing.assert_close(vjp(lambda x, f=f: f(x).sum(), x)[1](torch.ones(()))[0], expected, msg=name)


# What a search of the whole database has found: complex results of wrappers, and what they are computed by; places of the largest bool.
OPERATORS = (
    "complex polar view_as_complex cfloat cdouble stft fft.fft fft.rfftn fft.ihfft2 linalg.eigvals cumprod masked.cumprod "
    "ceil floor round trunc copysign div.trunc_rounding"
).split()


def presence(f: Callable, leaves: tuple, make: Callable) -> list:
    """For each tensor given whether there is a gradient, and its values; for each result whether it requires grad."""
    given = [make(v.detach().clone()) for v in leaves if isinstance(v, torch.Tensor)]
    given = [t.requires_grad_() if t.is_floating_point() else t for t in given]
    results = [t for t in tree_leaves(f(*given)) if isinstance(t, torch.Tensor)]
    moving = [t for t in results if t.requires_grad]
    torch.autograd.backward(moving, [torch.ones_like(t) for t in moving])
    gradients = [t.grad for t in given if t.is_floating_point()]
    return [[t.requires_grad for t in results], [None if g is None else getattr(g, "a", g) for g in gradients]]


def tensors_of(case: Case) -> list[torch.Tensor]:
    return [v for v in case.leaves if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("make", [WrapperSubclass, lambda t: t], ids=["wrapper", "plain"])
def test_operators_of_the_database(make: Callable) -> None:
    of_name = {op_name(op): op for op in op_db}
    for name in OPERATORS:
        for case in cases(of_name[name], samples=1):
            f = program([case])
            found, expected = (
                presence(thunder.jit(f, transforms=[SubclassTransform()]), case.leaves, make),
                presence(f, case.leaves, make),
            )
            if any(
                t.is_complex() for t in tree_leaves(f(*tensors_of(case)))
            ):  # in eager mode a wrapper forgets a lazy conjugation
                expected = presence(f, case.leaves, lambda t: t)
            assert found[0] == expected[0], name
            torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def has_constant_results(op: Any) -> bool:
    """Whether torch has no derivative of some result, though all that is given requires grad."""
    if (
        not op.supports_dtype(torch.float64, "cpu")
        or op.name.startswith(("new_", "rand", "empty", "jiterator"))
        or op.name.endswith("_like")
    ):
        return False
    for case in cases(op, samples=1):
        given = [t.detach().clone() for t in tensors_of(case)]
        try:
            results = program([case])(*(t.requires_grad_() if t.is_floating_point() else t for t in given))
        except RuntimeError:  # torch has no derivative for some argument, and says so
            return False
        floating = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if not all(t.requires_grad for t in floating) and any(t.is_floating_point() for t in given):
            return True
    return False


def test_results_that_torch_has_no_derivative_of_do_not_require_grad() -> None:
    others = (
        "native_",
        "_native",
        "torch.ops",
        "linalg.lstsq",
    )  # of which a part is recorded as aten operations: flags are those of the whole
    names = [op_name(op) for op in op_db if not op_name(op).startswith(others) and has_constant_results(op)]
    assert len(names) >= 15, names  # polynomials, histograms, permutations
    of_name = {op_name(op): op for op in op_db}
    for name in names:
        for case in cases(of_name[name], samples=1):
            f = program([case])
            found = presence(thunder.jit(f, transforms=[SubclassTransform()]), case.leaves, lambda t: t)
            expected = presence(f, case.leaves, lambda t: t)
            assert found[0] == expected[0], name


@pytest.mark.parametrize("by", ["reshape_as", "view_as", "expand_as", "type_as"])
def test_a_tensor_asked_for_its_shape_or_dtype_has_no_gradient(by: str) -> None:
    def f(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = getattr(x, by)(other)
        return y, y * 2

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for x_moves, other_moves in ((True, True), (True, False), (False, True)):
        given = torch.randn(6, requires_grad=x_moves), torch.randn(1 if by == "expand_as" else 2, 6, dtype=torch.float64)
        given = given[0], given[1].reshape(-1, 6 if by == "expand_as" else 3)[:2].requires_grad_(other_moves)
        found, expected = jitted(*given), f(*given)
        assert [t.requires_grad for t in found] == [t.requires_grad for t in expected]
        torch.testing.assert_close(found, expected)
        if x_moves:
            gradients = [torch.autograd.grad(sum(t.sin().sum() for t in r), given[0]) for r in (found, expected)]
            torch.testing.assert_close(*gradients)


BUFFER = torch.full((2,), 3.0)


def results_without_history(x: torch.Tensor) -> dict[str, torch.Tensor]:
    made = torch.zeros(3)
    made[1:] = 2.0
    return {
        "made": torch.ones(2),
        "made, written into": made,
        "computed from what is made": torch.arange(3.0).exp() + torch.tensor(0.5),
        "drawn": torch.rand(2),
        "given to the program otherwise": BUFFER,
        "computed from that": BUFFER * 2,
        "complex": torch.zeros(2, dtype=torch.complex64),
        "of its shape": torch.full(x.shape, 2.0),
        "of its dtype": x.new_tensor([1.0, 2.0]),
        "detached": x.detach() * 2,
        "a history that starts here": torch.ones(2, requires_grad=True),
        "dependent": x * 2,
        "dependent on both": x * made.sum(),
    }


@pytest.mark.parametrize(("kind", "transform"), crossed(MAKERS, [SubclassTransform, NormTransform]))
def test_results_that_depend_on_no_input_do_not_require_grad(kind: str, transform: type) -> None:
    x = MAKERS[kind](torch.tensor([0.3, -1.7, 2.5]))
    jitted = thunder.jit(results_without_history, transforms=[transform()])
    expected = {name: (t.requires_grad, t.is_leaf) for name, t in results_without_history(x).items()}
    for _ in range(2):  # the second call is served by what the first has left
        found = {name: (t.requires_grad, t.is_leaf) for name, t in jitted(x).items()}
        assert found == expected
    assert jitted(x)["given to the program otherwise"] is BUFFER


def test_what_is_complex_inside_of_the_program_is_differentiated() -> None:
    def f(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).abs() * z.real + (z * z.conj()).imag + torch.polar(x, z.imag).angle()

    given = []
    for g, make in ((thunder.jit(f, transforms=[SubclassTransform()]), WrapperSubclass), (f, lambda t: t)):
        torch.manual_seed(seeded(0))
        x, z = torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.complex128)
        tensors = [make(x).requires_grad_(), make(z).requires_grad_()]
        result = g(*tensors)
        result.backward(torch.ones_like(result))
        given.append([getattr(t.grad, "a", t.grad) for t in tensors])
    torch.testing.assert_close(*given)


def halved(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.mul_(0.5)
    return x * x


def halved_in_a_part(x: torch.Tensor) -> torch.Tensor:
    y, transposed = x.exp(), x.t()
    with torch.no_grad():
        x[0] = 0.5
        x[1, 0].add_(1)
        x[:, 1] += x[:, 0]
    return y * transposed @ x


def normalized(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        with torch.no_grad():
            x.div_(x.norm())
    return x.view(-1).sin()


def masked(x: torch.Tensor) -> torch.Tensor:
    x.data *= torch.tensor([0.0, 2.0])
    return x * x


def on_the_diagonal(x: torch.Tensor) -> torch.Tensor:
    x.data.diagonal().fill_(2.0)
    return x @ x


def detached(x: torch.Tensor) -> torch.Tensor:
    y = x.detach()
    y.mul_(2).add_(1)
    return x * x


def diagonal(x: torch.Tensor) -> torch.Tensor:
    """Recorded, in place on a part of what the program made."""
    return (x * 2).fill_diagonal_(0.3).exp()


def copied(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, 2)
    y.copy_(x)
    return y


def returned(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.neg_()
    return x


WRITTEN = [halved, halved_in_a_part, normalized, masked, on_the_diagonal, detached, diagonal, copied, returned]
WAYS = [(SubclassTransform, True), (NormTransform, False)], [(NormTransform, True), (SubclassTransform, False)]


@pytest.mark.parametrize(("f", "transform", "is_leaf"), [(f, *way) for several in WAYS for f, way in crossed(WRITTEN, several)])
def test_what_is_written_without_autograd_keeps_its_gradients(f: Callable, transform: type, is_leaf: bool) -> None:
    torch.manual_seed(seeded(0))
    data = torch.randn(2, 2)
    found = []
    for run in (thunder.jit(f, transforms=[transform()]), f):
        leaf = data.clone().requires_grad_()
        x = leaf if is_leaf else leaf * 1
        result = run(x)
        assert (result is x) == (f is returned)
        found.append((result.detach().clone(), x.detach(), *torch.autograd.grad(result.sum(), leaf)))
    torch.testing.assert_close(*found)


WRITES: dict[str, Callable] = {
    "diagonal": lambda y, x: y.diagonal().add_(1),
    "rows": lambda y, x: y.view(-1)[1:3].mul_(2),
    "columns": lambda y, x: y.t()[0].copy_(y[0]),
    "of what is differentiated": lambda y, x: y.__setitem__((slice(None), 0), y[:, 0].add_(x[0])),
    "all, then the diagonal": lambda y, x: y.add_(1).diagonal().sub_(1.5),
    "the data, then the diagonal": lambda y, x: (y.data.fill_(2), y.diagonal().sub_(1.5)),
}


def test_views_of_inputs_without_gradients_are_written_into() -> None:
    torch.manual_seed(seeded(0))
    x, data = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
    for name, write in WRITES.items():

        def f(x: torch.Tensor, y: torch.Tensor, write=write) -> torch.Tensor:
            write(y, x)
            return x * y

        found = []
        for run in (thunder.jit(f, transforms=[SubclassTransform()]), f):
            y = data.clone()
            result = run(x, y)
            found.append((result.detach(), y, *torch.autograd.grad(result.sum(), x)))
        torch.testing.assert_close(*found, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_a_table_that_is_renormalized_is_trained(transform: type, kind: type) -> None:
    torch.manual_seed(seeded(0))
    models = [torch.nn.Sequential(kind(5, 3, max_norm=0.5), torch.nn.Linear(3, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    runs = thunder.jit(models[0], transforms=[transform()]), models[1]
    for _ in range(2):
        indices = torch.randint(0, 5, (2, 3))
        results = [run(indices) for run in runs]
        torch.testing.assert_close(*results)
        for result in results:
            result.square().sum().backward()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close((a, a.grad), (b, b.grad))


def test_no_norms_in_real_mode_after_a_write() -> None:
    torch.manual_seed(seeded(0))
    model = torch.nn.Linear(3, 3)

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        halved(y)
        return model(y)

    x = torch.randn(2, 3)
    found = thunder.jit(twice, transforms=[NormTransform()])(x)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, twice(x))


def of_one(x: torch.Tensor, p: torch.Tensor) -> Any:
    return p.sin(), x.sin().detach()


def constructed(x: torch.Tensor, p: torch.Tensor) -> Any:
    return x[None], TwoTensor(p.detach().sin(), p.detach()) * -1.5


def detached_alone(x: torch.Tensor, p: torch.Tensor) -> Any:
    return x.detach(), p.exp()


def compared(x: torch.Tensor, p: torch.Tensor) -> Any:
    return (x > p).to(x.dtype) * p, x.argmax()


def without_gradients(x: torch.Tensor, p: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x * p
    return y, p * 2


def within_an_operation(x: torch.Tensor, p: torch.Tensor) -> Any:
    made = torch.zeros_like(x), x.new_ones(3), x.new_full((3,), 2.0), torch.full_like(x, 3.0), x.new_tensor([1.0, 2.0, 3.0])
    assert not any(t.requires_grad for t in made)
    return torch.layer_norm(p, (3,), x.detach()[0], x[1].detach()), sum(made) + p


def nothing(x: torch.Tensor, p: torch.Tensor) -> Any:
    return x.detach(), TwoTensor(p.detach(), (p.detach() * 2).detach())


@pytest.mark.parametrize("make", [wrapped, MAKERS["plain"]], ids=["wrapper", "plain"])
@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize(
    "f",
    [nothing, of_one, constructed, detached_alone, compared, without_gradients, within_an_operation],
    ids=lambda f: f.__name__,
)
def test_an_input_that_no_result_depends_on_has_no_gradient(f: Callable, transform: type, make: Callable) -> None:
    torch.manual_seed(seeded(0))
    data = torch.randn(2, 3, 3).unbind()

    def gradients(call: Callable) -> list:
        x, p = make(data[0]), data[1].clone().requires_grad_()
        results = call(x, p)
        moving = [t for t in results if t.requires_grad]
        if moving:
            torch.autograd.backward(moving, [torch.ones_like(t.detach()) for t in moving])
        results += tuple(t for x in results if isinstance(x, TwoTensor) for t in (x.a, x.b))
        return [[t.requires_grad for t in results], *[None if t.grad is None else getattr(t.grad, "a", t.grad) for t in (x, p)]]

    expected = gradients(f)
    assert None in expected[1:]
    torch.testing.assert_close(gradients(thunder.jit(f, transforms=[transform()])), expected)


@pytest.mark.parametrize("shape", [(2, 3, 3), (3, 3), (1, 3), ()])
def test_what_is_multiplied_by_a_beta_of_0_has_a_gradient_of_zeros(shape):
    def f(a, b, c):
        return torch.baddbmm(a * 1, b, c, beta=0) + torch.baddbmm(a, b, c, beta=0, alpha=2)

    found = []
    for g in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        args = [torch.full(shape, torch.nan), torch.randn(2, 3, 3), torch.randn(2, 3, 3)]
        args = [a.requires_grad_() for a in args]
        result = g(*args)
        found.append([result, *torch.autograd.grad(result.sum(), args)])
    torch.testing.assert_close(found[1], found[0])


CONSTANT: dict[str, Callable] = {
    "detach": lambda x: x * x.sqrt().detach(),
    "data": lambda x: x * x.sqrt().data,
    "zeros_like": lambda x: x * 2 + torch.zeros_like(x.sqrt()),
    "new_zeros": lambda x: x * 2 + x.sqrt().new_zeros(2),
    "of samples": lambda x: torch.func.vmap(lambda v: v * v.sqrt().detach())(x),
}


@pytest.mark.parametrize(("name", "transform"), crossed(CONSTANT, [SubclassTransform, NormTransform]))
def test_nothing_goes_back_to_what_was_detached(name: str, transform: type) -> None:
    """A gradient of 0 times the infinite slope of the root at 0 was NaN, silently."""
    f, x = CONSTANT[name], torch.tensor([0.0, 4.0])
    _, found = gradient(thunder.jit(f, transforms=[transform()]), x.clone().requires_grad_())
    _, expected = gradient(f, x.clone().requires_grad_())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["rand_like", "randn_like", "randint_like", "zeros_like", "empty_like"])
def test_what_is_made_like_a_tensor_has_no_history(name: str) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.randint_like(x, 3) if name == "randint_like" else getattr(torch, name)(x)
        return made, made * x

    for transform in (SubclassTransform, NormTransform):
        made, product = thunder.jit(f, transforms=[transform()])(torch.ones(3, requires_grad=True))
        assert not made.requires_grad and product.requires_grad


OF_NOTHING: dict[str, Callable] = {
    "repeat": lambda x: [x.repeat(0, 1), x.tile(0, 1)],
    "parts": lambda x: [*x[:0].chunk(2), *x[:0].tensor_split(2)],
    "powers": lambda x: [x**0, x.pow(0.0)],
    "dropout": lambda x: [torch.nn.functional.dropout(x, 1.0)],
}


@pytest.mark.parametrize("name", OF_NOTHING)
def test_what_thunder_writes_without_its_arguments_has_their_history(name: str) -> None:
    found = []
    for run in (OF_NOTHING[name], thunder.jit(OF_NOTHING[name], transforms=[SubclassTransform()])):
        x = torch.ones(3, 4, requires_grad=True)
        results = run(x)
        assert all(r.requires_grad for r in results)
        found.append(torch.autograd.grad(sum(r.sum() for r in results), x))
    torch.testing.assert_close(*found)
