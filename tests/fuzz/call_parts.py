"""What programs of the subject `calls` are drawn from: statements of a module, arguments, surroundings, and what is done with a call.

In these texts ``C`` is what is called and ``A`` its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """Statements that make inputs, and a call's arguments."""

    name: str
    made: str
    passed: str = "x"


@dataclass(frozen=True)
class Action:
    """Statements that call, or that change something before a call."""

    name: str
    text: str
    weight: float = 1.0


# of a forward(self, x, y=None, *rest, k=1.5, o=None, **named)
STATEMENTS = (
    "x = self.lin(x)",
    "x = self.lin(x).tanh()",
    "x = torch.tanh(x)",
    "x = self.twin(x) + self.lin(x)",
    "x = F.linear(x, self.w)",
    "x = x * self.w[0]",
    "x = self.inner(x)",
    "x = x * k",
    "x = x + k",
    "x = x if y is None else x + y",
    "x = x * y if isinstance(y, torch.Tensor) else x - 1",
    "for r in rest: x = x * r",
    "x = x * (len(rest) + len(named) + 1)",
    "for n, v in named.items(): x = x + v * len(n)",
    "x = x if o is None else x * (o['u'] if isinstance(o, dict) else o[0] if isinstance(o, tuple) else getattr(o, 'u', 2))",
    "x = x if k is None else x / k",
    "x = x.softmax(-1)",
    "x = x.exp().sin()",
    "x = x.pow(2)",
    "x = F.gelu(x) + F.silu(x)",
    "x = x - x.mean(-1, keepdim=True)",
    "x = F.layer_norm(x, x.shape[-1:])",
    "x = x + torch.ones(4)",
    "x = x + torch.arange(4.0)",
    "x = x * torch.tensor(1.5)",
    "x = x + torch.ones_like(x)",
    "x = x + x.new_ones(4)",
    "x = x * 2 if torch.is_grad_enabled() else x",
    "x = x * 2 if x.requires_grad else x",
    "x = x * 3 if self.training else x",
    "x = x * 2 if torch.is_autocast_enabled('cpu') else x",
    "x = x * 2 if torch.is_inference_mode_enabled() else x",
    "x = x * (2 if x.dtype == torch.float32 else 3)",
    "x = x.float()",
    "x = x.to(torch.float64)",
    "x = x.reshape(-1, 4)",
    "x = x.t().contiguous().t()",
    "x = x.view(x.shape)",
    "x = x[..., :]",
    "x = x.detach()",
    "x = x.clone()",
    "with torch.no_grad(): x = x * 2",
    "with torch.no_grad(): z = self.lin(x)\nx = x + z",
    "with torch.enable_grad(): x = x * 2",
    "with torch.autocast('cpu', torch.bfloat16): x = self.lin(x)\nx = x.to(self.w.dtype)",
    "with torch.autocast('cpu', enabled=False): x = self.lin(x)",
    "x = checkpoint(self.lin, x, use_reentrant=False)",
    "x = checkpoint(lambda v: self.lin(v).tanh(), x, use_reentrant=False)",
    "x = torch.cat([x, x], 0)[: x.shape[0]]",
    "x = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]",
    "x = torch.stack([x, x]).sum(0)",
    "x = torch.where(x > 0, x, x * 0.1)",
    "x = x.clamp(min=-1)",
    "x = x.masked_fill(x < 0, 0.5)",
    "x = x * self.k",
    "x = x * self.table['a']",
    "x = x * COUNT",
    "x = x.sum()",
    "x = x.abs() if x.is_complex() else x",
    "x = x.real + x.imag if x.is_complex() else x",
    "x = Squared.apply(x)",
    "x = x.sum(-1, keepdim=True).expand_as(x) * 1",
    "z = x * 1\nz += 1\nx = z",
    "z = x * 1\nz[..., 0] = 0\nx = z",
    "x = x @ self.w",
    "x = torch.einsum('...i,ij->...j', x, self.w)",
    "x = F.relu(x, inplace=False)",
    "x = x.type_as(self.w)",
    "x = x.nan_to_num()",
    "if x.requires_grad: x.register_hook(lambda g: g * 2)",
)
# what keeps something, or draws numbers: not for calls from several threads
KEEPING = (
    "x = F.dropout(x, 0.5, self.training)",
    "x = x * torch.rand(4)",
    "x = x + torch.randn_like(x)",
    "x = x * torch.rand(4, generator=GENERATOR)",
    "x = self.norm(x)",
    "x = self.drop(x)",
    "self.count += 1",
    "self.count += 1\nx = x * self.count",
    "self.mean = x.detach().mean(0)",
    "self.seen.add_(1)\nx = x + self.seen",
    "with torch.no_grad(): self.seen.copy_(x.detach().mean())",
    "self.last = x",
    "self.kept.append(x.detach())",
    "with torch.no_grad(): self.w.mul_(1.5)",
    "x = self.inner(x) if self.count > 1 else x\nself.count += 1",
    "LOG.append(1)",
    "x = torch.func.functional_call(self.lin, {'weight': self.lin.weight * 2}, (x,))",
)  # fmt: skip
RESULTS = (
    "x",
    "x",
    "x",
    "(x, x * 2)",
    "{'a': x, 'b': (k, None)}",
    "Pair(x, [x.sum()])",
    "(x, y)",
    "Data(x, k)",
    "[x, o]",
    "x, self.w * 1",
)

HEAD = """\
import collections, contextlib, copy, functools, gc, io, numpy, pickle, weakref
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import BaseTorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from unittest import mock

COUNT, LOG, GENERATOR = 2, [], torch.Generator().manual_seed(3)

class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v * v
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] * 2

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        return x + self.lin(x).relu()

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.twin, self.inner = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), Inner()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.w = nn.Parameter(torch.eye(4) + 0.1)
        self.register_buffer("seen", torch.zeros(()))
        self.k, self.count, self.table, self.kept = 0.5, 0, {"a": 1.5}, []
    def forward(self, x, y=None, *rest, k=1.5, o=None, **named):
"""

_X = "x = torch.randn(3, 4)"
_LEAF = "x = torch.randn(3, 4).requires_grad_()"
ARGUMENTS = (
    *(Argument("a tensor", _X), Argument("a leaf", _LEAF), Argument("a leaf", _LEAF), Argument("the last", "")),
    Argument("no leaf", "x = torch.randn(3, 4).requires_grad_() * 1"),
    Argument("by keyword", _LEAF, "x=x"),
    Argument("keywords in turn", _LEAF, "k=2.5, y=x * 2, x=x"),
    Argument("None", _X, "x, None, k=1.5, o=None"),
    Argument("no number", _X, "x, k=None"),
    Argument("more positions", _LEAF, "x, x.detach(), 2.0, torch.ones(4)"),
    Argument("more names", _LEAF, "x, a=torch.ones(4), bc=2"),
    Argument("unpacked", _LEAF, "*(x, 2.0), **{'k': 2, 'o': (2.0, 'a')}"),
    Argument("a dict", _LEAF, "x, o={'u': x * 2, 'v': 3}"),
    Argument("an ordered dict", _LEAF, "x, o=collections.OrderedDict(u=torch.ones(4), v='a')"),
    Argument("a default dict", _X, "x, o=collections.defaultdict(list, u=2.0)"),
    Argument("a dataclass", _LEAF, "x, o=Data(x * 2, None)"),
    Argument("a named tuple", _LEAF, "x, o=Pair(torch.ones(4), 3)"),
    Argument("a tuple of a class", _LEAF, "x, o=Several((torch.ones(4), 3))"),
    Argument("a tuple", _LEAF, "x, o=(torch.ones(4), slice(1, 2))"),
    Argument("a string", _X, "x, o='abc'"),
    Argument("a slice", _X, "x, o=slice(0, 2)"),
    Argument("a dtype", _X, "x, o=(2, torch.float64)"),
    Argument("a module", _X, "x, o=nn.Linear(2, 2)"),
    Argument("twice", _LEAF, "x, x"),
    Argument("twice, no leaf", "x = torch.randn(3, 4).requires_grad_() * 1", "x, y=x"),
    Argument("a view of it", _LEAF, "x, x[0]"),
    Argument("two views", "z = torch.randn(6, 4).requires_grad_(); x = z[:3]", "x, z[3:]"),
    Argument("memory in common", "z = torch.randn(4, 4); x = z[:3]", "x, z[1:]"),
    Argument("transposed", "x = torch.randn(4, 3).t().requires_grad_()"),
    Argument("steps", "x = torch.randn(6, 8)[::2, ::2]"),
    Argument("expanded", "x = torch.randn(1, 4).requires_grad_().expand(3, 4)"),
    Argument("expanded, plain", "x = torch.randn(4).expand(3, 4)"),
    Argument("conjugate", "x = torch.randn(3, 4, dtype=torch.complex64).conj()"),
    Argument("complex leaf", "x = torch.randn(3, 4, dtype=torch.complex64).requires_grad_()"),
    Argument("negated", "x = torch.randn(3, 4, dtype=torch.complex64).conj().imag"),
    Argument("negated leaf", "z = torch.randn(3, 4, dtype=torch.complex64).requires_grad_(); x = z.conj().imag"),
    Argument("0-d", "x = torch.tensor(2.0).requires_grad_()"),
    Argument("0-d as second", _LEAF, "x, torch.tensor(3.0)"),
    Argument("empty", "x = torch.randn(0, 4).requires_grad_()"),
    Argument("one row", "x = torch.randn(1, 4)"),
    Argument("other rows", "x = torch.randn(5, 4).requires_grad_()"),
    Argument("three dimensions", "x = torch.randn(2, 3, 4).requires_grad_()"),
    Argument("a parameter", "x = nn.Parameter(torch.randn(3, 4))"),
    Argument("a parameter of the model", "x = m.w"),
    Argument("a part of a parameter", "x = m.w[:3]"),
    Argument("a parameter as second", _X, "x, m.w[0]"),
    Argument("a tensor of a class", "x = torch.randn(3, 4).as_subclass(Marked)"),
    Argument("a leaf of a class", "x = torch.randn(3, 4).as_subclass(Marked).requires_grad_()"),
    Argument("a second of a class", _LEAF, "x, torch.ones(4).as_subclass(Marked)"),
    Argument("a buffer", "x = nn.Buffer(torch.randn(3, 4))"),
    Argument("integers", "x = torch.arange(12).view(3, 4)"),
    Argument("double", "x = torch.randn(3, 4, dtype=torch.float64).requires_grad_()"),
    Argument("half", "x = torch.randn(3, 4, dtype=torch.bfloat16)"),
    Argument("bool", "x = torch.randn(3, 4) > 0"),
    Argument("on meta", "x = torch.randn(3, 4, device='meta')"),
    Argument("of numpy", "x = torch.from_numpy(numpy.ones((3, 4), dtype='float32'))"),
    Argument("an array as second", _X, "x, numpy.ones(4, dtype='float32')"),
    Argument("a number of numpy", _LEAF, "x, k=numpy.float32(2)"),
    Argument("an integer of numpy", _LEAF, "x, k=numpy.int64(2)"),
    Argument("an int", _LEAF, "x, k=3"),
    Argument("another int", _LEAF, "x, k=4"),
    Argument("a float", _LEAF, "x, k=3.0"),
    Argument("a bool", _LEAF, "x, k=True"),
    Argument("complex number", _LEAF, "x, k=2j"),
    Argument("a tensor as number", _LEAF, "x, k=torch.tensor(2.0)"),
    Argument("infinite", _X, "x, k=float('inf')"),
    Argument("nan", _X, "x, k=float('nan')"),
    Argument("no argument", _X, ""),
    Argument("a wrong name", _X, "x, x=x"),
    Argument("of inference", "with torch.inference_mode(): x = torch.randn(3, 4)"),
    Argument("a second of inference", _LEAF + "\nwith torch.inference_mode(): y = torch.randn(4)", "x, y"),
    Argument("made without grad", "x = torch.randn(3, 4).requires_grad_()\nwith torch.no_grad(): x = x.view(3, 4)"),
    Argument("detached", "z = torch.randn(3, 4).requires_grad_(); x = z.detach()"),
    Argument("a gradient kept", "x = torch.randn(3, 4).requires_grad_() * 1; x.retain_grad()"),
    Argument("a hook on it", "x = torch.randn(3, 4).requires_grad_(); x.register_hook(lambda g: g * 3)"),
    Argument("a result", _LEAF + "\nx = total(C(x)) * torch.ones(3, 4)"),
    Argument("channels last", "x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)"),
)  # fmt: skip

SURROUNDINGS = (
    *("torch.no_grad()", "torch.enable_grad()", "torch.inference_mode()", "torch.inference_mode(False)", "torch.set_grad_enabled(False)"),
    *("torch.autocast('cpu', torch.bfloat16)", "torch.autocast('cpu', torch.float16)", "torch.autocast('cpu', enabled=False)"),
    *("torch.autocast('cpu', torch.bfloat16, cache_enabled=False)", "default_dtype(torch.float64)", "default_dtype(torch.bfloat16)"),
    *("torch.device('cpu')", "torch.device('meta')", "default_device('cpu')", "default_device('meta')", "deterministic()"),
    *("torch.autograd.detect_anomaly()", "torch.autograd.detect_anomaly(check_nan=False)", "Counting()", "Tripling()", "Dispatched()"),
    *("Quadrupling()", "FlopCounterMode(display=False)", "BaseTorchFunctionMode()", "torch._C.DisableTorchFunctionSubclass()"),
    *("torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1)", "torch.autograd.graph.save_on_cpu()"),
    *("torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().resolve_conj().resolve_neg().numpy().copy(), lambda a: torch.from_numpy(a))",),
    *("torch.autograd.graph.disable_saved_tensors_hooks('no hooks')", "torch.autograd.graph.allow_mutation_on_saved_tensors()"),
    *("torch.autograd.set_multithreading_enabled(False)", "parametrize.cached()", "sdpa_kernel(SDPBackend.MATH)"),
    *("torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])", "torch.random.fork_rng(devices=[])"),
    *("mock.patch.object(m, 'k', 3.0)", "mock.patch.object(torch, 'tanh', torch.sin)", "torch.backends.mkldnn.flags(enabled=False)"),
    *("torch.compiler.set_stance('force_eager')", "contextlib.redirect_stdout(io.StringIO())", "torch.utils._device.DeviceContext('cpu')"),
    *("torch.autograd.forward_ad.dual_level()", "mock.patch.dict(m.table, {'a': 4.0})", "torch.profiler.record_function('f')"),
    *("torch.autograd._force_original_view_tracking(True)", "torch.autograd.grad_mode.set_multithreading_enabled(True)"),
)  # fmt: skip

_OF = "[x, *m.parameters()]"
# either autograd notices that what it has kept was changed, or the gradients are those from before
_NOTICED = f"try: h = gradients(r, {_OF})\nexcept RuntimeError: h = g\nout((r, g, h))"
CALLS = (
    Action("call", "out(C(A))", 6),
    Action("backward", "r = C(A)\nout(r)\nbackward(r)", 4),
    Action("gradients", f"out(gradients(C(A), {_OF}))", 3),
    Action("gradients twice", f"r = C(A)\nout(gradients(r, {_OF}, retain_graph=True))\nout(gradients(r, {_OF}))"),
    Action("backward twice", "r = C(A)\nbackward(r, retain_graph=True)\nbackward(r)\nout(r)"),
    Action("backward after release", "r = C(A)\nl = total(r)\nif l.requires_grad: l.backward(); l.backward()"),
    Action("second gradients", f"g = gradients(C(A), {_OF}, create_graph=True)\nout(g)\nout(gradients(g, {_OF}))"),
    Action("two graphs", f"r = C(A)\nq = C(A)\nout((r, q, gradients(r, {_OF}), gradients(q, {_OF})))"),
    Action("two graphs, last first", f"r = C(A)\nq = C(A)\nout(gradients(q, {_OF}))\nout(gradients(r, {_OF}))"),
    Action("of some", "out(gradients(C(A), [x]))\nout(gradients(C(A), [m.w]))"),
    Action("with inputs", "r = total(C(A))\nif r.requires_grad: r.backward(inputs=[p for p in (m.w, m.lin.weight)])"),
    Action("after a change", f"r = C(A)\ng = gradients(r, {_OF}, retain_graph=True)\nwith torch.no_grad(): m.lin.weight.mul_(2)\n{_NOTICED}"),
    Action(
        "after a change of the input",
        "r, p = C(A), [*m.parameters()]\ng = gradients(r, p, retain_graph=True)\nx.detach().add_(1)\n"
        "try: h = gradients(r, p)\nexcept RuntimeError: h = g\nout((g, h))",
    ),
    Action(
        "a result changed",
        "r = [t for t in tree_leaves(C(A)) if isinstance(t, torch.Tensor)]\n"
        f"g = gradients([r[0] * 2, *r[1:]], {_OF}, retain_graph=True)\n"
        f"try: r[0].mul_(2); h = gradients(r, {_OF})\n"
        "except RuntimeError: h = g\nout((g, h))",
    ),
    Action("in a checkpoint", f"out(gradients(checkpoint(C, A, use_reentrant=False), {_OF}))"),
    Action("in a reentrant checkpoint", f"out(gradients(checkpoint(C, x, use_reentrant=True), {_OF}))"),
    Action("vmap", "out(torch.func.vmap(C)(torch.stack([x, x * 2])))"),
    Action("vmap, random", "out(torch.func.vmap(C, randomness='different')(torch.stack([x, x * 2])))", 0.5),
    Action("func.grad", "out(torch.func.grad(lambda v: total(C(v)))(x))"),
    Action("func.vjp", "out(torch.func.vjp(lambda v: total(C(v)), x)[1](torch.tensor(2.0, dtype=torch.float64)))", 0.5),
    Action("func.jvp", "out(torch.func.jvp(lambda v: total(C(v)), (x,), (torch.ones_like(x),)))"),
    Action("jacrev", "out(torch.func.jacrev(lambda v: total(C(v)))(x))", 0.5),
    Action("per sample", "out(torch.func.vmap(torch.func.grad(lambda v: total(C(v[None]))))(x))", 0.5),
    Action("hessian", "out(torch.autograd.functional.hessian(lambda v: total(C(v)), x))", 0.5),
    Action("autograd.jacobian", "out(torch.autograd.functional.jacobian(lambda v: total(C(v)), x))", 0.5),
    Action("functional_call", "p = {n: t.detach() * 2 for n, t in m.named_parameters()}\na, b = given(A)\nout(torch.func.functional_call(c, p, a, b))"),
    Action("functional_call, gradients", "p = {n: (t.detach() * 2).requires_grad_() for n, t in m.named_parameters()}\na, b = given(A)\nout(gradients(torch.func.functional_call(c, p, a, b), list(p.values())))"),
    Action("grad of functional_call", "p = {n: t.detach() for n, t in m.named_parameters()}\nout(torch.func.grad(lambda p: total(torch.func.functional_call(c, p, (x,))))(p))", 0.5),
    Action("torch.compile", f"out(gradients(torch.compile(lambda *a, **b: C(*a, **b), backend='eager')(A), {_OF}))", 0.15),
    Action("dual numbers", "with torch.autograd.forward_ad.dual_level():\n    v = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))\n    out(list(torch.autograd.forward_ad.unpack_dual(total(C(v)))))"),
    Action("a function around", f"out(gradients(J(lambda *a, **b: C(*a, **b))(A), {_OF}))", 2),
    Action("a function around, other", f"out(gradients(K(lambda *a, **b: C(*a, **b))(A), {_OF}))", 1.5),
    Action("a module around", f"n = nn.Sequential(c, nn.Tanh())\nout(gradients(n(x), {_OF}))"),
    Action("a compiled module around", f"n = J(nn.Sequential(c, nn.Tanh()))\nout(gradients(n(x), {_OF}))\nout(sorted(n.state_dict()))"),
    Action("again on its result", f"out(gradients(C(C(x)), {_OF}))"),
    Action("grad of ours", "out(G(lambda v: total(C(v)))(x))"),
    Action("hooks on results", "r = total(C(A))\nif r.requires_grad: r.register_hook(lambda g: log.append(float(g)))\nbackward(r)"),
    Action("a hook that raises", "r = total(C(A))\nif r.requires_grad: r.register_hook(Interrupting(ValueError('hook')))\ntry: backward(r)\nexcept ValueError as e: out(str(e))\nout(C(A))"),
    Action("is it let go", "r = C(A)\nq = [weakref.ref(t) for t in tree_leaves(r) if isinstance(t, torch.Tensor) and t is not x and t is not y]\ndel r\ngc.collect()\nout([t() is None for t in q])", 1.5),
    Action("is the input let go", "v = x.detach().clone().requires_grad_()\nq = weakref.ref(v)\nr = C(v)\ndel r, v\ngc.collect()\nout(q() is None)"),
    Action("a graph kept", "kept.append(C(A))"),
    Action("a graph that was kept", f"while kept: out(gradients(kept.pop(), {_OF}))"),
    Action("state changed by a copy", "n = copy.deepcopy(c)\nout(n(A))\nout(gradients(n(A), list(n.parameters())))\nout(n.state_dict())"),
    Action("a copy by bytes", "n = pickled(c)\nout(n(A))\nout(gradients(n(A), list(n.parameters())))"),
    Action("a copy of the module", "n = J(copy.deepcopy(m))\nout(gradients(n(A), list(n.parameters())))"),
    Action("another of the module", f"n = J(m)\nout(gradients(n(A), {_OF}))\nout(C(A))"),
    Action("another, of other transforms", f"n = K(m)\nout(gradients(n(A), {_OF}))\nout(C(A))"),
    Action("a module that shares", f"n = Module()\nn.lin, n.w = m.lin, m.w\nn = J(n)\nout(gradients((n(A), C(A)), {_OF}))"),
    Action("a method", f"out(gradients(J(m.forward)(A), {_OF}))"),
    Action("a partial", f"a, b = given(A)\nout(gradients(J(functools.partial(m, **b))(*a), {_OF}))"),
    Action("in threads", "out(in_threads(3, lambda n: C(A)))", 2),
    Action("in threads, modes", "def f(n):\n    with torch.set_grad_enabled(n % 2 == 0): return C(x * n)\nout(in_threads(3, f))", 1.5),
    Action("in threads, gradients", f"out(in_threads(3, lambda n: gradients(C(x * n), {_OF})))", 1.5),
    Action("in threads, shapes", "out(in_threads(3, lambda n: C(torch.ones(n + 1, 4))))"),
    Action("in threads, autocast", "def f(n):\n    with torch.autocast('cpu', torch.bfloat16, enabled=n > 0): return C(A)\nout(in_threads(2, f))"),
    Action("in threads, new", "n = J(m)\nout(in_threads(3, lambda i: n(A)))"),
    Action("backward in a thread", f"r = C(A)\nout(in_threads(1, lambda n: gradients(r, {_OF})))"),
    Action("FLOPs", "with FlopCounterMode(display=False) as f: C(A)\nout(f.get_total_flops())", 0.7),
    Action("in fake mode", "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode(allow_non_fake_inputs=True): out([tuple(t.shape) for t in tree_leaves(C(torch.ones(3, 4))) if isinstance(t, torch.Tensor)])", 0.7),
)  # fmt: skip

_HOOKED = ("r * 2", "None")
BETWEEN = (
    *(Action(t, t) for t in ("m.eval()", "m.train()", "c.eval()", "c.train()", "m.double()", "m.float()", "c.double()", "c.float()", "m.bfloat16()")),
    *(Action(t, t) for t in ("m.requires_grad_(False)", "m.requires_grad_(True)", "c.requires_grad_(False)", "m.lin.weight.requires_grad_(False)")),
    *(Action(t, t) for t in ("m.zero_grad()", "m.zero_grad(set_to_none=False)", "c.zero_grad()", "gc.collect()", "COUNT += 1", "m.k = 2.5", "m.k = 2", "c.k = 3.5")),
    *(Action(t, t) for t in ("m.count = 5", "m.table['a'] = 3.0", "m.table = {'a': torch.ones(4)}", "m.kept.clear()", "m.kept = []", "LOG.clear()")),
    Action("load a state", "m.load_state_dict({n: t * 1.5 if t.is_floating_point() else t for n, t in m.state_dict().items()})"),
    Action("load into the compiled", "c.load_state_dict({n: t * 1.5 if t.is_floating_point() else t for n, t in c.state_dict().items()})"),
    Action("assign a state", "m.load_state_dict({n: t * 1.5 if t.is_floating_point() else t for n, t in m.state_dict().items()}, assign=True)"),
    Action("assign into the compiled", "c.load_state_dict({n: t * 1.5 if t.is_floating_point() else t for n, t in c.state_dict().items()}, assign=True)"),
    *(Action("a forward hook", f"{o}.register_forward_hook(lambda m, a, r: {r})") for o in ("m", "c", "m.lin", "m.inner") for r in _HOOKED),
    Action("a forward hook with keywords", "m.register_forward_hook(lambda m, a, k, r: (log.append(sorted(k)), None)[1], with_kwargs=True)"),
    *(Action("a forward hook in front", f"{o}.register_forward_pre_hook(lambda m, a: {r})") for o in ("m", "c", "m.lin") for r in ("None", "(a[0] * 2, *a[1:]) if a else None")),
    Action("a forward hook in front with keywords", "m.register_forward_pre_hook(lambda m, a, k: (a, {**k, 'k': 3.0}), with_kwargs=True)"),
    *(Action("a backward hook", f"{o}.register_full_backward_hook(lambda m, i, o: {r})") for o in ("m", "m.lin", "m.inner") for r in ("None", "tuple(g and g * 2 if g is None else g * 2 for g in i)")),
    Action("a backward hook of the compiled", "c.register_full_backward_hook(lambda m, i, o: None)"),
    Action("a backward hook in front", "m.lin.register_full_backward_pre_hook(lambda m, o: tuple(None if g is None else g * 2 for g in o))"),
    Action("a hook of a parameter", "m.lin.weight.register_hook(lambda g: g * 2) if m.lin.weight.requires_grad else None"),
    Action("a hook of a parameter that looks", "m.w.register_hook(lambda g: log.append(float(g.sum().round(decimals=2)))) if m.w.requires_grad else None"),
    Action("a hook after accumulation", "m.lin.weight.register_post_accumulate_grad_hook(lambda p: (log.append(tuple(p.grad.shape)), p.grad.mul_(2))) if m.lin.weight.requires_grad else None"),
    Action("a step in a hook", "def step(p):\n    with torch.no_grad(): p.sub_(p.grad, alpha=0.1)\n    p.grad = None\nfor p in m.parameters():\n    if p.requires_grad: p.register_post_accumulate_grad_hook(step)"),
    Action("a hook that raises", "h = m.lin.register_forward_hook(Interrupting(ValueError('hook')))\ntry: out(C(A))\nexcept ValueError as e: out(str(e))\nh.remove()"),
    Action("a hook that interrupts", "h = m.lin.register_forward_hook(Interrupting(KeyboardInterrupt()))\ntry: out(C(A))\nexcept KeyboardInterrupt: out('interrupted')\nh.remove()"),
    Action("an interrupt, the hook stays", "m.lin.register_forward_pre_hook(Interrupting(KeyboardInterrupt()))\ntry: out(C(A))\nexcept KeyboardInterrupt: out('interrupted')"),
    Action("hooks of all modules", "from torch.nn.modules.module import register_module_forward_hook as g\nh = g(lambda m, a, r: log.append(type(m).__name__) if type(m) is nn.Linear else None)\ntry: out(C(A))\nfinally: h.remove()"),
    Action("another submodule", "m.lin = nn.Linear(4, 4)"),
    Action("another submodule of the compiled", "c.lin = nn.Linear(4, 4)"),
    Action("a submodule more", "m.more = nn.Linear(4, 4)\nout(sorted(c.state_dict()))"),
    Action("without a bias", "m.lin.bias = None"),
    Action("a submodule less", "del m.inner"),
    Action("identity", "m.inner = nn.Identity()"),
    Action("another parameter", "m.w = nn.Parameter(torch.eye(4) * 2)"),
    Action("a tied parameter", "m.lin.weight = m.w"),
    Action("another forward", "m.lin.forward = lambda x: x * 2"),
    Action("another forward of the class", "Inner.forward = lambda self, x: x * 3"),
    Action("a wrapped forward", "f = m.forward\nm.forward = lambda *a, **k: f(*a, **k)"),
    Action("swapped tensors", "torch.utils.swap_tensors(m.w, nn.Parameter(torch.eye(4) * 3))"),
    Action("other data", "m.w.data = m.w.data * 2"),
    Action("changed in place", "with torch.no_grad():\n    for p in m.parameters(): p.mul_(1.1)"),
    Action("a step", "torch.optim.SGD(m.parameters(), 0.1).step()"),
    Action("a step of Adam", "torch.optim.Adam(c.parameters(), 0.1).step()"),
    Action("spectral norm", "parametrizations.orthogonal(m.twin) if not parametrize.is_parametrized(m.twin) else None"),
    Action("weight norm", "parametrizations.weight_norm(m.lin) if not parametrize.is_parametrized(m.lin) else None"),
    Action("a parametrization less", "parametrize.remove_parametrizations(m.lin, 'weight') if parametrize.is_parametrized(m.lin) else None"),
    Action("pruned", "from torch.nn.utils import prune\nprune.l1_unstructured(m.inner.lin, 'weight', 0.5)"),
    Action("compiled anew", "c = J(m)"),
    Action("compiled with others", "c = K(m)"),
    Action("compiled of a copy", "m = copy.deepcopy(m)\nc = J(m)"),
    Action("compiled of bytes", "m = pickled(m)\nc = J(m)"),
    Action("the copy of the compiled", "c = m = copy.deepcopy(c)"),
    Action("the bytes of the compiled", "c = m = pickled(c)"),
    Action("without compiled ones", "c = None\ngc.collect()\nc = J(m)"),
    Action("one without gradients", "m.lin.weight.grad = None\nx.grad = None"),
    Action("children", "out([n for n, _ in c.named_modules()])\nout([n for n, _ in c.named_parameters()])\nout(c.training)"),
    Action("applied", "c.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)"),
    Action("to meta and back", "m.to_empty(device='cpu')\nwith torch.no_grad():\n    for t in (*m.parameters(), *m.buffers()): t.fill_(0.5)\nm.zero_grad()"),
    Action("share memory", "m.share_memory()"),
)  # fmt: skip
