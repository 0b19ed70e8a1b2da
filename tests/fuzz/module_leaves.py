"""Random modules of torch.nn, and of users, that hold no other, for an input of a shape.

Whether one runs on the shape at hand is left to whoever runs it: what is drawn may not.
"""

from __future__ import annotations

from collections.abc import Callable

from .module_nodes import Node, Pick, Shape, places

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
