"""Programs on wrappers that `torch.compile(fullgraph=True)` runs, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.compiled_classes import Affine, Config, Rounding, Tagged, Triple, Weighted

r = torch.randn


def two(*shape: int) -> TwoTensor:
    return TwoTensor(r(*shape), r(*shape))


def ragged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(r(sum(lengths), 4), F.pad(torch.tensor(lengths).cumsum(0), (1, 0)))


@dataclass(frozen=True)
class Program:
    """A function, what makes its arguments, and those of these that gradients are for."""

    function: Callable
    make: Callable[[], tuple]
    moving: tuple[int, ...] = ()


PROGRAMS: dict[str, Program] = {}


def program(make: Callable[[], tuple], *moving: int) -> Callable:
    """The function below it, named so, is one of the programs."""

    def add(function: Callable) -> Callable:
        PROGRAMS[function.__name__] = Program(function, make, moving)
        return function

    return add


# -- classes with classmethods, enums, dataclasses, tensors that may be missing ---------------------------------------


@program(lambda: (Affine.from_float(r(4, 6)), r(2, 6)), 1)
def quantised_linear(w, x):
    return F.linear(x, w), w.config.bits * x, w.is_symmetric


@program(lambda: (Affine.from_float(r(4, 6), symmetric=False), r(2, 6)), 1)
def quantised_with_zero_points(w, x):
    return F.linear(x, w).relu(), None if w.zero is None else w.zero + 1


@program(lambda: (Affine.from_float(r(4, 6), symmetric=False), r(2, 6)))
def quantised_anew(w, x):
    with torch.no_grad():
        w.copy_(w.dequantize() * 2)
    return x @ w.dequantize().t()


@program(lambda: (r(4, 6), r(2, 6)), 1)
def quantised_inside(p, x):
    w = Affine.from_float(p, Config(bits=4, rounding=Rounding.DOWN))
    return F.linear(x, w), w


@program(lambda: (Affine.from_float(r(4, 6), Config(rounding=Rounding.DOWN)), r(2, 6)))
def decided_by_an_enum(w, x):
    return x.sum() + w.scale.sum() if w.config.rounding is Rounding.DOWN else x


@program(lambda: (Tagged(r(3, 4), ("a",)), Tagged(r(3, 4), ("b",))))
def tags_that_are_joined(x, y):
    z = (x + y).with_tag("c")
    return z, torch.cat([x, y]), torch.stack([y, x]), "c" in z.tags, len(z.tags)


@program(lambda: (Tagged(r(3, 4), ("a",)), Tagged(r(3, 4), ("b",))), 0, 1)
def gradients_of_tags(x, y):
    return (x * y).sin().sum(0)


@program(lambda: (Tagged(r(3, 4), ("a",)), Tagged(r(3, 4), ("a",))))
def contexts_compared(x, y):
    return x - y if x.tags == y.tags else x + y


@program(lambda: (Weighted.repeated(r(3, 4)), r(3, 4)))
def a_class_of_a_class(x, y):
    return x * y, Weighted.repeated(y), x.total(), type(x).weights[1] * y, isinstance(x, Triple), type(x) is Triple


# -- several inner tensors, and wrappers in wrappers ------------------------------------------------------------------


@program(lambda: (Triple(r(3, 4), r(3, 4), r(3, 4)), r(4, 5)), 0, 1)
def product_of_three(x, w):
    return (x @ w).tanh()


@program(lambda: (Triple(r(4, 4), r(4, 4), r(4, 4)),))
def parts_of_three(x):
    a, b = x.chunk(2)
    u, _ = x.split([1, 3], dim=1)
    return a + b, u * 2, [t.sum() for t in x.unbind(0)]


@program(lambda: (Tagged(two(3, 4), ("n",)),), 0)
def tagged_pair(x):
    return F.softmax(x * 2, -1)


@program(lambda: (TwoTensor(Triple(r(3, 4), r(3, 4), r(3, 4)), Triple(r(3, 4), r(3, 4), r(3, 4))), r(3, 4)))
def pair_of_threes_written(x, y):
    x.mul_(y)
    return x + 1, x.a.x * 2, x.b.total()


# -- writes -----------------------------------------------------------------------------------------------------------


@program(lambda: (Tagged(r(3, 4), ("a",)), r(3, 4)))
def views_written(x, y):
    x.add_(y)
    x[0].mul_(2)
    x[:, 1] = 0.5
    return x.t(), x.view(-1)


@program(lambda: (two(3, 4), torch.tensor([0, 2])))
def rows_written(x, i):
    x[i] = 1.0
    x.index_add_(0, i, torch.ones(2, 4))
    x[:, 0] += 1
    return x * 1


@program(lambda: (two(3, 4), r(3, 4)))
def inner_tensors_written(x, y):
    x.a.mul_(2)
    x.b.copy_(y)
    return x + y


@program(lambda: (two(3, 4), r(3, 4)))
def views_of_what_is_written(x, y):
    z = x.view(-1)
    x.add_(1)
    column = y.T
    y.mul_(2)
    return x, z, column + 0


@program(lambda: (two(4, 3), r(2, 2)))
def every_second_column_written(x, y):
    x[1:3, ::2] = y
    x[::3, ::2].mul_(2)
    return x * 1


@program(lambda: ([two(3) for _ in range(3)], [r(3) for _ in range(3)]))
def lists_written(xs, ys):
    torch._foreach_mul_(xs, 2.0)
    torch._foreach_add_(xs, ys, alpha=0.5)
    return torch._foreach_sqrt(torch._foreach_abs(xs))


@program(lambda: (two(3, 4), {"w": two(3, 4), "k": 2.0}))
def a_dict_that_is_written(x, values):
    for v in list(values.values()):
        x = x * v if isinstance(v, torch.Tensor) else x + v
    values["new"] = x.sum()
    return x


# -- gradients --------------------------------------------------------------------------------------------------------


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensors[0]


@program(lambda: (two(3, 4),), 0)
def a_function_of_autograd(x):
    return Cubed.apply(x) * 2


@program(lambda: (two(3, 4), r(4, 4)), 0, 1)
def checkpointed(x, w):
    return torch.utils.checkpoint.checkpoint(lambda a, b: (a @ b).sin(), x, w, use_reentrant=False).sum(0)


@program(lambda: (two(3, 4), two(3, 4)), 0)
def detached(x, y):
    z = x.detach() * y
    return x * z, z.requires_grad, (x * y).requires_grad


@program(lambda: (two(3, 4), r(3, 4)), 0, 1)
def without_autograd_inside(x, y):
    with torch.no_grad():
        s = (x * y).mean()
    return x * s + y


@program(lambda: (two(2, 3, 4),), 0)
def einsum(x):
    return torch.einsum("bij,bkj->bik", x, x).permute(2, 0, 1).reshape(3, -1).flatten()


@program(lambda: (two(2, 3, 8, 8), r(4, 3, 3, 3)), 0, 1)
def convolved(x, w):
    return F.max_pool2d(F.gelu(F.conv2d(x, w, padding=1)), 2).mean((2, 3))


@program(lambda: (two(2, 2, 3, 4),), 0)
def attention(x):
    return F.scaled_dot_product_attention(x, x * 2, x)


@program(lambda: (two(5, 4), torch.tensor([1, 3])), 0)
def embedded(w, i):
    return F.embedding(i, w) * 2


@program(lambda: (two(5, 4), torch.tensor([1, 3, 0, 0, 2])), 0)
def cross_entropy(x, labels):
    return F.cross_entropy(x, labels, label_smoothing=0.1)


# -- what is asked, made and handed on --------------------------------------------------------------------------------


@program(lambda: (two(3, 4), r(3, 4)))
def metadata(x, y):
    size = x.shape[0] * x.size(1) + x.numel() + x.dim() + len(x)
    asked = x.dtype == torch.float32, x.device.type, x.is_contiguous(), x.stride(), x.T.stride(), x.requires_grad
    return y * size, asked, torch.is_tensor(x), isinstance(x, TwoTensor), isinstance(y, TwoTensor)


@program(lambda: (two(3, 4), r(3, 4)))
def made_like_it(x, y):
    return (
        torch.zeros_like(x) + y,
        x.new_zeros(2),
        torch.empty_like(x).fill_(1.0),
        torch.full_like(x, 2.0),
        x.new_ones((3, 4)) * x,
    )


@program(lambda: (two(3, 4), r(3, 4)))
def containers(x, y):
    return {"a": x + 1, "b": [x * 2, (y, x.sum())]}, tuple(v * 2 for v in (x, y))


@program(lambda: (two(3, 4), r(3, 4)))
def cast(x, y):
    return x.double(), x.to(torch.bfloat16), x.to(y.dtype), x.half().float(), x.to("cpu")


@program(lambda: (two(3, 4), r(4, 4)))
def in_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ w


@program(lambda: (two(3, 4), r(3, 4) > 0))
def masks(x, mask):
    return torch.where(mask, x, 0.0), x.masked_fill(mask, 1.0), x.clamp(min=0), torch.where(mask, x, x * 2)


@program(lambda: (two(3, 4), torch.tensor([0, 2])))
def indexed(x, i):
    return x[i], x[:, i], x.index_select(0, i), x.gather(0, i[None].expand(1, 2)), x[..., None], x[-1]


@program(lambda: (two(3, 4), r(3, 4)))
def taken_apart_and_put_together(x, y):
    names, context = x.__tensor_flatten__()
    return TwoTensor.__tensor_unflatten__({n: getattr(x, n) * y for n in names}, context, x.shape, x.stride())


@program(lambda: (two(3, 4), r(3, 4)), 1)
def data_read(x, y):
    return x.data * y, y.data * 2


# -- jagged tensors ---------------------------------------------------------------------------------------------------


@program(lambda: (ragged(2, 3, 4), r(4, 4)), 1)
def jagged_layer(x, w):
    return F.layer_norm(x @ w, (4,)).relu().values(), x.offsets()


@program(lambda: (ragged(2, 3, 4), r(4)))
def jagged_padded(x, b):
    return (x * 2 + b).to_padded_tensor(0.0)


@program(lambda: (ragged(2, 3, 4),))
def jagged_written(x):
    x.mul_(2)
    return x.sin(), x.values() * 1


# -- modules ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A wrapper among its parameters, and one among its buffers."""

    shift: torch.Tensor

    def __init__(self, wrap: Callable):
        super().__init__()
        self.w, self.linear = nn.Parameter(wrap(r(4, 4))), nn.Linear(4, 4)
        self.register_buffer("shift", wrap(r(4)))

    def forward(self, x):
        return F.linear(self.linear(x).relu(), self.w) + self.shift


def called(m, x):
    return m(x)


def called_with_others(m, x, w, weight):
    return torch.func.functional_call(m, {"w": w, "linear.weight": weight}, (x,))


def updated(m, x):
    with torch.no_grad():
        m.w.sub_(0.1 * m.w)
        m.shift.mul_(0.9)
        m.linear.weight.add_(1.0)
    return m(x)


for _wrap in (lambda t: TwoTensor(t, t + 1), lambda t: Tagged(t, ("w",)), Triple.repeated):
    _name = type(_wrap(torch.ones(1))).__name__
    PROGRAMS[f"module of {_name}"] = Program(called, lambda w=_wrap: (Net(w), r(2, 4)), (1,))
    PROGRAMS[f"functional_call of {_name}"] = Program(
        called_with_others, lambda w=_wrap: (Net(w), r(2, 4), w(r(4, 4)), r(4, 4)), (1, 2, 3)
    )
    PROGRAMS[f"updated {_name}"] = Program(updated, lambda w=_wrap: (Net(w).requires_grad_(False), r(2, 4)))


# -- leaves that the program makes ------------------------------------------------------------------------------------


@program(lambda: (two(3, 3), r(2, 3)), 1)
def parameter_of_a_wrapper(w, x):
    return F.linear(x, nn.Parameter(w))


@program(lambda: (two(3, 3), r(2, 3)), 0)
def parameter_of_a_wrapper_that_requires_grad(w, x):
    p = nn.Parameter(w)
    return (x @ p).sum() if p.requires_grad and p.is_leaf else x, w * 2


@program(lambda: (two(3, 3), r(2, 3)))
def parameter_of_a_wrapper_with_its_results(w, x):
    p = nn.Parameter(w)
    return F.linear(x, p), p


@program(lambda: (r(3),), 0)
def wrapper_of_what_requires_grad(x):
    y = TwoTensor(x.sin(), x) * 2
    return y.requires_grad, y.is_leaf, y


@program(lambda: (two(3),))
def history_that_starts_in_the_program(w):
    y, z = (w * 2).requires_grad_(), torch.ones_like(w, requires_grad=True)
    return y * 3, z, w * 2


# -- checkpointed functions that have wrappers which they are not given ------------------------------------------------

_around = TwoTensor(torch.ones(3), torch.full((3,), 2.0))


@program(lambda: (r(3),), 0)
def checkpointed_beside_a_wrapper(x):
    return checkpoint(lambda a: a * _around, x, use_reentrant=False)


@program(lambda: (r(3),), 0)
def wrapper_made_in_a_checkpointed_function(x):
    return checkpoint(lambda a: (TwoTensor(a, a * 2) * 3).b, x, use_reentrant=False)
