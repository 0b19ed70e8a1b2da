"""How each operation is written into a random program: its expression, what shapes it takes, which further operands it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm import L1Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor

Shape = tuple[int, ...]
Pick = Callable[[Sequence], Any]
Write = Callable[[Shape, Pick], "str | None"]

R, INF, L1, OP, CONV = RMSTensor, LinfTensor, L1Tensor, RMSToRMSTensor, RMSToRMSConvTensor


@dataclass(frozen=True)
class Operand:
    """A further operand, of a shape that depends on the first one's: a value the program has already, or a new input."""

    shape: Callable[[Shape], Shape] = tuple
    kinds: tuple[type[NormedTensor], ...] = (R, R, INF)
    is_new: bool = False


@dataclass(frozen=True)
class Plain:
    """A further operand that is a plain tensor: indices, masks, targets."""

    make: Callable[[Shape, torch.Generator], torch.Tensor]


@dataclass(frozen=True, repr=False)
class Form:
    """One way to write an operation: `write` gives the expression with operands ``{0}, {1}``, or None if the shape does not fit."""

    name: str
    write: Write
    others: tuple[Operand | Plain, ...] = ()
    is_traced: bool = True

    def __repr__(self) -> str:
        return self.name


# -- the operations -------------------------------------------------------------------------------------------------------


def always(text: str) -> Write:
    return lambda s, pick: text


def of_rank(low: int, text: str, high: int = 4) -> Write:
    return lambda s, pick: text if low <= len(s) <= high else None


def along(text: str, *, low: int = 1) -> Write:
    """`text` with DIM replaced by a dimension."""
    return lambda s, pick: text.replace("DIM", str(pick(range(-len(s), 0)))) if len(s) >= low else None


def _integers(high: Callable[[Shape], int], shape: Callable[[Shape], Shape]) -> Plain:
    return Plain(lambda s, g: torch.randint(high(s), shape(s), generator=g))


def _merged(s: Shape, pick: Pick) -> str | None:
    if len(s) < 2:
        return None
    at = pick(range(len(s) - 1))
    return f"{{0}}.reshape({(*s[:at], s[at] * s[at + 1], *s[at + 2 :])})"


def _split(s: Shape, pick: Pick) -> str | None:
    even = [d for d, n in enumerate(s) if n % 2 == 0]
    if not even or len(s) > 3:
        return None
    at = pick(even)
    return f"{{0}}.reshape({(*s[:at], *pick([(2, s[at] // 2), (s[at] // 2, 2)]), *s[at + 1 :])})"


def _expanded(s: Shape, pick: Pick) -> str | None:
    return f"{{0}}.expand({(2, *s)})" if len(s) < 4 else None


def _over_several(text: str) -> Write:
    """`text` with DIMS replaced by one, two or all dimensions."""

    def write(s: Shape, pick: Pick) -> str | None:
        every = tuple(range(-len(s), 0))
        return text.replace("DIMS", str(pick([(-1,), every, every[-2:], every[:1]]))) if s else None

    return write


def _chunked(s: Shape, pick: Pick) -> str | None:
    wide = [d for d in range(-len(s), 0) if s[d] > 1]
    return f"torch.chunk({{0}}, 2, {pick(wide)})[{pick([0, 1])}]" if wide else None


def _narrowed(s: Shape, pick: Pick) -> str | None:
    wide = [d for d in range(-len(s), 0) if s[d] > 1]
    if not wide:
        return None
    d = pick(wide)
    return f"torch.narrow({{0}}, {d}, 1, {s[d] - 1})"


def _group_norm(s: Shape, pick: Pick) -> str | None:
    groups = 2 if len(s) > 1 and s[1] % 2 == 0 else 1
    if (
        len(s) < 3 or math.prod(s[1:]) == groups
    ):  # of one entry each nothing is left but rounding, which is of the size of the entries
        return None
    return f"F.group_norm({{0}}, {groups}, {{1}}, {{2}}, eps=1e-2)"


def _normalized(text: str) -> Write:
    return lambda s, pick: text.replace("SHAPE", str(s[-pick([1, 2] if len(s) > 1 else [1]) :])) if s else None


UNARY = (
    "F.relu({0})", "F.leaky_relu({0}, 0.1)", "F.elu({0})", "F.selu({0})", "F.celu({0}, 0.5)", "F.silu({0})", "F.gelu({0})",
    "F.gelu({0}, approximate='tanh')", "F.mish({0})", "F.hardswish({0})", "torch.sigmoid({0})", "torch.tanh({0})",
    "F.softplus({0})", "F.logsigmoid({0})", "F.softsign({0})", "torch.erf({0})", "torch.atan({0})", "torch.asinh({0})",
    "torch.sin({0})", "torch.cos({0})", "torch.abs({0})", "-{0}", "torch.square({0})", "{0} ** 3", "torch.clamp({0}, -0.5, 1.0)",
    "F.hardtanh({0})", "F.relu6({0})", "F.hardsigmoid({0})", "torch.exp({0})", "F.softshrink({0})", "F.tanhshrink({0})",
    "{0} * -0.7", "{0} / 3", "{0} + 0.5", "1 - {0}", "torch.expm1({0})", "torch.sqrt({0}.square().mean(-1, keepdim=True) + 0.1)",
    "{0} * torch.sigmoid({0})", "{0} * torch.rsqrt({0}.square().mean(-1, keepdim=True) + 1e-2)", "{0}.flatten()",
    "torch.softmax({0}, -1)",
)  # fmt: skip

SAME = Operand()
ROW = Operand(lambda s: s[-1:])
COLUMN = Operand(lambda s: (*s[:-1], 1))
GAIN = Operand(lambda s: s[-1:], (INF, R), is_new=True)

FORMS = (
    *(Form(text, of_rank(1, text)) for text in UNARY),
    # two and three operands
    *(
        Form(f"{text} {name}", of_rank(1, text), (other,))
        for text in ("{0} + {1}", "{0} * {1}", "torch.maximum({0}, {1})")
        for name, other in (("same", SAME), ("row", ROW), ("column", COLUMN))
    ),
    Form("sub", always("torch.sub({0}, {1}, alpha=2)"), (SAME,)),
    Form("minimum", always("torch.minimum({0}, {1})"), (SAME,)),
    Form("lerp", always("torch.lerp({0}, {1}, 0.3)"), (SAME,)),
    Form("addcmul", always("torch.addcmul({0}, {1}, {2}, value=0.5)"), (SAME, ROW)),
    Form("where", always("torch.where({2}, {0}, {1})"), (SAME, Plain(lambda s, g: torch.rand(s, generator=g) > 0.5))),
    Form("where of a row", of_rank(2, "torch.where({2}, {0}, {1})"), (SAME, Plain(lambda s, g: torch.rand(s[-1:]) > 0.5))),
    # a mask made from values stands for itself: where it changes the two sides must meet
    Form("where by value", always("torch.where({0} > 0, {0}, {0} * 0.1)")),
    Form("glu", lambda s, pick: "F.glu({0}, -1)" if s[-1] % 2 == 0 else None),
    Form("swiglu", always("F.silu({0}) * {1}"), (SAME,)),
    # linear maps
    Form("linear", always("F.linear({0}, {1})"), (Operand(lambda s: (3, s[-1]), (OP, OP, R, L1), is_new=True),)),
    Form(
        "linear with bias",
        always("F.linear({0}, {1}, {2})"),
        (Operand(lambda s: (4, s[-1]), (OP, R), is_new=True), Operand(lambda s: (4,), (R, INF), is_new=True)),
    ),
    Form("linear, square", always("F.linear({0}, {1})"), (Operand(lambda s: (s[-1], s[-1]), (OP, R)),)),
    Form("x @ W", of_rank(1, "{0} @ {1}"), (Operand(lambda s: (s[-1], 2), (OP, R, L1), is_new=True),)),
    Form("a @ b.mT", of_rank(2, "{0} @ {1}.mT"), (SAME,)),
    Form("a.mT @ b", of_rank(2, "{0}.mT @ {1} / 4"), (SAME,)),
    Form("outer", of_rank(1, "torch.outer({0}, {1})", 1), (SAME,)),
    Form("dot", of_rank(1, "torch.dot({0}, {1})", 1), (SAME,)),
    Form("einsum", of_rank(3, "torch.einsum('bij,bkj->bik', {0}, {1})", 3), (SAME,)),
    Form("addmm", of_rank(2, "torch.addmm({1}, {0}, {2})", 2), (
        Operand(lambda s: (3,)), Operand(lambda s: (s[1], 3), (R, OP), is_new=True),
    )),
    Form("conv1d", lambda s, pick: f"F.conv1d({{0}}, {{1}}, {{2}}, stride={pick([1, 2])}, padding=1)" if len(s) == 3 else None, (
        Operand(lambda s: (4, s[1], 3), (CONV,), is_new=True), Operand(lambda s: (4,), (R,), is_new=True),
    )),
    Form("conv_transpose1d", of_rank(3, "F.conv_transpose1d({0}, {1})", 3), (
        Operand(lambda s: (s[1], 2, 2), (CONV,), is_new=True),
    )),
    Form("embedding", of_rank(2, "F.embedding({1}, {0})", 2), (_integers(lambda s: s[0], lambda s: (2, 3)),)),
    # normalizations
    Form("layer_norm", _normalized("F.layer_norm({0}, SHAPE, eps=1e-2)")),
    Form("layer_norm, affine", always("F.layer_norm({0}, {0}.shape[-1:], {1}, {2}, eps=1e-2)"), (GAIN, GAIN)),
    Form("rms_norm", _normalized("F.rms_norm({0}, SHAPE, eps=1e-1)")),
    Form("rms_norm, gain", always("F.rms_norm({0}, {0}.shape[-1:], {1}, eps=1e-2)"), (GAIN,)),
    Form("group_norm", _group_norm, (Operand(lambda s: s[1:2], (INF,), True), Operand(lambda s: s[1:2], (R,), True))),
    Form("normalize", along("F.normalize({0}, dim=DIM, eps=1e-1)")),
    Form("subtract the mean", along("{0} - {0}.mean(DIM, keepdim=True)")),
    # softmax and attention
    Form("softmax", along("torch.softmax({0}, DIM)")),
    Form("log_softmax", along("torch.log_softmax({0}, DIM)")),
    Form("logsumexp", along("torch.logsumexp({0}, DIM)")),
    Form("self-attention", of_rank(3, "F.scaled_dot_product_attention({0}, {0}, {0})", 4)),
    Form("attention", of_rank(3, "F.scaled_dot_product_attention({0}, {1}, {2}, is_causal=True, scale=0.5)", 4), (SAME, SAME)),
    # reductions
    *(Form(f"{name} over", _over_several(f"torch.{name}({{0}}, DIMS)")) for name in ("mean", "sum", "amax", "amin")),
    Form("mean, kept", along("{0}.mean(DIM, keepdim=True)")),
    Form("var", along("torch.var({0}, DIM, correction=0)")),
    Form("std", along("torch.std({0}, DIM, correction=0, keepdim=True)")),
    Form("vector_norm", _over_several("torch.linalg.vector_norm({0}, 2, DIMS)")),
    Form("1-norm", along("torch.linalg.vector_norm({0}, 1, DIM)")),
    Form("cumsum", along("torch.cumsum({0}, DIM)")),
    Form("max", along("torch.max({0}, DIM)[0]")),
    Form("sort", along("torch.sort({0}, DIM)[0]")),
    Form("topk", along("torch.topk({0}, 1, DIM)[0]")),
    Form("prod", along("torch.prod({0}, DIM)")),
    # shapes
    Form("merge", _merged),
    Form("split", _split),
    Form("expand", _expanded),
    Form("transpose", lambda s, pick: f"{{0}}.transpose(0, {pick(range(len(s)))})"),
    Form("movedim", along("torch.movedim({0}, DIM, 0)", low=2)),
    Form("unsqueeze", lambda s, pick: f"{{0}}.unsqueeze({pick(range(len(s) + 1))})" if len(s) < 4 else None),
    Form("squeeze", of_rank(1, "{0}.squeeze()")),
    Form("repeat", of_rank(1, "{0}.repeat(2, *[1] * ({0}.ndim - 1))")),
    Form("flip", along("torch.flip({0}, (DIM,))")),
    Form("roll", along("torch.roll({0}, 1, DIM)")),
    Form("roll as a whole", of_rank(1, "torch.roll({0}, 2)")),
    Form("chunk", _chunked),
    Form("narrow", _narrowed),
    Form("select", along("torch.select({0}, DIM, 0)", low=2)),
    Form("slice", of_rank(2, "{0}[:, ::2]")),
    Form("index with tensors", of_rank(2, "{0}[:, {1}]"), (_integers(lambda s: s[1], lambda s: (3,)),)),
    Form("index_select", of_rank(1, "torch.index_select({0}, 0, {1})"), (_integers(lambda s: s[0], lambda s: (3,)),)),
    Form("gather", of_rank(1, "torch.gather({0}, -1, {1})"), (_integers(lambda s: s[-1], tuple),)),
    Form("gather, first dim", of_rank(2, "torch.gather({0}, 0, {1})"), (_integers(lambda s: s[0], tuple),)),
    Form("cat", along("torch.cat([{0}, {1}], DIM)"), (SAME,)),
    Form("stack", of_rank(1, "torch.stack([{0}, {1}, {0}], 1)", 3), (SAME,)),
    Form("pad", of_rank(1, "F.pad({0}, (1, 2), value=0.5)")),
    Form("pad, reflected", of_rank(2, "F.pad({0}, (1, 0), mode='replicate')", 3)),
    Form("tril", of_rank(2, "torch.tril({0})")),
    Form("masked_fill", always("{0}.masked_fill({1}, 0.5)"), (Plain(lambda s, g: torch.rand(s, generator=g) > 0.5),)),
    Form("diagonal", of_rank(2, "torch.diagonal({0}, 0, 0, 1)")),
    Form("index_add", of_rank(2, "torch.index_add({0}, 0, {2}, {1})"), (SAME, _integers(lambda s: s[0], lambda s: s[:1]))),
    Form("scatter_add", of_rank(1, "torch.scatter_add({0}, -1, {2}, {1})"), (SAME, _integers(lambda s: s[-1], tuple))),
    Form("slice_scatter", of_rank(2, "torch.slice_scatter({0}, {1}[:1], 0, 0, 1)"), (SAME,)),
    # pooling
    Form("avg_pool1d", lambda s, pick: "F.avg_pool1d({0}, 2)" if len(s) == 3 and s[2] > 1 else None),
    Form("max_pool1d", lambda s, pick: "F.max_pool1d({0}, 2, 1)" if len(s) == 3 and s[2] > 1 else None),
    Form("adaptive_avg_pool1d", of_rank(3, "F.adaptive_avg_pool1d({0}, 1)", 3)),
    Form("interpolate", of_rank(3, "F.interpolate({0}, scale_factor=2)", 3)),
)  # fmt: skip

_CLASSES = _integers(lambda s: s[1] if len(s) > 1 else s[0], lambda s: s[:1] + s[2:] if len(s) > 1 else ())
_CHANCES = Plain(lambda s, g: torch.rand(s, generator=g, dtype=torch.float64))
LOSSES = (
    Form("mse_loss", of_rank(1, "F.mse_loss({0}, {1})"), (SAME,)),
    Form("l1_loss", of_rank(1, "F.l1_loss({0}, {1})"), (SAME,)),
    Form("smooth_l1_loss", of_rank(1, "F.smooth_l1_loss({0}, {1})"), (SAME,)),
    Form("huber_loss", of_rank(1, "F.huber_loss({0}, {1}, delta=0.5)"), (SAME,)),
    Form("cross_entropy", of_rank(1, "F.cross_entropy({0}, {1})"), (_CLASSES,)),
    Form("nll_loss", of_rank(2, "F.nll_loss(torch.log_softmax({0}, 1), {1})"), (_CLASSES,)),
    Form("bce with logits", of_rank(1, "F.binary_cross_entropy_with_logits({0}, {1})"), (_CHANCES,)),
    Form(
        "kl_div",
        of_rank(2, "F.kl_div(torch.log_softmax({0}, -1), {1}, reduction='batchmean')"),
        (Plain(lambda s, g: torch.rand(s, generator=g, dtype=torch.float64).softmax(-1)),),
    ),
)
