"""Sequences of several lengths in one batch: `nn.utils.rnn.pad_sequence`, in every way that a program is run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence, unpad_sequence
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import L2Tensor, RMSTensor, norm_report, normed
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

LAYOUTS = [
    {"batch_first": True},
    {"padding_value": 1.5},
    {"batch_first": True, "padding_side": "left"},
]


def sequences(*trailing: int) -> list[torch.Tensor]:
    torch.manual_seed(seeded(0))
    return [torch.randn(n, *trailing) for n in (5, 3, 1)]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("trailing", [(), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("transform", [NormTransform, CheckpointTransform, SubclassTransform])
def test_plain_ones_and_their_gradients_are_torchs(transform, trailing, options):
    given, same = ([t.requires_grad_() for t in sequences(*trailing)] for _ in range(2))
    found = thunder.jit(lambda *ts: pad_sequence([t * 2 for t in ts], **options), transforms=[transform()])(*given)
    expected = pad_sequence([t * 2 for t in same], **options)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for t, s in zip(given, same, strict=True):
        torch.testing.assert_close(t.grad, s.grad)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64], ids=str)
def test_other_dtypes(dtype):
    given = [(t > 0).to(dtype) for t in sequences(4)]
    value = 1 if dtype is torch.bool else -100
    found = thunder.jit(lambda *ts: pad_sequence(ts, padding_value=value), transforms=[NormTransform()])(*given)
    torch.testing.assert_close(found, pad_sequence(given, padding_value=value))


def test_wrappers():
    """Torch's own makes a plain tensor of them."""
    given = [TwoTensor(t, 2 * t) for t in sequences(4)]
    found = thunder.jit(lambda *ts: pad_sequence(ts, batch_first=True), transforms=[SubclassTransform()])(*given)
    torch.testing.assert_close(found, pad_sequence(given, batch_first=True))
    assert type(found) is type(pad_sequence(given, batch_first=True))


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind, dims", [(RMSTensor, (-1,)), (RMSTensor, (-2, -1)), (L2Tensor, (-2, -1))])
@pytest.mark.parametrize("is_traced", [False, True])
def test_the_norm_bounds_what_comes_out(is_traced, kind, dims, options):
    if kind is L2Tensor:
        options = options | {"padding_value": 0.0}  # the length of what is not 0 depends on how much there is of it

    def pad(*ts):
        return pad_sequence(ts, **options)

    given = sequences(4)
    run = normed(thunder.jit(pad, transforms=[NormTransform()])) if is_traced else pad
    found = run(*(kind.of(t, dims) for t in given))
    torch.testing.assert_close(found.backing, pad(*given))
    assert actual_norm(found) <= found.norm_size * (1 + 1e-6)


class Classifier(nn.Module):
    """A mean over the words of each text."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, *texts):
        x = pad_sequence([self.words(t) for t in texts], batch_first=True)
        return self.head(torch.stack([row.mean(0) for row in unpad_sequence(x, torch.tensor([len(t) for t in texts]), True)]))


def test_a_model_of_texts_has_a_modular_norm_and_a_report():
    torch.manual_seed(seeded(0))
    texts = [torch.randint(11, (n,)) for n in (5, 3, 1)]
    model = Classifier()
    assert min(ModularNorm(model, *texts, mode="typical").targets.values()) > 0
    jitted = thunder.jit(model, transforms=[NormTransform()])
    torch.testing.assert_close(jitted(*texts), model(*texts))
    assert norm_report(jitted, *texts).rows[-1].tightness <= 1 + 1e-6


@pytest.mark.parametrize("make", [RMSTensor.of, lambda t: t], ids=["normed", "plain"])
def test_a_side_that_there_is_not_is_torchs_error(make):
    with pytest.raises(RuntimeError, match="padding_side to be one of left or right") as expected:
        pad_sequence(sequences(4), padding_side="middle")
    with pytest.raises(RuntimeError, match="padding_side to be one of left or right") as found:
        thunder.jit(lambda *ts: pad_sequence(ts, padding_side="middle"), transforms=[NormTransform()])(*map(make, sequences(4)))
    assert type(found.value) is type(expected.value)
