"""What a training monitor says of one parameter, its update and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from thunder_norm.core.kinds import LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.measuring import extreme_singular_values, stacked
from thunder_norm.core.tensors import has_norm
from thunder_norm.errors import NormMismatchError
from thunder_norm.model_state.shards import is_spread
from thunder_norm.modular.duality import Ball, OperatorBall, ball
from thunder_norm.modular.orthogonal import at_least_float32
from thunder_norm.modular.steepest import steepest_steps
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.lifts.parameters import canonical_dims

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_NORMALIZATIONS = (torch.nn.LayerNorm, torch.nn.RMSNorm)
_TOKENS = ("bias_k", "bias_v")
TRANSPOSED = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)


def measured_names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that have norms, by their first name.

    Raises:
        NormMismatchError: one is sharded, or has no data.
    """
    found = {name: p for name, p in model.named_parameters() if has_norm(p)}
    for name, p in found.items():
        if is_spread(p) or p.is_meta or p.layout != torch.strided:
            what = "sharded" if is_spread(p) else "on the meta device" if p.is_meta else f"not dense ({p.layout})"
            raise NormMismatchError(
                f"{name!r} is {what}: a training monitor measures whole tensors that this process has the data of"
            )
    return found


def natural_norms(model: torch.nn.Module) -> dict[str, NormSpec]:
    """The norms of parameters by the modules they are in, for a program that says nothing about them.

    Weights of convolutions are kernels, those of embeddings tables, gains, biases and tokens vectors; else what has two dimensions or more
    is a (stack of) operators, and what has fewer a vector.  What is parametrized is what it is without.
    """
    found: dict[int, NormSpec] = {}
    for _, p, norm in natural_norms_by_module(model):
        found.setdefault(id(p), norm)
    return {name: found[id(p)] for name, p in model.named_parameters()}


def natural_norms_by_module(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.Tensor, NormSpec]]:
    """Each parameter in every module that has it, and its norm there."""
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, ParametrizationList):
                yield owner_of(model, f"{path}.{name}"), p, _parametrized(model, path, name, p)
            else:
                yield module, p, _natural(module, name, p)


def owner_of(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The module that a parameter is of, or what it is made of."""
    path = name.rpartition(".")[0]
    is_made = isinstance(model.get_submodule(path), ParametrizationList)
    return model.get_submodule(path.rpartition("parametrizations.")[0].rstrip(".") if is_made else path)


def _parametrized(model: torch.nn.Module, path: str, name: str, p: torch.Tensor) -> NormSpec:
    first = next(iter(model.get_submodule(path).children()), None)
    if name == "original0" and isinstance(first, _WeightNorm):  # lengths
        return NormSpec(LinfTensor, ())
    return _natural(owner_of(model, f"{path}.{name}"), path.rpartition(".")[2], p)


def _natural(module: torch.nn.Module, name: str, p: torch.Tensor) -> NormSpec:
    is_vector = isinstance(module, _NORMALIZATIONS) or isinstance(module, torch.nn.MultiheadAttention) and name in _TOKENS
    if p.ndim < 2 or is_vector or isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return NormSpec(RMSTensor, canonical_dims(RMSTensor, None, p.ndim))
    if p.ndim > 2 and isinstance(module, TRANSPOSED):
        grouped = RMSToRMSConvTensor if module.groups == 1 else RMSToRMSTensor  # its groups are along the other dimension
        return NormSpec(grouped, (1 - p.ndim, -p.ndim))
    if p.ndim > 2 and isinstance(module, _CONVOLUTIONS):
        kind = RMSToRMSConvTensor.grouped(module.groups)
        return NormSpec(kind, canonical_dims(kind, None, p.ndim))
    return NormSpec(RMSToRMSTensor, (-2, -1))


@torch.no_grad()
def norm_of(spec: NormSpec, t: torch.Tensor) -> float:
    """The norm of a tensor in a kind; NaN or infinite if an entry is."""
    return spec.kind.of(t.detach(), spec.elem_dims).norm_size.item()


@dataclass(frozen=True)
class Spectrum:
    """The singular values of an operator, or of all matrices of a kernel or stack.

    Attributes:
        largest: of them.
        smallest: of the min(m, n) that each matrix has.
        stable_rank: ``|W|_F^2 / (n sigma_max^2)`` of n matrices; 0 of zeros.
    """

    largest: float
    smallest: float
    stable_rank: float

    @staticmethod
    @torch.no_grad()
    def of(spec: NormSpec, t: torch.Tensor) -> Spectrum | None:
        """Of a tensor in a kind; None if the kind is no operator's. NaN where an entry is not finite."""
        if not issubclass(spec.kind, RMSToRMSTensor) or not t.numel():
            return None
        t = t.detach()
        groups = getattr(spec.kind, "groups", 1)
        dims = spec.elem_dims[0], spec.elem_dims[1]
        extremes = extreme_singular_values(t, dims, groups)
        if extremes is None:
            return Spectrum(math.nan, math.nan, math.nan)
        largest, smallest = extremes
        matrices = stacked(t, dims, groups)
        scaled = torch.linalg.vector_norm(matrices.abs(), dtype=torch.float64).item() / largest if largest > 0 else 0.0
        return Spectrum(largest, smallest, scaled**2 / len(matrices))


@torch.no_grad()
def dual_norms(specs: Mapping[str, NormSpec], grads: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The dual norm of each gradient, ``max <G, D> over |D| <= 1``: what a step of norm 1 gains, to first order.

    Of an operator it is ``sqrt(out / in)`` times the sum of the singular values.  Where these are not found faster (see `OperatorBall.dual`) it is
    ``<G, lmo(G)>`` with the polar factor by Newton-Schulz steps: up to 0.6 % below the exact value, more only where many singular values
    below 0.004 of the Frobenius norm add up (see `orthogonalize`).  NaN where an entry is not finite.  Left out: a kind of which no duality
    map is known.
    """
    found: dict[str, float] = {}
    parts: list[tuple[str, Ball, torch.Tensor]] = []
    for name, g in grads.items():
        dense = (g.to_dense() if g.layout != torch.strided else g).detach()
        try:
            its = ball(specs[name].kind, specs[name].elem_dims, dense.shape)
        except NormMismatchError:
            continue
        if not dense.isfinite().all():
            found[name] = math.nan
        elif isinstance(its, OperatorBall) and (size := its.dual(dense)) is not None:
            found[name] = size
        else:
            parts.append((name, its, at_least_float32(dense)))
    steps = steepest_steps([(its, g, 1.0) for _, its, g in parts])
    return found | {name: _inner(g, d) for (name, _, g), d in zip(parts, steps, strict=True)}


def _inner(g: torch.Tensor, d: torch.Tensor) -> float:
    """``Re <g, d>``, summed in float64."""
    if g.is_complex():
        g, d = torch.view_as_real(g.resolve_conj()), torch.view_as_real(d.resolve_conj())
    return sum((a.double() * b.double()).sum().item() for a, b in _pieces(g, d))


def _pieces(g: torch.Tensor, d: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    if g.ndim == 0:
        return [(g, d)]
    rows = max(1, (1 << 19) * len(g) // max(1, g.numel()))
    return list(zip(g.split(rows), d.split(rows), strict=True))


def difference(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """``new - old`` in float32 at least: the difference of two numbers of half precision is not one itself."""
    return at_least_float32(new.detach()) - at_least_float32(old)
