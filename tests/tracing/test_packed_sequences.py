"""Packed sequences: `nn.utils.rnn.pack_padded_sequence`, recurrent layers of what it makes, and the way back, in every way that a program is run."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

from tests.seeds import crossed, seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, build_norm_map, norm_report, norm_sensitivity, normed, sensitivities, with_perturbation
from thunder_norm.errors import DataDependentError, UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform, grad, jvp, vmap
from thunder_norm.trees import leaves_of_results
import thunder

D = torch.float64
LENGTHS, UNSORTED = [5, 3, 3, 1], [3, 1, 5, 3]


class Padded(nn.Module):
    """A recurrent layer of sequences that were padded."""

    def __init__(self, kind: type[nn.RNNBase], **options):
        super().__init__()
        self.rnn, self.batch_first = kind(3, 4, **options), options.get("batch_first", False)

    def forward(self, x, lengths, enforce_sorted=True, hx=None):
        out, last = self.rnn(pack_padded_sequence(x, lengths, self.batch_first, enforce_sorted), hx)
        return *pad_packed_sequence(out, self.batch_first), last


LAYERS = {
    "LSTM": lambda: Padded(nn.LSTM, batch_first=True),
    "LSTM, two layers, both directions, projected": lambda: Padded(nn.LSTM, num_layers=2, bidirectional=True, proj_size=2),
    "GRU, both directions, without biases": lambda: Padded(nn.GRU, bidirectional=True, bias=False, batch_first=True),
    "RNN, two layers, relu": lambda: Padded(nn.RNN, num_layers=2, nonlinearity="relu"),
}


def made(name: str) -> tuple[Padded, torch.Tensor]:
    torch.manual_seed(seeded(0))
    m = LAYERS[name]().to(D)
    return m, torch.randn((4, 5, 3) if m.batch_first else (5, 4, 3), dtype=D)


def floating(result) -> list[torch.Tensor]:
    return [t for t in leaves_of_results(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("name", "is_sorted"), crossed(LAYERS, [False, True]))
def test_values_and_gradients_are_torchs(name, is_sorted):
    m, x = made(name)
    lengths = torch.tensor(LENGTHS) if is_sorted else UNSORTED
    given = [x, *m.parameters()]
    jm = thunder.jit(m, transforms=[NormTransform()])
    x.requires_grad_()
    found, expected = jm(x, lengths, is_sorted), m(x, lengths, is_sorted)
    torch.testing.assert_close(found, expected)
    weights = [torch.randn_like(t) for t in floating(expected)]
    of_each = [
        torch.autograd.grad(sum((w * t).sum() for w, t in zip(weights, floating(r), strict=True)), given)
        for r in (found, expected)
    ]
    torch.testing.assert_close(*of_each)


@pytest.mark.parametrize("transform", [SubclassTransform, CheckpointTransform])
def test_other_transforms(transform):
    m, x = made("GRU, both directions, without biases")
    torch.testing.assert_close(thunder.jit(m, transforms=[transform()])(x, UNSORTED, False), m(x, UNSORTED, False))


def test_a_first_state_and_lengths_of_each_call():
    m, x = made("LSTM")
    hx = torch.randn(1, 4, 4, dtype=D), torch.randn(1, 4, 4, dtype=D)
    jm = thunder.jit(m, transforms=[NormTransform()])
    for lengths in (UNSORTED, [1, 2, 3, 4], UNSORTED):
        given = x, torch.tensor(lengths), False, hx
        torch.testing.assert_close(jm(*given), m(*given))
    assert thunder.cache_misses(jm) == 2


def test_function_transforms():
    m, x = made("GRU, both directions, without biases")

    def loss(x):
        out, _, last = m(x, [2, 4], False)
        return out.square().sum() + last.sum()

    x = x[:2]
    xs = torch.stack([x, 2 * x])
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(grad(loss)(x), gradient)
    torch.testing.assert_close(thunder.jit(grad(loss), transforms=[NormTransform()])(x), gradient)
    torch.testing.assert_close(vmap(loss)(xs), torch.stack([loss(x) for x in xs]))
    torch.testing.assert_close(jvp(loss, (x,), (xs[1],))[1], (gradient * xs[1]).sum())
    with pytest.raises(DataDependentError, match="_pack_padded_sequence"):
        vmap(lambda n: m(x, n, False)[0])(torch.tensor([[2, 4], [4, 1]]))


def of_entries(x):
    packed = pack_padded_sequence(x, [5, 3, 1])
    packed = PackedSequence(2 * packed.data, *packed[1:])
    packed = packed._replace(data=packed.data.relu())
    return packed, pad_packed_sequence(packed, batch_first=True, padding_value=-1.5, total_length=7)


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform, CheckpointTransform])
def test_a_packed_sequence_that_a_program_takes_apart(transform):
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(seeded(1)))
    found = thunder.jit(of_entries, transforms=[transform()])(x)
    assert type(found[0]) is PackedSequence
    torch.testing.assert_close(found, of_entries(x))


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_packed_inputs_and_sequences_one_by_one(transform):
    torch.manual_seed(seeded(2))
    rnn, sequences = nn.GRU(3, 4), [torch.randn(n, 3) for n in (3, 5, 1)]
    packed = pack_sequence(sequences, enforce_sorted=False)

    def whole(*sequences):
        return unpack_sequence(rnn(pack_sequence(sequences, enforce_sorted=False))[0])

    jitted = functools.partial(thunder.jit, transforms=[transform()])
    torch.testing.assert_close(jitted(lambda p: pad_packed_sequence(rnn(p)[0]))(packed), pad_packed_sequence(rnn(packed)[0]))
    torch.testing.assert_close(jitted(whole)(*sequences), whole(*sequences))


def test_lengths_that_are_values_are_refused_where_none_are_known():
    rnn, packed = nn.GRU(3, 4), pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])
    for f in (lambda p: rnn(p)[0].data, lambda p: pad_packed_sequence(p)[0]):
        with pytest.raises(DataDependentError, match="needed for"):
            thunder.jit(f, transforms=[CheckpointTransform()])(packed)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64], ids=str)
def test_other_dtypes(dtype):
    x = torch.arange(24).reshape(3, 4, 2).to(dtype)
    f = lambda x: pad_packed_sequence(pack_padded_sequence(x, [4, 3, 1], True), padding_value=1)[0]  # noqa: E731
    torch.testing.assert_close(thunder.jit(f, transforms=[NormTransform()])(x), f(x))


def test_dropout_between_layers_draws_what_torch_draws():
    torch.manual_seed(seeded(3))
    m, x = Padded(nn.LSTM, num_layers=3, dropout=0.5), torch.randn(5, 4, 3)
    jm = thunder.jit(m, transforms=[NormTransform()])
    found = []
    for run in (m, jm):
        torch.manual_seed(seeded(4))
        found.append(run(x, LENGTHS))
    torch.testing.assert_close(*found)


REFUSED = {
    "not sorted": ([3, 5, 3, 1], RuntimeError, "sorted in decreasing order"),
    "none at all": ([5, 3, 3, 0], RuntimeError, "greater than 0"),
    "too few": ([5, 3], RuntimeError, "batch_size"),
    "too long": ([7, 3, 3, 1], UnsupportedOpError, "length 7 is packed, of a batch that is padded to 5"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_traced", [False, True])
def test_lengths_that_do_not_fit(is_traced, name):
    lengths, error, words = REFUSED[name]
    m, x = made("LSTM")
    with pytest.raises(error, match=words):
        thunder.jit(m, transforms=[NormTransform()])(x, lengths) if is_traced else m(RMSTensor.of(x), lengths)


# -- norms ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("dims", [(-1,), (-2, -1)])
@pytest.mark.parametrize("name", LAYERS)
def test_norms_bound_what_comes_out(name, dims):
    m, x = made(name)
    for y, t in zip(floating(m(RMSTensor.of(x, dims), UNSORTED, False)), floating(m(x, UNSORTED, False)), strict=True):
        torch.testing.assert_close(y.backing, t)
        assert actual_norm(y) <= y.norm_size * (1 + 1e-6)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_norms_in_a_trace_are_those_of_eager_mode(kind):
    torch.manual_seed(seeded(6))
    m, x = Padded(kind, bidirectional=kind is nn.RNN).to(D), torch.randn(3, 2, 3, dtype=D)
    run = normed(thunder.jit(m, transforms=[NormTransform()]))
    found, eager = (floating(f(RMSTensor.of(x), [1, 3], False)) for f in (run, m))
    for y, z in zip(found, eager, strict=True):
        torch.testing.assert_close(y.backing, z.backing)
        assert z.norm_size.item() == pytest.approx(y.norm_size.item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_of_equal_lengths_it_says_what_the_layer_says_of_tensors(name):
    m, x = made(name)
    packed = m(RMSTensor.of(x), [5, 5, 5, 5])
    whole, last = m.rnn(RMSTensor.of(x))
    for y, z in zip(floating(packed), floating((whole, last)), strict=True):
        torch.testing.assert_close(y.backing, z.backing)
        assert y.norm_size.item() == pytest.approx(z.norm_size.item(), rel=1e-9)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("sensitivity", ["global", "local", "composed"])
@pytest.mark.parametrize("name", LAYERS)
def test_sensitivity_bounds_the_jacobian(name, sensitivity):
    """Against the largest of many directions' differences."""
    m, x = made(name)
    given = with_perturbation(RMSTensor.of(x))
    with norm_sensitivity(sensitivity):
        claims = [sensitivities(y, [given])[0] for y in floating(m(given, LENGTHS))]
    for _ in range(10):
        direction = torch.randn_like(x)
        direction /= RMSTensor.of(direction).norm_size
        ahead, behind = (floating(m(x + s * 1e-6 * direction, LENGTHS)) for s in (1, -1))
        for claimed, a, b in zip(claims, ahead, behind, strict=True):
            assert RMSTensor.of((a - b) / 2e-6).norm_size <= claimed * (1 + 1e-6)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = (
            nn.Embedding(11, 6),
            nn.LSTM(6, 5, bidirectional=True, batch_first=True),
            nn.Linear(10, 3),
        )

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.rnn(packed)
        return self.head(torch.cat([h[-2], h[-1]], -1))


def test_a_model_of_texts_has_a_report_a_norm_map_and_a_modular_norm():
    torch.manual_seed(seeded(5))
    m, words, lengths = Classifier(), torch.randint(11, (2, 3)), [1, 3]
    report = norm_report(thunder.jit(m, transforms=[NormTransform()]), words, lengths)
    assert report.rows[-1].tightness <= 1 + 1e-6
    assert min(ModularNorm(m, words, lengths, mode="typical").targets.values()) > 1e-6
    on_meta = build_norm_map(Classifier().to("meta"), words.to("meta"), lengths, parameters="unit")(words.to("meta"), lengths)
    here = build_norm_map(m, words, lengths, parameters="unit")(words, lengths)
    assert on_meta.norm_size.item() == pytest.approx(here.norm_size.item())
