"""Masses: which share of a step each parameter gets.  A parameter contributes at most ``m_k / sum(m)`` of the output's change.

By default matrices, kernels and tables have mass 1; what has one dimension of size above 1 at most and is no operator (biases, gains,
scales) is light: mass 0.1, in mode "modula" 0, for Modula has none.  So is, in other modes, what is only added, whatever its shape (a
vision transformer's positions: a bias for each place).  In mode "typical" a table whose rows the program's integers choose (tokens,
classes) has mass 4, if nothing else is done with it: a row moves only in the steps that meet it.  What makes queries, keys or values of
attention, and what multiplies its result, may have a mass of its own (`attention`), and so may gates and what they gate (`gated`), in one
matrix or each in its own: their product moves by the sum of what both move it by; and tables that are looked up at places which depend on
no input (`places`), learned positions.  1/2, and 0.3 for places, is what trains best with noise adaptation.
Frozen parameters have mass 0, whatever is said.

Repeated blocks have the mass of one of them together: modules inside an ``nn.ModuleList`` or ``nn.Sequential`` that are of one class,
have submodules and parameters of the same names.  So a deeper model leaves as much of a step to its embedding and its head, without
which a learning rate would have to grow with depth.  In mode "modula" they add up, as Modula's do.

A statement names a *scope*, a parameter, a module or a pattern, and the mass its parameters have together: theirs are multiplied by
the same number, Modula's ``tare``.  Statements hold from the inside out, as Modula's models are built: that of a smaller scope first,
so one of a larger scope may scale it again.  Zeros come before all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch

from thunder_norm.core.context import Mode
from thunder_norm.core.kinds import RMSToRMSTensor
from thunder_norm.errors import NormMapKeyError, NormMismatchError, with_details
from thunder_norm.model_state.shards import own_class
from thunder_norm.modular.roles import Roles
from thunder_norm.norms.lifts.annotations import annotations_of
from thunder_norm.norms.lifts.inference import NormSpec, Use

LIGHT = 0.1
TABLE = 4.0
ATTENTION = 0.5
GATED = 0.5
PLACES = 0.3

_ADDITIONS = {"add", "sub"}


@dataclass(frozen=True)
class ParameterUses:
    """What a program does with some parameters, by first name.

    Attributes:
        added: those that it does nothing with but add them to activations.
        tables: those of which it does nothing but take the rows that integers say which it is given.
    """

    added: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()

    @staticmethod
    def of(uses: Mapping[str, Sequence[Use]]) -> ParameterUses:
        """From all uses of each parameter."""
        return ParameterUses(
            frozenset(name for name, some in uses.items() if all(u.op in _ADDITIONS and u.is_with_activation for u in some)),
            frozenset(name for name, some in uses.items() if all(u.is_with_integers for u in some)),
        )


@dataclass(frozen=True)
class Scope:
    """A statement: what it names, the parameters that covers, and their mass together."""

    name: str
    parameters: frozenset[str]
    mass: float


def light_mass(given: float | None, mode: Mode) -> float:
    """The mass of light parameters: what is given, else 0.1, in mode "modula" 0.

    Raises:
        NormMismatchError: a mass that is negative or not finite.
    """
    if given is None:
        return 0.0 if mode == "modula" else LIGHT
    return _checked("light parameters", given)


def default_mass(norm: NormSpec, shape: torch.Size, light: float, *, heavy: float = 1.0, is_added: bool = False) -> float:
    """The mass of a parameter that nothing was said about.

    >>> from thunder_norm import RMSTensor
    >>> row = NormSpec(RMSTensor, (-1,))
    >>> [default_mass(row, shape, LIGHT) for shape in [(4, 8), (1, 8), (8,)]]
    [1.0, 0.1, 0.1]
    >>> default_mass(row, torch.Size([4, 8]), LIGHT, is_added=True)
    0.1
    """
    is_heavy = issubclass(norm.kind, RMSToRMSTensor) or sum(size > 1 for size in shape) > 1 and not is_added
    return heavy if is_heavy else light


def repetitions(model: torch.nn.Module, tied: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """How many blocks like its own a parameter, by its first name, shares a mass with; 1 outside of any.

    >>> def block():
    ...     return torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU())
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4, bias=False), block(), block(), block())
    >>> repetitions(model, {name: (name,) for name, _ in model.named_parameters()})
    {'0.weight': 1, '1.0.weight': 3, '2.0.weight': 3, '3.0.weight': 3}
    """
    found = dict.fromkeys(tied, 1)
    for path, container in model.named_modules():
        if not isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        alike: dict[Any, list[str]] = {}
        for name, child in container.named_children():
            if next(child.children(), None) is not None:
                key = own_class(child), frozenset(name for name, _ in child.named_parameters(remove_duplicate=False))
                alike.setdefault(key, []).append(f"{path}.{name}" if path else name)
        for paths in alike.values():
            for name in frozenset().union(*(_inside(p, tied) for p in paths)):
                found[name] *= len(paths)
    return found


def role_masses(roles: Roles, attention: float = 1.0, gated: float = 1.0, places: float = 1.0) -> dict[str, float]:
    """The masses, by first name, of matrices and tables that have one of their own for their role.

    Args:
        roles: of all parameters.
        attention: the mass of what makes queries, keys or values, or multiplies what attention returns.
        gated: of each of two factors, a gate and what it gates, or of the matrix that both are, if it has nothing to do with attention.
        places: of a table that is looked up at places which depend on no input.

    Raises:
        NormMismatchError: a mass is negative or not finite.
    """
    of_gates = dict.fromkeys((role.name for role in roles if role.is_factor), _checked("gated", gated))
    of_places = dict.fromkeys((role.name for role in roles if role.is_at_places), _checked("places", places))
    return of_places | of_gates | dict.fromkeys(roles.of_attention, _checked("attention", attention))


def assign_masses(
    model: torch.nn.Module,
    masses: Mapping[str, float] | None,
    norms: Mapping[str, NormSpec],
    tied: Mapping[str, tuple[str, ...]],
    light: float,
    mode: Mode,
    uses: ParameterUses | None = None,
    by_role: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The mass of every parameter, by its first name.

    Args:
        model: whose parameters they are; masses that `annotate` stated for its modules hold as well.
        masses: parameter name, module path ("" for the model) or pattern (``"*.bias"``, of names of parameters) -> mass.
        norms: the norm of each parameter, by its first name.
        tied: for each first name, all names of the parameter.
        light: the mass of biases, gains and scales.
        mode: in "modula" repeated blocks do not share a mass.
        uses: which parameters are only added (in mode "modula" no reason to be light, for light is without mass there), which are
            tables of tokens (of a mass of their own in mode "typical").
        by_role: the masses of matrices and tables for which that is not 1; see `role_masses`.

    Raises:
        NormMapKeyError: a name or pattern that nothing has.
        NormMismatchError: a mass is negative or not finite, two scopes overlap and neither is part of the other, or a scope has
            no parameter whose mass could be more than 0.
    """
    parameters = dict(model.named_parameters())
    trainable = frozenset(name for name, p in parameters.items() if p.requires_grad)
    repeats = dict.fromkeys(tied, 1) if mode == "modula" else repetitions(model, tied)
    uses = uses or ParameterUses()
    heavy = dict.fromkeys(tied, 1.0) | dict(by_role or {})
    heavy |= dict.fromkeys(uses.tables if mode == "typical" else (), TABLE)
    found = {
        name: default_mass(norms[name], p.shape, light, heavy=heavy[name], is_added=mode != "modula" and name in uses.added)
        / repeats[name]
        if p.requires_grad
        else 0.0
        for name, p in parameters.items()
    }
    scopes = [*_annotated(model, tied), *_given(model, masses, tied)]
    stated: dict[frozenset[str], Scope] = {}
    for scope in scopes:  # of two statements about the same parameters the last one counts: the one given in the call
        covered = scope.parameters & trainable
        if covered:
            stated.pop(covered, None)
            stated[covered] = scope
    zeros = frozenset(name for covered, scope in stated.items() if scope.mass == 0 for name in covered)
    found |= dict.fromkeys(zeros, 0.0)
    sharing = [
        (covered - zeros, scope) for covered, scope in sorted(stated.items(), key=lambda item: len(item[0])) if scope.mass > 0
    ]
    _check_nested(sharing)
    for covered, scope in sharing:
        _tare(found, covered, scope)
    return found


def _tare(masses: dict[str, float], covered: frozenset[str], scope: Scope) -> None:
    if not covered:
        raise NormMismatchError(
            f"{scope.name!r} cannot have mass {scope.mass}: all of its parameters have mass 0, stated elsewhere"
        )
    total = sum(masses[name] for name in covered)
    for name in covered:  # light ones of mass 0 share alike if there are no others
        masses[name] = masses[name] * scope.mass / total if total else scope.mass / len(covered)


def _check_nested(scopes: Sequence[tuple[frozenset[str], Scope]]) -> None:
    for (one, scope), (other, other_scope) in itertools.combinations(scopes, 2):
        if one & other and not (one <= other or other <= one):
            raise NormMismatchError(
                with_details(
                    f"masses for {scope.name!r} and {other_scope.name!r} cannot both hold: they overlap, neither is part of the other",
                    both=", ".join(sorted(one & other)[:4]),
                )
            )


def _annotated(model: torch.nn.Module, tied: Mapping[str, tuple[str, ...]]) -> list[Scope]:
    """What `annotate` said: a module's own parameters and those of its submodules."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        mass = annotations_of(module).mass
        if mass is not None:
            found.append(Scope(path, _inside(path, tied), _checked(path, mass)))
    return found


def _given(model: torch.nn.Module, masses: Mapping[str, float] | None, tied: Mapping[str, tuple[str, ...]]) -> list[Scope]:
    if masses is None:
        return []
    if not isinstance(masses, Mapping):
        raise NormMismatchError(f"masses must be a mapping from names to numbers, got {type(masses).__name__}")
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for name, mass in masses.items():
        by_name = frozenset(first for first, names in tied.items() if name in names)
        if by_name:
            covered = by_name
        elif name in modules:
            covered = _inside(name, tied)
        elif isinstance(name, str):
            covered = frozenset(first for first, names in tied.items() if any(fnmatchcase(n, name) for n in names))
        else:
            covered = frozenset()
        if not covered:
            raise _nothing_named(name, [*tied, *modules])
        found.append(Scope(name, covered, _checked(name, mass)))
    return found


def _inside(path: str, tied: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    prefix = f"{path}." if path else ""
    return frozenset(first for first, names in tied.items() if any(n.startswith(prefix) for n in names))


def _checked(name: str, mass: Any) -> float:
    if isinstance(mass, bool) or not isinstance(mass, Real) or not 0 <= float(mass) < math.inf:
        raise NormMismatchError(f"the mass of {name!r} must be a number >= 0, got {mass!r}")
    return float(mass)


def _nothing_named(name: Any, names: list[str]) -> NormMapKeyError:
    import difflib

    close = difflib.get_close_matches(name, names, n=3) if isinstance(name, str) else []
    return NormMapKeyError(
        with_details(
            f"masses names {name!r}, but no parameter, no module with parameters and no pattern of parameter names is that",
            did_you_mean=", ".join(map(repr, close)) or None,
        )
    )
