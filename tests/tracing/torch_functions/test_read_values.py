"""Values that a program asks for: as in eager mode whatever they are, and one trace for each answer."""

from __future__ import annotations

import cmath
import collections
import decimal
import gc
import itertools
import json
import math
import operator
import struct
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.op_coverage import compare
from tests.seeds import crossed, seeded
from tests.tracing.python.test_control_flow import ON_VALUES
from thunder_norm import RMSTensor, normed
from thunder_norm.errors import AcquiredAnewWarning, DataDependentError, UnsupportedOpError
from thunder_norm.subclass.acquiring import data_sizes
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform, grad
import thunder

INPUTS = [torch.tensor(v) for v in ([1.0, 2.0, 0.5], [-1.0, 2.0, -3.5], [0.25, 4.0, 3.0], [-2.0, -1.0, -3.0])]
# which return one of the tensors, or leave torch
REFUSED = ("sorted", "numpy", "a ufunc")
ELSEWHERE = ("assert",)  # tests/tracing/guarding/test_assertions.py


def _loop(x: torch.Tensor) -> torch.Tensor:
    n = (x > 0).sum().item()
    for i in range(n):
        x = x * (i + 2)
    return x[: n // 2 + 1]


def _split(x: torch.Tensor) -> Any:
    counts = torch.bincount((x > 0).long(), minlength=2).tolist()
    return [part * 2 for part in x.sort()[0].split(counts)]


def _checked(x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x < 9, lambda: "too large")
    return x * 2


def _computed_numbers(x: torch.Tensor) -> torch.Tensor:
    low, high = x.min().item(), abs(x.max().item())
    return x * low if 2 * (high - low) >= 3.5 and not low == high else x + high


ASKED: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: f for name, f in ON_VALUES.items() if name not in REFUSED + ELSEWHERE},
    "loop": _loop,
    "split by counts": _split,
    "numbers computed": _computed_numbers,
    "a count as a factor": lambda x: x * (x > 0).sum().item(),
    "truth": lambda x: x.exp() if (x.sum() > 0).item() is True else x,
    "checked": _checked,
    "rounded": lambda x: x * round(x.sum().item()),
    "returned": lambda x: (x.sum().item() > 1, int(x.sum()), x.exp()),
    "asked twice": lambda x: x.sin() if (y := x.cumsum(0)).max() > 1 and y.min() > 0 else y.cos(),
    "arange": lambda x: torch.arange(int(x.abs().max().item())) * x[0],
}


def outcome(f: Callable, *args: Any) -> Any:
    try:
        return f(*args)
    except (TypeError, IndexError) as e:
        return type(e)


@pytest.mark.parametrize(("name", "transform"), crossed(ASKED, [SubclassTransform, NormTransform]))
def test_values_are_eagers(name: str, transform: type) -> None:
    f = ASKED[name]
    jf = thunder.jit(lambda x: f(x), transforms=[transform()])
    for x in (*INPUTS, *INPUTS):
        compare(outcome(jf, x), outcome(f, x))
    assert thunder.cache_misses(jf) <= len(INPUTS)


@pytest.mark.parametrize("name", ASKED)
def test_values_of_plain_tensors_beside_wrappers_are_eagers(name: str) -> None:
    def f(w: TwoTensor, x: torch.Tensor) -> Any:
        return (w * 2).a.sum(), ASKED[name](x)

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for x in INPUTS:
        w = TwoTensor(x.clone(), x.clone())
        compare(outcome(jf, w, x), outcome(f, w, x))


@pytest.mark.parametrize("name", ["item compared", "item within a condition", "equal", "allclose", "loop", "range"])
def test_values_of_what_wrappers_hold_are_eagers(name: str) -> None:
    f = ASKED[name]
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for x in INPUTS:
        compare(*(opened(outcome(g, TwoTensor(x.clone(), x.clone()))) for g in (jf, f)))


def opened(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: (t.a, t.b) if type(t) is TwoTensor else t, tree)


def test_what_counts_of_a_number_is_the_answer() -> None:
    jf = thunder.jit(lambda x: x.sin() if x.sum().item() > 0 else x.cos(), transforms=[NormTransform()])
    torch.manual_seed(seeded(0))
    for x in torch.rand(20, 3):
        torch.testing.assert_close(jf(x), x.sin())
        torch.testing.assert_close(jf(-x), (-x).cos())
    assert thunder.cache_misses(jf) == 2


def test_numbers_are_compared_as_python_does() -> None:
    """A single-precision 0.1 is above the double-precision 0.1."""
    f = lambda x: x * 2 if x.max().item() > 0.1 else x  # noqa: E731
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for x in (torch.tensor([0.1]), torch.tensor([0.1], dtype=torch.float64), torch.tensor([2**53 + 1])):
        g = (lambda x: x * 2 if x.max().item() > 2**53 else x) if not x.is_floating_point() else f
        compare(thunder.jit(g, transforms=[SubclassTransform()])(x), g(x))
        compare(jf(x), f(x))


@pytest.mark.parametrize("name", ["if", "while", "item compared", "asked twice", "numbers computed", "slice"])
def test_gradients_are_eagers(name: str) -> None:
    f = ASKED[name]
    jf = thunder.jit(f, transforms=[NormTransform()])
    for x in INPUTS:
        found, expected = (torch.autograd.grad(g(y := x.clone().requires_grad_()).square().sum(), y)[0] for g in (jf, f))
        torch.testing.assert_close(found, expected)


class Deciding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("is_on", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.relu() if self.is_on and self.linear.bias.sum() > 0 else -y


def test_parameters_and_buffers_may_decide() -> None:
    torch.manual_seed(seeded(0))
    model, x = Deciding(), torch.randn(2, 3)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    changes = (
        lambda: model.linear.bias.data.fill_(1),
        lambda: model.is_on.fill_(False),
        lambda: model.is_on.fill_(True),
        lambda: model.linear.bias.data.neg_(),
    )
    for change in changes:
        change()
        torch.testing.assert_close(jitted(x), model(x))


def test_in_normed_mode_values_decide_as_in_eager_mode() -> None:
    def f(x: torch.Tensor, ids: torch.Tensor) -> Any:
        if ids.max().item() > 9:
            return x
        return x * 2 if (ids > 2).all() and x.sum() > 1 else x.relu()

    jf = thunder.jit(f, transforms=[NormTransform()])
    for i, ids in enumerate((torch.tensor([3, 4]), torch.tensor([1, 4]), torch.tensor([5, 5]), torch.tensor([5, 5]))):
        x = RMSTensor(2.0, backing=torch.ones(2, 3) if i < 3 else -torch.ones(2, 3))
        found, expected = jf(x, ids), f(x, ids)
        for name in ("backing", "norm_size"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def test_a_normed_call_reads_values_before_the_first_norm() -> None:
    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(8, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)[:, : ids.max().item()]

    torch.manual_seed(seeded(0))
    model = Embedding()
    call = normed(thunder.jit(model, transforms=[NormTransform()]))
    for ids in (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]])):
        torch.testing.assert_close(call(ids).backing, model(ids))


def _beside(x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    y += 1
    y[0] = 2
    return y if x.sum() > 0 and (x * 2).max() > 1 else y * 2


def test_what_the_program_writes_elsewhere_does_not_matter() -> None:
    jf = thunder.jit(_beside, transforms=[SubclassTransform()])
    for x in INPUTS:
        torch.testing.assert_close(jf(x), _beside(x))


def _write(y: torch.Tensor) -> None:
    y += 1.5


WRITTEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "an input": lambda x, y: (_write(x), x * 2 if x.sum() > 0 else x)[1],
    "a view of an input": lambda x, y: (_write(x[1:]), x * 2 if x.sum() > 0 else x)[1],
    "what it is a view of": lambda x, y: (z := x[:2], _write(x), x * 2 if z.sum() > 0 else x)[2],
    "a view in another shape": lambda x, y: (z := x.reshape(1, 3), _write(x), x * 2 if z.sum() > 0 else x)[2],
    "what is computed": lambda x, y: (z := x * 2, _write(z), x * 2 if z.sum() > 0 else x)[2],
    "a number of it": lambda x, y: (z := x * 2, _write(z), x * 2 if z.sum().item() > 0 else x)[2],
    "asked before": lambda x, y: (x.sum() > 0 or x.max() > 0, _write(x), x * 2 if x.sum() > 0 else x)[2],
    "sizes": lambda x, y: (_write(x), x[x > 0])[1],
    "an input in the same memory": lambda x, y: (_write(x), x * 2 if y.sum() > 0 else x)[1],
    "in the same dtype": lambda x, y: (z := x.to(torch.float32), _write(z), x * 2 if x.sum() > 0 else x)[2],
    "nothing of it": lambda x, y: (z := x + 0, _write(z), x * 2 if x.sum() > 0 else x)[2],
}


@pytest.mark.parametrize(("name", "transform"), crossed(WRITTEN, [SubclassTransform, NormTransform]))
def test_what_the_program_has_written_into_is_eagers(name: str, transform: type) -> None:
    f, refused = WRITTEN[name], 0
    jf = thunder.jit(f, transforms=[transform()])
    for values in INPUTS:
        given, expected = values.clone(), values.clone()
        wanted = f(expected, expected.view(3))
        try:
            found = jf(given, given.view(3))
        except (DataDependentError, UnsupportedOpError):
            refused += 1
            continue
        torch.testing.assert_close((found, given), (wanted, expected))
    assert refused == 0 or name == "an input in the same memory"


def test_what_has_no_value_or_more_than_one_is_refused() -> None:
    refused: list[tuple[Callable, str]] = [
        (lambda x: x if torch.rand(()) > 0.5 else -x, "random numbers"),
        (lambda x: x if torch.nn.functional.dropout(x, 0.5).sum() > 1 else -x, "random numbers"),
        (lambda x: x if torch.empty_like(x)[0] > 0 else -x, "nothing was written"),
    ]
    for f, why in refused:
        with pytest.raises(DataDependentError, match=f"needed for(.|\n)*test_read_values.py(.|\n)*{why}"):
            thunder.jit(f, transforms=[SubclassTransform()])(torch.ones(3))
    with pytest.raises(DataDependentError, match="without data"):
        thunder.jit(lambda x: x if x.sum() > 0 else -x, transforms=[SubclassTransform()])(torch.ones(3, device="meta"))


def test_what_eager_pytorch_raises_is_raised() -> None:
    for f in (lambda x: x if x > 0 else -x, lambda x: int(x)):
        for call in (f, thunder.jit(f, transforms=[SubclassTransform()])):
            with pytest.raises((RuntimeError, ValueError), match="more than one value|only one element tensors"):
                call(torch.ones(3))


def test_what_torch_checks_is_raised() -> None:
    for call in (_checked, jf := thunder.jit(_checked, transforms=[NormTransform()])):
        with pytest.raises(RuntimeError, match="too large"):
            call(torch.full((2,), 10.0))
    torch.testing.assert_close(jf(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="too large"):
        jf(torch.full((2,), 10.0))


def test_of_ever_new_values_some_traces_are_kept() -> None:
    jf = thunder.jit(lambda x: x * int(x.sum()), transforms=[SubclassTransform()])
    n = data_sizes.MAX_TRACES
    with pytest.warns(AcquiredAnewWarning, match=f"in {n} calls(.|\n)*test_read_values.py"):
        for i in range(n + 2):
            x = torch.full((2,), float(i))
            torch.testing.assert_close(jf(x), x * (2 * i))
    assert len(thunder.compile_stats(jf).interpreter_cache) == n


def test_nothing_of_the_first_call_stays_with_the_trace() -> None:
    jf = thunder.jit(lambda x: x.sin() if x.sum() > 0 else x, transforms=[SubclassTransform()])
    x = torch.ones(3)
    gone = weakref.ref(x)
    jf(x)
    del x
    gc.collect()
    assert gone() is None


SIZES_BY_TENSORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "repeat": lambda x, n: x.repeat(2, n),
    "repeat by a computed one": lambda x, n: x.repeat(1, n.clamp(max=2) + 1),
    "expand": lambda x, n: x[None].expand(n, -1, -1),
    "interpolate": lambda x, n: torch.nn.functional.interpolate(x[None], size=(n * 2,)),
    "narrow": lambda x, n: x.narrow(1, n - 1, 2),
}


@pytest.mark.parametrize("kind", [TwoTensor, RMSTensor])
@pytest.mark.parametrize("name", SIZES_BY_TENSORS)
def test_sizes_that_are_given_as_tensors_are_eagers(name: str, kind: type) -> None:
    f = SIZES_BY_TENSORS[name]
    jf = thunder.jit(lambda x, n: f(x, n), transforms=[NormTransform()])
    for i, n in enumerate((torch.tensor(1), torch.tensor(2), torch.tensor(1))):
        x = torch.stack([t + i for t in INPUTS])
        if kind is RMSTensor:
            found, expected = jf(RMSTensor.of(x), n), f(RMSTensor.of(x), n)
            torch.testing.assert_close((found.backing, found.norm_size), (expected.backing, expected.norm_size))
        else:
            compare(opened(jf(TwoTensor(x.clone(), x.clone()), n)), opened(f(TwoTensor(x.clone(), x.clone()), n)))
    assert thunder.cache_misses(jf) == 2


# -- texts of values ------------------------------------------------------------------------------------------------------------

TEXTS = {
    "a number, formatted": lambda y: f"{y.sum().item():.2f}",
    "a number": lambda y: f"{y.sum().item()} {y.sum().item()!r}",
    "a tensor of one entry": lambda y: f"{y.sum():.1f}",
    "a tensor": lambda y: f"{y}",
    "str and repr": lambda y: str(2 * y) + repr(y[0]) + str(y[0].item()),
    "%": lambda y: "%s %.2f %d" % (y, y[0].item(), 3),  # noqa: UP031
    "str.format": lambda y: "{:.3f} {}".format(y[0], y[1].item()),  # noqa: UP032
    "of a list": lambda y: f"{[y[0], 2.0]}",
    "of numbers alone": lambda y: f"{torch.ones(2) * 2}",
    "a key": lambda y: {"1": y + 1, "3": y}[f"{y[0].item():.0f}"],
}


ASKED_OF_NUMBERS = {
    "class": lambda x, n: (
        x * (isinstance(x.sum().item(), float) + 2 * isinstance(n.sum().item(), (int, str)) + (type(n.sum().item()) is int))
    ),
    "name of the class": lambda x, n: x * len(n.sum().item().__class__.__name__),
    "hash": lambda x, n: x * hash((x.sum().item(), n.sum().item())),
    "method": lambda x, n: x * n.sum().item().bit_length() + x.sum().item().is_integer() * x.sum().item().real,
    "key": lambda x, n: x * {n.sum().item(): 3.0}.get(6, 1.0),
    "key that is looked up": lambda x, n: x * {6: 3.0, 9: 4.0}.get(n.sum().item(), 1.0),
    "key that is set": lambda x, n: x * (lambda d: d.__setitem__(n.sum().item(), 2.0) or d.get(6, 1.0))({}),
    "keys": lambda x, n: x * len({v.item(): 1 for v in n}),
    "elements": lambda x, n: x * len({n.sum().item(), 6}) + len({v.item() for v in n}),
    "element": lambda x, n: x * (n.sum().item() in {6}) + len(set([n.sum().item(), 6, 7])),
    "a pair": lambda x, n: x * ((n.sum().item(), 1) in {(6, 1)}),
    "counted": lambda x, n: x * collections.Counter([n.sum().item(), 6])[6],
    "slice of a list": lambda x, n: x * len([1, 2, 3, 4][: n.max().item()]),
    "bits": lambda x, n: x * (n.max().item() << 1) + (~n.max().item()) + (n.max().item() >> 1),
}


@pytest.mark.parametrize(("name", "transform"), crossed(ASKED_OF_NUMBERS, [NormTransform, SubclassTransform]))
def test_numbers_of_tensors_are_pythons(name: str, transform: type) -> None:
    f = ASKED_OF_NUMBERS[name]
    jf = thunder.jit(f, transforms=[transform()])
    for n in ([1, 2, 3], [2, 2, 5], [1, 2, 3]):
        given = torch.tensor([0.5, 1.5, float(n[0])], requires_grad=True), torch.tensor(n)
        found, expected = jf(*given), f(*given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), given[0])[0] for y in (found, expected)))


@pytest.mark.parametrize(("name", "transform"), crossed(TEXTS, [NormTransform, SubclassTransform]))
def test_texts_of_values_are_those_of_the_call(transform, name):
    jf = thunder.jit(TEXTS[name], transforms=[transform()])
    for y in (torch.tensor([1.25, 2.0]), torch.tensor([3.0, 4.5])):
        assert repr(jf(y)) == repr(TEXTS[name](y))


@pytest.mark.parametrize(
    "call",
    [
        lambda f, y: thunder.jit(f, transforms=[CheckpointTransform()])(y),
        lambda f, y: thunder.jit(f, transforms=[NormTransform()])(y.requires_grad_()),  # torch writes what made it
        lambda f, y: thunder.jit(f, transforms=[SubclassTransform()])(TwoTensor(y, y)),
        lambda f, y: grad(lambda y: (f(y), y.sum())[1])(y),
    ],
    ids=["without values", "of what requires grad", "of a wrapper", "in a function under a transform"],
)
def test_texts_that_are_not_known_are_refused(call):
    with pytest.raises((DataDependentError, UnsupportedOpError), match="the text of a"):
        call(lambda y: f"{3 * y:}", torch.tensor([1.25, 2.0]))


def test_what_cannot_be_iterated_over_is_pythons_error():
    for f in (lambda x: dict([1]), lambda x: [a for a, b in [(1, 2), 3]]):  # noqa: C406
        with pytest.raises(TypeError):
            thunder.jit(f, transforms=[NormTransform()])(torch.ones(2))


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_sizes_that_are_values(transform):
    f = lambda x: (torch.zeros(x[0].long(), 2), torch.ones((x[1].long(), 3)), torch.empty(2, x.sum().long()).fill_(2))  # noqa: E731
    jf = thunder.jit(f, transforms=[transform()])
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])):
        torch.testing.assert_close(jf(x), f(x))
    with pytest.raises(DataDependentError, match="the size of what torch.zeros returns"):
        thunder.jit(f, transforms=[CheckpointTransform()])(x)


def test_arrays_of_plain_tensors_beside_norms_are_refused_with_the_line():
    def f(x, labels):
        return x * float(labels[labels > 0].cpu().numpy().sum())

    with pytest.raises(UnsupportedOpError, match="numpy reads values of a tensor") as error:
        normed(thunder.jit(f, transforms=[NormTransform()]))(RMSTensor.of(torch.ones(3)), torch.tensor([1, 0, 2]))
    assert "test_read_values.py:" in str(error.value)


# functions of numbers, in C, that ask a tensor for its own
OF_NUMBERS = {
    "math": lambda x: (
        math.exp(x[0]) + math.pow(x[1], 2) + math.atan2(x[0], x[1]) + math.copysign(1, x[0]) + math.floor(x.max() * 3)
    ),
    "math of a number": lambda x: x * math.exp(x[0].item()) + math.sin(x.sum().item() + 1),
    "math of several": lambda x: math.hypot(*x) + math.fsum(x) + math.dist([x[0], x[1]], [0, 0]) + math.fsum([x[1], x[2]]),
    "math of integers": lambda x: math.gcd(x.argmax() + 2, 4) + math.factorial(x.argmax()),
    "comparisons": lambda x: x * (2 if math.isclose(x[0], 1.0) else 3) if not math.isnan(x[1]) else x,
    "cmath": lambda x: cmath.sqrt(x[0]).imag + cmath.exp(x[1]).real,
    "digits": lambda x: (bin(x.argmax()), hex(x.argmax()), chr(x.argmax() + 65)),
    "what there is none of": lambda x: _type_error(lambda: round(x)) + _type_error(lambda: math.trunc(x)),
}


def _type_error(f: Callable[[], Any]) -> str:
    try:
        return str(f())
    except TypeError as e:
        return str(e)


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize(("name", "transform"), crossed(OF_NUMBERS, [SubclassTransform, NormTransform]))
def test_functions_of_numbers_are_told_those_of_the_call(name: str, transform: type) -> None:
    jitted = thunder.jit(OF_NUMBERS[name], transforms=[transform()])
    for x in INPUTS:
        for given in (x, x.clone().requires_grad_()):
            found, wanted = jitted(given), OF_NUMBERS[name](given)
            if isinstance(wanted, torch.Tensor | float | int):
                torch.testing.assert_close(found, wanted)
            else:
                assert found == wanted


def _arithmetic(x: torch.Tensor) -> Any:
    n, a = (x > 0).sum().item() + 1, x.max().item()
    mixed = [
        n * 0.5,
        2.0 - n,
        n / 4,
        a * n,
        n**0.5,
        2.0**n,
        a // n,
        n % 2.5,
        divmod(n, 2),
        pow(n, 2, 5),
        sum([n, 0.5]),
        +n,
        n * 1j,
        a * True,
    ]
    return mixed, n // x, n % x, n - x, n / x, n**x, operator.mod(n, x), x.long() // n, x * (n / 4)


def _sequences(x: torch.Tensor) -> Any:
    n = (x > 0).sum().item()
    kept = list(range(5))
    kept.insert(n, 7)
    del kept[n]
    return (
        ([0] * n, n * "a", (1, 2) * n, "a" * n, "abcdef"[:n], kept, kept.pop(n), n in range(3), slice(n).indices(9)),
        (list(itertools.repeat(1, n)), list(itertools.islice("abc", n)), list(enumerate("ab", start=n)), "a".ljust(n)),
        collections.deque([1, 2, 3], maxlen=n + 1),
    )


def _asked_by_c(x: torch.Tensor) -> Any:
    n, a = (x > 0).sum().item(), x.max().item()
    texts = json.dumps({"a": [n, a]}), str(decimal.Decimal(n)), struct.unpack("i", struct.pack("i", n))
    return texts, float(np.float32(a)), hasattr(a, "real"), hasattr(a, "name"), dir(n) == dir(1), torch.eye(n), torch.Size([n, 2])


def _wrong_operands(x: torch.Tensor) -> Any:
    n = x.max().item()
    return [
        _type_error(f)
        for f in (lambda: n + "a", lambda: n < "a", lambda: [] >= n, lambda: n @ n, lambda: n - None, lambda: [0] * n)
    ]


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize("f", [_arithmetic, _sequences, _asked_by_c, _wrong_operands])
def test_numbers_of_tensors_are_pythons_wherever_they_go(f: Callable) -> None:
    jitted = thunder.jit(f, transforms=[NormTransform()])
    for x in INPUTS[:3]:
        (found, structure), (wanted, expected) = tree_flatten(jitted(x)), tree_flatten(f(x))
        assert structure == expected and list(map(type, found)) == list(map(type, wanted))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b) if isinstance(b, torch.Tensor) else _assert_one(a, b)


def _assert_one(a: Any, b: Any) -> None:
    assert a == (b if isinstance(b, int | str | bool | None) else pytest.approx(b))


_BESIDE_NUMBERS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "bounds": lambda y, n: y.clamp(min=n) + torch.clamp(y, max=n) + y.clamp(n, 2 * n) + (y * 1).clamp_(n) + y.exp().lerp(y, n),
    "quotients": lambda y, n: (
        y % n + torch.div(y, n, rounding_mode="trunc") + (0.5 + n) ** y.abs() + n / y - torch.remainder(y, n)
    ),
    "factors": lambda y, n: (
        torch.add(y, y, alpha=n) - y.sub(y.exp(), alpha=n) + F.normalize(y, dim=0, eps=n) + torch.copysign(y, n)
    ),
    "layers": lambda y, n: F.cosine_similarity(y, y.exp(), 0, eps=n) + F.leaky_relu(y, n) + F.layer_norm(y, (3,), eps=n),
    "counts": lambda y, n: int(n + 2) ** y.abs() - int(n + 2) / y,
}


@pytest.mark.parametrize("name", _BESIDE_NUMBERS)
def test_gradients_beside_numbers_of_tensors_are_eagers(name: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return _BESIDE_NUMBERS[name](x * 1, x.detach().abs().sum().item() / 2)

    jitted = thunder.jit(f, transforms=[NormTransform()])
    for values in INPUTS[:2]:
        found, wanted = (torch.autograd.grad(g(x := values.clone().requires_grad_()).sin().sum(), x)[0] for g in (jitted, f))
        torch.testing.assert_close(found, wanted)
