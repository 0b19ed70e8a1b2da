"""Learning tasks on data that comes with Python and scikit-learn, for models of any width and depth.

Residual branches are scaled by 1 / depth and attention by 1 / channels of a head, unless a `Form` says otherwise; GPT-2 and Llama are
as transformers writes them, x + f(x) with attention scaled by the root of a head's channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

HEAD = 16  # channels of an attention head
CONTEXT = 32  # characters that the transformer sees
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Form:
    """Powers of the depth and of a head's channels by which branches and attention scores are divided."""

    depth_power: float = 1.0
    head_power: float = 1.0


class MLPBlock(nn.Module):
    """x + scale * down(relu(up(x)))."""

    def __init__(self, width: int, scale: float):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = scale

    def forward(self, x):
        return x + self.scale * self.down(F.relu(self.up(x)))


class ResidualMLP(nn.Module):
    def __init__(self, inputs: int, width: int, depth: int, form: Form):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.Sequential(*(MLPBlock(width, depth**-form.depth_power) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


class ConvBlock(nn.Module):
    """x + scale * relu(conv(x)), the kernel 3 x 3."""

    def __init__(self, width: int, scale: float):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.scale = scale

    def forward(self, x):
        return x + self.scale * F.relu(self.conv(x))


class ConvNet(nn.Module):
    """Images of 8 x 8 become 4 x 4 positions, at last one."""

    def __init__(self, width: int, depth: int, form: Form):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock(width, depth**-form.depth_power) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x.view(-1, 1, 8, 8))).mean((-2, -1)))


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a layer norm."""

    def __init__(self, width: int, scale: float, head_power: float, is_causal: bool = True):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale, self.attention_scale, self.is_causal = scale, HEAD**-head_power, is_causal

    def attention(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(-3, -2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=self.attention_scale)
        return self.out(y.transpose(-3, -2).flatten(-2))

    def forward(self, x):
        x = x + self.scale * self.attention(self.norm_1(x))
        return x + self.scale * self.down(F.gelu(self.up(self.norm_2(x))))


class CharTransformer(nn.Module):
    def __init__(self, width: int, depth: int, form: Form):
        super().__init__()
        scale = depth**-form.depth_power
        self.characters, self.positions = nn.Embedding(len(ALPHABET), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, scale, form.head_power) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, ids):
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[-1]))
        return self.head(self.norm(self.blocks(x)))


class VisionTransformer(nn.Module):
    """Images of 8 x 8 as 16 patches of 2 x 2, whose places are parameters; the head has their mean."""

    def __init__(self, width: int, depth: int, form: Form):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, 16, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, depth**-form.depth_power, form.head_power, is_causal=False) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x.view(-1, 1, 8, 8)).flatten(-2).mT + self.places
        return self.head(self.norm(self.blocks(x)).mean(-2))


class FromTransformers(nn.Module):
    """GPT-2 or Llama for characters: numbers of them to logits.  Width, depth and vocabulary are set, nothing else of the model."""

    def __init__(self, name: str, width: int, depth: int, form: Form):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        if form != Form():
            raise ValueError(f"{name} is as transformers writes it: it has no other form")
        shared: dict = dict(vocab_size=len(ALPHABET), tie_word_embeddings=False, use_cache=False, bos_token_id=0, eos_token_id=0)
        if name == "gpt2":
            no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config = GPT2Config(n_embd=width, n_layer=depth, n_head=width // HEAD, n_positions=CONTEXT, **no_dropout, **shared)
            self.model = GPT2LMHeadModel(config)
        else:
            sizes = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth)
            heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // HEAD)
            self.model = LlamaForCausalLM(
                LlamaConfig(**sizes, **heads, max_position_embeddings=CONTEXT, pad_token_id=0, **shared)
            )

    def forward(self, ids):
        return self.model(ids).logits


@functools.cache
def digits(side: int = 8) -> Batch:
    """All 1797 images of digits, side x side pixels in a row, with mean 0 and mean square 1 over all."""
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    x = F.adaptive_avg_pool2d(x.float().view(-1, 8, 8), side).flatten(1)
    return (x - x.mean()) / x.std(), y


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Python's language reference as pydoc shows it, as numbers of characters: to learn from, and every tenth stretch apart."""
    from pydoc_data.topics import topics

    number = {c: i for i, c in enumerate(ALPHABET)}
    ids = torch.tensor([number.get(c, 0) for name in sorted(topics) for c in topics[name]])
    length = 32 * (CONTEXT + 1)
    stretches = ids[: len(ids) // length * length].view(-1, length)
    is_apart = torch.arange(len(stretches)) % 10 == 9
    return stretches[~is_apart].flatten(), stretches[is_apart]


def some_digits(count: int, side: int, random: torch.Generator) -> Batch:
    x, y = digits(side)
    i = torch.randint(len(x), (count,), generator=random)
    return x[i], y[i]


def some_text(random: torch.Generator) -> Batch:
    ids, _ = text()
    starts = torch.randint(len(ids) - CONTEXT, (8, 1), generator=random)
    return _next_characters(ids[starts + torch.arange(CONTEXT + 1)])


def text_apart() -> Batch:
    """The first eighth of each stretch that is not learnt from."""
    _, apart = text()
    return _next_characters(apart[:, : 4 * (CONTEXT + 1)].reshape(-1, CONTEXT + 1))


def _next_characters(rows: torch.Tensor) -> Batch:
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class Task:
    """What is learnt.

    Attributes:
        title: for people.
        model: (width, depth, form) -> module.
        batch: random inputs and classes.
        judged: those on which the final loss is taken: of digits all, for it is optimizers that are compared.
        classes: how many there are.
        steps: of a run.
        widths: at the first of `depths`.
        depths: at `width`.
        blocks_mass: of all residual blocks together; what comes before and after them has mass 1 for each matrix.
        blocks: how the names of parameters inside of residual blocks begin.
    """

    title: str
    model: Callable[[int, int, Form], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    judged: Callable[[], Batch]
    classes: int
    steps: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    width: int
    blocks_mass: float
    blocks: str = "blocks."

    @property
    def chance(self) -> float:
        return math.log(self.classes)


_MLP = Task(
    title="digits, residual MLP",
    model=partial(ResidualMLP, 64),
    batch=partial(some_digits, 64, 8),
    judged=digits,
    classes=10,
    steps=60,
    widths=(16, 32, 64, 128),
    depths=(2, 4, 8),
    width=32,
    blocks_mass=2.0,
)
_TEXT = replace(
    _MLP,
    title="text, transformer",
    model=CharTransformer,
    batch=some_text,
    judged=text_apart,
    classes=len(ALPHABET),
    blocks_mass=5.0,
)


def _of_transformers(title: str, name: str, blocks: str) -> Task:
    """The text task with a model as transformers writes it."""
    return replace(
        _TEXT,
        title=f"text, {title} of transformers",
        model=partial(FromTransformers, name),
        steps=40,
        widths=(16, 64, 256),
        depths=(2, 8),
        width=16,
        blocks=blocks,
    )


TASKS = {
    "mlp": _MLP,
    "conv": replace(
        _MLP, title="digits, conv net", model=ConvNet, batch=partial(some_digits, 32, 8), widths=(8, 16, 32, 64), width=16
    ),
    "text": _TEXT,
    "gpt": replace(_TEXT, title="text, GPT of 4 layers", widths=(64, 128, 256), depths=(4,)),
    "gpt2": _of_transformers("GPT-2", "gpt2", "model.transformer.h."),
    "llama": _of_transformers("Llama", "llama", "model.model.layers."),
    "vit": replace(_MLP, title="digits, ViT", model=VisionTransformer, depths=(2,), blocks_mass=5.0),
    # the inputs are no more than the narrowest model is wide
    "small": replace(
        _MLP,
        title="digits of 4 x 4, residual MLP",
        model=partial(ResidualMLP, 16),
        batch=partial(some_digits, 64, 4),
        judged=partial(digits, 4),
        depths=(2,),
    ),
}
