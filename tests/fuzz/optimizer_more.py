"""More parts of models as text: tables and heads in their spellings, modulations, mixtures without softmax, tokens that are learned, state spaces."""

from __future__ import annotations

import random

from .optimizer_attentions import TOKENS, WIDTH, Part, cut_apart, projection, rows_of
from .optimizer_truth import Cut, Known

GAIN, BIAS = Known("gain", "entries", mass="light"), Known("bias", "rows", mass="light")
HEAD = Known("head", "matrix", mass="heavy")
TABLE = Known("table", "rows", mass="tokens")

# of tokens: lines that make the table, and what looks rows up
TABLES = (
    ("nn.Embedding(11, 8)", "self.table(inputs)", "table.weight"),
    ("nn.Embedding(11, 8, padding_idx=0)", "self.table(inputs)", "table.weight"),
    ("nn.Embedding(11, 8)", "F.embedding(inputs, self.table.weight)", "table.weight"),
    ("nn.Embedding(11, 8)", "self.table.weight[inputs]", "table.weight"),
    ("nn.Parameter(torch.randn(11, 8))", "self.table[inputs]", "table"),
    ("nn.Parameter(torch.randn(11, 8))", "self.table[inputs.long(), :]", "table"),
    ("nn.Parameter(torch.randn(11, 8))", "self.table.index_select(0, inputs.flatten()).view(2, 5, 8)", "table"),
    ("nn.Parameter(torch.randn(11, 8))", "torch.stack([self.table[i] for i in inputs])", "table"),
    ("nn.Parameter(torch.randn(11, 8))", "self.table.gather(0, inputs.view(-1, 1).expand(-1, 8)).view(2, 5, 8)", "table"),
    ("nn.Parameter(torch.randn(11, 8))", "F.embedding(inputs, self.table) * 8**0.5", "table"),
    ("nn.Parameter(torch.randn(11, 8))", "torch.take_along_dim(self.table, inputs.view(-1, 1), 0).view(2, 5, 8)", "table"),
    ("nn.Parameter(torch.randn(11, 8))", "torch.index_select(self.table, 0, inputs.reshape(-1)).unflatten(0, (2, 5))", "table"),
)

_LINEAR = ("nn.Linear(8, 11, bias=False)", "head.weight", (0, 1))
_PLAIN = ("nn.Parameter(torch.randn(11, 8) / 3)", "head", (0, 1))
_SECOND = ("nn.Parameter(torch.randn(8, 11) / 3)", "head", (1, 0))
# how a head is kept, and what is returned
HEADS = (
    (_LINEAR, "return self.head(x)"),
    (_LINEAR, "return self.head(x).softmax(-1)"),
    (_LINEAR, "return {'logits': self.head(x), 'hidden': F.rms_norm(x, (8,))}"),
    (_LINEAR, "return self.head(F.rms_norm(x, (8,))), F.rms_norm(x, (8,))"),
    (_LINEAR, "return self.head(x).flatten(1)"),
    (_LINEAR, "return self.head(x.mean(1))"),
    (_LINEAR, "return self.head(x[:, -1]).sigmoid()"),
    (_LINEAR, "return torch.stack([self.head(x[:, i]) for i in range(5)], 1)"),
    (_LINEAR, "return torch.cat([self.head(t) for t in x.split(2, 1)], 1)"),
    (_LINEAR, "return self.head(x).logsumexp(-1).mean()"),
    (
        _LINEAR,
        "y = self.head(x)\nreturn F.cross_entropy(y.flatten(0, 1), torch.arange(10)) + 1e-3 * y.logsumexp(-1).square().mean()",
    ),
    (_LINEAR, "return 30 * torch.tanh(self.head(x) / 30)"),
    (_LINEAR, "return self.head(x).masked_fill(torch.arange(11) == 3, -1e4)"),
    (_LINEAR, "y = self.head(x)\nreturn F.cross_entropy(y.flatten(0, 1), torch.arange(10))"),
    (_LINEAR, "return F.cross_entropy(self.head(x).mT, torch.arange(10).view(2, 5))"),
    (_LINEAR, "return F.cross_entropy(self.head(x[:, :-1]).reshape(-1, 11), torch.arange(8), label_smoothing=0.1)"),
    (_LINEAR, "return F.nll_loss(self.head(x).log_softmax(-1).flatten(0, 1), torch.arange(10))"),
    (_LINEAR, "y = self.head(x)\nreturn (y.logsumexp(-1) - y.gather(-1, torch.arange(10).view(2, 5, 1)).squeeze(-1)).mean()"),
    (_LINEAR, "return F.mse_loss(self.head(x), torch.zeros(2, 5, 11))"),
    (_LINEAR, "return (self.head(x) - 1).square().mean()"),
    (_LINEAR, "return F.binary_cross_entropy_with_logits(self.head(x), torch.ones(2, 5, 11))"),
    (_LINEAR, "return F.kl_div(self.head(x).log_softmax(-1), torch.ones(2, 5, 11) / 11, reduction='batchmean')"),
    (_LINEAR, "return F.smooth_l1_loss(self.head(x), torch.ones(2, 5, 11))"),
    (_LINEAR, "return -self.head(x).log_softmax(-1)[..., 2].mean()"),
    (_LINEAR, "return self.head(x).float()"),
    (_PLAIN, "return F.linear(x, self.head)"),
    (_PLAIN, "return x @ self.head.T"),
    (_PLAIN, "return torch.einsum('btd,vd->btv', x, self.head)"),
    (_PLAIN, "return torch.cat([F.linear(x, w) for w in self.head.split(4)], -1)"),
    (_PLAIN, "return torch.matmul(x, self.head.mT)"),
    (_PLAIN, "return torch.tensordot(x, self.head, ([2], [1]))"),
    (_SECOND, "return x @ self.head"),
    (_SECOND, "return torch.einsum('btd,dv->btv', x, self.head)"),
    (_SECOND, "return torch.mm(x.flatten(0, 1), self.head).unflatten(0, (2, 5))"),
    (_SECOND, "return torch.bmm(x, self.head.expand(2, -1, -1))"),
    (_SECOND, "return (x[..., None, :] @ self.head).squeeze(-2)"),
)


def modulated(rng: random.Random, n: str, is_first: bool) -> Part:
    """Scales and shifts that a matrix makes of a mean, of all tokens (FiLM, adaptive normalizations)."""
    names = rng.sample(("a", "b", "c"), rng.choice((2, 3)))
    init, product, params, _ = projection(
        rng,
        f"{n}m",
        WIDTH * len(names),
        "h.mean(1, keepdim=True)",
        ("linear", "F.linear", "transposed", "matmul"),
        is_first=is_first,
    )
    cut = (
        cut_apart(rng, "y", names, [WIDTH] * len(names))
        .replace(".view(2, -1,", ".view(2, 1,")
        .replace(".reshape(2, -1,", ".reshape(2, 1,")
    )
    rows = rows_of(
        [cut.replace("view(2, 1,", "view(2, -1,").replace("reshape(2, 1,", "reshape(2, -1,")], names, WIDTH * len(names)
    )
    init = [*init, f"self.{n}o = nn.Linear({WIDTH}, {WIDTH}, bias=False)"]
    used = {"a": f"x = x + self.{n}o(x) * (1 + a)", "b": "x = x + b", "c": f"x = x + c * self.{n}o(x).tanh()"}
    cuts = tuple(Cut(None, tuple(rows[name].tolist())) for name in names)
    known = [
        (name, Known(**fields | {"cuts": cuts, "mass": "" if fields["role"] == "matrix" else "light"})) for name, fields in params
    ]
    known.append((f"{n}o.weight", Known("matrix" if {*names} & {"a", "c"} else "unused", "matrix")))
    return Part("modulated", tuple(init), (f"y = {product}", cut, *(used[name] for name in names)), tuple(known))


_MIXED = (  # of q, k and v, without a softmax
    "y = torch.einsum('btd,bsd,bse->bte', q, k, v) / 5",
    "y = q @ (k.mT @ v) / 5",
    "y = (q @ k.mT).tril() @ v / 5",
    "y = (q @ k.mT).sigmoid() @ v / 5",
    "y = q.sigmoid() * (k.softmax(1) * v).sum(1, keepdim=True)",
    "y = q.sigmoid() * (k.exp() * v).cumsum(1) / k.exp().cumsum(1)",
    "y = F.elu(q + 1) @ (F.elu(k + 1).mT @ v) / 5",
    "y = (q * k).cumsum(1) * v / 5",
)


def linear_attention(rng: random.Random, n: str, is_first: bool) -> Part:
    """Three parts of one product, and no attention of scores."""
    width, names = rng.choice((4, 6)), rng.sample("qkv", 3)
    init, product, params, _ = projection(
        rng, f"{n}qkv", 3 * width, "h", ("linear", "F.linear", "transposed", "matmul", "einsum", "joined"), is_first=is_first
    )
    cut = cut_apart(rng, "y", names, [width] * 3)
    rows = rows_of([cut], "qkv", 3 * width)
    cuts = tuple(Cut(None, tuple(rows[name].tolist())) for name in names)
    known = [
        (name, Known(**fields | {"cuts": cuts, "mass": "" if fields["role"] == "matrix" else "light"})) for name, fields in params
    ]
    how = rng.choice(_MIXED)
    forward = (f"y = {product}", cut, how, f"x = x + self.{n}out(y)")
    known.append((f"{n}out.weight", Known("matrix", "matrix")))
    return Part(f"mixed: {how}", (*init, f"self.{n}out = nn.Linear({width}, {WIDTH}, bias=False)"), forward, tuple(known))


def selective(rng: random.Random, n: str, is_first: bool) -> Part:
    """A gate beside what a convolution of each channel by itself, and a recurrence, go over (Mamba, RG-LRU)."""
    hidden, names = rng.choice((4, 6)), rng.sample("az", 2)
    init, product, params, _ = projection(
        rng, f"{n}in", 2 * hidden, "h", ("linear", "F.linear", "matmul", "transposed"), is_first=is_first
    )
    cut = cut_apart(rng, "y", names, [hidden, hidden])
    rows = rows_of([cut], "az", 2 * hidden)
    cuts = tuple(Cut({"z": "gate", "a": None}[name], tuple(rows[name].tolist())) for name in names)
    init += [f"self.{n}c = nn.Conv1d({hidden}, {hidden}, 3, padding=2, groups={hidden})", f"self.{n}d = nn.Parameter(torch.rand({hidden}))", f"self.{n}out = nn.Linear({hidden}, {WIDTH}, bias=False)"]  # fmt: skip
    recurrence = rng.choice((
        f"s, r = torch.zeros_like(a[:, 0]), []\nfor i in range({TOKENS}):\n    s = s * self.{n}d.sigmoid() + a[:, i]\n    r.append(s)\na = torch.stack(r, 1)",
        f"a = a * self.{n}d",
        f"a = a.cumsum(1) * self.{n}d",
    ))  # fmt: skip
    forward = (
        f"y = {product}",
        cut,
        f"a = F.silu(self.{n}c(a.mT)[..., :{TOKENS}].mT)",
        *recurrence.splitlines(),
        f"x = x + self.{n}out(a * F.silu(z))",
    )
    known = [
        (name, Known(**fields | {"cuts": cuts, "mass": "" if fields["role"] == "matrix" else "light"})) for name, fields in params
    ]
    known += [(f"{n}c.weight", Known("depthwise", "matrix", groups=hidden, is_kernel=True, mass="heavy")), (f"{n}c.bias", BIAS), (f"{n}d", Known("gain")), (f"{n}out.weight", Known("matrix", "matrix", mass="heavy"))]  # fmt: skip
    return Part("selective", tuple(init), forward, tuple(known))


def learned_tokens(rng: random.Random, n: str, is_first: bool) -> Part:
    """Learned tokens beside others, or rows of places."""
    vector, rows = f"nn.Parameter(torch.randn({WIDTH}))", f"nn.Parameter(torch.randn(7, {WIDTH}))"
    table, row = Known("table", "rows"), Known("bias", "rows")
    options = (
        ("class token", f"nn.Parameter(torch.randn(1, 1, {WIDTH}))", f"x = torch.cat([self.{n}.expand(2, -1, -1), x], 1)\nx = x[:, 1:] + x[:, :1].tanh()", n, Known(None, "rows")),
        ("registers", f"nn.Parameter(torch.randn(3, {WIDTH}))", f"x = torch.cat([x, self.{n}.expand(2, -1, -1)], 1)\nx = x[:, :5] + x[:, 5:].mean(1, keepdim=True).tanh()", n, table),
        ("positions cut", rows, f"x = x + self.{n}[:{TOKENS}]", n, Known("table", "rows", mass="added")),
        ("positions cut from x", rows, f"x = x + self.{n}[: x.shape[1]][None]", n, Known("table", "rows", mass="added")),
        ("positions indexed", rows, f"x = x + self.{n}[torch.arange({TOKENS})]", n, Known("table", "rows")),
        ("positions F", rows, f"x = x + F.embedding(torch.arange({TOKENS}), self.{n})", n, Known("table", "rows", mass="places")),
        ("positions reversed", f"nn.Embedding(7, {WIDTH})", f"x = x + self.{n}(torch.arange({TOKENS}).flip(0))", f"{n}.weight", Known("table", "rows", mass="places")),
        ("positions expanded", f"nn.Embedding(7, {WIDTH})", f"x = x + self.{n}(torch.arange({TOKENS}).expand(2, -1))", f"{n}.weight", Known("table", "rows", mass="places")),
        ("positions cumulated", f"nn.Embedding(7, {WIDTH})", f"x = x + self.{n}(torch.ones(2, {TOKENS}).cumsum(1).long())", f"{n}.weight", Known("table", "rows", mass="places")),
        ("exponential gain", vector, f"x = x * self.{n}.exp()", n, Known("gain")),
        ("gain from 0", vector, f"x = x * (1 + self.{n})", n, Known("gain")),
        ("gain in place", vector, f"x = x.clone().mul_(self.{n})", n, GAIN),
        ("bias in place", vector, f"x = x.clone().add_(self.{n})", n, row),
        ("gain of tokens", f"nn.Parameter(torch.rand({TOKENS}, 1))", f"x = x * self.{n}", n, Known("gain")),
        ("lerp", vector, f"x = torch.lerp(x, x.tanh(), self.{n})", n, Known("gain")),
        ("addcmul", vector, f"x = torch.addcmul(x, x.sin(), self.{n})", n, Known("gain")),
        ("batch norm", f"nn.BatchNorm1d({WIDTH})", f"x = self.{n}(x.mT).mT", f"{n}.weight", Known("gain")),
        ("group norm", f"nn.GroupNorm(2, {WIDTH})", f"x = self.{n}(x.mT).mT", f"{n}.weight", Known("gain")),
        ("layer norm by hand", vector, f"x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * self.{n}", n, GAIN),
        ("rms norm by hand", vector, f"x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.{n}", n, GAIN),
        ("prelu", "nn.PReLU(8)", f"x = self.{n}(x.mT).mT", f"{n}.weight", Known(None)),
    )  # fmt: skip
    label, init, forward, name, known = rng.choice(options)
    more = ((f"{n}.bias", BIAS),) if label in ("batch norm", "group norm") else ()
    return Part(label, (f"self.{n} = {init}",), tuple(forward.splitlines()), ((name, known), *more))


def squeezed(rng: random.Random, n: str, is_first: bool) -> Part:
    """Gates that matrices make of means over tokens (squeeze and excitation), of tokens (highways), or of other matrices."""
    how = rng.choice(("squeeze", "highway", "two", "low rank", "summed"))
    matrix = Known("matrix", "matrix", mass="heavy")
    bias = Known("bias", "rows", mass="light")
    any_matrix = Known("matrix", "matrix")
    first = Known("matrix", "matrix", is_first=is_first)
    if how == "squeeze":
        init = (f"self.{n}a, self.{n}b = nn.Linear({WIDTH}, 4), nn.Linear(4, {WIDTH})",)
        forward = (f"x = x * self.{n}b(self.{n}a(h.mean(1, keepdim=True)).relu()).sigmoid()",)
        return Part(
            how,
            init,
            forward,
            ((f"{n}a.weight", first), (f"{n}a.bias", bias), (f"{n}b.weight", any_matrix), (f"{n}b.bias", bias)),
        )
    if how == "highway":
        init = (f"self.{n}a, self.{n}b = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})",)
        forward = (f"t = self.{n}a(h).sigmoid()", f"x = t * self.{n}b(h).tanh() + (1 - t) * x")
        return Part(
            how, init, forward, ((f"{n}a.weight", first), (f"{n}a.bias", bias), (f"{n}b.weight", first), (f"{n}b.bias", bias))
        )
    if how == "two":
        init = (f"self.{n}a, self.{n}b = nn.Linear({WIDTH}, 6, bias=False), nn.Linear(6, {WIDTH}, bias=False)",)
        forward = (f"x = x + F.linear(h, self.{n}b.weight @ self.{n}a.weight)",)
        return Part(how, init, forward, ((f"{n}a.weight", Known("matrix")), (f"{n}b.weight", Known("matrix"))))
    if how == "low rank":
        init = (f"self.{n}a, self.{n}b = nn.Linear({WIDTH}, 3, bias=False), nn.Linear(3, {WIDTH}, bias=False)",)
        forward = (f"x = x + self.{n}b(self.{n}a(h))",)
        return Part(
            how,
            init,
            forward,
            ((f"{n}a.weight", Known("matrix", "matrix", mass="heavy", is_first=is_first)), (f"{n}b.weight", matrix)),
        )
    init = (
        f"self.{n}a, self.{n}b = nn.Linear({WIDTH}, 6, bias=False), nn.Linear(6, {WIDTH}, bias=False)",
        f"self.{n}c = nn.Linear({WIDTH}, 6)",
    )
    forward = (f"x = x + self.{n}b((self.{n}a(h) + self.{n}c(h)).relu())",)
    return Part(how, init, forward, ((f"{n}a.weight", Known("matrix", "matrix", mass="heavy", is_first=is_first)), (f"{n}b.weight", matrix), (f"{n}c.weight", Known("matrix", "matrix", mass="heavy", is_first=is_first)), (f"{n}c.bias", bias)))  # fmt: skip
