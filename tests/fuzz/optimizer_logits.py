"""Logits of drawn attentions by hand: what a clip makes of them, and what a monitor says of them and of parameters, whose training it leaves alone."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch

from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import QKClip, TrainingMonitor

from .optimizer_attentions import Attended
from .optimizer_case import Case, total
from .optimizer_training import same


def logits_of(model: torch.nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits [batch, heads, queries, keys] of each attention, -inf where they are masked."""
    model.looks, model.seen = True, {}
    state = torch.get_rng_state()
    with torch.no_grad():
        model(inputs)
    torch.set_rng_state(state)
    model.looks = False
    return dict(model.seen)


def clip(case: Case) -> str | None:
    """A clip multiplies the logits of the heads above tau so that they reach it, and changes nothing else."""
    draw, model = case.draw, case.model.double()
    inputs = case.inputs.double() * 3 if case.inputs.is_floating_point() else case.inputs
    has_others = any(isinstance(m, torch.nn.MultiheadAttention) for m in model.modules())
    if not case.attentions:
        try:
            clip = QKClip(model, inputs)
        except NormMismatchError:
            return "there is an attention" if has_others else None
        return None if has_others else f"there are {clip.num_heads} heads of no attention"
    before = logits_of(model, inputs)
    largest = {name: t.amax((0, 2, 3)) for name, t in before.items()}
    all_of_them = torch.cat(list(largest.values())).sort().values
    alpha = draw.choice((0.5, 0.0, 1.0, 0.3))
    try:
        clip = QKClip(model, inputs, alpha=alpha)
        found = clip.largest_logits(inputs)
    except NormMismatchError:
        if any(a.is_refused for a in case.attentions):
            return None
        raise
    if not has_others and (
        len(found) != len(all_of_them) or not torch.allclose(found.sort().values, all_of_them, rtol=1e-9, atol=1e-12)
    ):
        return f"the largest logits are {found.sort().values.tolist()}, not {all_of_them.tolist()}"
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    clip.tau = max(1e-3, draw.uniform(0.3, 1.1) * all_of_them.max().item())
    try:
        clipped = clip.step_(inputs)
    except NormMismatchError:
        if not same(old, {name: p.detach() for name, p in model.named_parameters()}):
            return "a clip is refused, and something has changed"
        return None if clip.fixed else "a clip is refused without fixed heads"
    gammas = {a.name: _gammas(a, largest[a.name], clip.tau) for a in case.attentions}
    if not has_others and len(clipped) != sum(int((g < 1).sum()) for g in gammas.values()):
        return f"clipped {clipped}, not {gammas}"
    first = case.attentions[0].name
    after, wanted = logits_of(model, inputs)[first], before[first] * gammas[first].view(-1, 1, 1)
    if not has_others and not torch.allclose(after, wanted, rtol=1e-9, atol=1e-9):
        return f"logits of {first} are {after.amax((0, 2, 3)).tolist()} at most, not {wanted.amax((0, 2, 3)).tolist()}, tau {clip.tau}"
    return _changed_otherwise(case, model, old, gammas, alpha)


def _gammas(attended: Attended, largest: torch.Tensor, tau: float) -> torch.Tensor:
    found = torch.where(largest > tau, tau / largest, 1.0)
    if attended.is_by_keys:
        found = found.view(attended.groups, -1).amin(1, keepdim=True).expand(-1, attended.heads // attended.groups).flatten()
    return found.amin().expand(len(found)) if attended.is_shared else found


def _changed_otherwise(case: Case, model: torch.nn.Module, old: dict[str, torch.Tensor], gammas: dict[str, torch.Tensor], alpha: float) -> str | None:  # fmt: skip
    """Where a parameter is not what it was times powers of gamma in the rows of clipped heads."""
    rows = {name: (a, axis, dict(parts)) for a in case.attentions for name, axis, parts in a.scaled}
    by_gains = {name for a in case.attentions for name in a.by_gains}
    for name, p in model.named_parameters():
        if name in by_gains or isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.MultiheadAttention):
            continue
        factor = torch.ones_like(p)
        if name in rows:
            attended, axis, parts = rows[name]
            if attended.unscaled:
                continue
            is_shared = attended.heads > attended.groups
            for part, power in (("q", 1.0 if is_shared else alpha), ("k", 0.0 if is_shared else 1 - alpha)):
                for head, of_head in enumerate(parts.get(part, ())):
                    factor.index_fill_(axis, torch.tensor(of_head), gammas[attended.name][head].item() ** power)
        elif ".parametrizations." in name:
            continue
        if not torch.equal(p[factor == 1], old[name][factor == 1]):
            return f"{name} has changed where nothing is clipped"
        if not torch.allclose(p, old[name] * factor, rtol=1e-12, atol=0):
            return f"{name} is not multiplied by the powers of gamma"
    return None


# -- the monitor ------------------------------------------------------------------------------------------------------------------


def monitor(case: Case) -> str | None:
    """Training is to the bit what it is without a monitor, whose numbers are those of numpy."""
    draw = case.draw
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    model, seed = case.model.to(dtype), draw.randrange(2**31)
    batches = [_batch(case, dtype, n) for n in range(3)]
    ends = []
    every, with_example = draw.choice((1, 2)), draw.random() < 0.8
    makes = draw.choice((torch.optim.AdamW, torch.optim.SGD))
    problem = None
    for is_watched in (False, True):
        watched = copy.deepcopy(model)
        optimizer = makes([p for p in watched.parameters() if p.requires_grad], lr=0.02)
        torch.manual_seed(seed)
        kept = (
            TrainingMonitor(watched, batches[0] if with_example else None, every=every, optimizer=optimizer)
            if is_watched
            else None
        )
        gradients = []
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            logits = logits_of(watched, batch) if number == 0 else {}
            old = {name: p.detach().clone() for name, p in watched.named_parameters()}
            out = watched(batch)
            total(out).backward()
            gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in watched.named_parameters()})
            optimizer.step()
            if kept is not None and number == 0:
                problem = _misfit(case, kept, watched, old, gradients[0], logits, with_example)
        ends.append(({n: p.detach() for n, p in watched.named_parameters()}, gradients, torch.rand(3)))
    (one, g_1, r_1), (two, g_2, r_2) = ends
    if not (_same(one, two) and all(map(_same, g_1, g_2)) and torch.equal(r_1, r_2)):
        return f"training with a monitor is another, {dtype}, every={every}, example {with_example}"
    return problem


def _same(a: dict, b: dict) -> bool:
    return all(
        (a[n] is None) == (b[n] is None) and (a[n] is None or torch.equal(a[n].nan_to_num(), b[n].nan_to_num())) for n in a
    )


def _batch(case: Case, dtype: torch.dtype, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    if case.inputs.is_floating_point():
        return torch.randn(case.inputs.shape, generator=generator).to(dtype)
    return torch.randint(11, case.inputs.shape, generator=generator)


def _misfit(case: Case, monitor: TrainingMonitor, model: torch.nn.Module, old: dict, gradients: dict, logits: dict, with_example: bool) -> str | None:  # fmt: skip
    """Which number of the first record is another than numpy's."""
    record = monitor.latest
    accuracy = 1e-5 if next(model.parameters()).dtype != torch.bfloat16 else 2e-2
    for name, p in model.named_parameters():
        known, numbers = case.known[name], record["parameters"][name]
        if not known.norm or not with_example:
            continue
        before = old[name].double().numpy()
        update = (p.detach().double() - old[name].double()).numpy()
        wanted = {"norm": known.size(before, False)}
        if known.is_trained:
            wanted["update"] = known.size(update, False)
        if known.norm == "matrix":
            s = [np.linalg.svd(before.reshape(-1)[at], compute_uv=False) for at in known.units(before.shape, False)]
            wanted["sigma_max"], wanted["sigma_min"] = max(t[0] for t in s), min(t[-1] for t in s)
        for what, value in wanted.items():
            if not math.isclose(numbers[what], value, rel_tol=1e-4, abs_tol=1e-6 * wanted["norm"] + 1e-12):
                return f"{what} of {name} is {numbers[what]}, not {value}"
        g = gradients[name]
        if g is not None:
            dual = _dual(case, name, g.double().numpy())
            if not 0.99 * dual - 1e-9 <= numbers["gradient"] <= dual * (1 + 1e-4) + 1e-9:
                return f"gradient of {name} is {numbers['gradient']}, not {dual}"
    found = [heads for heads in record["attention"].values()]
    by_number: dict[int, torch.Tensor] = {}
    for t in logits.values():
        of_it = t.double().amax((0, 2, 3))
        by_number[len(of_it)] = torch.maximum(by_number.get(len(of_it), of_it), of_it)
    for number, of_it in by_number.items():
        if not any(
            len(h) == number and np.allclose(h, of_it, rtol=accuracy, atol=accuracy * of_it.abs().max().item()) for h in found
        ):
            return f"the largest logits are {record['attention']}, not {of_it.tolist()}"
    return None


def _dual(case: Case, name: str, g: np.ndarray) -> float:
    known, total = case.known[name], 0.0
    for at in known.units(g.shape, False):
        unit = g.reshape(-1)[at]
        if unit.ndim == 2:
            total += np.linalg.svd(unit, compute_uv=False).sum() * math.sqrt(unit.shape[0] / unit.shape[1])
        else:
            total += float(np.linalg.norm(unit)) * math.sqrt(unit.size)
    return total / known.taps(g.shape)
