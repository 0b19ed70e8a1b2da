"""A ``torch.autograd.Function`` that is given tensors of classes that do not dispatch: results, their classes and gradients are eager mode's."""

from typing import Any

import pytest
import torch

from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedSubclassError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


class Doubling(torch.Tensor):
    def twice(self):
        return self * 2

    @property
    def half(self):
        return self / 2


class Derived(Doubling):
    pass


class Other(torch.Tensor):
    pass


class Silent(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class Telling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Changing(torch.Tensor):
    """Doubles products, has sums that are plain, and leaves the rest to torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.mul, torch.Tensor.__mul__, torch.mul):
            plain = [v.as_subclass(torch.Tensor) if isinstance(v, cls) else v for v in args]
            return (func(*plain, **kwargs) * 2).as_subclass(cls)
        if func is torch.Tensor.sum:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def twice(self):
        return self * 2


class Closer(Changing):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cos:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs)


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.mul:
            result.what = "product"
        return result


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x  # not what autograd would find


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, k):
        ctx.save_for_backward(x, y)
        ctx.k = k
        first = x.twice() if isinstance(x, Doubling) else x * 5
        with torch._C.DisableTorchFunctionSubclass():
            unseen = x * 1
        return first + y, y * k, x.as_subclass(torch.Tensor) * 1, unseen

    @staticmethod
    def backward(ctx, a, b, c, d):
        x, _ = ctx.saved_tensors
        return a * (2 if isinstance(x, Doubling) else 5) + c + d, a + b * ctx.k, None


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum(), x @ x, torch.relu(x), x.shape[0] * x

    @staticmethod
    def backward(ctx, a, b, c, d):
        (x,) = ctx.saved_tensors
        return a * x + b + c * 2 + d


class Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cos()

    @staticmethod
    def backward(ctx, g):
        return g


class OfType(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * (2 if type(x) is Doubling else 3)

    @staticmethod
    def backward(ctx, g):
        return g


def one(x, y):
    z = Square.apply(x)
    return z, Square.apply(z * 2), Same.apply(x), Square.apply(y)


def several(x, y):
    a, b, c, d = Several.apply(x, y, 4)
    return a * 2, b, c, d, [type(t).__name__ for t in (a, b, c, d)]


def unasked(x, y):
    with torch._C.DisableTorchFunctionSubclass():
        return Square.apply(x), Square.apply(y)


def made_inside(x, y):
    z = x.as_subclass(torch.Tensor).as_subclass(Derived)
    return Square.apply(z).half, Several.apply(z, x, 2)


def sums(x, y):
    return Sums.apply(x), Sums.apply(y * 2), Sums.apply(Square.apply(x))


def _of(cls: type, *numbers: float) -> torch.Tensor:
    return torch.Tensor._make_subclass(cls, torch.tensor(numbers), True)


def _outcome(f: Any, classes: tuple[type, type]) -> Any:
    given = [_of(cls, 1.0 + i, -2.0) for i, cls in enumerate(classes)]
    found = f(*given)
    with torch._C.DisableTorchFunctionSubclass():
        sum(
            t.as_subclass(torch.Tensor).sin().sum() for t in torch.utils._pytree.tree_leaves(found) if not isinstance(t, str)
        ).backward()
        return found, [x.grad for x in given]


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform, CheckpointTransform])
@pytest.mark.parametrize(
    ("program", "classes"),
    [
        *((one, (cls, other)) for cls, other in ((Doubling, torch.Tensor), (Silent, Derived))),
        *((several, c) for c in ((Doubling, torch.Tensor), (Derived, Doubling), (Derived, torch.Tensor), (Other, Silent))),
        (unasked, (Doubling, Telling)),
        (made_inside, (Doubling, Doubling)),
        *((one, (cls, torch.Tensor)) for cls in (Telling, Changing, Closer)),
        *((several, c) for c in ((Telling, torch.Tensor), (Changing, torch.Tensor), (Closer, Changing), (Changing, Closer))),
        *((sums, c) for c in ((Telling, Telling), (Changing, Closer), (Doubling, Changing))),
    ],
)
def test_functions_of_tensors_of_classes(program, classes, transform):
    jitted = thunder.jit(program, transforms=[transform()])
    for _ in range(2):
        assert_same(_outcome(jitted, classes), _outcome(program, classes))


def test_classes_that_do_not_answer_one_another():
    for f in (several, thunder.jit(several, transforms=[SubclassTransform()])):
        with pytest.raises(TypeError):
            f(_of(Doubling, 1.0), _of(Other, 2.0))


def test_a_class_that_does_not_answer():
    for f in (Cosine.apply, thunder.jit(lambda x: Cosine.apply(x), transforms=[SubclassTransform()])):
        with pytest.raises(TypeError, match="returned NotImplemented"):
            f(_of(Closer, 1.0))


@pytest.mark.parametrize(("function", "cls"), [(OfType, Doubling), (Square, Named)])
def test_what_only_tensors_of_the_class_know_is_refused(function, cls):
    with pytest.raises(UnsupportedSubclassError, match=f"{function.__name__}.*{cls.__name__}"):
        thunder.jit(lambda x: function.apply(x), transforms=[SubclassTransform()])(_of(cls, 1.0))


def test_what_a_class_may_read_of_a_tensor_is_refused():
    x = _of(Telling, 1.0)
    x.note = 3
    with pytest.raises(UnsupportedSubclassError, match="Square.*Telling(.|\n)*attributes"):
        thunder.jit(lambda x: Square.apply(x), transforms=[SubclassTransform()])(x)
