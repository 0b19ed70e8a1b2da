"""Views, writes into them, and the memory of results."""

from __future__ import annotations

from .real_statement import results, statements

VIEW_OF = (
    "{t}.unfold(1, 2, 1)", "{t}.unfold(0, 2, 2)", "{t}.unfold(-1, 4, 1)", "{t}.as_strided((2, 2), (4, 1))", "{t}.as_strided((2, 2), (4, 1), 1)",
    "{t}.diagonal()", "torch.diagonal({t}, 1)", "{t}.chunk(2, 1)[1]", "{t}.split(2, 1)[0]", "torch.split({t}, [1, 3], dim=1)[1]", "{t}.unbind(1)[2]",
    "{t}.expand(2, 3, 4)[0]", "{t}.movedim(0, 1)", "{t}.transpose(0, 1)", "{t}.t()", "{t}.T", "{t}.mT", "{t}.view(-1)", "{t}.view(2, 6)",
    "{t}.reshape(12)", "{t}.flatten()", "{t}.unsqueeze(0)", "{t}[None]", "{t}[0]", "{t}[1:]", "{t}[:, ::2]", "{t}[..., -1]", "{t}[-1, 1:3]",
    "{t}.narrow(1, 1, 2)", "{t}.select(0, 1)", "{t}.squeeze()", "{t}.detach()", "{t}.data", "{t}.view_as({t})", "{t}.unflatten(1, (2, 2))",
    "{t}.swapaxes(0, 1)", "{t}.permute(1, 0)", "{t}.tensor_split(2, dim=1)[0]", "torch.hsplit({t}, 2)[1]", "{t}.contiguous()", "{t}.to(torch.float32)",
    "{t}.float()", "{t}.real", "{t}.expand_as({t})", "{t}.broadcast_to(3, 4)", "torch.atleast_2d({t})", "{t}.ravel()", "{t}.type_as({t})",
    "{t}.requires_grad_()", "torch.view_copy({t}, (12,))", "{t}.positive()", "{t}.conj()", "{t}.clone()", "{t} * 1", "{t}.index_select(1, i[1, 1:2])",
    "{t}.view(torch.int32)", "{t}.adjoint()", "{t}.dropout(0.0, True)" if False else "F.dropout({t}, 0.0)", "{t}.repeat(1, 1)", "nn.Identity()({t})",
)  # fmt: skip
WRITE = (
    "v.mul_(2)", "v.add_(1)", "v += 1", "v.zero_()", "v.fill_(0.5)", "v[0] = 3.0", "v[...] = 2.0", "v.copy_(v * 2)", "v.copy_(z)", "v.relu_()",
    "torch.add(v, 1, out=v)", "v.clamp_(max=0.1)", "v.masked_fill_(v > 0, 0.5)", "v.div_(2)", "v.sub_(self.w.sum())", "v.mul_(z)",
    "v.data.mul_(2)", "v.detach().add_(1)", "v.neg_()", "v.exp_()", "F.relu(v, inplace=True)", "v[v > 0] = 0.1", "v.index_fill_(0, i[1, 0:1].abs() * 0, 2.0)",
)  # fmt: skip
TARGETS = ("x", "x0", "y", "x.clone()", "(x * 2)", "d['a']", "torch.zeros(3, 4)", "self.mean")

WRITES = statements(
    *(f"v = {view.format(t='x')}\n{WRITE[(7 * n) % len(WRITE)]}\nr.append(v)" for n, view in enumerate(VIEW_OF)),
    *(f"x = x.clone()\nv = {view.format(t='x')}\n{WRITE[(5 * n + 1) % len(WRITE)]}" for n, view in enumerate(VIEW_OF)),
    *(f"u = x * 2\nv = {view.format(t='u')}\n{WRITE[(3 * n + 2) % len(WRITE)]}\nr.append(u)" for n, view in enumerate(VIEW_OF)),
    *(f"u = torch.zeros(3, 4)\nv = {view.format(t='u')}\n{WRITE[(11 * n + 3) % len(WRITE)]}\nr.append(u + x)" for n, view in enumerate(VIEW_OF)),
    *(f"v = {t}\n{w}" for t in TARGETS for w in WRITE),
    *(f"v = {view.format(t='x')}\nx = x * 2\nr.append(v)" for view in VIEW_OF),
    "v = torch.view_as_real(c)\nv.mul_(2)\nr.append(c)", "c.real.add_(1)\nr.append(c)", "c.imag.zero_()\nr.append(c)", "v = c.conj()\nv.mul_(2j)\nr.append(c)",
    "c.real = x\nr.append(c)", "u = torch.view_as_complex(x.view(3, 2, 2))\nu.mul_(2j)", "u = c * x\nu.real.mul_(2)\nr.append(u)", "u = c.clone()\nu.imag = x\nr.append(u)",
    "y.copy_(x[0])\nr.append(y)", "y.add_(x.sum(0))\nr.append(y)", "y[1:] = x[0, 1:]\nr.append(y)", "y.mul_(self.w)\nr.append(y)", "y.add_(1)\nx = x + y",
    "d['a'].mul_(self.w)", "l[0].add_(x[0])\nr.append(l[0] * 2)", "u = x.expand(2, 3, 4)\nu[0] = 1.0\nr.append(u)", "u = y.expand(3, 4)\nu.add_(1)\nr.append(u)",
    "u = torch.zeros(4).expand(3, 4)\nu[0] = y\nr.append(u)", "u = torch.zeros(1, 4).expand(3, 4).contiguous()\nu[0] = y\nr.append(u)",
    "i.add_(1)\nr.append(i)", "b.logical_not_()\nr.append(b)", "h.mul_(2)\nr.append(h)", "i[b] = 0\nr.append(i)", "b[0] = True\nr.append(b)", "b &= x > 0\nr.append(b)",
    "y.resize_(4)", "y.t_()", "u = x * 2\nu.t_()\nr.append(u)", "u = x * 2\nu.unsqueeze_(0)\nr.append(u)", "u = x * 2\nu.squeeze_()\nr.append(u)", "u = x.clone()\nu.transpose_(0, 1)\nr.append(u)",
    "u = torch.empty(3, 4)\ntorch.mul(x, 2, out=u)\nr.append(u)", "u = torch.empty_like(x)\nu[:] = x\nr.append(u)", "u = x.new_zeros(3, 4)\nu[:, 1:3] += x[:, 1:3]\nr.append(u)",
    "with torch.no_grad():\n    self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)\nx = x - self.mean", "self.mean = x.mean(0).detach()\nx = x - self.mean", "self.count += 1\nr.append(self.count)",
    "self.count.add_(1)\nx = x * self.count", "self.mean[0] = x[0, 0].detach()\nr.append(self.mean)", "self.mean = self.mean + 1\nr.append(self.mean * 1)", "self.last = x.detach()\nr.append(self.last)",
    "u = x.clone()\nfor j in range(3):\n    u[j] = u[j - 1] * 2\nr.append(u)", "u = x.clone()\nu[:, 0], u[:, 1] = u[:, 1], u[:, 0]\nr.append(u)", "u = x.clone()\nu[[0, 1]] = u[[1, 0]]\nr.append(u)",
    "u = x.clone()\nu.index_add_(0, i[1, :2].abs() % 3, x[:2])\nr.append(u)", "u = x.clone()\nu.scatter_(1, i.abs() % 4, 0.5)\nr.append(u)", "u = x.clone()\nu.scatter_add_(1, i.abs() % 4, x)\nr.append(u)",
    "u = torch.zeros(3, 4)\nu.index_put_((i[1, :3].abs() % 3,), x)\nr.append(u)", "u = torch.zeros(3, 4)\nu.index_put_((i[1, :3].abs() % 3,), x, accumulate=True)\nr.append(u)", "u = x.clone()\nu.diagonal().copy_(y[:3])\nr.append(u)",
    "u = x.clone()\nu.fill_diagonal_(0)\nr.append(u)", "u = torch.ones(3, 4)\nu.masked_scatter_(b, x)\nr.append(u)", "u = x.clone()\nu.uniform_()\nr.append(u)", "u = torch.empty(3).normal_()\nr.append(u)", "u = x.clone()\nu.bernoulli_(0.5)\nr.append(u)",
    "u = x.clone()\nu.t()[1] = 0.0\nr.append(u)", "u = x.clone()\nu.view(-1)[::2] *= 3\nr.append(u)", "u = x.clone()\nu.unsqueeze(0).squeeze(0)[1] += y\nr.append(u)", "u = x.clone()\nw = u[0]\nu.mul_(2)\nr.append(w)", "u = x.clone()\nw = u.t()\nw[0] = 1.0\nu[0] = 2.0\nr.append(w)",
)  # fmt: skip
VIEWS = (
    *results(
        *(v.format(t="x") for v in VIEW_OF),
        *(v.format(t="x0") for v in VIEW_OF[:20]),
        "x.unbind()",
        "x.split(1)",
        "i.view(-1)",
        "c.real",
        "c.imag",
        "torch.view_as_real(c)",
        "y",
        "x0",
        "d",
        "l",
        "l[0]",
        "(x, x)",
        "self.mean",
        "self.w",
        "self.w * 1",
        "self.lin.weight.t()",
        "z.expand(3)",
    ),
    *WRITES,
)
