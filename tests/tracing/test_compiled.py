"""What torch.compile has wrapped is interpreted as it was written, and runs so in runs that only we know of."""

import functools

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm import build_norm_map, norm_report
from thunder_norm.transforms import NormTransform, SubclassTransform, profile
import thunder


def _never(graph, example_inputs):
    raise AssertionError("Dynamo compiles")


_compiled = torch.compile(backend=_never)
_factor = 3.0


def _scale(x):
    return x.sin() * _factor


@functools.wraps(_compiled(_scale))
def _wrapped_again(x):
    return x.cos()  # with the attributes of another function, which ``functools.wraps`` copies


class _Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factor = torch.nn.Linear(4, 4), 2.0

    @_compiled
    def forward(self, x):
        return torch.relu(self.linear(x)) * self.factor


class _Plain(_Block):
    forward = _Block.forward._torchdynamo_orig_callable


def _model(is_compiled):
    torch.manual_seed(seeded(0))
    block, first, last = (_Block if is_compiled else _Plain)(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    if is_compiled:
        first.compile(backend=_never)
        last = _compiled(last)
    return torch.nn.Sequential(first, block, last)


_scaled, _disabled = _compiled(_scale), torch.compiler.disable(_scale)
_PROGRAMS = {
    "function": (lambda x: _scaled(x) + 1, lambda x: _scale(x) + 1),
    "the function itself": (_scaled, _scale),
    "made inside": (lambda x: torch.compile(lambda y: y.exp(), backend=_never)(x), torch.exp),
    "of torch": (lambda x: torch.compile(torch.exp, backend=_never)(x), torch.exp),
    "disabled": (lambda x: _disabled(x), _scale),
    "wrapped again": (lambda x: _wrapped_again(x), torch.cos),
    "fullgraph": (lambda x: torch.compile(_scale, backend=_never, fullgraph=True, dynamic=True)(x), _scale),
    "modules": (_model(True), _model(False)),
    "module itself": (_compiled(_model(False)), _model(False)),
}


@pytest.mark.parametrize("kind", ["normed", "plain", "wrapper"])
@pytest.mark.parametrize("name", list(_PROGRAMS))
def test_programs(name, kind):
    program, as_written = _PROGRAMS[name]
    torch.manual_seed(seeded(1))
    x = torch.randn(3, 4)
    x = TwoTensor(x, x + 1) if kind == "wrapper" else x
    jf = thunder.jit(program, transforms=[NormTransform() if kind == "normed" else SubclassTransform()])
    x.requires_grad_()
    result, expected = jf(x), as_written(x)
    torch.testing.assert_close(*(r.a if kind == "wrapper" else r for r in (result, expected)))
    gradients = [torch.autograd.grad(r.sum(), x)[0] for r in (result, expected)]
    torch.testing.assert_close(*(g.b if kind == "wrapper" else g for g in gradients))


def test_what_they_read_is_guarded(monkeypatch):
    model, x = _model(True), torch.ones(3, 4)
    jf = thunder.jit(lambda model, x: _scaled(model(x)), transforms=[NormTransform()])
    expected = _model(False)

    def agree():
        torch.testing.assert_close(jf(model, x), _scale(expected(x)))

    with torch.no_grad():
        agree()
        model[1].factor = expected[1].factor = 5.0
        agree()
        monkeypatch.setattr(f"{__name__}._factor", 7.0)
        agree()
        agree()
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (3, 1)


def test_norms_and_profiles():
    x = torch.ones(3, 4)
    compiled, written = [norm_report(build_norm_map(_model(c), x), x).rows for c in (True, False)]
    assert [(r.op, float(r.norm_size)) for r in compiled] == [(r.op, float(r.norm_size)) for r in written]
    for target in ("eager", "trace"):
        flops = [profile(_model(c), x, target=target).flops for c in (True, False)]
        assert flops[0] == flops[1] > 0
