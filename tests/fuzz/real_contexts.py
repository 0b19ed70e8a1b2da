"""Contexts that a program enters."""

from __future__ import annotations

from .real_statement import results, statements

CONTEXT = (
    "torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(False)", "torch.set_grad_enabled(n > 1)", "torch.inference_mode()", "torch.inference_mode(False)",
    "torch.autocast('cpu', dtype=torch.bfloat16)", "torch.autocast('cpu')", "torch.autocast('cpu', enabled=False)", "torch.autocast('cpu', dtype=torch.float16)", "torch.amp.autocast('cpu', torch.bfloat16, cache_enabled=False)",
    "torch.random.fork_rng(devices=[])", "torch.device('cpu')", "contextlib.nullcontext()", "contextlib.suppress(ValueError)", "torch.autograd.set_detect_anomaly(False)", "torch.autograd.profiler.record_function('a')",
    "torch.autograd.graph.save_on_cpu()", "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)", "torch.backends.mkldnn.flags(enabled=False)",
)  # fmt: skip
INSIDE = (
    "x = x * 2", "r.append(x @ x.t())", "r.append(self.lin(x))", "r.append(torch.zeros(2, 2))", "r.append(x.sum() + self.w)", "r.append(F.softmax(x @ self.lin.weight, -1))", "r.append(x.clone().mul_(2))",
    "u = x * 3\nr.append(u.requires_grad)", "r.append(x.detach())", "r.append(torch.rand(2))", "r.append(F.layer_norm(x, (4,)))", "r.append(torch.cat([x, h]))", "r.append(torch.addmm(y, x, self.lin.weight))", "r.append(F.mse_loss(self.lin(x), x))",
    "r.append(torch.bmm(x[None], x.t()[None]))", "r.append(x.pow(2).sum())", "r.append((x @ x.t()).float())", "r.append(F.cross_entropy(self.lin(x), i[1, :3].abs() % 4))", "r.append(F.scaled_dot_product_attention(x[None], x[None], x[None]))", "r.append(self.norm(x))",
    "r.append(torch.tensor(2.0) * x)", "r.append(torch.is_grad_enabled())", "r.append(torch.is_autocast_enabled('cpu'))", "r.append(torch.einsum('ab,cb->ac', x, x))", "r.append(x.view(-1))", "r.append(x.float() @ x.t().bfloat16())", "r.append(torch.matmul(h, h.t()))", "r.append(F.conv1d(x[None], x[:, :3].expand(3, 3, 3)))",
)  # fmt: skip


def _indented(lines: str) -> str:
    return "\n".join(f"    {line}" for line in lines.splitlines())


CONTEXTS = statements(
    *(f"with {c}:\n{_indented(inside)}" for n, c in enumerate(CONTEXT) for inside in INSIDE),
    *(f"with {a}:\n    with {b}:\n{_indented(_indented(INSIDE[(3 * n + m) % len(INSIDE)]))}\n    r.append(x @ x.t())" for n, a in enumerate(CONTEXT) for m, b in enumerate(CONTEXT) if a != b),
    "with torch.no_grad():\n    u = without(x)\n    x = x * 2", "with torch.no_grad():\n    u = with_grad(x)\n    r.append(x * 2)\nr.append(u)", "with torch.no_grad():\n    u = inferred(x)\n    x = x + u",
    "torch.set_grad_enabled(False)\nx = x * 2", "torch.set_grad_enabled(False)\nx = x * 2\ntorch.set_grad_enabled(True)\nx = x + 1", "p = torch.is_grad_enabled()\ntorch.set_grad_enabled(False)\nu = x * 2\ntorch.set_grad_enabled(p)\nr.append(u)",
    "torch.set_default_dtype(torch.float64)\nr.append(torch.zeros(2))\ntorch.set_default_dtype(torch.float32)", "torch.set_default_dtype(torch.float64)\nr.append(torch.tensor(1.5))\nr.append(i / 2)\ntorch.set_default_dtype(torch.float32)", "torch.set_default_device('cpu')\nr.append(torch.zeros(2))\ntorch.set_default_device(None)",
    "p = torch.are_deterministic_algorithms_enabled()\ntorch.use_deterministic_algorithms(True)\nx = x.cumsum(0)\ntorch.use_deterministic_algorithms(p)", "torch.manual_seed(3)\nr.append(torch.rand(2))", "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(3)\n    r.append(torch.rand(2))\nr.append(torch.rand(2))",
    "try:\n    with torch.no_grad():\n        u = x * 2\n        raise ValueError\nexcept ValueError:\n    r.append(u * self.w)", "with torch.no_grad() as p:\n    r.append(x * 2)", "with contextlib.ExitStack() as stack:\n    stack.enter_context(torch.no_grad())\n    r.append(x * 2)\nr.append(x * 3)", "for mode in (torch.no_grad(), torch.enable_grad()):\n    with mode:\n        r.append(x * 2)",
    "u = checkpoint(lambda t: t.sin() * self.w, x, use_reentrant=False)\nr.append(u)", "u = checkpoint(lambda t: t.sin() * 2, x, use_reentrant=True)\nr.append(u)", "r.append(checkpoint(self.lin, x, use_reentrant=False))", "r.append(checkpoint(lambda t: self.drop(t) * 2, x, use_reentrant=False))", "r.append(checkpoint(lambda t: self.norm(t), x, use_reentrant=False))",
    "with torch.no_grad():\n    r.append(checkpoint(self.lin, x, use_reentrant=False))", "with torch.autocast('cpu', dtype=torch.bfloat16):\n    r.append(checkpoint(self.lin, x, use_reentrant=False))", "r.append(checkpoint(lambda t: with_grad(t) + without(t), x, use_reentrant=False))", "r.append(checkpoint(lambda t: (t * 2, t.sum()), x, use_reentrant=True))",
    "with torch.no_grad():\n    self.w.mul_(0.5)\nr.append(x * self.w)", "with torch.no_grad():\n    u = x.clone()\nu.mul_(self.w)\nr.append(u)", "with torch.inference_mode():\n    u = x * 2\nr.append(u + 1)", "with torch.inference_mode():\n    u = x * 2\nr.append(u.clone() * self.w)", "u = x * 2\nwith torch.no_grad():\n    u.mul_(3)\nr.append(u)", "u = x * 2\nwith torch.no_grad():\n    v = u[0]\nr.append(v.requires_grad)",
    "with torch.no_grad():\n    u = self.lin(x)\nwith torch.enable_grad():\n    r.append(u * self.w)", "with torch.no_grad():\n    u = x * 2\n    u.requires_grad_()\nr.append((u * self.w).sum())",
)  # fmt: skip
CONTEXTS += results(
    "without(x)", "without(x) * self.w", "with_grad(x)", "inferred(x)", "low(x)", "(low(x), x @ x.t())", "torch.no_grad()(lambda t: t * 2)(x)", "torch.set_grad_enabled(False)", "torch.get_default_dtype()", "torch.autocast('cpu', dtype=torch.bfloat16)(self.lin)(x)", "x.requires_grad", "(x * 2).requires_grad", "(i * 2).requires_grad", "x.detach().requires_grad", "x.is_leaf", "(x * self.w).is_leaf", "x.grad", "torch.is_inference_mode_enabled()", "x.is_inference()"
)  # fmt: skip
