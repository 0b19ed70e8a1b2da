"""Random expressions for modules: what can be made of torch.nn, and of the classes in module_classes, for an input of a shape.

An expression is a `Node`: the text of a class, its positional arguments (texts and other nodes) and its options (texts), each of which
can be left out.  Whether it runs on the shape at hand is left to the one who runs it: a drawn expression may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """``head(*args, **options)``; `options` are texts such as ``bias=False``."""

    head: str
    args: tuple[Node | str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The expression."""
        given = [a if isinstance(a, str) else a.text for a in self.args]
        return f"{self.head}({', '.join([*given, *self.options])})"

    def nodes(self) -> Iterator[Node]:
        """This one and all inside."""
        yield self
        for a in self.args:
            if isinstance(a, Node):
                yield from a.nodes()

    def smaller(self) -> Iterator[Node]:
        """Expressions with one thing less: a part in place of the whole, an argument or an option less, or such a part."""
        yield from (a for a in self.args if isinstance(a, Node))
        for i, a in enumerate(self.args):
            if isinstance(a, Node) and len(self.args) > 1 and self.head in SEVERAL:
                yield replace(self, args=self.args[:i] + self.args[i + 1 :])
        for i in range(len(self.options)):
            yield replace(self, options=self.options[:i] + self.options[i + 1 :])
        for i, a in enumerate(self.args):
            if not isinstance(a, Node):
                continue
            if a.head != "nn.Identity":
                yield replace(self, args=(*self.args[:i], Node("nn.Identity"), *self.args[i + 1 :]))
            for b in a.smaller():
                yield replace(self, args=(*self.args[:i], b, *self.args[i + 1 :]))


SEVERAL = ("nn.Sequential", "Each", "Mean", "Concat", "CheckpointedInParts")


class Pick:
    """Random choices."""

    def __init__(self, random: Random):
        self.random = random
        self.choice = random.choice

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.random.random() < p

    def options(self, *given: str, p: float = 0.3) -> tuple[str, ...]:
        """Each of these texts with probability p; of those that say the same thing, parted by "|", one."""
        return tuple(self.choice(text.split("|")) for text in given if self.chance(p))

    def several(self, values: tuple, n: int) -> tuple:
        """n of these, with repetitions."""
        return tuple(self.choice(values) for _ in range(n))


def places(shape: Shape) -> int:
    """The number of dimensions of a picture: of [n, c, *places]."""
    return min(max(len(shape) - 2, 1), 3)


# -- leaves: a function for each family, of (pick, shape) ------------------------------------------------------------------------

ACTIVATIONS = (
    "ReLU ReLU6 ELU SELU CELU GELU SiLU Mish Hardtanh Hardsigmoid Hardswish LeakyReLU LogSigmoid PReLU RReLU Sigmoid Softplus "
    "Softshrink Hardshrink Softsign Tanh Tanhshrink Threshold"
).split()
IN_PLACE = {
    *"ReLU ReLU6 ELU SELU CELU SiLU Mish Hardtanh Hardsigmoid Hardswish LeakyReLU RReLU Threshold".split(),
}


def activation(pick: Pick, shape: Shape) -> Node:
    name = pick.choice(ACTIVATIONS)
    args: tuple[str, ...] = ("0.1", "0.5") if name == "Threshold" else ()
    if name == "PReLU" and pick.chance(0.5) and len(shape) > 1:
        args = (str(shape[1]),)
    more = {
        "GELU": ("approximate='tanh'",),
        "ELU": ("alpha=0.5|alpha=2.0",),
        "CELU": ("alpha=0.5|alpha=2.0",),
        "LeakyReLU": ("negative_slope=0.2|negative_slope=1.5",),
        "Hardtanh": ("min_val=-0.5", "max_val=2.0"),
        "Softplus": ("beta=2.0", "threshold=3.0"),
        "Softshrink": ("lambd=0.1",),
        "Hardshrink": ("lambd=0.1",),
        "RReLU": ("upper=0.8",),
        "PReLU": ("init=1.5|init=-0.5",),
    }
    options = pick.options(*more.get(name, ()))
    if name in IN_PLACE and pick.chance(0.5):
        options += ("inplace=True",)
    return Node(f"nn.{name}", args, options)


def softmax(pick: Pick, shape: Shape) -> Node:
    if len(shape) == 4 and pick.chance(0.2):
        return Node("nn.Softmax2d")
    if shape[-1] % 2 == 0 and pick.chance(0.25):
        return Node("nn.GLU", (), pick.options("dim=-1"))
    return Node(f"nn.{pick.choice(['Softmax', 'LogSoftmax', 'Softmin'])}", (), (f"dim={pick.choice([-1, 1])}",))


def linear(pick: Pick, shape: Shape) -> Node:
    out = pick.choice([shape[-1], shape[-1], 2, 3, 4, 6])
    if pick.chance(0.1):
        return Node("nn.LazyLinear", (str(out),), pick.options("bias=False"))
    return Node("nn.Linear", (str(shape[-1]), str(out)), pick.options("bias=False"))


def bilinear(pick: Pick, shape: Shape) -> Node:
    c = shape[-1]
    body = pick.choice([Node("nn.Identity"), Node("nn.Linear", (str(c), str(c))), Node("nn.Tanh")])
    return Node("Pairs", (Node("nn.Bilinear", (str(c), str(c), str(pick.choice([c, 2]))), pick.options("bias=False")), body))


def conv(pick: Pick, shape: Shape) -> Node:
    n, c = places(shape), shape[1]
    out = pick.choice([c, 2 * c, 2, 4, 6])
    is_lazy = pick.chance(0.08)
    kernel = pick.choice(["1", "2", "3", "3"]) if pick.chance(0.8) else str(pick.several((1, 2, 3), n))
    if pick.chance(0.35):
        options = pick.options("stride=2", "padding=1", "bias=False", "dilation=2", p=0.25)
        options += ("groups=2",) if c % 2 == 0 and out % 2 == 0 and pick.chance(0.25) else ()
        options += ("output_padding=1",) if "stride=2" in options and pick.chance(0.3) else ()
        name = f"ConvTranspose{n}d"
    else:
        options = pick.options("stride=2", "padding=1|padding=2|padding='same'", "bias=False", "dilation=2", p=0.25)
        options += (pick.choice(["groups=2", f"groups={c}"]),) if c % 2 == 0 and out % 2 == 0 and pick.chance(0.3) else ()
        if any(o.startswith("padding=") for o in options):
            options += pick.options("padding_mode='reflect'|padding_mode='replicate'|padding_mode='circular'")
        name = f"Conv{n}d"
    return Node(f"nn.Lazy{name}" if is_lazy else f"nn.{name}", (*(() if is_lazy else (str(c),)), str(out), kernel), options)


def normalization(pick: Pick, shape: Shape) -> Node:
    n, c = places(shape), str(shape[1])
    which = pick.choice(["batch", "batch", "batch", "instance", "group", "layer", "layer", "rms", "local", "map"])
    if which in ("batch", "instance"):
        name = f"{'Batch' if which == 'batch' else 'Instance'}Norm{n}d"
        options = pick.options("affine=False|affine=True", "eps=0.01", "momentum=0.3|momentum=None", p=0.25)
        options += pick.options("track_running_stats=False|track_running_stats=True")
        if pick.chance(0.1):
            return Node(f"nn.Lazy{name}", (), options)
        if which == "batch" and pick.chance(0.08):
            return Node("nn.SyncBatchNorm", (c,), options)
        return Node(f"nn.{name}", (c,), options)
    if which == "group":
        groups = pick.choice([g for g in (1, 2, 3, shape[1]) if shape[1] % g == 0])
        return Node("nn.GroupNorm", (str(groups), c), pick.options("affine=False", "eps=0.01"))
    if which == "local":
        return Node("nn.LocalResponseNorm", (str(pick.choice([1, 2, 3])),), pick.options("alpha=0.1", "beta=0.5", "k=2.0"))
    if which == "map":
        return Node("nn.CrossMapLRN2d", (str(pick.choice([1, 3])),), pick.options("alpha=0.1"))
    last = shape[-pick.choice([1, 1, 1, 2]) :]
    dims = str(last[0]) if len(last) == 1 else str(list(last))
    if which == "layer":
        return Node("nn.LayerNorm", (dims,), pick.options("eps=0.01", "bias=False|elementwise_affine=False"))
    return Node("nn.RMSNorm", (dims,), pick.options("eps=0.01", "elementwise_affine=False"))


def pooling(pick: Pick, shape: Shape) -> Node:
    n = places(shape)
    which = pick.choice(["Max", "Avg", "LP", "AdaptiveAvg", "AdaptiveMax", "Fractional", "Unpool"])
    kernel = str(pick.choice([2, 3]))
    if which == "Max":
        return Node(f"nn.MaxPool{n}d", (kernel,), pick.options("stride=1|stride=2", "padding=1", "dilation=2", "ceil_mode=True"))
    if which == "Avg":
        options = pick.options("stride=1|stride=2", "padding=1", "ceil_mode=True", "count_include_pad=False")
        options += pick.options("divisor_override=3") if n > 1 else ()
        return Node(f"nn.AvgPool{n}d", (kernel,), options)
    if which == "LP":
        return Node(f"nn.LPPool{n}d", (pick.choice(["1", "2", "3", "1.5"]), kernel), pick.options("stride=1", "ceil_mode=True"))
    if which.startswith("Adaptive"):
        size = pick.choice(["1", "2", "3"]) if n == 1 or pick.chance(0.6) else str(pick.several((1, 2, None), n))
        if which == "AdaptiveMax" and pick.chance(0.15):
            return Node("Part", (Node(f"nn.{which}Pool{n}d", (size,), ("return_indices=True",)),))
        return Node(f"nn.{which}Pool{n}d", (size,))
    if which == "Fractional" and n > 1:
        return Node(f"nn.FractionalMaxPool{n}d", ("2",), (pick.choice(["output_size=2", "output_ratio=0.6"]),))
    if which == "Unpool":
        options = ("stride=1",) if pick.chance(0.2) else ()
        pool = Node(f"nn.MaxPool{n}d", ("2",), ("return_indices=True", *options))
        return Node("PoolAndUnpool", (pool, Node(f"nn.MaxUnpool{n}d", ("2",), options)))
    return Node(f"nn.AvgPool{n}d", ("2",))


def padding(pick: Pick, shape: Shape) -> Node:
    n = places(shape)
    which = pick.choice(["Constant", "Zero", "Reflection", "Replication", "Circular"])
    amount = pick.choice(["1", "2", str(pick.several((0, 1, 1, 2), 2 * n))])
    return Node(f"nn.{which}Pad{n}d", (amount, "0.5") if which == "Constant" else (amount,))


def resampling(pick: Pick, shape: Shape) -> Node:
    n = places(shape)
    if n == 2 and pick.chance(0.3):
        name = pick.choice(["UpsamplingNearest2d", "UpsamplingBilinear2d"])
        return Node(f"nn.{name}", (), ("scale_factor=2",))
    modes = ["'nearest'", {1: "'linear'", 2: "'bilinear'", 3: "'trilinear'"}[n], *(["'bicubic'"] if n == 2 else [])]
    size = pick.choice(["scale_factor=2", "scale_factor=1.5", "size=5"])
    return Node(
        "nn.Upsample", (), (size, *pick.options(*[f"mode={m}" for m in pick.several(tuple(modes), 1)], "align_corners=True"))
    )


def reshaping(pick: Pick, shape: Shape) -> Node:
    which = pick.choice(["flatten", "unflatten", "shuffle", "unshuffle", "channels", "unfold", "fold"])
    if which == "flatten":
        return Node("nn.Flatten", (), pick.options("start_dim=0|start_dim=1|start_dim=2", "end_dim=-1|end_dim=-2"))
    if which == "unflatten":
        return Node("nn.Unflatten", ("-1", f"({pick.choice([2, 1])}, -1)"))
    if which == "shuffle":
        return Node("nn.PixelShuffle", ("2",))
    if which == "unshuffle":
        return Node("nn.PixelUnshuffle", ("2",))
    if which == "channels":
        return Node("nn.ChannelShuffle", ("2",))
    if which == "unfold":
        return Node("nn.Unfold", ("2",), pick.options("padding=1", "stride=2", "dilation=2"))
    return Node(
        "nn.Sequential", (Node("nn.Unfold", ("2",), ("stride=1",)), Node("nn.Fold", (f"({shape[-2]}, {shape[-1]})", "2")))
    )


def dropout(pick: Pick, shape: Shape) -> Node:
    name = pick.choice(["Dropout", "Dropout", "Dropout", f"Dropout{places(shape)}d", "AlphaDropout", "FeatureAlphaDropout"])
    return Node(f"nn.{name}", (pick.choice(["0.1", "0.5", "0.0"]),), pick.options("inplace=True", p=0.5))


def recurrent(pick: Pick, shape: Shape) -> Node:
    c, h = shape[-1], pick.choice([2, 3, shape[-1]])
    name = pick.choice(["RNN", "LSTM", "GRU"])
    options = ("batch_first=True",) if pick.chance(0.7) else ()
    options += pick.options("bidirectional=True", "num_layers=2", "bias=False", p=0.25)
    options += ("dropout=0.3",) if "num_layers=2" in options and pick.chance(0.4) else ()
    options += pick.options("nonlinearity='relu'") if name == "RNN" else ()
    options += ("proj_size=1",) if name == "LSTM" and pick.chance(0.15) and h > 1 else ()
    node = Node(f"nn.{name}", (str(c), str(h)), options)
    if pick.chance(0.15):
        return Node("State", (node,))
    if pick.chance(0.15):
        layers = (2 if "num_layers=2" in options else 1) * (2 if "bidirectional=True" in options else 1)
        batch = shape[0] if "batch_first=True" in options else shape[1]
        first = 1 if "proj_size=1" in options else h
        shapes = [f"({layers}, {batch}, {first})"] + ([f"({layers}, {batch}, {h})"] if name == "LSTM" else [])
        return Node("FromState", (node, *shapes))
    return Node("Part", (node,))


def cell(pick: Pick, shape: Shape) -> Node:
    c, h, name = shape[-1], pick.choice([2, 3, shape[-1]]), pick.choice(["RNNCell", "LSTMCell", "GRUCell"])
    options = pick.options("bias=False") + (pick.options("nonlinearity='relu'") if name == "RNNCell" else ())
    node = Node(f"nn.{name}", (str(c), str(h)), options)
    if len(shape) == 3:
        return Node("OverTime", (node,))
    return Node("Part", (node,)) if name == "LSTMCell" else node


def attention(pick: Pick, shape: Shape) -> Node:
    c = shape[-1]
    batch_first = ("batch_first=True",) if pick.chance(0.7) else ()
    options = batch_first + pick.options("bias=False", "dropout=0.2", "add_bias_kv=True", "add_zero_attn=True", p=0.2)
    which = pick.choice(["self", "self", "weights", "causal", "padded", "cross", "cross", "cross", "cross"])
    heads = str(2 if c % 2 == 0 else 1)
    if which == "cross":
        how = pick.choice(["half", "learned", "same key", "same query and value", "projected"])
        if how == "projected":
            options += pick.options("kdim=3", "vdim=5", p=0.6)
        more = pick.options("need_weights=False", p=0.5)
        return Node("CrossAttention", (Node("nn.MultiheadAttention", (str(c), heads), options), f"{how!r}"), more)
    node = Node("nn.MultiheadAttention", (str(c), heads), options)
    if which == "weights":
        return Node("AttentionWeights", (node,), pick.options("average_attn_weights=False"))
    if which == "causal":
        return Node("CausalAttention", (node,), pick.options("is_causal=True"))
    if which == "padded":
        return Node("PaddedAttention", (node,))
    return Node("SelfAttention", (node,), pick.options("need_weights=False", p=0.5))


def transformer(pick: Pick, shape: Shape) -> Node:
    c, heads = shape[-1], 2 if shape[-1] % 2 == 0 else 1
    options = ("batch_first=True",) if pick.chance(0.7) else ()
    options += pick.options("norm_first=True", "bias=False", "activation='gelu'", "dropout=0.0", p=0.3)
    args = (str(c), str(heads), str(pick.choice([4, 8])))
    which = pick.choice(["layer", "layer", "encoder", "decoder layer", "decoder layer", "decoder", "whole"])
    other = Node("nn.Linear", (str(c), str(c))) if pick.chance(0.5) else Node("nn.Tanh")
    norm = pick.options(f"norm=nn.LayerNorm({c})")
    if which == "layer":
        node = Node("nn.TransformerEncoderLayer", args, options)
        return (
            Node("Masked", (node, pick.choice(["'src_mask'", "'is_causal'", "'src_key_padding_mask'"])))
            if pick.chance(0.15)
            else node
        )
    if which == "encoder":
        layer = Node("nn.TransformerEncoderLayer", args, options)
        return Node("nn.TransformerEncoder", (layer, "2"), norm + pick.options("enable_nested_tensor=False", p=0.7))
    if which == "decoder layer":
        return Node("Decode", (Node("nn.TransformerDecoderLayer", args, options), other))
    if which == "decoder":
        return Node(
            "Decode", (Node("nn.TransformerDecoder", (Node("nn.TransformerDecoderLayer", args, options), "2"), norm), other)
        )
    sizes = ("num_encoder_layers=1", "num_decoder_layers=1", "dim_feedforward=4")
    return Node("Decode", (Node("nn.Transformer", args[:2], sizes + options), other))


def parametrized(pick: Pick, shape: Shape) -> Node:
    node = conv(pick, shape) if len(shape) > 2 and pick.chance(0.4) else linear(pick, shape)
    how = pick.choice(
        [
            "nn.utils.weight_norm",
            "nn.utils.parametrizations.weight_norm",
            "nn.utils.parametrizations.weight_norm",
            "nn.utils.spectral_norm",
            "nn.utils.parametrizations.spectral_norm",
            "nn.utils.parametrizations.orthogonal",
            "with_parametrization",
            "prune.l1_unstructured",
            "prune.random_unstructured",
            "prune.ln_structured",
        ]
    )
    if how == "with_parametrization":
        return Node("with_parametrization", (node, "'weight'", Node(pick.choice(["Symmetric", "Bounded", "nn.Tanh"]))))
    if how.startswith("prune"):
        more = ("n=2", "dim=0") if how == "prune.ln_structured" else ()
        return Node(how, (node, "'weight'", "0.4"), more)
    if how == "nn.utils.parametrizations.orthogonal":
        maps = "'matrix_exp'|'cayley'|'householder'"
        return Node(
            how,
            (node,),
            pick.options(*[f"orthogonal_map={m}" for m in [pick.choice(maps.split("|"))]], "use_trivialization=False"),
        )
    if how.endswith("weight_norm"):
        return Node(how, (node,), pick.options("dim=None|dim=1"))
    return Node(how, (node,), pick.options("n_power_iterations=2"))


def written(pick: Pick, shape: Shape) -> Node:
    """Modules of users that hold no other."""
    c = str(shape[-1])
    how = "slice chunk split view unbind index select flat stack cat".split()
    choices: list[Callable[[], Node]] = [
        lambda: Node("Affine", (c,)),
        lambda: Node("AffineInPlace", (c,)),
        lambda: Node("Sliced", (c, f"{pick.choice(how)!r}")),
        lambda: Node("Sliced", (c, f"{pick.choice(how)!r}")),
        lambda: Node("Tied", (c,)),
        lambda: Node("TiedLayers", (c,)),
        lambda: Node("TwiceUsed", (c,)),
        lambda: Node("ListOfParameters", (c,)),
        lambda: Node("Positions", (c,)),
        lambda: Node("LowRank", (c,)),
        lambda: Node("MergedLowRank", (c,)),
        lambda: Node("StandardizedWeight", (c,)),
        lambda: Node("EqualizedWeight", (c,)),
        lambda: Node("CachedTable", (c,)),
        lambda: Node("CachedBySize"),
        lambda: Node("UsesLast"),
        lambda: Node("EmaInPlace", (c,)),
        lambda: Node("EmaReassigned", (c,)),
        lambda: Node("Counter"),
        lambda: Node("Constants", (c,)),
        lambda: Node("Rotary"),
        lambda: Node("Cubed"),
        lambda: Node("ScaledBy", (c,)),
        lambda: Node("WrittenRMSNorm", (c, f"{pick.choice(['rsqrt', 'divided', 'layer', 'normalize'])!r}")),
        lambda: Node("WrittenAttention", (c,), pick.options("heads=1", "how='softmax'", p=0.5)),
        lambda: Node("Mixer", (str(shape[1]), c)),
        lambda: Node("SetsItems"),
        lambda: Node("Preallocated"),
        lambda: Node("TopGate"),
        lambda: Node("Noise"),
        lambda: Node("StraightThrough"),
        lambda: Node("SqueezeExcite", (str(shape[1]),)),
    ]
    return pick.choice(choices)()


LEAVES: tuple[tuple[int, Callable[[Pick, Shape], Node]], ...] = (
    (6, linear),
    (5, activation),
    (2, softmax),
    (1, bilinear),
    (4, conv),
    (5, normalization),
    (3, pooling),
    (2, padding),
    (1, resampling),
    (2, reshaping),
    (3, dropout),
    (3, recurrent),
    (1, cell),
    (3, attention),
    (3, transformer),
    (3, parametrized),
    (6, written),
)


def leaf(pick: Pick, shape: Shape) -> Node:
    """A module without other modules of ours inside."""
    make = pick.random.choices([f for _, f in LEAVES], [w for w, _ in LEAVES])[0]
    return make(pick, shape)


# -- modules around modules -----------------------------------------------------------------------------------------------------


def wrapper(pick: Pick, shape: Shape, depth: int) -> Node:
    """A module around others, which may not keep the shape that it needs."""

    def body() -> Node:
        return part(pick, shape, depth + 1)

    def same() -> Node:
        """A body that is likely to keep the shape."""
        c = str(shape[-1])
        if pick.chance(0.4):
            return body()
        inner = [Node("nn.Linear", (c, c)), activation(pick, shape), Node("nn.LayerNorm", (c,)), dropout(pick, shape)]
        kept = inner[: pick.choice([1, 2, 4])]
        return kept[0] if len(kept) == 1 else Node("nn.Sequential", tuple(kept))

    reentrant = ("reentrant=True",) if pick.chance(0.5) else ()
    choices: list[Callable[[], Node]] = [
        lambda: Node("nn.Sequential", (body(), activation(pick, shape))),
        lambda: Node("Each", (body(), same())),
        lambda: Node("Named", (same(), body())),
        lambda: Node("InContainer", (body(),)),
        lambda: Node("nn.DataParallel", (body(),)),
        lambda: Node("Mean", (same(), same())),
        lambda: Node("Concat", (same(), same())),
        lambda: Node("Residual", (same(),), pick.options("scale=0.5", p=0.5)),
        lambda: Node("ResidualInPlace", (same(),)),
        lambda: Node("LayerScale", (same(), str(shape[-1]))),
        lambda: Node("Twice", (same(),)),
        lambda: Node("Shared", (same(),)),
        lambda: Node("Copied", (body(),)),
        lambda: Node("Gated", (same(),)),
        lambda: Node("Experts", (str(shape[-1]), same(), same())),
        lambda: Node("TrainBranch", (same(), same())),
        lambda: Node("Alternating", (same(), same())),
        lambda: Node("ByKeyword", (Node("nn.Linear", (str(shape[-1]), "3")),)),
        lambda: Node("StochasticDepth", (same(),)),
        lambda: Node("NoGrad", (body(),)),
        lambda: Node("NoGradDecorated", (body(),)),
        lambda: Node("InferenceRegion", (same(),)),
        lambda: Node("GradAgain", (body(),)),
        lambda: Node("Detached", (body(),)),
        lambda: Node("StopGradient", (body(),)),
        lambda: Node("Frozen", (body(),)),
        lambda: Node("Checkpointed", (body(),), reentrant + pick.options("preserve_rng_state=False", p=0.1)),
        lambda: Node("Checkpointed", (body(),), reentrant),
        lambda: Node("CheckpointedInParts", (same(), body()), reentrant),
        lambda: Node("CheckpointedFunction", (same(),), reentrant),
        lambda: Node("InAutocast", (body(),)),
        lambda: Node("Functional", (same(),)),
        lambda: Node("Remembers", (body(),)),
        lambda: Node("Hooked", (body(),)),
        lambda: Node("Watched", (body(),)),
        lambda: Node("ReversedGradient", (body(),)),
        lambda: Node("Side", (Node("nn.Linear", (str(max(shape[-1] // 2, 1)), "2")), Node("nn.ReLU", (), ("inplace=True",)))),
    ]
    return pick.choice(choices)()


def part(pick: Pick, shape: Shape, depth: int = 0) -> Node:
    """A module for an input of this shape; it need not fit."""
    return wrapper(pick, shape, depth) if depth < 3 and pick.chance(0.3) else leaf(pick, shape)


# -- what a model begins and ends with --------------------------------------------------------------------------------------------


def embedding(pick: Pick, length: int, n: int = 7) -> Node:
    """A module for ids below 7, [2, length]."""
    c = pick.choice([2, 4, 6])
    if pick.chance(0.2):
        return Node("TiedEmbedding", (str(n), str(c)))
    if pick.chance(0.6):
        more = pick.options("padding_idx=0", "max_norm=1.0", "scale_grad_by_freq=True", "sparse=True", p=0.15)
        return Node("nn.Embedding", (str(n), str(c)), more)
    mode = pick.choice(["mean", "sum", "max"])
    options = (f"mode={mode!r}", *pick.options("padding_idx=0", p=0.2))
    bag = Node("nn.EmbeddingBag", (str(n), str(c)), options)
    if pick.chance(0.5):
        return Node("Bags", (bag, str(2 * length)), ("how='weights'",) if mode == "sum" and pick.chance(0.5) else ())
    return bag


def head(pick: Pick, shape: Shape) -> Node:
    """A loss or distance."""
    text, c = str(shape), shape[-1]
    reduction = pick.options("reduction='sum'|reduction='none'")
    other = pick.choice([Node("nn.Tanh"), Node("nn.Linear", (str(c), str(c))), Node("nn.Flatten", ("0", "0"))])

    def with_target(name: str, *targets: str, options: tuple[str, ...] = ()) -> Node:
        return Node("WithTarget", (Node(f"nn.{name}", (), options + reduction), *targets))

    def after(first: str, node: Node) -> Node:
        return Node("nn.Sequential", (Node(first, (), ("dim=1",) if "Softmax" in first else ()), node))

    classes = f"torch.randint({shape[1]}, {shape[:1] + shape[2:]})" if len(shape) > 1 else "torch.tensor(0)"
    signs = f"(2 * torch.randint(2, {text}) - 1)"
    choices: list[Callable[[], Node]] = [
        lambda: with_target(pick.choice(["MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"]), f"torch.randn{text}"),
        lambda: with_target("CrossEntropyLoss", classes, options=pick.options("label_smoothing=0.1", "ignore_index=0")),
        lambda: with_target("CrossEntropyLoss", classes, options=(f"weight=torch.rand({shape[1]})",)),
        lambda: with_target("CrossEntropyLoss", f"torch.softmax(torch.randn{text}, 1)"),
        lambda: after("nn.LogSoftmax", with_target("NLLLoss", classes)),
        lambda: (
            after("nn.LogSoftmax", with_target("NLLLoss2d", classes))
            if len(shape) == 4
            else with_target("MSELoss", f"torch.zeros{text}")
        ),
        lambda: after("nn.Sigmoid", with_target("BCELoss", f"torch.rand{text}")),
        lambda: with_target("BCEWithLogitsLoss", f"torch.rand{text}", options=pick.options("pos_weight=torch.tensor(2.0)")),
        lambda: after(
            "nn.LogSoftmax",
            with_target("KLDivLoss", f"torch.softmax(torch.randn{text}, 1)", options=pick.options("log_target=True", p=0.1)),
        ),
        lambda: with_target("PoissonNLLLoss", f"torch.rand{text}", options=pick.options("log_input=True", "full=True")),
        lambda: with_target("GaussianNLLLoss", f"torch.randn{text}", f"torch.rand{text}", options=pick.options("full=True")),
        lambda: with_target("SoftMarginLoss", signs),
        lambda: with_target("HingeEmbeddingLoss", signs, options=pick.options("margin=0.5")),
        lambda: with_target("MultiLabelSoftMarginLoss", f"torch.randint(2, {text})"),
        lambda: with_target("MultiLabelMarginLoss", f"torch.full({text}, -1)"),
        lambda: with_target("MultiMarginLoss", f"torch.randint({c}, ({shape[0]},))", options=pick.options("p=2", "margin=0.5")),
        lambda: Node("WithOther", (Node("nn.MarginRankingLoss", (), reduction), other, f"torch.ones{text}")),
        lambda: Node("WithOther", (Node("nn.CosineEmbeddingLoss", (), reduction), other, f"torch.ones({shape[0]})")),
        lambda: Node(
            "WithOthers",
            (Node("nn.TripletMarginLoss", (), reduction + pick.options("p=1|p=3", "swap=True")), other, Node("nn.Sigmoid")),
        ),
        lambda: Node("WithOthers", (Node("nn.TripletMarginWithDistanceLoss", (), reduction), other, Node("nn.Sigmoid"))),
        lambda: Node("WithOther", (Node("nn.CosineSimilarity", (), pick.options("dim=-1|dim=1", "eps=0.01")), other)),
        lambda: Node("WithOther", (Node("nn.PairwiseDistance", (), pick.options("p=1|p=3", "eps=0.01", "keepdim=True")), other)),
        lambda: Node(
            "Part",
            (
                Node(
                    "WithTarget",
                    (Node("nn.AdaptiveLogSoftmaxWithLoss", (str(c), "6", "[2, 4]")), f"torch.randint(6, ({shape[0]},))"),
                ),
            ),
            ("index=1",),
        ),
        lambda: (
            Node(
                "nn.Sequential",
                (
                    Node("nn.LogSoftmax", (), ("dim=-1",)),
                    Node(
                        "WithTarget",
                        (
                            Node("nn.CTCLoss", (), reduction),
                            f"torch.ones({shape[1]}, 2, dtype=torch.long)",
                            f"torch.full(({shape[1]},), {shape[0]})",
                            f"torch.full(({shape[1]},), 1)",
                        ),
                    ),
                ),
            )
            if len(shape) > 1
            else with_target("MSELoss", f"torch.zeros{text}")
        ),
        lambda: Node("Both", (other, Node("nn.Identity"))),
        lambda: Node("AsDict", (other, Node("nn.ReLU"))),
        lambda: Node("AsNamedTuple", (other,)),
        lambda: Node("ReturnsParameter", (str(c),)),
        lambda: Node("Penalty", (Node("nn.Linear", (str(c), "2")),)),
    ]
    return pick.choice(choices)()


# -- all of torch.nn ---------------------------------------------------------------------------------------------------------------

LEFT_OUT = {
    "Module": "the base class",
    "RNNBase": "the base class of RNN, LSTM and GRU",
    "RNNCellBase": "the base class of the cells",
}
