"""What libraries do that Thunder's interpreter cannot follow, done as in eager mode: torch.vmap inside, modes, classes of pybind11."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from packaging.version import Version
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from tests.seeds import crossed, seeded
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.errors import DataDependentError, UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform, grad, vmap
import thunder


def windowed(x):
    """A mask as transformers 4.57 makes it: a function of indices, mapped over each of them."""
    padding = x[:, :1] > -1.0

    def is_seen(batch, query, key):
        return (key <= query) & (key > query - 2) & padding[batch, 0]

    for dims in [(None, None, 0), (None, 0, None), (0, None, None)]:
        is_seen = torch.vmap(is_seen, in_dims=dims, out_dims=0)
    positions = torch.arange(x.shape[1])
    with TransformGetItemToIndex():
        mask = is_seen(torch.arange(x.shape[0]), positions, positions)
    return torch.where(mask, x[:, None, :], 0.0).sum(-1)


PROGRAMS = {
    "vmap": lambda x: torch.vmap(lambda row: row * row.sum())(x),
    "vmap of keywords": lambda x: torch.func.vmap(func=torch.dot, in_dims=(0, None), out_dims=0)(x, x[0]),
    "in chunks": lambda x: torch.vmap(lambda row: row.cos(), in_dims=1, out_dims=1, chunk_size=2)(x),
}
if Version(torch.__version__) >= Version("2.10"):  # before that torch's own vmap asks an index for its value there
    PROGRAMS["masks"] = windowed


@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_vmap_in_a_traced_program(name):
    f, x = PROGRAMS[name], torch.randn(3, 4, dtype=torch.float64)
    for transform in (SubclassTransform(), NormTransform()):
        torch.testing.assert_close(thunder.jit(f, transforms=[transform])(x), f(x))
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x), torch.func.grad(lambda x: f(x).sum())(x))
    torch.testing.assert_close(vmap(f)(x[None]), f(x)[None])


def cubes(x):
    return (x**3).sum()


TRANSFORMS = {
    "grad": lambda x: torch.func.grad(cubes)(x),
    "grad with aux": lambda x: torch.func.grad(lambda y: (cubes(y), y * 2), has_aux=True)(x)[1],
    "of the second": lambda x: torch.func.grad(lambda a, b: cubes(a * b), argnums=1)(x, x.cos()),
    "grad_and_value": lambda x: torch.stack(torch.func.grad_and_value(lambda y: y**3)(x[0, 0])),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "linearize": lambda x: torch.func.linearize(torch.sin, x)[1](x) + torch.func.linearize(torch.cos, x)[0],
    "jacrev": lambda x: torch.func.jacrev(torch.sin, chunk_size=3)(x).sum((0, 1)),
    "jacfwd": lambda x: torch.func.jacfwd(torch.sin)(x).sum((0, 1)),
    "hessian": lambda x: torch.func.hessian(cubes)(x).sum((0, 1)),
    "per sample": lambda x: torch.vmap(torch.func.grad(cubes))(x),
}


# what torch's linearize has computed beforehand is constant to torch.func.grad
EQUALS = {"linearize": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1] + torch.cos(x)}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_in_a_traced_program(name):
    f, x = TRANSFORMS[name], torch.randn(3, 4, dtype=torch.float64)
    known = EQUALS.get(name, f)
    expected = torch.func.grad(lambda x: known(x).sin().sum())(x)
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    torch.testing.assert_close(jitted(x), f(x))
    torch.testing.assert_close(grad(lambda x: f(x).sin().sum())(x), expected)
    jitted(y := x.clone().requires_grad_()).sin().sum().backward()
    torch.testing.assert_close(y.grad, expected)


def test_classes_of_pybind11_are_made_and_their_methods_called():
    """Thunder takes the record that pybind11 keeps of a function for the object that it is a method of, and the process is aborted."""

    def f(x):
        store = torch._C._distributed_c10d.HashStore()
        store.set("factor", "3")
        return x * float(store.get("factor").decode())

    x = torch.ones(2)
    torch.testing.assert_close(thunder.jit(f, transforms=[SubclassTransform()])(x), 3 * x)


def test_a_context_variable_that_a_compiler_is_given_as_a_global(monkeypatch: pytest.MonkeyPatch):
    """transformers 5 collects outputs in one; what it sets while it is traced is reset there."""
    name = "transformers.utils.output_capturing"
    module = sys.modules.get(name)
    if module is None:
        module = types.ModuleType(name)
        exec(_COLLECTOR, module.__dict__)  # noqa: S102 - as the library has it, where an older one is installed
        monkeypatch.setitem(sys.modules, name, module)
    variable = module.CompileableContextVar("collector")

    def f(x):
        token = variable.set({"seen": []})
        variable.get()["seen"].append(x * 2)
        (y,) = variable.get()["seen"]
        variable.reset(token)
        return y

    x = torch.ones(2)
    torch.testing.assert_close(thunder.jit(f, transforms=[SubclassTransform()])(x), 2 * x)
    assert variable.get() is None and variable.global_var is None


_COLLECTOR = """
from contextvars import ContextVar
import torch

class CompileableContextVar:
    def __init__(self, name):
        self.context_var, self.global_var, self.compiling = ContextVar(name, default=None), None, False

    def get(self):
        return self.global_var if self.compiling else self.context_var.get()

    def set(self, value):
        if torch.compiler.is_compiling():
            self.global_var, self.compiling = value, True
            return None
        return self.context_var.set(value)

    def reset(self, token):
        if self.compiling or token is None:
            self.global_var, self.compiling = None, False
        else:
            self.context_var.reset(token)
"""


_MODEL = """
import torch
from transformers.utils.import_utils import is_torchdynamo_compiling

def masked(x, mask=None):
    if mask is None and not is_torchdynamo_compiling():
        mask = torch.ones(x.shape)
    return x * mask[:, None]
"""


@pytest.mark.parametrize("mode", ["real", "normed"])
def test_models_of_transformers_do_what_they_do_in_eager_mode(mode):
    """LongT5, Switch Transformers and others make no mask, and Mamba has another scan, where they take dynamo to compile them."""
    pytest.importorskip("transformers.utils.import_utils")
    model = types.ModuleType("transformers.models.masked.modeling_masked")
    exec(_MODEL, model.__dict__)  # noqa: S102 - it is about the name of the module
    x = torch.randn(3)
    jitted = thunder.jit(model.masked, transforms=[NormTransform()])
    if mode == "normed":
        torch.testing.assert_close(jitted(LinfTensor.of(x)).backing, model.masked(x))
    else:
        torch.testing.assert_close(jitted(x), model.masked(x))


def test_what_models_of_transformers_share_looks_at_no_values():
    utils = pytest.importorskip("transformers.utils.import_utils")
    if not hasattr(utils, "is_tracing"):
        pytest.skip("this version asks for no values")
    ones = torch.ones(3)
    f = thunder.jit(lambda x: x + 1 if utils.is_tracing(x) or bool((x == 1).all()) else x, transforms=[NormTransform()])
    torch.testing.assert_close(f(ones), ones + 1)


def _mask_of_ones(x):
    return torch.ones(x.shape[:2])


def _mask_that_is_written_into(x):
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    mask[:, -1] = 0
    return mask


@pytest.mark.parametrize("made", [_mask_of_ones, _mask_that_is_written_into, lambda x: torch.ones(x.shape[:2]).long()])
@pytest.mark.parametrize("kind", ["create_bidirectional_mask", "create_causal_mask"])
def test_a_mask_that_hides_nothing_is_not_made(kind, made):
    """transformers looks at the values in eager mode: whether there is a mask decides what the program does."""
    transformers = pytest.importorskip("transformers")
    masking = pytest.importorskip("transformers.masking_utils")
    if not hasattr(masking, kind):
        pytest.skip("this version has no such function")
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, attn_implementation="sdpa")

    def f(x):
        options = {} if kind == "create_bidirectional_mask" else {"past_key_values": None}
        mask = getattr(masking, kind)(config=config, inputs_embeds=x, attention_mask=made(x), **options)
        return x if mask is None else torch.where(mask[:, 0].any(1)[..., None], x + 1, x - 1)

    x = torch.randn(2, 4, 8)
    assert torch.equal(f(x), x) == (made is not _mask_that_is_written_into)
    for given in (x, LinfTensor.of(x)):
        found = thunder.jit(f, transforms=[NormTransform()])(given)
        torch.testing.assert_close(found if given is x else found.backing, f(x))


@pytest.mark.parametrize(
    "name", ["longformer.modeling_longformer.LongformerSelfAttention", "led.modeling_led.LEDEncoderSelfAttention"]
)
def test_overlapping_windows_of_transformers(name):
    """The models cut them with strides, of which a trace knows nothing."""
    module, _, cls = name.rpartition(".")
    attention = getattr(pytest.importorskip(f"transformers.models.{module}"), cls)
    layer = attention.__new__(attention)
    torch.nn.Module.__init__(layer)
    x, probs, value = torch.randn(3, 12, 4), torch.rand(2, 12, 3, 5), torch.randn(2, 12, 3, 4)

    def f(x, probs, value):
        return attention._chunk(x, 2), layer._sliding_chunks_matmul_attn_probs_value(probs, value, 2)

    torch.testing.assert_close(thunder.jit(f, transforms=[NormTransform()])(x, probs, value), f(x, probs, value))
    windows = thunder.jit(f, transforms=[NormTransform()])(LinfTensor.of(x), probs, value)[0]
    torch.testing.assert_close(windows.backing, f(x, probs, value)[0])
    assert windows.norm_size >= x.abs().max()


class Embedding(torch.nn.Module):
    """With the hook that transformers 5 puts on embeddings where activations are checkpointed."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 4)
        self.table.register_forward_hook(lambda module, args, out: out.requires_grad_(True))
        self.head = torch.nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.table(ids))


def test_a_model_may_ask_its_embedding_to_require_grad():
    ids, model = torch.tensor([0, 3]), Embedding()
    targets = ModularNorm(model, ids).targets
    assert set(targets) == {"table.weight", "head.weight", "head.bias"} and all(t > 0 for t in targets.values())
    with pytest.raises(UnsupportedOpError, match="never requires grad itself"):
        LinfTensor.of(torch.ones(3)).requires_grad_()


@pytest.mark.parametrize(("is_causal", "recorded"), crossed([None, True, False], [True, False]))
def test_torchs_transformer_in_evaluation(recorded, is_causal):
    """torch takes one kernel for a layer where nothing is recorded, and looks at a mask's values to see whether it is causal."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

        def forward(self, source, target):
            mask = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.model(source, target, tgt_mask=mask, tgt_is_causal=is_causal)

    torch.manual_seed(seeded(0))
    model = Model().eval().requires_grad_(False)
    for coder in (model.model.encoder, model.model.decoder):
        coder.layers[0].norm1.bias.requires_grad_()  # for torch to record it
    inputs = torch.randn(2, 4, 8), torch.randn(2, 3, 8)
    with torch.set_grad_enabled(recorded):
        for transform in (NormTransform(), SubclassTransform())[: 2 if is_causal is None else 1]:
            torch.testing.assert_close(thunder.jit(model, transforms=[transform])(*inputs), model(*inputs))
        y = thunder.jit(model, transforms=[NormTransform()])(*(RMSTensor.of(x) for x in inputs))
    assert y.norm_size >= RMSTensor.of(y.backing, elem_dims=y.elem_dims).norm_size * (1 - 1e-6)
    assert torch.backends.mha.get_fastpath_enabled()


# -- checks of distributions --------------------------------------------------------------------------------------------


def _mixture(x):
    components = D.Normal(torch.stack([x, -x], -1), F.softplus(torch.stack([x, -x], -1)) + 0.1)
    return D.MixtureSameFamily(D.Categorical(logits=torch.stack([x, 0 * x], -1)), components).log_prob(x.detach())


DENSITIES = {
    "Normal": lambda x: D.Normal(x, F.softplus(x)).log_prob(torch.zeros_like(x)),
    "StudentT": lambda x: D.StudentT(2 + F.softplus(x), x, x.exp()).log_prob(torch.zeros_like(x)),
    "Categorical": lambda x: D.Categorical(logits=x).log_prob(torch.tensor(1)),
    "Beta": lambda x: D.Beta(x.exp(), F.softplus(x)).log_prob(torch.full_like(x, 0.25)),
    "mixture": _mixture,
    "multivariate": lambda x: D.MultivariateNormal(x, x[:, None] * x + torch.eye(3)).log_prob(torch.zeros_like(x)),
    "divergence": lambda x: D.kl_divergence(D.Normal(x, x.exp()), D.Normal(torch.zeros_like(x), 1.0)),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_distributions_in_a_traced_program(name):
    torch.manual_seed(seeded(0))
    f, x = DENSITIES[name], torch.randn(3, dtype=torch.float64)
    wanted = torch.func.grad(lambda x: f(x).sum())(x)
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x), wanted)
    x.requires_grad_()
    found = thunder.jit(f, transforms=[NormTransform()])(x)
    torch.testing.assert_close(found, f(x))
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], wanted)


INVALID = {
    "a scale": (lambda x: D.Normal(0.0, x).log_prob(torch.ones(2)), torch.tensor([1.0, -1.0])),
    "a value": (lambda x: D.Bernoulli(logits=torch.zeros(2)).log_prob(x), torch.tensor([1.0, 0.5])),
    "not a number": (lambda x: D.Categorical(logits=x).entropy(), torch.tensor([1.0, torch.nan])),
    "a matrix": (lambda x: D.MultivariateNormal(torch.zeros(2), torch.diag(x)).mean, torch.tensor([1.0, -1.0])),
    "constants": (lambda x: x + D.Normal(0.0, -torch.ones(2)).mean, torch.ones(2)),
}


@pytest.fixture
def validating(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile turns the checks of distributions off, for the process, and other tests use it."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


@pytest.mark.usefixtures("validating")
@pytest.mark.parametrize("name", INVALID)
def test_a_call_with_an_invalid_distribution_raises_as_eager_pytorch_does(name):
    f, bad = INVALID[name]
    for call in (f, jitted := thunder.jit(f, transforms=[NormTransform()])):
        with pytest.raises(ValueError, match="Expected (parameter|value argument)"):
            call(bad)
    if name != "constants":
        torch.testing.assert_close(jitted(torch.ones(2)), f(torch.ones(2)))
        with pytest.raises(ValueError, match="Expected (parameter|value argument)"):
            jitted(bad)


@pytest.mark.usefixtures("validating")
def test_transforms_that_run_nothing_in_between_refuse_what_a_distribution_checks():
    f = DENSITIES["Normal"]
    with pytest.raises(DataDependentError, match="validate_args=False"):
        thunder.jit(f, transforms=[CheckpointTransform()])(torch.ones(2))
    thunder.jit(lambda x: D.Normal(x, 1.0, validate_args=False).log_prob(x), transforms=[CheckpointTransform()])(torch.ones(2))
