"""What random programs with wrapper subclasses are made of: constructors, statements, and how often each is drawn."""

from __future__ import annotations

CONSTRUCTORS = {
    "TwoTensor": "TwoTensor({a}, {b})",
    "WrapperSubclass": "WrapperSubclass({a})",
    "Masked": "Masked({a}, {b} > -0.5)",
    "Dual": "Dual({a}, {b})",
    "Interval": "Interval({a}, {a} + {b}.abs())",
    "LowRank": "LowRank({a}[:, :2], {b}[:, 1:3])",
    "BlockQuantised": "BlockQuantised.of({a})",
}
INNER = {
    "TwoTensor": ("a", "b"),
    "WrapperSubclass": ("a",),
    "Masked": ("values_", "mask"),
    "Dual": ("primal", "tangent"),
    "Interval": ("low", "high"),
    "LowRank": ("left",),
    "BlockQuantised": ("codes", "scales"),
}

# {a} and {b} are values of the program, {x} an input, {p} a plain tensor, {c} a number; {v} is what the statement is to define.
STATEMENTS = {
    "elementwise": """
        {a}.sin() | torch.cos({a}) | torch.exp({a} * 0.3) | torch.tanh({a}) | {a}.sigmoid() | torch.relu({a}) | F.gelu({a})
        {a}.abs() | {a} ** 2 | {a} * {c} | {a} + {c} | {c} - {a} | {a} / {c} | -{a} | torch.sqrt({a} * {a} + 1) | F.silu({a})
        F.softplus({a}) | torch.clamp({a}, -0.5, 0.5) | F.leaky_relu({a}, 0.1) | torch.log1p({a}.abs()) | torch.erf({a})
        torch.softmax({a}, -1) | F.log_softmax({a}, 0) | F.layer_norm({a}, {a}.shape[-1:]) | torch.cumsum({a}, -1) | {a}.round()
        {a}.detach() | torch.square({a}) | {a}.clone() | torch.sign({a}) | torch.rsqrt({a}.abs() + 1) | {a} % 2 | F.elu({a})
    """,
    "binary": """
        {a} + {b} | {a} * {b} | {a} - {b} | {a} / ({b}.abs() + 1) | torch.maximum({a}, {b}) | torch.minimum({a}, {b})
        torch.add({a}, {b}, alpha=2) | {a}.sub({b}, alpha=0.5) | torch.lerp({a}, {b}, 0.3) | torch.addcmul({a}, {b}, {b})
        {a} * {p} | {p} + {a} | {p} - {a} | F.mse_loss({a}, {b}) | torch.hypot({a}, {b}) | torch.atan2({a}, {b}.abs() + 1)
    """,
    "reductions": """
        {a}.sum() | {a}.mean() | {a}.sum(-1) | {a}.sum(0, keepdim=True) | {a}.mean(-1) | {a}.amax(-1) | {a}.max() | {a}.std(-1)
        {a}.var(0) | {a}.norm() | torch.logsumexp({a}, -1) | {a}.prod(-1) | {a}.argmax(-1) | {a}.mean((0, -1)) | {a}.min(-1).values
        torch.linalg.vector_norm({a}, dim=-1) | {a}.max(0)[0] | {a}.square().sum().sqrt()
    """,
    "matmul": """
        {a} @ {b} | {a} @ {b}.t() | F.linear({a}, {b}) | torch.mm({a}.t(), {b}) | torch.einsum("ij,kj->ik", {a}, {b}) | {p} @ {a}
        torch.addmm({b}, {a}, {a}) | {a} @ {p} | F.linear({p}, {a}) | torch.bmm({a}[None], {b}[None]) | torch.matmul({a}, {b}[0])
        torch.outer({a}[0], {b}[0]) | torch.dot({a}[0], {b}[0]) | F.linear({a}, {b}, {p}[0])
    """,
    "views": """
        {a}.t() | {a}.transpose(0, -1) | {a}.reshape(-1) | {a}.view(-1, 2) | {a}[0] | {a}[:, :2] | {a}[..., -1] | {a}[1:] | {a}.unsqueeze(0)
        {a}.squeeze() | {a}.flatten() | {a}.expand(2, *{a}.shape) | {a}[None] | {a}.contiguous() | {a}.flip(0) | {a}.T | {a}.mT
        {a}.repeat(2, 1) | {a}.index_select(0, torch.tensor([1, 0])) | {a}[torch.tensor([1, 0])] | {a}.roll(1, 0) | {a}[::2]
        {a}.permute(1, 0) | {a}.narrow(0, 0, 2) | {a}.diagonal() | {a}.tril() | F.pad({a}, (1, 0)) | {a}.view_as({b})
        {a}.gather(-1, torch.zeros_like({a}, dtype=torch.int64)) | {a}.reshape(2, -1).t().contiguous()
    """,
    "in-place on what was computed": """
        ({a} * 1).mul_(0.5) | {a}.clone().add_({b}) | {a}.clone().sub_({c}) | {a}.sin().relu_() | {a}.clone().clamp_(-0.5, 0.5)
        {v} = {a} * 2; {v} += {b} | {v} = {a}.clone(); {v}.mul_({b}); {v} = {v} + {a} | {a}.clone().fill_(0.5) | {a}.exp().div_(2)
        {a}.clone().copy_({b}) | {a}.clone().zero_() | {v} = torch.zeros_like({a}); {v}.add_({a}) | {a}.clone().neg_()
    """,
    "in-place on inputs": "{x}.mul_(0.5) | {x}.add_({b}) | {x}.sub_({c}) | {x}.copy_({b}) | {v} = {x}; {v} += 1 | {x}.neg_()",
    "comparisons": """
        {a} > 0 | {a} > {b} | torch.where({a} > 0, {a}, {a} * 0.1) | torch.where({a} > {b}, {a}, {b}) | {a}.masked_fill({a} > 0.5, 0.25)
        ({a} > 0).to({a}.dtype) | {a} * ({a} > 0) | {a}.eq({b}) | torch.where({p} > 0, {a}, 0.5) | ({a} <= {b}).any() | {a}.isfinite()
    """,
    "joining": """
        torch.cat([{a}, {b}]) | torch.stack([{a}, {b}]) | torch.cat([{a}, {a}], -1) | {a}.chunk(2)[1] | {a}.split(1)[0] | torch.cat([{a}, {p}])
        torch.unbind({a})[0] | torch.stack([{a}, {b}], -1) | torch.cat({a}.split(1), 1) | torch.stack(list({a})) | torch.vstack(({a}, {b}))
    """,
    "dtypes": """
        {a}.to(torch.float32) | {a}.double() | {a}.float() | {a}.type(torch.float64) | {a}.to({b}.dtype) | {a}.to(torch.int64) | {a}.to({b})
        {a}.to(torch.float32) * {b} | {a}.half().double() | {a}.bool()
    """,
    "construction": " | ".join(form.format(a="{p}", b="({p} * 2)") for form in CONSTRUCTORS.values())
    + " | "
    + " | ".join(form.format(a="{p}.sin()", b="{p}") + " * {c}" for form in CONSTRUCTORS.values()),
    "inside": "{inner} | {inner} * 2 | {inner}.sum() | {w}.dense() | {w}.dense() * {c} | torch.sin({inner}) + {w}",
    "Python": """
        {a} * {a}.shape[0] | {a} if type({a}) is TwoTensor else -{a} | {a} * 2 if {a}.ndim == 2 else {a} | {a} * (1 if {a}.requires_grad else 3)
        sum([{a}, {b}]) | {a} * len({a}) | {a} if isinstance({a}, (Masked, Dual)) else {a} + 1 | [r * 2 for r in {a}][0] | {a} + {a}.numel()
        {a} * {a}.stride(0) | {a} if {a}.dtype == torch.float64 else {a}.double() | {a} * 2 if {a}.is_contiguous() else {a} * 3
    """,
    "Python's own": """
        next(t * 2 for t in [{a}, {b}]) | (lambda t, s={b}: t + s)({a}) | dict(a={a})["a"] * {c} | functools.reduce(torch.add, [{a}, {a}])
        (lambda *ts, **k: ts[0] * k["by"])({a}, by={c}) | max([{a}, {b}], key=lambda t: t.ndim) | [*{a}][0] * {c} | Pair({a}, {b}).first * 2
        sorted([{a}, {b}], key=lambda t: t.ndim)[0] + 1 | {v} = Pair({a}, {b}); {v}.first = {v}.second * 2; {v} = {v}.first + {a}
        list(map(torch.sin, [{a}, {b}]))[1] | list(rows_of({a}))[0] | tried(lambda: {a} @ torch.ones(99, 7), {a}) | tried(lambda: {a} * 2, {b})
        {v} = {{"x": {a}}}; {v}["x"] *= 2; {v} = {v}["x"] + 1 | {v} = [{a} * 1]; {v}[0] += {b}; {v} = {v}[0] | (({a}, {b}), {c})[0][1] * 2
    """,
    "identities": """
        {a} * (2 if {a}.contiguous() is {a} else 3) | {a} * (2 if {a}.to({a}.dtype) is {a} else 3) | {a} * (2 if {a} is {b} else 3)
        {a} * len({{{a}, {b}}}) | {{{a}: 2.0}}[{a}] * {b} | {a} * (2 if id({a}) == id({b}) else 3) | {a} * (2 if {a} in {{{b}}} else 3)
        {v} = {a} * 1; {v} = {v} * (2 if {v}.add_(1) is {v} else 3) | {v} = {{{a}: {b}}}; {v} = [k + w for k, w in {v}.items()][0]
        {a} * (2 if {a}.detach() is {a} else 3) | {a} * (2 if F.dropout({a}, 0.5, False) is {a} else 3) | {a} * (1 + (hash({a}) == hash({b})))
    """,
    "functions of autograd": """
        Doubled.apply({a}) | Called.apply({a}, torch.sin) | Called.apply({a}, lambda t: t * {b}) | Called.apply({a}, functools.partial(torch.add, {b}))
        Doubled.apply({a}) * {b} | Called.apply({a}, Pair({b}, {a}).scaled) | {v} = {b} * 2; {v} = Called.apply({a}, lambda t: t + {v})
    """,
    "transforms of torch's": """
        torch.func.grad(lambda t: (t * t).sum())({a}) | torch.func.grad(lambda t: (t * {b}).sum())({a}) | torch.func.vjp(torch.sin, {a})[1]({a})[0]
        torch.func.jvp(torch.sin, ({a},), ({a},))[1] | torch.func.vmap(lambda r: r * 2)({a}) | torch.func.vmap(lambda r: r * {b})({a})
        torch.func.vmap(torch.func.grad(lambda r: (r * r).sum()))({a}) | torch.func.vmap(torch.func.grad(lambda r: (r * {b}).sum()))({a})
    """,
    "torch.autograd.grad": """
        torch.autograd.grad({a}, {x}, {a}.detach(), create_graph=True)[0] | torch.autograd.grad({a}.sum(), {x}, create_graph=True)[0] * {b}
        torch.autograd.grad({a}, {x}, torch.ones_like({a}), retain_graph=True)[0] | torch.autograd.grad(({a} * {a}).sum(), {a}, create_graph=True)[0]
        torch.autograd.grad(({a} * {b}).sum(), [{a}, {b}], create_graph=True)[1] | torch.autograd.grad({a}.sin().sum(), {b}, create_graph=True)[0]
        torch.autograd.grad({a}, [{x}, {b}], {a}, allow_unused=True, create_graph=True)[0]
        {v} = {a}.detach().requires_grad_(); {v} = torch.autograd.grad(({v} * {v} * {b}).sum(), {v}, create_graph=True)[0]
        {v} = {a} * 2; {v}.mul_({b}); {v} = torch.autograd.grad({v}, {a}, {v}, create_graph=True)[0]
    """,
    "hooks": """
        {v} = {a} * 2; {v}.register_hook(lambda g: g * 3) if {v}.requires_grad else None | {v} = {a} * 1; {v}.retain_grad() if {v}.requires_grad else None
    """,
    "regions": """
        with torch.no_grad(): {v} = {a} * 2 | with torch.no_grad(): {v} = {a}.clone().mul_(3)
        with torch.enable_grad(): {v} = {a} * {b} | {v} = torch.utils.checkpoint.checkpoint(lambda t: t.sin() * t, {a}, use_reentrant=False)
    """,
}
WEIGHTS = {"elementwise": 6, "binary": 6, "reductions": 3, "matmul": 4, "views": 5, "construction": 1, "joining": 2}
TEMPLATES = {
    kind: [t.strip() for line in text.strip().splitlines() for t in line.split(" | ")] for kind, text in STATEMENTS.items()
}
