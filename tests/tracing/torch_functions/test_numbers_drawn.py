"""Random numbers in traced programs are those that eager PyTorch draws from the same state, in values, gradients and the state after."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import crossed, seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def _weights(rows: int) -> list[torch.Tensor]:
    """Of two layers of width 2, the first of which takes 3 numbers."""
    return [
        t for n in (3, 2) for t in (torch.full((rows, n), 0.4), torch.full((rows, 2), 0.3), torch.ones(rows), torch.ones(rows))
    ]


def _two_of_torch(x):
    hidden = x.new_zeros(2, 1, 2)
    y = torch.gru(x[:, None], hidden, _weights(6), True, 2, 0.3, True, False, False)[0]
    z = torch.rnn_tanh(x[:, None], hidden, _weights(2), True, 2, 0.6, True, False, False)[0]
    return y * z + torch.rand(2)


def _all_in_place(y):
    y = F.alpha_dropout(F.dropout(y, 0.2, True, True), 0.2, True, True)
    for f in (torch.dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_, torch.feature_dropout_):
        f(y, 0.1, True)
    return torch.rrelu_(F.dropout1d(y, 0.2, True, True), 0.1, 0.6, True)


def _in_views(y):
    y[:, ::2].uniform_()
    y[1].normal_()
    y.t()[0].exponential_()
    y[::2, 1:].bernoulli_(0.5)
    return y


PROGRAMS = {
    "rand": lambda x: torch.rand(4, 3) + torch.rand_like(x),
    "randn": lambda x: torch.randn(4, 3) * torch.randn_like(x),
    "like tensors of other layouts": lambda x: (
        torch.rand_like(x.t()).t() * x + (torch.randn_like(x.t().sin()) + torch.rand_like(x[None].expand(2, 4, 3))[0].t()).t()
    ),
    "in tensors of other layouts": lambda x: (
        x
        * (torch.empty_like(x.t()).uniform_() + x.detach().t().clone().normal_() + torch.zeros(4, 3).t().bernoulli_(0.4)).t()
        * torch.empty_like(x.t()).random_(9).t()
    ),
    "in views": lambda x: _in_views(x.detach().clone()) * x,
    "in formats": lambda x: (
        torch.stack(
            [
                torch.rand_like(y, memory_format=f)
                + y.to(memory_format=f, copy=True).normal_() * torch.zeros_like(y, memory_format=f).uniform_()
                for y in (
                    x.detach().expand(2, 2, 4, 3).contiguous(),
                    x.detach().expand(2, 2, 4, 3).to(memory_format=torch.channels_last),
                )
                for f in (torch.channels_last, torch.contiguous_format, torch.preserve_format)
            ]
        )
        * x
    ),
    "randint": lambda x: x + torch.randint(0, 9, (3,)) + torch.randint_like(x, 5),
    "randperm": lambda x: x[torch.randperm(4)],
    "low precision": lambda x: x * torch.rand(3, dtype=torch.bfloat16) + torch.randn(3, dtype=torch.float16),
    "complex": lambda x: x * torch.randn(3, dtype=torch.complex64).abs(),
    "normal": lambda x: torch.normal(x, x.exp()) + torch.normal(0.0, x.detach().exp()) + torch.normal(1.0, 2.0, (3,)),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()) + torch.empty_like(x).bernoulli_(0.3),
    "multinomial": lambda x: x + torch.multinomial(x.detach().softmax(-1), 2).sum(),
    "poisson": lambda x: x + torch.poisson(x.detach().exp()),
    "exponential": lambda x: x * torch.empty_like(x).exponential_() + torch.empty(3).exponential_(2.5),
    "exponential distribution": lambda x: torch.distributions.Exponential(x[:, :2].exp()).rsample(),
    "what is like draws that nobody uses": lambda x: (
        x
        + torch.rand_like(torch.empty_like(torch.randint_like(x, 5)).uniform_())
        + torch.zeros_like(torch.bernoulli(x.sigmoid()))
    ),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(-2, 3),
    "normal in place": lambda x: x * torch.empty_like(x).normal_(2, 0.5),
    "cauchy": lambda x: x + torch.empty_like(x).cauchy_(),
    "geometric": lambda x: x + torch.empty_like(x).geometric_(0.3),
    "log normal": lambda x: x + torch.empty_like(x).log_normal_(),
    "integers": lambda x: x + torch.empty_like(x).random_(0, 9),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, tau=0.7),
    "gumbel softmax, hard": lambda x: F.gumbel_softmax(x, tau=0.7, hard=True, dim=0),
    "dropout": lambda x: F.dropout(F.dropout(x, 0.3).double(), 0.5),
    "dropout of other layouts": lambda x: F.dropout(x.t(), 0.3) @ F.dropout((x * 2)[:1].expand(4, 3), 0.5, training=True),
    "dropout in low precision": lambda x: F.dropout(x.bfloat16(), 0.3).float() + F.dropout(x.half(), 0.5).float(),
    "dropout in attention": lambda x: F.multi_head_attention_forward(
        x[:, None], x[:, None], x[:, None], 3, 1, x.new_full((9, 3), 0.1), None, None, None, False, 0.5, torch.eye(3), None
    )[0],
    "dropout, torch's": lambda x: torch.dropout(x.t(), 0.3, True) + torch.native_dropout(x.t(), 0.4, True)[0],
    "dropout of nothing": lambda x: F.dropout(x, 0.0) + torch.rand(3),
    "dropout of channels": lambda x: F.dropout2d(x[None, :, :, None], 0.5) + torch.feature_dropout(x[..., None], 0.3, True)[None],
    "dropout of channels, unbatched": lambda x: F.dropout1d(x, 0.5) + F.dropout3d(x[..., None, None], 0.5)[..., 0, 0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True) + F.feature_alpha_dropout(x[None], 0.5, True),
    "alpha dropout, torch's": lambda x: torch.alpha_dropout(x.t(), 0.5, True) * torch.feature_alpha_dropout(x.t(), 0.2, True),
    "rrelu": lambda x: F.rrelu(x, training=True) + torch.rrelu(x.t(), 0.1, 0.7, True).t() + F.rrelu_(x * 2, 0.2, 0.2, True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x, x.sin(), x, x @ x.t() > -1, 0.3, scale=0.7),
    "numbers of nobody": lambda x: (F.alpha_dropout(x, 0.2, True), torch.rand(3), F.dropout(x, 0.2))[2] + torch.rand(3),
    "dropout of everything": lambda x: F.dropout(x, 1.0) + x.detach() * torch.rand(3),
    "in place": lambda x: _all_in_place(x * 2),
    "recurrent": lambda x: torch.lstm(x[:, None], [x.new_zeros(2, 1, 2)] * 2, _weights(8), True, 2, 0.5, True, False, False)[0],
    "recurrent, of two": lambda x: _two_of_torch(x),
    "fractional pooling": lambda x: F.fractional_max_pool2d(x[None], 2, output_size=2) * torch.rand(2),
    "many": lambda x: x.sum() + torch.rand(300) + torch.empty(2000).exponential_()[:300] + F.dropout(torch.ones(300), 0.3),
    "one after the other": lambda x: F.gumbel_softmax(x * torch.rand(3)) + torch.randn(3) * torch.empty(3).exponential_(),
}


# integers have no gradient that reuses them
_OTHERWISE = ("randint", "integers")
_CASES = [(name, False) for name in PROGRAMS] + [(name, True) for name in PROGRAMS if name not in _OTHERWISE]


@pytest.mark.parametrize(("case", "transform"), crossed(_CASES, [SubclassTransform, NormTransform]))
def test_they_are_those_of_eager_mode(case, transform):
    name, requires_grad = case
    torch.manual_seed(seeded(0))
    x = torch.randn(4, 3, requires_grad=requires_grad)
    jitted = thunder.jit(PROGRAMS[name], transforms=[transform()])
    jitted(x)
    found = []
    for f in (jitted, PROGRAMS[name]):
        torch.manual_seed(seeded(1))
        y = f(x)
        after = torch.rand(())
        found.append((y, after, *(torch.autograd.grad(y.sin().sum(), x) if y.requires_grad else ())))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_their_order_is_that_of_the_tensor_in_each_call(transform):
    def draw(x):
        return torch.empty_like(x).uniform_(), torch.rand_like(x), torch.rand_like(x * 2), x.clone().normal_()

    jitted = thunder.jit(draw, transforms=[transform()])
    x = torch.ones(2, 6, 5, 4)
    for given in (x, x.mT, x.to(memory_format=torch.channels_last), x[:, ::2], x):
        found = []
        for f in (jitted, draw):
            torch.manual_seed(seeded(1))
            found.append(f(given))
        torch.testing.assert_close(*found)


class Noisy(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x * torch.rand(3, generator=self.generator) + torch.randn(4, 3, generator=self.generator)


def _from_all(x, g):
    y = x.detach().exp()
    integers = torch.randint(0, 9, (3,), generator=g) + torch.randperm(3, generator=g) + torch.multinomial(y[0], 3, generator=g)
    like = torch.bernoulli(y / y.max(), generator=g) + torch.normal(y, 1.0, generator=g) + torch.poisson(y, g)
    into = torch.empty_like(y.t()).uniform_(-1, 1, generator=g).t() + y.clone().exponential_(generator=g)
    return x * integers * (like + into + torch.nn.init.normal_(y.clone(), generator=g)) + torch.rand(3)


GENERATORS = {
    "an argument": lambda g: (_from_all, (g,)),
    "an attribute": lambda g: (Noisy(g), ()),
    "of the surroundings": lambda g: (lambda x: x + torch.rand(3, generator=g), ()),
    "torch's": lambda _: (lambda x: x * torch.rand(3, generator=torch.default_generator) + torch.rand(3), ()),
    "its seed": lambda g: (lambda x: x * g.initial_seed(), ()),
}


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("name", "transform"), crossed(GENERATORS, [SubclassTransform, NormTransform]))
def test_those_of_a_generator(name, requires_grad, transform):
    torch.manual_seed(seeded(0))
    x = torch.randn(4, 3, requires_grad=requires_grad)
    found = []
    for is_jitted in (True, False):
        torch.manual_seed(seeded(1))
        g = torch.Generator().manual_seed(seeded(2))
        f, given = GENERATORS[name](g)
        f = thunder.jit(f, transforms=[transform()]) if is_jitted else f
        results = [f(x, *given), f(x, *given)]
        g.manual_seed(seeded(3))
        results.append(f(x, *given))
        if given:
            results.append(f(x, torch.Generator().manual_seed(seeded(4))))
        gradients = torch.autograd.grad(sum(y.sin().sum() for y in results), x) if requires_grad else ()
        found.append((results, gradients, g.get_state(), torch.get_rng_state()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_those_of_a_generator_that_would_be_another_in_each_call_are_refused(transform):
    g = torch.Generator()
    programs = (
        lambda x: x * torch.rand(3, generator=torch.Generator().manual_seed(seeded(0))),
        lambda x: torch.func.grad(lambda x: (x * torch.rand(3, generator=g)).sum())(x),
        lambda x: (g.manual_seed(seeded(0)), x * torch.rand(3, generator=g))[1],
    )
    for f in programs:
        with pytest.raises(UnsupportedOpError, match=r"generator|Generator"):
            thunder.jit(f, transforms=[transform()])(torch.ones(3))


SECOND = {
    "dropout": lambda x: F.dropout(x.sin(), 0.3) * x,
    "dropouts": lambda x: F.alpha_dropout(x.sin(), 0.3, True) * torch.dropout(x, 0.5, True) * F.rrelu(x, training=True),
    "recurrent": lambda x: torch.rnn_tanh(
        x.reshape(4, 1, 5)[..., :3], x.new_zeros(2, 1, 2), _weights(2), True, 2, 0.6, True, False, False
    )[0],
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_of_the_same_numbers(name):
    f = SECOND[name]
    found = []
    for g in (thunder.jit(f, transforms=[SubclassTransform()]), f):
        x = torch.linspace(-1, 2, 20, requires_grad=True)
        torch.manual_seed(seeded(1))
        (gradient,) = torch.autograd.grad(g(x).sum(), x, create_graph=True)
        found.append((gradient, *torch.autograd.grad(gradient.square().sum(), x)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("draw", [lambda x: torch.distributions.Gamma(x, x).rsample(), lambda x: torch._sample_dirichlet(x) * x])
def test_private_functions_of_torch_draw_too(draw):
    x = torch.rand(3, generator=torch.Generator().manual_seed(seeded(0))) + 1
    found = []
    for f in (draw, thunder.jit(lambda x: draw(x), transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(1))
        found.append([f(x), f(x)])
    torch.testing.assert_close(*found)


_OF_GAMMA = {
    "gamma": lambda x: torch.distributions.Gamma(x.exp(), x.exp()).rsample((2,)),
    "student": lambda x: torch.distributions.StudentT(x.exp(), x).rsample(),
    "chi2": lambda x: torch.distributions.Chi2(x.exp()).rsample() + torch.distributions.InverseGamma(x.exp(), 3.0).rsample(),
    "in a program": lambda x: torch.autograd.grad(torch._standard_gamma(x.exp()).square().sum(), x)[0],
}


@pytest.mark.parametrize(("name", "transform"), crossed(_OF_GAMMA, [SubclassTransform, NormTransform]))
def test_what_is_drawn_from_a_gamma_distribution_moves_with_its_argument(name, transform):
    f = _OF_GAMMA[name]
    jf, found = thunder.jit(lambda x: f(x), transforms=[transform()]), []
    for g in (f, jf):
        torch.manual_seed(seeded(0))
        for _ in range(2):
            x = torch.randn(3, dtype=torch.float64).requires_grad_()
            y = g(x)
            found.append([y.detach(), torch.autograd.grad(y.sum(), x)[0] if y.grad_fn is not None else None])
    torch.testing.assert_close(found[:2], found[2:])
