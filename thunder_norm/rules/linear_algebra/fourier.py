"""Norm rules for discrete Fourier transforms.

Along a dimension of N entries a transform is a matrix with entries of modulus s, the scale that `norm` names, and orthogonal but for
s sqrt(N).  Of the input K entries matter: it is cut to N, or filled with zeros.  What a transform of real numbers leaves out, or takes
to be there, are the conjugates of other entries; these count twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.programs import written_as
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._facts import values_known
from thunder_norm.rules._shared import negative, rms, scaled, spread
from thunder_norm.scalars import times


@dataclass(frozen=True)
class _Transform:
    """A transform along one dimension: as many entries as given, as it works on, as it has.

    Attributes:
        given: entries of the input.
        n: entries of the whole signal, N.
        out: entries of the output.
        scale: modulus of the matrix's entries, s.
        half: which side has one half of the spectrum, "out" or "in"; "" for neither.
    """

    given: int
    n: int
    out: int
    scale: float
    half: str

    @property
    def _weights(self) -> list[int]:
        """How often each input entry that matters counts: those of a half spectrum with their conjugates."""
        if self.half != "in":
            return [1] * min(self.given, self.n)
        return [1 if k in (0, self.n / 2) else 2 for k in range(min(self.given, self.n // 2 + 1))]

    @property
    def typical(self) -> float:
        """RMS of the output of independent entries of RMS 1; of complex ones of which one takes the real part, half the squares."""
        squares = math.fsum(w * w for w in self._weights)
        return self.scale * math.sqrt(squares / 2 if self.half == "in" else squares)

    @property
    def largest(self) -> float:
        """Largest entry of the output per largest entry of the input: entries that agree, in the first place."""
        return self.scale * math.fsum(self._weights)

    @property
    def mean(self) -> float:
        """RMS of the output per RMS of the input: the length of what matters times its share, K of the input's length at most."""
        length = self.n * max(self._weights, default=0)
        if self.half == "out":
            # (N |x|^2 + |X_0|^2 + |X_(N/2)|^2) / 2; the two last have the sums over even and odd places
            used = min(self.given, self.n)
            length = self.n / 2 + math.ceil(used / 2) if self.n % 2 == 0 else (self.n + used) / 2
        return self.scale * math.sqrt(length * self.given / max(self.out, 1))

    def factor(self, is_normed: bool) -> float:
        """The norm's growth, where the norm runs over the dimension or not."""
        bound = self.mean if is_normed else self.largest
        return self.typical * spread(bound / self.typical) if self.typical > 0 else 0.0


def _transformed(x: RMSTensor, transforms: Sequence[tuple[int, _Transform]]) -> RMSTensor:
    """One transform after the other, each along a dimension."""
    c = 1.0
    for dim, t in transforms:
        c *= t.factor(dim in x.elem_dims)
    return scaled(x, c)


def _scale(n: int, norm: str | None, is_inverse: bool) -> float:
    """s for a signal of n entries."""
    if norm == "ortho":
        return 1 / math.sqrt(n)
    return 1 / n if ((norm or "backward") == "backward") == is_inverse else 1.0


def _along(x: RMSTensor, dim: int, n: int | None, norm: str | None, kind: str) -> tuple[int, _Transform]:
    """The transform `kind` ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") along a dimension."""
    at = negative(dim, x.ndim)
    given = x.shape[at]
    half = {"rfft": "out", "ihfft": "out", "irfft": "in", "hfft": "in"}.get(kind, "")
    length = n if n is not None else 2 * (given - 1) if half == "in" else given
    out = length // 2 + 1 if half == "out" else length
    return at, _Transform(given, length, out, _scale(length, norm, kind in ("ifft", "irfft", "ihfft")), half)


def _dims(
    x: RMSTensor, s: Sequence[int] | int | None, dim: Sequence[int] | int | None
) -> tuple[Sequence[int], Sequence[int | None]]:
    """The dimensions of a transform along several, and the sizes given for them; -1 is the input's own."""
    s, dim = ((v,) if isinstance(v, int) else v for v in (s, dim))
    if dim is None:
        dim = range(-len(s), 0) if s is not None else range(-x.ndim, 0)
    return dim, [None] * len(dim) if s is None else [None if n == -1 else n for n in s]


_DOC = """{title}

    Value:       along a dimension of K entries, N with zeros, M of them in the result, s = 1 (1 / N, 1 / sqrt(N): as `norm` says):
                 s sqrt(c K N / M) n where the norm runs over it; s c' n where it does not: {counts}
                 (attained: constants, or one frequency; in one dimension)
    Sensitivity: the same factor
    Typical:     s sqrt(K) n: entries of a random sign{typical}
    Source:      Parseval; triangle inequality
    """
_PLAIN_COUNTS = "c = 1, c' = min(K, N)"
_OUT_COUNTS = "c = (N / 2 + ceil(K / 2)) / N, or (N + K) / 2 N for odd N, c' = min(K, N)"
_IN_COUNTS = "c = 2 where a frequency has a conjugate that is not given, c' counts both"


def _one(kind: str) -> Callable[..., RMSTensor]:
    def rule(input: RMSTensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> RMSTensor:
        return _transformed(input, [_along(input, dim, n, norm, kind)])

    return rule


def _several(first: str, last: str, default: tuple[int, ...] | None) -> Callable[..., RMSTensor]:
    """A transform along several dimensions: `last` along the last of them, `first` along the others."""

    def rule(
        input: RMSTensor,
        s: Sequence[int] | int | None = None,
        dim: Sequence[int] | int | None = default,
        norm: str | None = None,
    ) -> RMSTensor:
        dims, sizes = _dims(input, s, dim)
        kinds = [*[first] * (len(dims) - 1), last]
        return _transformed(input, [_along(input, d, n, norm, k) for d, n, k in zip(dims, sizes, kinds, strict=True)])

    return rule


def _register(name: str, rule: Callable[..., RMSTensor], last: str, title: str) -> None:
    counts = {"rfft": _OUT_COUNTS, "ihfft": _OUT_COUNTS, "irfft": _IN_COUNTS, "hfft": _IN_COUNTS}.get(last, _PLAIN_COUNTS)
    typical = "; of a half spectrum, the real parts of both halves" if counts is _IN_COUNTS else ""
    rule.__name__ = rule.__qualname__ = f"fft_{name}"
    rule.__doc__ = _DOC.format(title=title, counts=counts, typical=typical)
    normed_op(getattr(torch.fft, name)).register_norm(rule, takes_complex=True)


for _kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _register(_kind, _one(_kind), _kind, "A discrete Fourier transform along one dimension.")
    _first = {"rfft": "fft", "irfft": "ifft", "hfft": "fft", "ihfft": "ifft"}.get(_kind, _kind)
    for _suffix, _default in (("2", (-2, -1)), ("n", None)):
        _title = "Discrete Fourier transforms along several dimensions."
        _register(_kind + _suffix, _several(_first, _kind, _default), _kind, _title)


@normed_op(torch.fft.fftshift).register_norm(takes_complex=True)
@normed_op(torch.fft.ifftshift).register_norm(takes_complex=True)
def fftshift(input: RMSTensor, dim: Any = None) -> RMSTensor:
    """The same entries, each half of them in the place of the other.  Value n, attained; sensitivity 1."""
    return rms(times(input.norm_size, 1.0), input.elem_dims, sensitivity={"input": 1})


# -- of frames ------------------------------------------------------------------------------------------------------------


@written_as(torch.stft, torch._VF.stft)  # pyright: ignore[reportAttributeAccessIssue]
def stft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    *kernels_own: Any,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> torch.Tensor:
    """As `torch.stft`, or the kernel that it calls with what comes before and after padding: frames, times a window, transformed."""
    if kernels_own:
        normalized, onesided, return_complex = kernels_own[:3]
    elif center:
        whole = input.unsqueeze(0) if input.ndim == 1 else input
        padded = F.pad(whole, [n_fft // 2, n_fft // 2], pad_mode)
        input = padded.squeeze(0) if input.ndim == 1 else padded
    hop, length = hop_length or n_fft // 4, win_length or n_fft
    frames: Any = input.unfold(-1, n_fft, hop)
    if window is None and length < n_fft:
        window = torch.ones(length, dtype=input.dtype, device=input.device)
    if window is not None:
        left = (n_fft - length) // 2
        frames = frames * (F.pad(window, [left, n_fft - length - left]) if length < n_fft else window)
    norm = "ortho" if normalized else "backward"
    is_half = not input.is_complex() if onesided is None else onesided
    found = (torch.fft.rfft if is_half else torch.fft.fft)(frames, norm=norm).transpose(-1, -2)
    return found if return_complex or input.is_complex() else torch.view_as_real(found)


_LEAST_OVERLAP = 1e-11  # torch.istft's


@written_as(torch.istft)
def istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor:
    """As `torch.istft`: frames of a spectrum, times a window, added where they overlap, over what the squared window adds up to there."""
    hop, given = hop_length or n_fft // 4, win_length or n_fft
    spectrum = input.unsqueeze(0) if input.ndim == 2 else input
    frames: Any = spectrum.transpose(-1, -2)
    norm = "ortho" if normalized else "backward"
    if return_complex:
        frames = torch.fft.ifft(frames, norm=norm)
    else:
        is_half = spectrum.shape[-2] != n_fft if onesided is None else onesided
        frames = torch.fft.irfft(frames if is_half else frames[..., : n_fft // 2 + 1], n_fft, norm=norm)
    if window is None:
        window = torch.ones(given, dtype=torch.float64 if frames.dtype in (torch.float64, torch.complex128) else torch.float32)
        window = window.to(frames.device)
    left = (n_fft - given) // 2
    window = F.pad(window, [left, n_fft - given - left]) if given < n_fft else window
    whole = n_fft + hop * (spectrum.shape[-1] - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - start

    def added(t: torch.Tensor) -> torch.Tensor:
        """What overlaps in one of these rows of frames, as `torch.istft` cuts it."""
        return F.fold(t.transpose(-1, -2), (1, whole), (1, n_fft), stride=(1, hop))[:, 0, 0, start:end]

    overlap = added(window.square().expand(1, spectrum.shape[-1], n_fft))
    values = values_known(overlap)
    if values is not None and bool((values < _LEAST_OVERLAP).any()):
        raise NormMismatchError("torch.istft: the squared windows add up to 0 in some place, where the signal is not known")
    weights = overlap.reciprocal()
    weighted = frames * window
    if return_complex and weighted.is_complex():
        parts = torch.view_as_real(weighted)
        found = torch.complex(added(parts[..., 0]) * weights, added(parts[..., 1]) * weights)
    else:
        found = added(weighted) * weights
    found = F.pad(found, [0, end - whole]) if end > whole else found
    return found.squeeze(0) if input.ndim == 2 else found
