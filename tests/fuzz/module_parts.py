"""Random modules around others, what a model begins and ends with, and which classes of torch.nn are left out."""

from __future__ import annotations

from collections.abc import Callable

from .module_leaves import activation, dropout, leaf
from .module_nodes import Node, Pick, Shape


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
    """A loss or distance, or a result that is no tensor."""
    c = str(shape[-1])
    reduction = pick.options("reduction='sum'|reduction='none'")
    other = pick.choice([Node("nn.Tanh"), Node("nn.Linear", (c, c)), Node("nn.Flatten", ("0", "0"))])
    choices: list[Callable[[], Node]] = [
        *_losses(pick, shape, reduction),
        *_losses_of_two(pick, shape, reduction, other),
        *_losses_of_classes(shape, reduction),
        lambda: Node("Both", (other, Node("nn.Identity"))),
        lambda: Node("AsDict", (other, Node("nn.ReLU"))),
        lambda: Node("AsNamedTuple", (other,)),
        lambda: Node("ReturnsParameter", (c,)),
        lambda: Node("Penalty", (Node("nn.Linear", (c, "2")),)),
    ]
    return pick.choice(choices)()


def _with_target(name: str, *targets: str, options: tuple[str, ...]) -> Node:
    return Node("WithTarget", (Node(f"nn.{name}", (), options), *targets))


def _losses(pick: Pick, shape: Shape, reduction: tuple[str, ...]) -> list[Callable[[], Node]]:
    """Of a result and a target."""
    text, c = str(shape), shape[-1]

    def with_target(name: str, *targets: str, options: tuple[str, ...] = ()) -> Node:
        return _with_target(name, *targets, options=options + reduction)

    def after(first: str, node: Node) -> Node:
        return Node("nn.Sequential", (Node(first, (), ("dim=1",) if "Softmax" in first else ()), node))

    classes = f"torch.randint({shape[1]}, {shape[:1] + shape[2:]})" if len(shape) > 1 else "torch.tensor(0)"
    signs = f"(2 * torch.randint(2, {text}) - 1)"
    return [
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
    ]


def _losses_of_two(pick: Pick, shape: Shape, reduction: tuple[str, ...], other: Node) -> list[Callable[[], Node]]:
    """Of two results and how they compare."""
    text = str(shape)
    return [
        lambda: Node("WithOther", (Node("nn.MarginRankingLoss", (), reduction), other, f"torch.ones{text}")),
        lambda: Node("WithOther", (Node("nn.CosineEmbeddingLoss", (), reduction), other, f"torch.ones({shape[0]})")),
        lambda: Node(
            "WithOthers",
            (Node("nn.TripletMarginLoss", (), reduction + pick.options("p=1|p=3", "swap=True")), other, Node("nn.Sigmoid")),
        ),
        lambda: Node("WithOthers", (Node("nn.TripletMarginWithDistanceLoss", (), reduction), other, Node("nn.Sigmoid"))),
        lambda: Node("WithOther", (Node("nn.CosineSimilarity", (), pick.options("dim=-1|dim=1", "eps=0.01")), other)),
        lambda: Node("WithOther", (Node("nn.PairwiseDistance", (), pick.options("p=1|p=3", "eps=0.01", "keepdim=True")), other)),
    ]


def _losses_of_classes(shape: Shape, reduction: tuple[str, ...]) -> list[Callable[[], Node]]:
    """Those that know how many classes there are."""
    text, c = str(shape), shape[-1]
    return [
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
            if len(shape) == 3 and c > 1  # torch writes beyond its memory for a label that is no class
            else _with_target("MSELoss", f"torch.zeros{text}", options=reduction)
        ),
    ]


# -- all of torch.nn ---------------------------------------------------------------------------------------------------------------

LEFT_OUT = {
    "Module": "the base class",
    "RNNBase": "the base class of RNN, LSTM and GRU",
    "RNNCellBase": "the base class of the cells",
    "LinearCrossEntropyLoss": "since torch 2.13: Linear and CrossEntropyLoss, which are drawn",
}
