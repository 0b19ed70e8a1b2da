"""Members of classes that do not dispatch: what programs read, set, delete, call and copy of their tensors is eager mode's."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.subclasses import assert_same
from thunder_norm.errors import EscapeError, UnsupportedSubclassError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


class _Factor:
    """A descriptor written in Python."""

    def __init__(self, by: float):
        self.by = by

    def __get__(self, obj: Any, cls: type | None = None) -> Any:
        return self if obj is None else obj * self.by


class _Stored:
    """One that is set, and stands before what the tensor has of its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.place = "stored_" + name

    def __get__(self, obj: Any, cls: type | None = None) -> Any:
        return self if obj is None else obj.__dict__.get(self.place, 1)

    def __set__(self, obj: Any, value: Any) -> None:
        obj.__dict__[self.place] = value

    def __delete__(self, obj: Any) -> None:
        obj.__dict__.pop(self.place, None)


class Many(torch.Tensor):
    tripled = _Factor(3.0)
    unit = _Stored()
    by_torch = torch.Tensor.mul
    rank = torch.Tensor.ndim
    dims = property(torch.Tensor.dim)

    @functools.cached_property
    def cached(self):
        return self * 5

    @property
    def of_class(self):
        return 7

    @property
    def without(self):
        raise AttributeError("none")

    @property
    def kept(self):
        return self._kept

    @kept.setter
    def kept(self, value):
        self._kept = value

    @kept.deleter
    def kept(self):
        del self._kept

    def double(self):
        return super().double() * 2

    def __call__(self, *factors, scale=1):
        return self * sum(factors) * scale


class Derived(Many):
    def double(self):
        return super().double() + 1

    @property
    def of_class(self):
        return super().of_class + 1

    def __reversed__(self):
        return iter([self * 3])

    def __getattr__(self, name):
        if name.startswith("got_"):
            return name[4:]
        raise AttributeError(name)


class Careful(torch.Tensor):
    """Says itself how attributes are read, set and deleted."""

    def __setattr__(self, name, value):
        if name.startswith("raw_"):
            object.__setattr__(self, name[4:], value)
        else:
            super().__setattr__(name, value + 1)

    def __delattr__(self, name):
        super().__delattr__("_" + name)

    def __getattribute__(self, name):
        return 11 if name == "eleven" else super().__getattribute__(name)


class Copied(torch.Tensor):
    def __copy__(self):
        made = self * 1
        made.how = "copied"
        return made

    def __deepcopy__(self, memo):
        made = self.clone()
        made.how = "deep"
        return made


def descriptors(x):
    x.unit = 4
    before = x.unit
    del x.unit
    return x.tripled, before, x.unit, x.by_torch(2), x.rank, x.dims


def computed_once(x):
    return x.cached + x.cached, x.cached is x.cached, "cached" in vars(x)


def properties(x):
    x.kept = 3
    kept = x.kept
    del x.kept
    try:
        x.of_class = 1
    except AttributeError:
        kept += 1
    return x * kept, hasattr(x, "kept"), hasattr(x, "without"), getattr(x, "without", None), x.of_class


def above(x):
    return x.double(), super(Many, x).double()


def called(x):
    return x(1, 2, scale=2), callable(x), x.as_subclass(Many)(3)


def own_dict(x):
    d = x.__dict__
    d["u"] = x * 2
    d.update(v=3, w=4)
    popped = d.pop("w")
    del d["note"]
    d.setdefault("z", 5)
    d |= {"more": 1}
    return list(d), popped, x.u, "note" in d, len(d), d.get("v"), x.more, hasattr(x, "note"), vars(x)


def updated(x):
    y = x * 2
    y.__dict__.update(x.__dict__)
    return y, y.note, y.held[0] * y, {k: v for k, v in vars(x).items() if k == "note"}


def handed_over(x):
    y = x.sin()
    y.held = x.held
    return y, y.held is x.held, len(x.held), x.held[0] * 2


def careful(x):
    x.k, x.raw_n = 1, 5
    y = x.as_subclass(torch.Tensor).as_subclass(Careful)
    y.m = 2
    x._gone = 3
    del x.gone
    return x * x.k, x.n, y, y.m, hasattr(x, "_gone"), x.eleven, x.sum()


def handed_back(x):
    return x.contiguous(), x.contiguous() is x, x.float() is x, x.to("cpu"), x.double() is x


def in_place(x):
    y = x * 1
    z = y.add_(1)
    return z, y is z, id(y) == id(z), z


def deep_copied(x):
    several = copy.deepcopy([x, x])
    return copy.copy(x), copy.deepcopy(x), several, several[0] is several[1]


def copied(x):
    y = copy.copy(x)
    return y, y is x, y.note, copy.copy([x])[0] is x


def got(x):
    return x.got_it, getattr(x, "no", 3), hasattr(x, "no")


def of_values(x):
    """Constructors, which are torch's own whatever holds the values, and what hands a tensor back."""
    one = x.detach().sum()
    made = (
        torch.tensor(x.detach()),
        torch.tensor([one, 2.0]),
        torch.full((2,), one),
        torch.scalar_tensor(one),
        torch.asarray(x.detach(), copy=True),  # of x itself some versions of torch switch gradients off
    )
    legacy = torch.Tensor(x.detach()), torch.FloatTensor(x.detach()), torch.as_tensor(x, dtype=torch.float64)
    return made, legacy, torch.as_tensor(x), torch.linspace(one, one + 1, 3), torch.full_like(x, 2.0)


def less_known(x):
    """Functions that torch's list of those that ask classes leaves out."""
    drawn = torch.rand_like(x), torch.randn_like(x), torch.randint_like(x.detach(), 3), torch.normal(x.detach(), 0.0)
    into, other = x.detach() * 1, torch.empty(2)
    written = torch.add(torch.ones(2), 1, out=into), torch.add(x.detach(), 1, out=other)
    others = torch.vander(x.detach()), torch.fill(x, 2), torch.as_strided(x * 1, (2,), (1,))
    return [t * 0 for t in drawn], written, written[0] is into, written[1] is other, others


def turned(x):
    return list(reversed(x)), list(reversed(x.as_subclass(torch.Tensor)))


_PROGRAMS = [
    *((p, Many) for p in (descriptors, computed_once, properties, above, called, own_dict, updated, handed_over)),
    *((p, Derived) for p in (above, properties, got)),
    (careful, Careful),
    *((p, torch.Tensor) for p in (handed_back, in_place)),
    *((p, Many) for p in (handed_back, in_place)),
    (deep_copied, Copied),
    *((p, cls) for p in (of_values, less_known) for cls in (Many, torch.Tensor)),
    (turned, Derived),
]


def _given(cls: type, requires_grad: bool = True) -> torch.Tensor:
    if cls is torch.Tensor:
        return torch.tensor([1.0, -2.0], requires_grad=requires_grad)
    x = torch.Tensor._make_subclass(cls, torch.tensor([1.0, -2.0]), requires_grad)
    vars(x).update(note="n", held=[torch.ones(2), {"a": 1}])
    return x


def _outcome(f: Callable, cls: type, requires_grad: bool = True) -> Any:
    """What a program returns, what its tensors have of their own, and the gradient of its input."""
    x = _given(cls, requires_grad)
    found = f(x)
    tensors = [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        followed = [t.as_subclass(torch.Tensor) for t in tensors if t.requires_grad and t is not x]
        if followed:
            sum(t.sin().sum() for t in followed).backward()
        return found, [(vars(t), t is x, t.requires_grad) for t in tensors], vars(x), x.grad


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform, CheckpointTransform])
@pytest.mark.parametrize(("program", "cls"), _PROGRAMS)
def test_members_are_those_of_the_class(program, cls, transform):
    jitted = thunder.jit(program, transforms=[transform()])
    for _ in range(2):
        assert_same(_outcome(jitted, cls), _outcome(program, cls))


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_copies_without_history(transform):
    jitted = thunder.jit(copied, transforms=[transform()])
    for _ in range(2):
        assert_same(_outcome(jitted, Many, False), _outcome(copied, Many, False))


def test_what_torch_refuses_to_copy():
    for f in (copy.deepcopy, thunder.jit(lambda x: copy.deepcopy(x), transforms=[SubclassTransform()])):
        with pytest.raises(RuntimeError, match="new_empty"):
            f(_given(Many))


def test_a_call_of_what_has_none():
    class Uncalled(torch.Tensor):
        pass

    jitted = thunder.jit(lambda x: x(1), transforms=[SubclassTransform()])
    for cls in (Uncalled, torch.Tensor):
        with pytest.raises(TypeError, match=f"'{cls.__name__}' object is not callable"):
            jitted(_given(cls))


def test_copies_that_are_refused():
    class Pickled(torch.Tensor):
        def __setstate__(self, state):
            raise NotImplementedError

    class Making(torch.Tensor):
        def new_empty(self, *size, **options):
            return super().new_empty(*size, **options).as_subclass(Making)

    for program, error, cls in (
        (copy.copy, EscapeError, Many),
        (lambda x: copy.copy(x.detach()), UnsupportedSubclassError, Pickled),
        (copy.deepcopy, UnsupportedSubclassError, Making),
    ):
        with pytest.raises(error):
            thunder.jit(lambda x, program=program: program(x), transforms=[SubclassTransform()])(_given(cls))


def test_another_value_in_a_descriptor_is_seen():
    class Scaled(torch.Tensor):
        by = _Factor(2.0)

    class Model(torch.nn.Module):
        by = _Factor(2.0)

        def __mul__(self, number):
            return number

        def forward(self, x):
            return x * self.by

    model = Model()
    of_tensor, of_module = (thunder.jit(f, transforms=[SubclassTransform()]) for f in (lambda x: x.by, model))
    for number in (2.0, 5.0):
        vars(Scaled)["by"].by = vars(Model)["by"].by = number
        assert_same(of_tensor(_given(Scaled)), _given(Scaled) * number)
        assert_same(of_module(torch.ones(2)), torch.ones(2) * number)
