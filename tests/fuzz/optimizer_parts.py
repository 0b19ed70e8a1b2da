"""Parts of models as text, of which it is known what each parameter is: gated and plain perceptrons, experts, convolutions, recurrent layers, gains."""

from __future__ import annotations

import random
from collections.abc import Callable

from .optimizer_attentions import BATCH, TOKENS, WIDTH, Part, attention, cut_apart, projection, rows_of
from .optimizer_more import HEADS, TABLE, TABLES, learned_tokens, linear_attention, modulated, selective, squeezed
from .optimizer_truth import Cut, Known

# what gates: of {0}, the gate
_GATES = ("F.silu({0})", "torch.sigmoid({0})", "F.gelu({0})", "{0}.relu()", "{0}.tanh()", "F.gelu({0}, approximate='tanh')", "({0} * {0}.sigmoid())", "F.softplus({0})")  # fmt: skip
# what a matrix's product goes through that is one matrix all the same
_WHOLE = (
    "y = y.relu()",
    "y = F.gelu(y)",
    "y = y * y.sigmoid()",
    "y = y.square() / (1 + y.abs())",
    "y = rotated_halves(y[:, None])[:, 0]",
    "y = rotated_pairs(y[:, None])[:, 0].tanh()",
    "a, b = y.chunk(2, -1)\ny = torch.cat([b, a], -1).tanh()",
    "y = y.unflatten(-1, (2, -1)).tanh().flatten(-2)",
    "y = torch.cat([y[..., :3].tanh(), y[..., 3:].relu()], -1)",
    "y = y.unflatten(-1, (-1, 2)).mT.flatten(-2).relu()",
    "y = y.flip(-1).relu()",
    "y = y.roll(2, -1).relu()",
    "y = F.dropout(y.tanh(), 0.2, self.training)",
    "y = torch.where(y > 0, y, 0.1 * y)",
    "y = F.rms_norm(y, (y.shape[-1],))",
    "y = F.layer_norm(y.relu(), (y.shape[-1],))",
    "z = torch.zeros_like(y)\nz[..., :4] = y[..., :4].tanh()\nz[..., 4:] = y[..., 4:]\ny = z",
    "y = y.softmax(-1)",
    "y = y.clone().relu_()",
    "y = y.cumsum(1).tanh()",
)


def plain(rng: random.Random, n: str, is_first: bool) -> Part:
    """A perceptron of one hidden layer, which is not cut."""
    hidden, how = rng.choice((6, 8, 12)), rng.choice(_WHOLE)
    up_init, up, of_up, _ = projection(rng, f"{n}up", hidden, "h", is_first=is_first)
    down_init, down, of_down, _ = projection(rng, f"{n}down", WIDTH, "y", inputs=hidden)
    if "softmax" in how:  # the mean of rows, by weights: a table as well as a matrix
        of_down = [(name, fields | {"norm": "", "mass": ""}) for name, fields in of_down]
    known = [(name, Known(**fields)) for name, fields in of_up + of_down]
    forward = (f"y = {up}", *how.splitlines(), f"x = x + {down}")
    return Part(f"plain: {how.splitlines()[-1]}", (*up_init, *down_init), forward, tuple(known))


def gated(rng: random.Random, n: str, is_first: bool) -> Part:
    """A perceptron with a gate, in a matrix of its own or beside what it gates, in halves or in turns."""
    hidden, gate = rng.choice((4, 6)), rng.choice(_GATES)
    how = rng.choice(("halves", "halves", "turns", "glu", "apart", "groups"))
    product = f"y = {gate.format('a')} * b" if rng.random() < 0.5 else f"y = b * {gate.format('a')}"
    names = rng.sample("ab", 2)
    if how == "apart":
        init, forward, known = [], [], []
        for role, name in (("gate", "a"), ("gated", "b")):
            its_init, its, of_it, kind = projection(
                rng, f"{n}{name}", hidden, "h", kinds=("linear", "F.linear", "transposed"), is_first=is_first
            )
            init, forward = init + its_init, [*forward, f"{name} = {its}"]
            for param, fields in of_it:
                its_mass = {"mass": "gated"} if fields["role"] == "matrix" else {}
                known.append((param, Known(**fields | its_mass | {"cuts": (Cut(role, tuple(range(hidden))),)})))
        # gates and what they gate are factors where both have one shape
        lines = [*forward, product]
    else:
        kinds = ("linear", "F.linear", "transposed", "joined", "matmul", "einsum", "addmm", "conv1d")
        init, up, of_up, kind = projection(rng, f"{n}up", 2 * hidden, "h", kinds=kinds, is_first=is_first)
        if how == "glu":
            names, cut, product = ["b", "a"], "b, a = y.chunk(2, -1)", f"y = F.glu(y, {rng.choice(('-1', 'dim=2'))})"
        elif how == "turns":
            cut = rng.choice([
                f"{names[0]}, {names[1]} = y.unflatten(-1, (-1, 2)).unbind(-1)",
                f"{names[0]}, {names[1]} = y[..., ::2], y[..., 1::2]",
                f"{names[0]}, {names[1]} = rearrange(y, 'b t (h n) -> n b t h', n=2)",
                f"{names[0]}, {names[1]} = y.view({BATCH}, {TOKENS}, {hidden}, 2).movedim(-1, 0)",
            ])  # fmt: skip
        elif how == "groups":
            cut = f"{names[0]}, {names[1]} = (t.flatten(2) for t in y.unflatten(-1, (2, 2, -1)).unbind(-2))"
        else:
            cut = cut_apart(rng, "y", names, [hidden, hidden])
        rows = rows_of([cut], "ab", 2 * hidden)
        order = sorted(
            ((role, tuple(sorted(rows[name].tolist()))) for role, name in (("gate", "a"), ("gated", "b"))), key=lambda c: c[1]
        )
        cuts = tuple(Cut(*one) for one in order)
        known = []
        for param, fields in of_up:
            its_mass = {"mass": "gated" if fields["role"] == "matrix" else fields["mass"]}
            known.append((param, Known(**fields | its_mass | {"cuts": cuts})))
        lines = [f"y = {up}", *([] if how == "glu" else [cut]), product]
    down_init, down, of_down, _ = projection(rng, f"{n}down", WIDTH, "y", inputs=hidden)
    known += [(name, Known(**fields)) for name, fields in of_down]
    return Part(f"gated, {how}", (*init, *down_init), (*lines, f"x = x + {down}"), tuple(known))


def experts(rng: random.Random, n: str, is_first: bool) -> Part:
    """Experts in stacks, of which a router mixes the results."""
    num, hidden, is_gated, is_last = rng.choice((2, 3)), rng.choice((4, 6)), rng.random() < 0.4, rng.random() < 0.5
    rows = 2 * hidden if is_gated else hidden
    shapes = [(num, rows, WIDTH), (num, WIDTH, hidden)]
    shapes = [(e, i, o) for e, o, i in shapes] if is_last else shapes
    init = [f"self.{n}up, self.{n}down = (nn.Parameter(torch.randn(*shape) / 3) for shape in {shapes})", f"self.{n}router = nn.Linear({WIDTH}, {num})"]  # fmt: skip
    letters = ("eio", "eoi")[not is_last]
    how = rng.choice(("einsum", "bmm", "loop", "matmul"))
    w = "{}" if is_last else "{}.mT"
    products = {
        "einsum": f"torch.einsum('{{1}}bti,{letters}->ebto', {{2}}, {{0}})",
        "bmm": f"torch.bmm({{3}}, {w.format('{0}')}).unflatten(1, ({BATCH}, {TOKENS}))",
        "loop": f"torch.stack([{{4}} @ {w.format('{0}[e]')} for e in range({num})])",
        "matmul": f"({{2}} @ {w.format('{0}')}[:, None])",
    }[how]
    first = products.format(f"self.{n}up", "", "h", f"h.flatten(0, 1).expand({num}, -1, -1)", "h")
    second = products.format(f"self.{n}down", "e", "y", "y.flatten(1, 2)", "y[e]")
    forward = [f"y = {first}"]
    cuts: tuple[Cut, ...] = ()
    if is_gated:
        turns = rng.random() < 0.4
        forward += [
            "a, b = y[..., ::2], y[..., 1::2]" if turns else "a, b = y.chunk(2, -1)",
            f"y = {rng.choice(_GATES).format('a')} * b",
        ]
        of_a = tuple(range(0, rows, 2)) if turns else tuple(range(hidden))
        cuts = (Cut("gate", of_a), Cut("gated", tuple(sorted(set(range(rows)) - set(of_a)))))
    else:
        forward.append("y = y.relu()")
    forward += [f"p = self.{n}router(h).softmax(-1)", f"x = x + torch.einsum('ebto,bte->bto', {second}, p)"]
    axes = (2, 1) if is_last else (1, 2)
    known = (
        (f"{n}up", Known("stack", "matrix", axes, cuts=cuts, mass="gated" if is_gated else "heavy", is_first=is_first)),
        (f"{n}down", Known("stack", "matrix", axes, mass="heavy")),
        (f"{n}router.weight", Known(None, "matrix", is_first=is_first)),
        (f"{n}router.bias", Known("bias", "rows")),
    )
    return Part(f"experts, {how}", tuple(init), tuple(forward), known)


def convolution(rng: random.Random, n: str, is_first: bool) -> Part:
    """Kernels of one or two dimensions, grouped, of each channel by itself, transposed, gated."""
    dims, taps, bias = rng.choice((1, 2)), rng.choice((1, 3)), rng.random() < 0.5
    kind = rng.choice(("whole", "groups", "depthwise", "transposed", "transposed groups", "gated", "gated by depthwise"))
    groups = {"groups": 2, "depthwise": WIDTH, "transposed groups": 2}.get(kind, 1)
    rows = 2 * WIDTH if kind.startswith("gated") else WIDTH
    size, pad = (f"{taps}", f"{taps // 2}") if dims == 1 else (f"({taps}, 1)", f"({taps // 2}, 0)")
    made = f"nn.Conv{'Transpose' if 'transposed' in kind else ''}{dims}d({WIDTH}, {rows}, {size}, padding={pad}, groups={groups}, bias={bias})"
    before, after = ("h.mT", ".mT") if dims == 1 else ("h.mT[..., None]", ".squeeze(-1).mT")
    axes = (1, 0) if "transposed" in kind else (0, 1)
    cuts: tuple[Cut, ...] = ()
    lines, init = [f"y = self.{n}c({before})"], [f"self.{n}c = {made}"]
    known: list[tuple[str, Known]] = []
    if kind.startswith("gated"):
        cuts = (Cut("gate", tuple(range(WIDTH))), Cut("gated", tuple(range(WIDTH, rows))))
        if kind == "gated by depthwise":
            init.append(f"self.{n}d = nn.Conv{dims}d({rows}, {rows}, {size}, padding={pad}, groups={rows}, bias=False)")
            lines.append(f"y = self.{n}d(y)")
            known.append((f"{n}d.weight", Known("depthwise", "matrix", groups=rows, is_kernel=True, mass="heavy")))
        lines += ["a, b = y.chunk(2, 1)", f"y = {rng.choice(_GATES).format('a')} * b"]
    else:
        lines.append("y = y.relu()")
    norm = "" if kind == "transposed groups" else "matrix"
    role = "depthwise" if kind == "depthwise" else "convolution"
    known.insert(0, (f"{n}c.weight", Known(role, norm, axes, groups, True, cuts, "heavy", is_first)))
    if bias:
        known.append((f"{n}c.bias", Known("bias", "rows", cuts=cuts, mass="light")))
    return Part(f"convolution, {kind}", tuple(init), (*lines, f"x = x + y{after}"), tuple(known))


def small(rng: random.Random, n: str, is_first: bool) -> Part:
    """Gains, biases, positions, normalizations."""
    gain, row = Known("gain", "entries", mass="light"), Known("bias", "rows", mass="light")
    vector, options = f"nn.Parameter(torch.rand({WIDTH}) + 0.5)", []
    options += [
        ("gain", f"self.{n} = {vector}", f"x = x * self.{n}", [(n, gain)]),
        ("bias", f"self.{n} = {vector}", f"x = x + self.{n}", [(n, row)]),
    ]
    options += [("layer scale", f"self.{n} = {vector}", f"x = x + self.{n} * x.tanh()", [(n, gain)])]
    options += [
        ("layer norm", f"self.{n} = nn.LayerNorm({WIDTH})", f"x = self.{n}(x)", [(f"{n}.weight", gain), (f"{n}.bias", row)])
    ]
    options += [("rms norm", f"self.{n} = nn.RMSNorm({WIDTH})", f"x = self.{n}(x)", [(f"{n}.weight", gain)])]
    options += [("scale", f"self.{n} = nn.Parameter(torch.ones(()))", f"x = x * self.{n}", [(n, gain)])]
    added = Known("table", "rows", mass="added")
    shape = rng.choice([f"{TOKENS}, {WIDTH}", f"1, {TOKENS}, {WIDTH}"])
    options += [("positions added", f"self.{n} = nn.Parameter(torch.randn({shape}))", f"x = x + self.{n}", [(n, added)])]
    looked_up = Known("table", "rows", mass="places")
    places = rng.choice([f"torch.arange({TOKENS})", "torch.arange(x.shape[1])", f"torch.arange({TOKENS})[None]"])
    options += [
        (
            "positions",
            f"self.{n} = nn.Embedding({TOKENS + 1}, {WIDTH})",
            f"x = x + self.{n}({places})",
            [(f"{n}.weight", looked_up)],
        )
    ]
    label, init, forward, known = rng.choice(options)
    return Part(label, (init,), (forward,), tuple(known))


def recurrent(rng: random.Random, n: str, is_first: bool) -> Part:
    """A layer of torch with gates in one matrix, or its attention."""
    if rng.random() < 0.5:
        heads, bias = rng.choice((1, 2, 4)), rng.random() < 0.5
        rows = [tuple(range(i * WIDTH, (i + 1) * WIDTH)) for i in range(3)]
        width = WIDTH // heads
        cuts = tuple(Cut(role, of, tuple(of[i * width : (i + 1) * width] for i in range(heads))) for role, of in zip(("query", "key", "value"), rows, strict=True))  # fmt: skip
        known = [(f"{n}.in_proj_weight", Known("matrix", "matrix", cuts=cuts, mass="attention", is_first=is_first)), (f"{n}.out_proj.weight", Known("matrix", "matrix", mass="attention"))]  # fmt: skip
        if bias:
            known += [(f"{n}.in_proj_bias", Known("bias", "rows", cuts=cuts, mass="light")), (f"{n}.out_proj.bias", Known("bias", "rows", mass="light"))]  # fmt: skip
        weights = rng.random() < 0.5
        forward = f"x = x + self.{n}(h, h, h, need_weights={weights})[0]"
        return Part("nn.MultiheadAttention", (f"self.{n} = nn.MultiheadAttention({WIDTH}, {heads}, bias={bias}, batch_first=True)",), (forward,), tuple(known))  # fmt: skip
    kind, gates = rng.choice((("GRU", 3), ("LSTM", 4)))
    cuts = tuple(Cut(None, tuple(range(i * WIDTH, (i + 1) * WIDTH))) for i in range(gates))
    known = [
        (f"{n}.weight_{of}_l0", Known("matrix", "matrix", cuts=cuts, is_first=is_first and of == "ih")) for of in ("ih", "hh")
    ]
    known += [(f"{n}.bias_{of}_l0", Known("bias", "rows", cuts=cuts)) for of in ("ih", "hh")]
    return Part(
        f"nn.{kind}", (f"self.{n} = nn.{kind}({WIDTH}, {WIDTH}, batch_first=True)",), (f"x = x + self.{n}(h)[0]",), tuple(known)
    )


PARTS: tuple[Callable[[random.Random, str, bool], Part], ...] = (
    *(attention, attention, plain, gated, gated, experts, convolution, small, recurrent),
    *(modulated, linear_attention, selective, learned_tokens, learned_tokens, squeezed),
)
NORMS = ("h = x", "h = x", "h = F.rms_norm(x, (8,))", "h = F.layer_norm(x, (8,))", "h = x * 0.5")


def start(rng: random.Random) -> Part:
    """What makes [batch, tokens, width] of the input."""
    if rng.random() < 0.5:
        return Part("floats", (), ("x = inputs * 1.0",), ())
    made, looked_up, name = rng.choice(TABLES)
    return Part("tokens", (f"self.table = {made}",), (f"x = {looked_up}",), ((name, TABLE),))


def end(rng: random.Random, first: Part) -> Part:
    """What makes the result."""
    if rng.random() < 0.1:
        return Part("no head", (), ("return F.rms_norm(x, (8,))",), ())
    if first.known and rng.random() < 0.2:
        name = first.known[0][0]
        tied = ((name, Known("tied")),)
        lines = (
            f"return F.linear(x, self.{name})",
            f"return x @ self.{name}.T",
            f"return F.cross_entropy(F.linear(x, self.{name}).flatten(0, 1), torch.arange(10))",
        )
        if name == "table.weight" and rng.random() < 0.5:
            return Part(
                "tied, module",
                (f"self.head = nn.Linear({WIDTH}, 11, bias=False)", "self.head.weight = self.table.weight"),
                ("return self.head(x)",),
                tied,
            )
        return Part("tied", (), (rng.choice(lines),), tied)
    (made, name, axes), lines = rng.choice(HEADS)
    known = [(name, Known("head", "matrix", axes, mass="heavy"))]
    if made.startswith("nn.Linear") and rng.random() < 0.3:
        made = made.replace("bias=False", "bias=True")
        known.append(("head.bias", Known("bias", "rows", mass="light")))
    return Part(f"head: {lines.splitlines()[-1]}", (f"self.head = {made}",), tuple(lines.splitlines()), tuple(known))
