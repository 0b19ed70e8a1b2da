"""Training for certified radii: a loss of the logits that are left when every input moves as far as it may."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from thunder_norm.core import conversions, linear_bounds
from thunder_norm.core.composed import spread_of
from thunder_norm.core.context import norm_mode, norm_sensitivity, perturbations_recorded
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import from_data
from thunder_norm.core.tensors import NormedTensor, describe
from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.norms.decisions import NoDecisions
from thunder_norm.norms.sensitivity import sensitivities, with_perturbation
from thunder_norm.norms.undisturbed import Surroundings
from thunder_norm.scalars import is_count, is_number
from thunder.core.module import ThunderModule

Scope = Literal["composed", "global"]


class LipschitzMargin(torch.nn.Module):
    """Cross entropy of the logits that remain when inputs move by at most a radius: Lipschitz-margin training.

    For inputs within ``|x' - x|_2 <= r`` the logits of a classifier differ by ``z'_j - z'_c <= z_j - z_c + r K_cj``, K_cj being the
    Lipschitz constant of that difference.  The loss is the cross entropy of ``z_j + r K_cj``, c the target; it is differentiable in
    the logits and, through the constants, in the model's parameters.  Where the target's logit is still the largest of these, the
    label is certified: no input within r has another one (Tsuzuku, Sato and Sugiyama, "Lipschitz-Margin Training", NeurIPS 2018).

    The constants are those of the model in eval mode, for all inputs of at most the norm of the example's, and r more.  They are bounds
    of real numbers: what floating point adds to the logits is not in them.  Their derivatives are those of a valid bound with the
    multipliers of its ellipsoids held fixed, which are chosen anew in each call.  A model that decides by values (masks of comparisons,
    indices, conditions) has no such constants and is refused.

    Args:
        model: from inputs [batch, ...] to logits [batch, classes].
        example: an input; its entries matter by their norm alone (the largest RMS over all but the first dimension), and where the
            model has no product of two tensors that depend on the input not even by that.
        radius: r >= 0, a Euclidean length, finite.
        sensitivity: "composed" (see `norm_sensitivity`): a constant for each pair of classes, from the ellipsoid that the logits move
            in; or "global": sqrt(2) times the product of norms, the same for all pairs.

    Raises:
        NormMismatchError: a radius that is no finite number >= 0, no such sensitivity, no plain module; later, logits that are not [batch, classes] or cannot
            be bounded, targets that are no classes, a model that decides by values, or draws random numbers in eval mode.
    """

    def __init__(self, model: torch.nn.Module, example: torch.Tensor, radius: float, *, sensitivity: Scope = "composed"):
        super().__init__()
        if sensitivity not in ("composed", "global"):
            raise NormMismatchError(f'sensitivity must be "composed" or "global", which hold for all inputs, got {sensitivity!r}')
        if not is_number(radius) or not 0 <= radius < math.inf:
            raise NormMismatchError(f"radius must be a finite length >= 0, got {radius!r}")
        _check_model(model)
        _check_example(example)
        self._model = (model,)  # in a tuple: its parameters are not this module's
        self.example = example[:1].detach()
        self._rms = RMSTensor.of(example.detach(), tuple(range(1 - example.ndim, 0))).norm_size
        self.radius, self.sensitivity = float(radius), sensitivity

    @property
    def model(self) -> torch.nn.Module:
        """The classifier."""
        return self._model[0]

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss.

        Args:
            logits: of the model, [batch, classes]; in training mode too.
            target: the class of each, [batch].
        """
        return F.cross_entropy(self._worst(logits, target), target)

    @torch.no_grad()
    def certified(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Which inputs have the target's label, and so has every input within the radius: booleans [batch].

        Args:
            logits: of the model in eval mode, [batch, classes].
            target: the class of each, [batch].
        """
        return _distances(self._of(logits, target), logits, target) > self.radius

    @torch.no_grad()
    def radii(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """How far each input may move before its label may be another than the target, [batch]; not positive if it is another now.

        At most `radius` for a model whose constants depend on the norm of the input (products, attention): further away they are
        others.

        Args:
            logits: of the model in eval mode, [batch, classes], for inputs of at most the norm of the example's.
            target: the class of each, [batch].
        """
        constants = self._of(logits, target)
        found = _distances(constants, logits, target)
        # the same for inputs of another norm: they hold everywhere
        larger = _constants(self.model, self.example, 2 * self._rms + 1, self.radius, self.sensitivity)
        return found if torch.allclose(larger, constants, rtol=1e-9, atol=0.0) else found.clamp(max=self.radius)

    def constants(self) -> torch.Tensor:
        """K_cj: how far the logit of j moves at most, relative to that of c, when the input moves by a Euclidean length of 1.

        Returns:
            [classes, classes] float64, 0 on the diagonal, differentiable in the parameters.
        """
        return _constants(self.model, self.example, self._rms, self.radius, self.sensitivity)

    def _of(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = self.constants()
        is_matrix = isinstance(logits, torch.Tensor) and logits.ndim == 2 and logits.is_floating_point()
        if not is_matrix or logits.shape[-1] != len(found):
            raise NormMismatchError(
                with_details(
                    f"logits are {describe(logits)}",
                    why=f"the model has {len(found)} classes",
                    instead="what the model returns, [batch, classes]",
                )
            )
        _check_target(target, len(logits))
        if target.numel() and target.max() >= len(found):
            raise NormMismatchError(f"a target is class {int(target.max())}, and the model has {len(found)}")
        return found

    def _worst(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return logits + self.radius * self._of(logits, target)[target].to(logits)


def certified_radii(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor, *, steps: int = 10) -> torch.Tensor:
    """How far each input may move before a classifier's label may be another than the target: certified radii, Euclidean.

    For a radius r the constants of pairs of classes hold for inputs within r of x alone (``norm_sensitivity("within")``), and for movements away
    from x alone: relus that cannot switch there are linear, and those that can have the slopes of chords from where they are.  They are the lesser of
    those by ellipsoids and those by linear bounds (`linear_bounds`).  The largest r with ``z_c - z_j > r K_cj(r)`` for all other classes j is found by lines
    through those that were tried, or halves, input by input; every number it returns is a radius that was checked.  The model is taken in eval mode; what floating point adds to the
    logits is not in the bounds.

    Args:
        model: from inputs [batch, ...] to logits [batch, classes].
        x: inputs [batch, ...].
        target: the class of each, [batch].
        steps: how many radii are tried at most, until the interval is halved as often; at least 1.

    Returns:
        [batch] float64; 0 where the label is another already.

    Raises:
        NormMismatchError: no plain module, inputs of no floating-point numbers, no such number of steps, targets that are no classes, logits that are not [batch,
            classes] or cannot be bounded, a model that decides by values, or draws random numbers in eval mode.
    """
    _check_model(model)
    _check_example(x)
    _check_target(target, len(x))
    if not is_count(steps):
        raise NormMismatchError(f"steps must be a number of steps > 0, got {steps!r}")
    around = Surroundings(model, x)  # nothing changes between the runs
    found = [_certified_radius(model, x[i : i + 1].detach(), int(c), steps, around) for i, c in enumerate(target)]
    return torch.tensor(found, dtype=torch.float64)


def _certified_radius(model: torch.nn.Module, x: torch.Tensor, target: int, steps: int, around: Surroundings) -> float:
    rms = RMSTensor.of(x, tuple(range(1 - x.ndim, 0))).norm_size
    with torch.no_grad(), _in_eval_mode(model, around):
        logits = _check_logits(model(x.clone()))[0].double()
    if not target < len(logits):
        raise NormMismatchError(f"a target is class {target}, and the model has {len(logits)}")
    margins = logits[target] - logits
    others = torch.arange(len(logits)) != target

    def bounds(radius: float, sensitivity: str) -> torch.Tensor:
        with from_data():
            found = _constants(model, x, rms, radius, sensitivity, around, target)
        return found[target].detach().to(margins.device)[others]

    margins = margins[others]
    if not (margins > 0).all():
        return 0.0

    def reached(radius: float) -> float:
        """How far inputs may move by the constants within a radius, which grow with it; it is certified if that is further."""
        return torch.nan_to_num(margins / bounds(radius, "within"), nan=0.0).amin().item()

    high = reached(0.0)  # what grows as at the data reaches no further
    known = [(0.0, high)]
    if not math.isfinite(high):
        high = _FAR
    low = min((margins / bounds(high, "composed")).amin().item(), high) * (1 - 1e-9)  # what holds for all inputs holds here
    while (further := reached(high)) > high and high < _FAR:  # and what grows less does
        known[0], low, high = (high, further), high, 2 * high
    known.append((high, further))
    return _where_they_meet(reached, known, low, high, steps)


def _where_they_meet(
    reached: Callable[[float], float], known: Sequence[tuple[float, float]], low: float, high: float, steps: int
) -> float:
    """The largest r found below `reached`, which falls as r grows, or `low`: by lines through what is known, or halves.

    Args:
        reached: of a radius.
        known: two radii, the first not above the last, and `reached` there.
        low: a radius that is known to be below.
        high: one that is not.
        steps: how many radii are tried at most, until `high - low` is halved as often.
    """
    (a, above), (b, below) = ((r, at - r) for r, at in known)
    enough, last = (high - low) * 0.5**steps, None
    for _ in range(steps):
        if high - low <= enough:
            break
        meeting = b - below * (b - a) / (below - above)
        # a little towards the end that is further from it, so that both get near
        tried = meeting + 0.4 * (enough if high - meeting > meeting - low else -enough)
        if not low < tried < high:
            tried = (low + high) / 2
        found = reached(tried) - tried
        is_below = found > 0
        # of the end that stays twice only half counts (the Illinois algorithm; Dowell and Jarratt, BIT 11, 1971)
        if is_below is last:
            above, below = (above, below / 2) if last else (above / 2, below)
        last = is_below
        if last:
            low, a, above = tried, tried, found
        else:
            high, b, below = tried, tried, found
    return low


# A radius for labels that nothing near changes.
_FAR = 1e12


def _distances(constants: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far each input may move before another logit may be larger than the target's, [batch]."""
    margins = logits.gather(-1, target[:, None]) - logits
    is_other = ~F.one_hot(target, logits.shape[-1]).bool()
    return torch.where(is_other, margins / constants[target].to(logits), torch.inf).amin(-1)


def _constants(
    model: torch.nn.Module,
    x: torch.Tensor,
    rms: torch.Tensor,
    radius: float,
    sensitivity: Any,
    around: Surroundings | None = None,
    target: int | None = None,
) -> torch.Tensor:
    """See `LipschitzMargin.constants`; for inputs of at most this RMS, and `radius` more.  Those of `target` may be less than of other classes.

    Raises:
        NormMismatchError: the result is no tensor of logits.
    """
    count = x[0].numel()
    moved = radius / math.sqrt(count)
    with _in_eval_mode(model, around or Surroundings(model, x)), norm_mode("bound"), norm_sensitivity(sensitivity):
        given = with_perturbation(RMSTensor._wrap(x.clone(), rms + moved, None, tuple(range(1 - x.ndim, 0))), moved)
        with NoDecisions():
            y = model(given)
    if not isinstance(_check_logits(y), NormedTensor):
        raise NormMismatchError(f"Lipschitz margins are of a model whose logits depend on its input, got {describe(y)}")
    pairs = None if sensitivity == "global" else _of_pairs(y, given)
    if pairs is None:
        pairs = _of_all(y, given)
    if target is not None and sensitivity == "within" and (row := _by_lines(y, moved, target)) is not None:
        pairs = torch.cat([pairs[:target], torch.minimum(pairs[target], row)[None], pairs[target + 1 :]])
    return pairs / math.sqrt(count)  # the input moves by an RMS of 1


def _check_example(x: Any) -> None:
    if type(x) is not torch.Tensor or not x.is_floating_point() or x.ndim < 2 or x.numel() == 0:
        raise NormMismatchError(f"Lipschitz margins need inputs [batch, ...] of floating-point numbers, got {describe(x)}")


def _of_pairs(y: NormedTensor, x: NormedTensor) -> torch.Tensor | None:
    """From the ellipsoids that the logits move in: ``sum over roots of sqrt((e_j - e_c)^T P (e_j - e_c))``; None if there are none."""
    spread = spread_of(y) if y.perturbation_size is not None else None
    if spread is None or spread.ndim != 1:
        return None
    total = torch.zeros((y.shape[-1], y.shape[-1]), dtype=torch.float64)
    for part in spread.parts:
        cov = part.ellipsoid.cov
        sizes = cov.diagonal()
        squares = (sizes[:, None] + sizes[None, :] - 2 * cov).clamp_min(0.0)
        squares = squares + 64 * len(cov) * torch.finfo(torch.float64).eps * (sizes[:, None] + sizes[None, :]).detach()
        off = ~torch.eye(len(cov), dtype=torch.bool)
        lengths = torch.where(off, torch.where(off, squares, 1.0).sqrt(), 0.0)
        total = total + lengths * part.ellipsoid.scale * _rate(part.root.size, x)
    return total


def _by_lines(y: NormedTensor, moved: float, target: int) -> torch.Tensor | None:
    """How far the other logits move relative to that of the target, by linear bounds, over how far the input does; None if there are none."""
    spread = spread_of(y) if y.perturbation_size is not None and moved else None
    if spread is None or spread.ndim != 1:
        return None
    eye = torch.eye(y.shape[-1], dtype=torch.float64)
    found = [linear_bounds.least(v, eye[target] - eye) for v in spread.parts]
    if any(f is None for f in found):
        return None
    return functools.reduce(torch.sub, (f for f in found if f is not None), torch.zeros((), dtype=torch.float64)) / moved


def _rate(size: torch.Tensor, x: NormedTensor) -> torch.Tensor:
    """How far a root moves when x does by 1."""
    if size is x.perturbation_size:
        return torch.ones((), dtype=torch.float64)
    if not size.requires_grad:
        return torch.zeros((), dtype=torch.float64)
    with perturbations_recorded():
        assert x.perturbation_size is not None
        (rate,) = torch.autograd.grad(size, x.perturbation_size, create_graph=True, allow_unused=True, materialize_grads=True)
    return rate.to(device="cpu", dtype=torch.float64)


def _of_all(y: NormedTensor, x: NormedTensor) -> torch.Tensor:
    """The same number for all pairs: two logits move by at most sqrt(2) times the length of the row, or twice the largest entry."""
    classes = y.shape[-1]
    over_classes = y.elem_dims == (-1,) and isinstance(y, RMSTensor)
    constant = sensitivities(y, x) * (math.sqrt(2 * classes) if over_classes else 2.0 * _entry(y))
    return constant.to(device="cpu", dtype=torch.float64) * (1 - torch.eye(classes, dtype=torch.float64))


def _entry(y: NormedTensor) -> float:
    """What bounds one logit in terms of the norm of y.

    Raises:
        NormMismatchError: nothing does.
    """
    found = conversions.factor(y, LinfTensor, ())
    if found is None:
        raise NormMismatchError(f"LipschitzMargin: the norm of {describe(y)} bounds no single logit")
    return float(found)


@contextlib.contextmanager
def _in_eval_mode(model: torch.nn.Module, around: Surroundings) -> Iterator[None]:
    """In eval mode, and what the model writes on the way (counters, caches, statistics) is undone.

    Raises:
        NormMismatchError: the model has drawn random numbers.
    """
    with around.undisturbed():
        for m in model.modules():
            m.training = False
        before = around.random_states()
        yield
        if around.random_states() != before:
            raise NormMismatchError(
                with_details(
                    f"Lipschitz margins of a {type(model).__name__} that draws random numbers in eval mode",
                    why="what holds for the numbers of one call says nothing of the labels of another",
                    instead="a model whose eval mode draws none: F.dropout(x, training=self.training); noise that is an input",
                )
            )


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch._dynamo.OptimizedModule | ThunderModule):
        raise NormMismatchError(
            f"Lipschitz margins are of a plain nn.Module, got {type(model).__name__}: the module that was compiled"
        )


def _check_logits(logits: Any) -> torch.Tensor:
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or logits.shape[-1] < 2:
        raise NormMismatchError(f"Lipschitz margins are of a model that returns logits [batch, classes], got {describe(logits)}")
    return logits


def _check_target(target: Any, batch: int) -> None:
    is_fine = isinstance(target, torch.Tensor) and target.dtype in (torch.int64, torch.int32) and tuple(target.shape) == (batch,)
    if not is_fine or target.numel() and target.min() < 0:
        raise NormMismatchError(
            f"the target is the class of each of {batch} inputs, integers [batch] >= 0, got {describe(target)}"
        )
