"""What a drawn model is checked for without training it; each check returns what is wrong: roles, groups, the bound of the norm."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from thunder_norm import L1Tensor, LinfTensor, NormedTensor, RMSTensor
from thunder_norm.modular import ModularNorm, find_roles, param_groups

from .optimizer_case import Case, NoOracle, total
from .optimizer_truth import Cut

_OF_ATTENTION = frozenset(["query", "key", "value"])


def roles(case: Case) -> str | None:
    """Roles, blocks, heads, and what decides masses, are those that were written."""
    found = find_roles(case.model, case.inputs)
    for row in found:
        known = case.known[row.name]
        if known.role is not None and row.role != known.role:
            return f"{row.name} is {row.role}, not {known.role}"
        attended = {b.role for b in row.blocks} & _OF_ATTENTION - {cut.role for cut in known.cuts}
        if attended:
            return f"{row.name} is {attended} of an attention that there is not"
        blocks = [set(b.indices.tolist()) for b in row.blocks] if row.is_split else []
        wanted = [set(cut.rows) for cut in known.cuts] if len(known.cuts) > 1 else []
        if known.role in (None, "tied", "gain", "table"):
            continue
        if sorted(map(sorted, blocks)) != sorted(map(sorted, wanted)):
            return f"{row.name} has blocks {[str(b) for b in row.blocks]}, not {wanted}"
        if row.blocks and len(row.shape) < 3 and known.norm == "matrix" and row.out_axis != known.axes[0]:
            return f"{row.name} has its outputs along {row.out_axis}, not {known.axes[0]}"
        for cut in known.cuts:
            (block,) = [b for b in row.blocks if set(b.indices.tolist()) == set(cut.rows)]
            if cut.role is not None and block.role != cut.role:
                return f"rows {cut.rows} of {row.name} are {block.role or 'no role'}, not {cut.role}"
            heads = [sorted(of.indices.tolist()) for of in block.of_heads or ()]
            if cut.heads and sorted(heads) != sorted(map(sorted, cut.heads)):
                return f"heads of {row.name}: {heads}, not {cut.heads}"
    return None


def groups(case: Case) -> str | None:
    """Leaves of a split parameter are its blocks, outputs first, and get their parts of its gradient."""
    model, inputs = case.model, case.inputs
    for_, split = case.draw.choice(("muon", "dion", "adamw", "normuon")), case.draw.choice((True, "heads"))
    found = param_groups(model, inputs, for_=for_, split=split)
    parameters = dict(model.named_parameters())
    wanted = {name: _leaves(case, name, p, split == "heads") for name, p in parameters.items() if p.requires_grad}
    given = {n: (p, g["algorithm"]) for g in found for n, p in zip(g["param_names"], g["params"], strict=True)}
    total(model(inputs)).backward()
    for name, leaves in wanted.items():
        known = case.known[name]
        of_it = {n: leaf for n, (leaf, _) in given.items() if n == name or n.startswith(name + "[")}
        is_matrix = known.role in ("matrix", "stack") and parameters[name].ndim <= 3
        if known.role is not None and is_matrix and len(of_it) != len(leaves):
            return f"{name} has leaves {list(of_it)}, not {len(leaves)}"
        algorithms = {algorithm for n, (_, algorithm) in given.items() if n in of_it}
        if known.role is not None and algorithms != {for_ if is_matrix and for_ != "adamw" else "adamw"}:
            return f"{name}, a {known.role}, is moved by {algorithms}"
        grad = parameters[name].grad
        for at in leaves if is_matrix and grad is not None else ():
            if not any(leaf.shape == at.shape and torch.equal(leaf, parameters[name].view(-1)[at]) and torch.equal(leaf.grad, grad.reshape(-1)[at]) for leaf in of_it.values()):  # fmt: skip
                return f"no leaf of {name} is, and has the gradient of, the entries {at.flatten().tolist()}"
    return None


def _leaves(case: Case, name: str, p: torch.Tensor, per_head: bool) -> list[torch.Tensor]:
    """The places of the matrices of a parameter: by heads those of queries and keys, and of values that are at no equal distances."""
    known, cuts = case.known[name], list[Cut]()
    if known.role not in ("matrix", "stack"):
        return []
    for cut in known.cuts:
        is_by_heads = cut.role in ("query", "key") or len({b - a for a, b in itertools.pairwise(cut.rows)}) > 1
        cuts += [Cut(None, rows) for rows in (per_head and is_by_heads and cut.heads) or (cut.rows,)]
    return [torch.as_tensor(at) for at in replace(known, norm="matrix", cuts=tuple(cuts)).units(tuple(p.shape), True)]


def bound(case: Case) -> str | None:
    """No update of modular norm 1 moves the output by more than 1, to first order, whoever looks for one."""
    draw, model = case.draw, case.model.double()
    inputs = case.inputs.double() if case.inputs.is_floating_point() else case.inputs
    norm = ModularNorm(model, inputs, blocks=draw.choice((False, True, "heads")))
    if (problem := case.misfit(norm)) is not None:
        return problem
    if not isinstance(norm.outputs, NormedTensor):
        raise NoOracle("several outputs")
    norm.initialize_(torch.Generator().manual_seed(draw.randrange(2**31)))
    try:
        with sdpa_kernel(SDPBackend.MATH):
            largest = _furthest(norm, inputs)
    except RuntimeError as e:  # torch has no second derivatives of some operations
        raise NoOracle(str(e)) from e
    if largest > 1 + 1e-6:
        return f"an update of norm 1 moves the output by {largest:.6g}, blocks {norm.blocks}"
    return None if largest > 0 or not any(norm.targets.values()) else "no update moves the output"


def _furthest(norm: ModularNorm, inputs: torch.Tensor) -> float:
    """How far an update of norm 1 is found to move the output, of norms and inputs that are looked for as well."""
    model, of_input, largest = norm.model, norm.inputs[0][0], 0.0
    p = {name: t.detach().clone() for name, t in model.named_parameters()}
    x, u = _unit(inputs, of_input), {name: torch.randn_like(t) for name, t in p.items()}

    def moved(p: dict[str, torch.Tensor], x: torch.Tensor, u: dict[str, torch.Tensor]) -> torch.Tensor:
        y, pulled, *_ = torch.func.vjp(lambda p: torch.func.functional_call(model, p, (x,)), p)
        pushed = torch.func.vjp(lambda w: pulled(w)[0], torch.zeros_like(y))[1]  # twice: not all operations have forward mode
        return _size(pushed(u)[0], norm.outputs)

    for step in range(8):
        g = torch.func.grad(moved, argnums=2)(p, x, u) if step else u
        u = {name: t.detach() for name, t in norm.dualize({n: t.detach() for n, t in g.items()}, method="svd").items()}
        largest = max(largest, moved(p, x, u).item())
        of_p, *of_x = torch.func.grad(moved, argnums=(0, 1) if x.is_floating_point() else (0,))(p, x, u)
        x = _unit(x + of_x[0] * (0.5 * x.norm() / of_x[0].norm().clamp(min=1e-12)), of_input) if of_x else x
        with torch.no_grad():
            for name, t in model.named_parameters():
                if t.requires_grad:
                    t.copy_(p[name] + of_p[name] * (0.5 * p[name].norm() / of_p[name].norm().clamp(min=1e-12)))
        norm.project_()
        p = {name: t.detach().clone() for name, t in model.named_parameters()}
    return largest


def _unit(x: torch.Tensor, of: Any) -> torch.Tensor:
    """An input of norm at most 1."""
    if not isinstance(of, NormedTensor):
        return x
    sizes = _rms(x, of.elem_dims) if not isinstance(of, LinfTensor) else x.abs()
    return x / sizes.clamp(min=1e-12)


def _rms(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x.square().mean(dims, keepdim=True).sqrt() if dims else x.abs()


def _size(y: torch.Tensor, of: Any) -> torch.Tensor:
    """The norm of a movement of the output."""
    if isinstance(of, L1Tensor):
        return y.abs().sum(of.elem_dims).amax()
    assert isinstance(of, RMSTensor), of
    if isinstance(of, LinfTensor):
        return y.abs().amax()
    return y.square().mean(of.elem_dims).amax().sqrt() if of.elem_dims else y.abs().amax()
