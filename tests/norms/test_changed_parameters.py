"""What a program writes into a tensor that it made from parameters: as in torch, or refused; never a norm of what was there before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import LONG, seeded
from thunder_norm import RMSTensor, build_norm_map, norm_report, normed
from thunder_norm.errors import ThunderNormError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

WRITES = {
    "fill_": lambda w: w.fill_(30.0),
    "mul_": lambda w: w.mul_(30.0),
    "add_": lambda w: w.add_(30.0),
    "zero_": lambda w: w.zero_(),
    "clamp_": lambda w: w.clamp_(min=30.0),
    "sigmoid_": lambda w: w.sigmoid_(),
    "nan_to_num_": lambda w: w.nan_to_num_(),
    "copy_": lambda w: w.copy_(torch.full_like(w, 30.0)),
    "copy_ of a constant": lambda w: w.copy_(torch.full((4,), 30.0)),
    "an entry": lambda w: w.__setitem__(0, 30.0),
    "a mask": lambda w: w.masked_fill_(torch.tensor([True, False, True, False]), 30.0),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([1]), 30.0),
    "swapped": lambda w: w.unsqueeze_(0),
}
THROUGH = {
    "itself": lambda w: w,
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "view": lambda w: w.view(2, 2).view(4),
    "slice": lambda w: w[:4],
    "detached slice": lambda w: w[:].detach(),
}
MADE = {"tanh": lambda p: torch.tanh(p).clone(), "transposed": lambda p: (p * 1.0).view(4, 1).t().contiguous().view(4)}


class Writes(nn.Module):
    """Makes tensors from a parameter in several ways, writes into each, and gives the input times each of them."""

    def __init__(self, write, through, makes, without_grad):
        super().__init__()
        torch.manual_seed(seeded(0))
        self.p = nn.Parameter(torch.randn(4) * 0.1)
        self.write, self.through, self.makes, self.without_grad = write, through, makes, without_grad

    def forward(self, x):
        made = [make(self.p) for make in self.makes]
        for w in made:
            with torch.set_grad_enabled(not self.without_grad):
                self.write(self.through(w))
        return [x * w for w in made]


def programs(model):
    """Each way to the norms, with a norm of the input that is that of x."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seeded(1)))
    given = RMSTensor.of(x)
    jm = thunder.jit(model, transforms=[NormTransform()])
    yield "eager", x, lambda: model(given)
    yield "traced", x, lambda: normed(jm)(given)
    yield "norm map", x, lambda: build_norm_map(model, x)(given)
    # the rows of the results: what each is made of is read, and has its rows, where it is needed
    yield "report", x, lambda: [row for row in norm_report(jm, given, sensitivity="global").rows if row.shape == x.shape]


def results(model, x, run):
    """Eager PyTorch's, and those with norms; None where one of the two refuses the program."""
    try:
        expected = model(x)
    except RuntimeError:
        return None
    try:
        return expected, run()
    except (ThunderNormError, AttributeError):  # Thunder has no x.data
        return None


def check(makes, write, through, without_grad, ways):
    """Together, which takes one acquisition; what is refused of several may be refused because of one of them."""
    model = Writes(WRITES[write], THROUGH[through], makes, without_grad)
    for way, x, run in programs(model):
        if way not in ways:
            continue
        found = results(model, x, run)
        if found is None:
            for make in makes if len(makes) > 1 else ():
                check([make], write, through, without_grad, [way])
            continue
        for wanted, y in zip(*found, strict=True):
            assert RMSTensor.of(wanted).norm_size <= y.norm_size * (1 + 1e-5), way
            if way in ("eager", "traced"):
                torch.testing.assert_close(y.backing, wanted)


# Each two of how, through what and whether recorded meet, and each way to the norms meets each of them; all where nothing is left out
# to save time.
WAYS = ("eager", "traced", "norm map", "report")
CASES = [
    pytest.param(
        *(write, through, without_grad, WAYS if LONG else (*WAYS[:2], WAYS[2 + (i + j) // 2 % 2])),
        id=f"{write}-{through}-{'no_grad' if without_grad else 'recorded'}",
    )
    for i, write in enumerate(WRITES)
    for j, through in enumerate(THROUGH)
    for without_grad in (False, True)
    if LONG or without_grad == (i + j) % 2
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("write", "through", "without_grad", "ways"), CASES)
def test_norms_are_those_of_what_is_there_now(write, through, without_grad, ways):
    check(list(MADE.values()), write, through, without_grad, ways)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("through", THROUGH)
def test_the_modular_norm_does_not_take_what_was_there_before(through):
    def write(w):
        w.copy_(torch.full((4,), 30.0))

    class Deep(Writes):
        def forward(self, x):
            return super().forward(x)[0] * self.p

    class Constant(Deep):
        def forward(self, x):
            return x * torch.full((4,), 30.0) * self.p

    x = torch.randn(3, 4)
    targets = [ModularNorm(cls(write, THROUGH[through], [MADE["tanh"]], True), x).targets["p"] for cls in (Deep, Constant)]
    assert 0 < targets[0] <= targets[1] * (1 + 1e-6)  # a target of what was there before, a tanh, would be larger
