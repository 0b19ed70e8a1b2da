"""Short-time Fourier transforms, as speech models begin: eager PyTorch's values, and bounds against adversarial signals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
window = torch.hann_window(8, dtype=D)


def spectrum_of(x, hop=4, onesided=True):
    return torch.stft(x, 8, hop, window=window, onesided=onesided, return_complex=True) * (1 + 0.5j)


CALLS = {
    "window": lambda x: torch.stft(x, 8, 4, window=window, return_complex=True),
    "window of other length": lambda x: torch.stft(x, 8, 3, 6, window[:6], return_complex=True),
    "no window": lambda x: torch.stft(x, 8, win_length=5, return_complex=True),
    "normalized": lambda x: torch.stft(x, 8, window=window, normalized=True, return_complex=True),
    "not centered": lambda x: torch.stft(x, 8, 2, center=False, return_complex=True),
    "both sides": lambda x: torch.stft(x, 8, 4, window=window, onesided=False, pad_mode="constant", return_complex=True),
    "and back": lambda x: torch.istft(spectrum_of(x), 8, 4, window=window),
    "and back, both sides": lambda x: spectrum_of(x, 2, onesided=False).istft(8, 2, 6, window[1:7], onesided=False, length=22),
    "and back, longer": lambda x: torch.istft(spectrum_of(x), 8, 4, normalized=True, length=30),
    "and back, complex": lambda x: torch.istft(spectrum_of(x, onesided=False), 8, 4, return_complex=True).imag,
    "method, real": lambda x: x.stft(8, 4, window=window, return_complex=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(24,), (2, 24)], ids=str)
def test_frames_and_their_norms(name, shape):
    torch.manual_seed(seeded(0))
    x = torch.randn(shape, dtype=D)
    wanted, traced = CALLS[name](x), thunder.jit(CALLS[name], transforms=[NormTransform()])
    torch.testing.assert_close(traced(x), wanted)
    for found in (CALLS[name](RMSTensor.of(x)), traced(RMSTensor.of(x))):
        torch.testing.assert_close(found.backing, wanted)
        assert actual_norm(found) <= found.norm_size * (1 + 1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["window", "not centered", "both sides"])
@pytest.mark.parametrize("kind, tight", [(RMSTensor, 0.1), (LinfTensor, 0.4)])
def test_bound_holds(name, kind, tight):
    Case(name, lambda x: torch.view_as_real(CALLS[name](x)), (Ball("x", kind, (2, 24), 1.5),), tight).check(seeded())


class Frontend(nn.Module):
    """Logarithms of energies in bands, normalized, as speech models take them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.bands = nn.Buffer(torch.rand(4, 9))
        self.conv = nn.Conv1d(4, 5, 3, padding=1)

    def forward(self, x):
        spectrum = torch.stft(x, 16, 8, window=self.window, return_complex=True)
        energies = torch.log(torch.clamp(self.bands @ spectrum.abs().pow(2), min=1e-5))
        return self.conv((energies - energies.mean(-1, keepdim=True)) / (energies.std(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize("mode", ["bound", "typical", "modula"])
def test_a_frontend_of_a_speech_model_has_a_modular_norm(mode):
    torch.manual_seed(seeded(0))
    norm = ModularNorm(Frontend(), torch.randn(2, 64), mode=mode)
    assert not norm.unreached and all(t > 1e-3 for name, t in norm.targets.items() if norm.masses[name] > 0)


def test_windows_that_leave_a_place_out_are_refused_as_torch_does():
    x = RMSTensor.of(torch.randn(24, dtype=D))
    spectrum = torch.stft(x, 8, 4, window=window, center=False, return_complex=True)
    with pytest.raises(RuntimeError, match="window overlap add"):
        torch.istft(spectrum.backing, 8, 4, window=window, center=False)
    with pytest.raises(NormMismatchError, match="add up to 0"):
        torch.istft(spectrum, 8, 4, window=window, center=False)
