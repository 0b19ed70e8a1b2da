"""Ways back that torch has kernels for, in every transform, against torch.func in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.seeds import seeded
from thunder_norm import transforms
from thunder_norm.transforms import NormTransform, grad, jacrev, vmap
import thunder

torch.manual_seed(seeded(0))
X = torch.randn(3, 2, 5, dtype=torch.float64)
W, B = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
WEIGHT = torch.randn(4, 5, dtype=torch.float64)
TARGETS = torch.tensor([[0, 4], [-100, 2], [3, 3]])


def weighted(y):
    return (y * (1 + torch.arange(y.numel()) / 32).reshape(y.shape)).sin().sum()


FUNCTIONS = {
    "gelu": lambda x, w, b: weighted(F.gelu(x * w) + b),
    "gelu, tanh": lambda x, w, b: weighted(F.gelu(x * w, approximate="tanh") + b),
    "softmax": lambda x, w, b: weighted(torch.softmax(x * w, -1) * b),
    "softmax, first dimension": lambda x, w, b: weighted(torch.softmax(x * w, 0) * b),
    "log_softmax": lambda x, w, b: weighted(torch.log_softmax(x * w, -1) * b),
    "layer_norm": lambda x, w, b: weighted(F.layer_norm(x, (5,), w, b)),
    "layer_norm, weight by keyword": lambda x, w, b: weighted(F.layer_norm(x, (5,), weight=w) * b),
    "layer_norm, no bias": lambda x, w, b: weighted(F.layer_norm(x, (5,), w) * b),
    "layer_norm, two dimensions": lambda x, w, b: weighted(F.layer_norm(x * w, (2, 5)) * b),
    "linear": lambda x, w, b: weighted(F.linear(x * w + b, WEIGHT)),
    "linear, one vector": lambda x, w, b: weighted(F.linear(x[0] * w, WEIGHT * b, b[:4])),
    "addmm": lambda x, w, b: weighted(torch.addmm(b[:4], x * w, WEIGHT.mT, beta=0.5, alpha=2)),
    "conv1d": lambda x, w, b: weighted(F.conv1d((x * w)[None], WEIGHT[:3, :4].reshape(3, 2, 2) * b[0], b[:3], 2, 1, 2)),
    "conv2d, groups": lambda x, w, b: weighted(
        F.conv2d((x * w)[None, :, None], WEIGHT[:, None, None] * b, None, 1, "same", 1, 2)
    ),
}


def close(ours, theirs):
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "in_dims"),
    [
        *((name, (0, 0, 0)) for name in FUNCTIONS),
        *((name, (0, None, None)) for name in ("softmax", "layer_norm", "linear")),
        *((name, (None, 0, None)) for name in ("gelu", "layer_norm", "linear, one vector")),
    ],
)
def test_per_sample_gradients_are_those_of_torch(name, in_dims):
    f = FUNCTIONS[name]
    args = [v if d is None or v.ndim == 3 else torch.stack([v, 2 * v, v - 1]) for v, d in zip((X, W, B), in_dims, strict=True)]
    if in_dims[0] is None:
        args[0] = X[0]

    def made_by(library):
        return library.vmap(library.grad(f, argnums=(0, 1, 2)), in_dims=in_dims)(*args)

    close(made_by(transforms), made_by(torch.func))


@pytest.mark.parametrize(
    "name", ["gelu", "gelu, tanh", "softmax", "layer_norm, two dimensions", "linear, one vector", "addmm", "conv1d"]
)
def test_second_derivatives_are_those_of_torch(name):
    f = FUNCTIONS[name]

    def made_by(library):
        forward_over_reverse = library.jvp(library.grad(f, argnums=1), (X[0], W, B), (X[1], W.sin(), B.cos()))
        return forward_over_reverse, library.jacrev(library.grad(f, argnums=0), argnums=1)(X[0], W, B)

    close(made_by(transforms), made_by(torch.func))


@pytest.mark.parametrize(
    ("reduction", "in_dims", "is_vector"),
    [
        ("mean", (0, 0), True),
        ("mean", (0, 0), False),
        ("sum", (0, None), False),
        ("none", (None, 0), False),
        ("mean", (None, 0), True),
    ],
)
def test_cross_entropies_of_samples(reduction, in_dims, is_vector):
    logits, targets = (X[:, 0], TARGETS[:, 0]) if is_vector else (X, TARGETS)
    args = [v if d is not None else v[0] for v, d in zip((logits, targets), in_dims, strict=True)]

    def loss(x, y):
        return weighted(F.cross_entropy(x, y, reduction=reduction))

    def made_by(library):
        return library.vmap(library.grad(loss), in_dims=in_dims)(*args)

    close(made_by(transforms).nan_to_num(7.0), made_by(torch.func).nan_to_num(7.0))


LAYERS = {
    "gelu": lambda x, w, b: F.gelu(x),
    "gelu, tanh": lambda x, w, b: F.gelu(x, approximate="tanh"),
    "relu": lambda x, w, b: F.relu(x),
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "layer_norm, no bias": lambda x, w, b: F.layer_norm(x, w.shape, w),
    "layer_norm, neither": lambda x, w, b: F.layer_norm(x, w.shape),
    "layer_norm, one tensor twice": lambda x, w, b: F.layer_norm(x, w.shape, w, w),
    "layer_norm, of a view": lambda x, w, b: F.layer_norm(x.transpose(0, 1), w.shape, w, b),
}


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [*((d, d) for d in (torch.float64, torch.float32, *HALVES)), *((d, torch.float32) for d in HALVES)],
)
@pytest.mark.parametrize("shape", [(3, 2, 5), (0, 2, 5)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_program_runs_the_kernels_of_eager_forward_and_backward(name, shape, dtype, of_weight):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    w, b = (torch.randn(5, dtype=of_weight, requires_grad=True) for _ in range(2))
    found = []
    for f in (LAYERS[name], thunder.jit(LAYERS[name], transforms=[transforms.SubclassTransform()])):
        y = f(x, w, b)
        with _Kernels() as kernels:
            gradients = torch.autograd.grad(y, [x, w, b], torch.ones_like(y) / 3, allow_unused=True)
        found.append((y, [0.0 if g is None else g for g in gradients], kernels.names))
    (expected, wanted, of_eager), (result, gradients, ours) = found
    torch.testing.assert_close(result, expected)
    for g, e in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(torch.as_tensor(g), torch.as_tensor(e))
    assert {name for name in of_eager if "_backward" in name} <= ours and not any(
        "erf" in name or "rsqrt" in name for name in ours
    )


@pytest.mark.parametrize("name", LAYERS)
def test_the_second_derivative_of_what_runs_as_one_kernel(name):
    args = [t.clone().requires_grad_() for t in (X, W, B)]
    found = []
    for f in (LAYERS[name], thunder.jit(LAYERS[name], transforms=[transforms.SubclassTransform()])):
        (first,) = torch.autograd.grad(weighted(f(*args)), args[0], create_graph=True)
        second = torch.autograd.grad(weighted(first), args, allow_unused=True)
        found.append((first, *[torch.zeros(()) if g is None else g for g in second]))
    close(*found)


@pytest.mark.parametrize("factors", [{}, {"beta": 0.3, "alpha": -3}, {"beta": 0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gradients_of_added_products_are_eagers_and_nothing_runs_again(dtype, factors):
    torch.manual_seed(seeded(0))
    given = [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((7,), (33, 70), (70, 7))]

    def f(c, a, b):
        return torch.addmm(c, a, b, **factors)

    found = []
    for g in (f, thunder.jit(f, transforms=[NormTransform()])):
        y = g(*given)
        with _Kernels() as kernels:
            found.append((y, *torch.autograd.grad(y, given, torch.ones_like(y) / 3)))
        assert not any("addmm" in name for name in kernels.names)
    torch.testing.assert_close(*found)


CONVOLUTIONS = {
    "1d": lambda x, w, b: F.conv1d(x, w, b, 2, 1, 2),
    "2d": lambda x, w, b: F.conv2d(x[..., None], w[..., None], b, padding=(1, 0)),
    "3d": lambda x, w, b: F.conv3d(x[..., None, None], w[..., None, None], padding="same"),
    "groups": lambda x, w, b: F.conv1d(x, w[:, :1], b, groups=2),
    "torch.convolution": lambda x, w, b: torch.convolution(x, w, b, [1], [1], [1], False, [0], 1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 0])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_convolutions_are_eagers_kernels(name, size, dtype):
    torch.manual_seed(seeded(0))
    given = [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((size, 2, 6), (4, 2, 3), (4,))]
    found = []
    for f in (CONVOLUTIONS[name], thunder.jit(CONVOLUTIONS[name], transforms=[transforms.SubclassTransform()])):
        y = f(*given)
        with _Kernels() as kernels:
            gradients = torch.autograd.grad(y, given, torch.ones_like(y) / 3, allow_unused=True)
        assert size == 0 or "convolution_backward" in "".join(kernels.names)
        assert not any("flip" in called or called == "aten.convolution.default" for called in kernels.names)
        found.append((y, *[torch.zeros(()) if g is None else g for g in gradients]))
    for ours, eager in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, eager)


IMAGES = torch.randn(2, 4, 6, 5)
ROWS, CHANNELS = torch.rand(5) + 0.5, torch.randn(4)
KERNEL, TRANSPOSED = torch.randn(6, 2, 3, 2), torch.randn(4, 3, 2, 2)
SEEN = torch.rand(6, 6) > 0.6  # some rows of it see nothing
SEEN[2] = False
attention = F.scaled_dot_product_attention
# of x like IMAGES, and a and b like ROWS or CHANNELS; the kernel of the gradient
ACTIVATIONS = {
    "hardswish": lambda x: F.hardswish(3 * x),
    "hardsigmoid": lambda x: F.hardsigmoid(3 * x),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, max_val=0.7) + F.relu6(6 * x),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3) + F.leaky_relu(x),
    "silu": lambda x: F.silu(x.sin(), inplace=True) + F.silu(x),
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, threshold=0.5, beta=2.0),
    "elu": lambda x: F.elu(x, alpha=0.3) + F.celu(x, 0.3) + F.selu(x),
    "tanh": torch.tanh,
    "sigmoid": torch.Tensor.sigmoid,
}
EAGERS = {
    "softmax": (lambda x, a, b: x.softmax(1) + torch.softmax(x, dim=-1), "_softmax_backward_data"),
    "layer_norm": (lambda x, a, b: F.layer_norm(x, (5,), a, b), "native_layer_norm"),
    "layer_norm, two dimensions": (lambda x, a, b: F.layer_norm(x, (6, 5), eps=0.1), "native_layer_norm"),
    "group_norm": (lambda x, a, b: F.group_norm(x, 2, a[:4], b[:4]), "native_group_norm"),
    "group_norm, bias": (lambda x, a, b: F.group_norm(x, 4, bias=b[:4], eps=0.1), "native_group_norm"),
    "batch_norm, in use": (lambda x, a, b: F.batch_norm(x, CHANNELS, ROWS[:4], a[:4], b[:4]), "native_batch_norm"),
    "conv2d": (lambda x, a, b: F.conv2d(x, KERNEL * a[:2], b.repeat(2)[:6], (2, 1), 1, groups=2), "convolution"),
    "conv2d, of the weight": (lambda x, a, b: F.conv2d(x.detach(), KERNEL * a[:2], groups=2, dilation=2), "convolution"),
    "conv1d": (lambda x, a, b: F.conv1d(x[0], KERNEL[:, :, 0].repeat(1, 3, 1)[..., :2], b[:1].repeat(6)), "convolution"),
    "conv_transpose2d": (lambda x, a, b: F.conv_transpose2d(x, TRANSPOSED * a[:2], b[:3], 2, 1, (1, 0)), "convolution"),
    "avg_pool2d": (lambda x, a, b: F.avg_pool2d(x, 2) + F.avg_pool2d(x, (2, 2), stride=2, count_include_pad=False), "avg_pool2d"),
    "avg_pool2d, padding": (lambda x, a, b: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=4), "avg_pool2d"),
    "masked_fill": (lambda x, a, b: x.masked_fill(SEEN[:, :5], -1e9).softmax(1) + x.masked_fill(a > 0, 2), "masked_fill"),
    "attention": (lambda x, a, b: attention(x, x * b, x, is_causal=True), "flash_attention"),
    "attention, scale": (lambda x, a, b: attention(x, x[:, :, :3] * b, x[:, :, 3:], scale=0.3), "flash_attention"),
    "attention, mask": (lambda x, a, b: attention(x, x * b, x, SEEN), "flash_attention"),
    "attention, added mask": (lambda x, a, b: attention(x, x * b, x, torch.where(SEEN, 0.5, -torch.inf)), "flash_attention"),
}


def assert_eagers(jitted, function, inputs, *expected):
    """Results and the gradients of the first input are eager's to the bit; others may be sums in another order."""
    found = []
    for f in (jitted, function):
        given = [t.clone().requires_grad_() for t in inputs]
        with _Kernels() as kernels:
            y = f(*given)
            found.append((y, *torch.autograd.grad(weighted(y), given, allow_unused=True)))
        assert all(any(kernel in n for n in kernels.names) for kernel in expected)
    exact, eager = (tuple(t for t in ts[:2] if t is not None) for ts in found)
    torch.testing.assert_close(exact, eager, rtol=0, atol=0)
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EAGERS)
def test_results_and_gradients_are_eagers(name):
    function, kernel = EAGERS[name]
    assert_eagers(thunder.jit(function, transforms=[NormTransform()]), function, (IMAGES, ROWS, ROWS.cos()), kernel)


def test_activations_are_eagers():
    def of_all(x):
        return torch.stack([f(row) for f, row in zip(ACTIVATIONS.values(), x.unbind(0), strict=True)])

    x = torch.randn(len(ACTIVATIONS), 7)
    assert_eagers(thunder.jit(of_all, transforms=[NormTransform()]), of_all, (x,), *(f"{name}_backward" for name in ACTIVATIONS))


@pytest.mark.parametrize("name", ["group_norm", "attention", "conv2d"])
def test_how_inputs_lie_in_memory_changes_nothing(name):
    """The kernels of attention go through the last dimension by themselves: elsewhere they would read what is not theirs."""
    function, kernel = EAGERS[name]
    jitted = thunder.jit(function, transforms=[NormTransform()])
    for x in (IMAGES.to(memory_format=torch.channels_last), IMAGES.mT.contiguous().mT):
        for ours, eager in zip(*(_gradients_of(f, x) for f in (jitted, function)), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


def _gradients_of(f, x):
    given = [t.requires_grad_() for t in (x.detach(), ROWS.clone(), ROWS.cos())]
    y = f(*given)
    return [t for t in (y, *torch.autograd.grad(weighted(y), given, allow_unused=True)) if t is not None]


def test_what_is_drawn_for_filled_entries_is_eagers_however_they_lie():
    """Numbers are drawn in the order of memory, and torch fills a copy in the order of dimensions."""

    def f(x, mask):
        return F.dropout(x.masked_fill(mask, 0.5), 0.5)

    jitted, x = thunder.jit(f, transforms=[NormTransform()]), torch.randn(7, 5).t()
    for mask in (x < 0, x[0] < 0):
        found = []
        for g in (jitted, f):
            torch.manual_seed(seeded(2))
            given = x.detach().requires_grad_()
            y = g(given, mask)
            found.append((y, *torch.autograd.grad(weighted(y), given)))
        torch.testing.assert_close(*found, rtol=0, atol=0)


BATCH_NORMS = {
    "2d": lambda: torch.nn.BatchNorm2d(3),
    "of matrices": lambda: torch.nn.BatchNorm1d(3, momentum=0.3, eps=0.1),
    "without weights": lambda: torch.nn.BatchNorm1d(3, affine=False),
    "without statistics": lambda: torch.nn.BatchNorm2d(3, track_running_stats=False),
    "in eval": lambda: torch.nn.BatchNorm2d(3).eval(),
}


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norms_in_training_are_eagers_with_their_statistics(name, twice):
    torch.manual_seed(seeded(0))
    model = BATCH_NORMS[name]()
    if model.affine:
        torch.nn.init.normal_(model.weight), torch.nn.init.normal_(model.bias)
    model, jitted = (copy.deepcopy(model).double() for _ in range(2))
    jm = thunder.jit(jitted, transforms=[transforms.SubclassTransform()])
    for _ in range(2):
        x = torch.randn(5, 3, *(() if "1d" in type(model).__name__ else (4, 2)), dtype=torch.float64)
        found = []
        for f in (model, jm):
            given = [x.clone().requires_grad_(), *f.parameters()]
            with _Kernels() as kernels:
                y = f(given[0])
                gradients = torch.autograd.grad(weighted(y), given, create_graph=twice)
                second = torch.autograd.grad(weighted(gradients[0]), given, allow_unused=True) if twice else ()
            found.append((y, *gradients, *[torch.zeros(()) if g is None else g for g in second]))
        assert twice or name == "in eval" or "aten.native_batch_norm_backward.default" in kernels.names
        assert twice or "aten.var_mean.correction" not in kernels.names  # statistics are those of the kernel
        close(*reversed(found))
        close(dict(jitted.named_buffers()), dict(model.named_buffers()))
    assert thunder.cache_misses(jm) == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_a_batch_norm_of_halves_keeps_statistics_of_floats(dtype):
    """Of another dtype than what is normalized: they are no kernel's, and are what they are in double precision."""
    torch.manual_seed(seeded(0))
    model, x = torch.nn.BatchNorm1d(3), torch.randn(8, 3).to(dtype)
    exact, jitted = copy.deepcopy(model).double(), thunder.jit(model, transforms=[transforms.SubclassTransform()])
    found = []
    for f, given in ((jitted, x.clone()), (exact, x.double())):
        y = f(given.requires_grad_())
        found.append([t.double() for t in (y, *torch.autograd.grad(weighted(y), given))])
    for got, want in zip(*found, strict=True):
        eps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, want, rtol=eps, atol=eps * want.abs().max().item())
    for name, t in exact.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name].to(t.dtype), t, rtol=1e-3, atol=1e-3)


class _NormalizedTwice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        between = self.norm(x).sin() + self.norm.running_var
        return self.norm(between) + self.norm.running_mean


def test_statistics_are_read_between_and_after_batch_norms():
    model = _NormalizedTwice().double()
    jitted = copy.deepcopy(model)
    jm, x = thunder.jit(jitted, transforms=[NormTransform()]), torch.randn(5, 3, dtype=torch.float64)
    ours, eager = ((f(x), *torch.autograd.grad(weighted(f(x)), list(f.parameters()))) for f in (jm, model))
    close(ours, eager)
    close(dict(jitted.named_buffers()), dict(model.named_buffers()))


def test_lower_precision_stays_what_it_is():
    half = X[0].bfloat16()
    gradient = grad(lambda x: F.layer_norm(x, (5,), W.bfloat16()).float().square().sum())(half)
    expected = torch.func.grad(lambda x: F.layer_norm(x, (5,), W).square().sum())(X[0])
    assert gradient.dtype is torch.bfloat16
    torch.testing.assert_close(gradient.double(), expected, rtol=0.1, atol=0.1)


def _program(transformed):
    """The program that runs, without comments."""
    lines = str(thunder.last_traces(transformed)[-1]).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


@pytest.mark.parametrize(
    ("f", "kernel"),
    [
        (lambda x: F.gelu(x).sum(), "torch_gelu_backward"),
        (lambda x: torch.softmax(x, -1).square().sum(), "torch_softmax_backward"),
        (lambda x: F.layer_norm(x, (5,)).square().sum(), "torch_standardize_backward"),
        (lambda x: torch.log_softmax(x, -1).square().sum(), "_log_softmax_backward_data"),
    ],
)
def test_one_kernel_of_torch_runs_for_the_whole_batch(f, kernel):
    per_sample = vmap(grad(f))
    per_sample(X)
    program = _program(per_sample)
    assert program.count(f"{kernel}(") == 1
    assert not any(f"torch.{part}(" in program for part in ("exp", "erf", "rsqrt"))


class _Kernels(TorchDispatchMode):
    """The operations that are run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class _OutputAlone(torch.nn.Module):
    def forward(self, found):
        return found[0]


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU])
def test_the_gradient_of_a_recurrent_layer_runs_the_kernels_of_eager(layer):
    torch.manual_seed(seeded(0))
    model, x = torch.nn.Sequential(layer(3, 4), _OutputAlone()), torch.randn(5, 2, 3)
    jitted = thunder.jit(model, transforms=[transforms.SubclassTransform()])
    found = []
    for f in (model, jitted):
        result = weighted(f(x))
        with _Kernels() as kernels:
            found.append((torch.autograd.grad(result, list(model.parameters())), kernels.names))
    (wanted, of_eager), (gradients, ours) = found
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-6)
    recurrent = {name for name in of_eager if "rnn" in name or "mm" in name}  # oneDNN has one for a whole LSTM
    assert {name for name in ours if "rnn" in name or "mm" in name} == recurrent  # and none of the forward
    assert not any("zeros" in name for name in ours - of_eager)  # for the states, which nothing uses


def test_the_gradient_of_a_recurrent_layer_twice_moved_and_after_a_write():
    """What torch has recorded of the layer stays for a second gradient; where saved tensors are moved away, the layer runs again."""
    torch.manual_seed(seeded(0))
    model, x = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), torch.randn(2, 5, 3, requires_grad=True)
    jitted = thunder.jit(model, transforms=[transforms.SubclassTransform()])
    parameters = [x, *model.parameters()]
    wanted = torch.autograd.grad(weighted(model(x)[0]), parameters)
    result = weighted(jitted(x)[0])
    for keeps in (True, False):
        torch.testing.assert_close(torch.autograd.grad(result, parameters, retain_graph=keeps), wanted, rtol=1e-5, atol=1e-6)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        result = weighted(jitted(x)[0])
    torch.testing.assert_close(torch.autograd.grad(result, parameters), wanted, rtol=1e-5, atol=1e-6)
    result = weighted(jitted(x)[0])
    with torch.no_grad():
        model.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result, parameters)


def test_gradients_by_torchs_formula_in_inference_mode():
    """They were zeros: torch's autograd records nothing there."""
    model, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3, requires_grad=True)
    (wanted,) = torch.autograd.grad(weighted(model(x)[0]), x)
    gradient = grad(lambda x: weighted(model(x)[0]))
    with torch.inference_mode():
        torch.testing.assert_close(gradient(x.detach()), wanted)
        torch.testing.assert_close(gradient(x.detach().clone()), wanted)


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU])
def test_the_second_derivative_of_a_recurrent_layer(layer):
    torch.manual_seed(seeded(0))
    model, x = layer(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for f in (model, thunder.jit(model, transforms=[transforms.SubclassTransform()])):
        (first,) = torch.autograd.grad(weighted(f(x)[0]), x, create_graph=True)
        found.append((first, *torch.autograd.grad(weighted(first), [x, *model.parameters()])))
    close(*found)


def test_gradients_of_a_weight_are_products_without_matrices_where_a_sample_is_one_vector():
    per_sample = vmap(grad(lambda w, x: F.linear(x, w).square().sum()), in_dims=(None, 0))
    close(per_sample(WEIGHT, X[:, 0]), torch.stack([2 * torch.outer(WEIGHT @ x, x) for x in X[:, 0]]))
    assert "torch.matmul" not in str(thunder.last_traces(per_sample)[-1])


def test_a_matrix_times_the_rows_of_all_samples_is_one_product():
    def loss(x):
        return F.linear(x, WEIGHT).tanh().square().sum()

    per_sample = vmap(grad(loss))
    close(per_sample(X[:, 0]), torch.func.vmap(torch.func.grad(loss))(X[:, 0]))
    program = _program(per_sample)
    assert program.count("torch.matmul(") == 1 and "reshape" not in program


def test_a_product_of_rows_that_is_used_twice_is_computed_once():
    def both(x):
        rows = x.reshape(1, -1) @ WEIGHT.T
        return rows.reshape(-1), rows.exp()

    mapped = vmap(both)
    for ours, theirs in zip(mapped(X[:, 0]), torch.func.vmap(both)(X[:, 0]), strict=True):
        close(ours, theirs)
    assert _program(mapped).count("torch.matmul(") == 1


def test_a_dimension_of_size_one_costs_no_second_operation():
    f = vmap(lambda x, y: x[:, None] * y[None])
    close(f(X[:, 0], X[:, 1]), X[:, 0, :, None] * X[:, 1, None])
    assert "expand" not in str(thunder.last_traces(f)[-1])


# -- what a call looks at ----------------------------------------------------------------------------------------------


def test_entries_with_dots_in_their_names_may_be_unused_or_tangents():
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    direction = {name: p.cos() for name, p in parameters.items()} | {"0_weight": torch.zeros(())}  # its name is taken, too

    def f(p, x):
        return torch.func.functional_call(net, p, (x,))

    def pushed(library, p, dp, x):
        return library.jvp(lambda q: f(q, x), (p,), ({name: dp[name] for name in p},))

    jacobian = vmap(jacrev(f, argnums=1), in_dims=(None, 0))  # does not need the last bias
    close(jacobian(parameters, X[0]), thunder.jit(jacobian)(parameters, X[0]))
    close(jacobian(parameters, X[0]), torch.func.vmap(torch.func.jacrev(f, argnums=1), in_dims=(None, 0))(parameters, X[0]))
    ours = thunder.jit(lambda p, dp, x: pushed(transforms, p, dp, x))(parameters, direction, X[0])
    close(ours, pushed(torch.func, parameters, direction, X[0]))


def test_parameters_that_others_stand_for_are_not_looked_at_and_others_are():
    net = torch.nn.Linear(5, 4).double()
    replacing = {"weight": WEIGHT}

    def f(p, x):
        return torch.func.functional_call(net, p, (x,)).square().sum()

    def both(p, x):
        return f(p, x) + (net.weight * net.bias[:, None]).sum() * x.sum()

    for function, looked_at in ((f, ["bias"]), (both, ["bias", "weight"])):
        gradient = grad(function, argnums=1)
        close(gradient(replacing, X[0]), torch.func.grad(function, argnums=1)(replacing, X[0]))
        guards = str(thunder.last_prologue_traces(gradient)[-1])
        assert [name for name in ("bias", "weight") if f"get_parameter('{name}')" in guards] == looked_at


def test_tensors_of_containers_that_torch_registered_are_found():
    from collections import OrderedDict

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = torch.tensor([3.0, 4.0])
    found = grad(lambda d, y: (d["x"] ** 3 * y**2).sum(), argnums=1)(OrderedDict(x=x), y)
    (mixed,) = torch.autograd.grad(found.sum(), x)
    close(mixed, 6 * x.detach() ** 2 * y)
