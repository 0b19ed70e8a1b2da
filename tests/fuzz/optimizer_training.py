"""Drawn training: steps of `ModularOptimizer` by its formulas, whatever happens between them; states that are saved; and what is refused."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from thunder_norm.errors import ThunderNormError
from thunder_norm.modular import ModularNorm, ModularOptimizer

from .optimizer_case import Case, total
from .optimizer_truth import Followed, in_training


def drawn_options(draw: random.Random) -> dict[str, Any]:
    """Of an optimizer or of a group."""
    return {
        "lr": draw.choice([0.1, 0.3, torch.tensor(0.2), 0.0]),
        "momentum": draw.choice([0.0, 0.5, 0.95]),
        "nesterov": draw.random() < 0.5,
        "weight_decay": draw.choice([0.0, 0.0, 0.3]),
        "noise_adaptation": draw.choice([None, None, 0.9]),
        "project": draw.random() < 0.2,
    }


@dataclass
class Run:
    """A model in training, and what the formulas make of it."""

    case: Case
    model: torch.nn.Module
    optimizer: ModularOptimizer
    blocks: Any
    followed: dict[str, Followed]
    log: list[str] = field(default_factory=list)

    @property
    def draw(self) -> random.Random:
        return self.case.draw

    def group(self, name: str) -> dict[str, Any] | None:
        """The options of a parameter."""
        return next((g for g in self.optimizer.param_groups if name in g["param_names"]), None)

    def read(self) -> None:
        """The formulas go on from what there is."""
        for name, p in self.model.named_parameters():
            if name in self.followed:
                self.followed[name].value = p.detach().double().numpy().copy()


def _copy(t: torch.Tensor) -> np.ndarray:
    return t.detach().double().numpy().copy()


def _started(case: Case) -> Run | str:
    draw, model = case.draw, case.model.double()
    inputs = case.inputs.double() if case.inputs.is_floating_point() else case.inputs
    blocks = draw.choice((False, True, "heads"))
    mode = draw.choice(("typical", "typical", "bound", "modula"))
    options = drawn_options(draw)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    draw.shuffle(names)
    some, later = names[: (cut := draw.randint(1, len(names)))], names[cut:]
    groups = [{"params": [(n, model.get_parameter(n)) for n in some]} | drawn_options(draw)]
    given: dict[str, Any] = {"missing_grads": "skip", "method": "svd", "params": groups, **options}
    optimizer = ModularOptimizer(model, inputs, mode=mode, blocks=blocks, **given)
    if later and draw.random() < 0.7:
        optimizer.add_param_group({"params": [model.get_parameter(n) for n in later], **drawn_options(draw)})
    if (problem := case.misfit(optimizer.norm, options["noise_adaptation"] is not None, is_of_optimizer=True)) is not None:
        return problem
    followed = {
        name: in_training(case.known[name], blocks, optimizer.norm.targets[name], _copy(p))
        for name, p in model.named_parameters()
        if case.known[name].norm or not optimizer.norm.targets[name]
    }
    return Run(case, model, optimizer, blocks, followed)


# -- what happens between two steps -------------------------------------------------------------------------------------------


def _resumed(run: Run) -> None:
    """From a file, in a copy of the model and an optimizer of other options."""
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    _ = run.optimizer.norm.roles
    model, norm = copy.deepcopy((run.model, run.optimizer.norm))
    groups = [{"params": [model.get_parameter(n) for n in g["param_names"]]} for g in run.optimizer.param_groups]
    optimizer = ModularOptimizer(norm, params=groups, method="svd", missing_grads="skip", **drawn_options(run.draw))
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    run.model, run.optimizer = model, optimizer


def _copied(run: Run) -> None:
    _ = run.optimizer.norm.roles
    run.model, run.optimizer = copy.deepcopy((run.model, run.optimizer))


def _pickled(run: Run) -> None:
    if any(map(torch.nn.utils.parametrize.is_parametrized, run.model.modules())):  # of which torch pickles none
        return
    _ = run.optimizer.norm.roles
    kept = run.model.__class__
    kept.__module__, kept.__qualname__ = __name__, kept.__name__
    globals()[kept.__name__] = kept  # where a pickle looks for it
    run.model, run.optimizer = pickle.loads(pickle.dumps((run.model, run.optimizer)))


def _taken_out(run: Run) -> None:
    """A parameter gets a group of its own, by hand, with its state."""
    group = run.draw.choice(run.optimizer.param_groups)
    if not group["params"]:
        return
    i = run.draw.randrange(len(group["params"]))
    of_it = {"params": [group["params"].pop(i)], **drawn_options(run.draw)}
    del group["param_names"][i]
    run.optimizer.add_param_group(of_it)


def _scheduled(run: Run) -> None:
    """A scheduler of torch takes the learning rates and momenta over, for a step."""
    for group in run.optimizer.param_groups:
        group.pop("initial_lr", None)
    schedulers = torch.optim.lr_scheduler
    made = run.draw.choice(
        (
            lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=4),
            lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
            lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o, 0.1), schedulers.ExponentialLR(o, 0.9)], [1]),
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps of schedulers before those of optimizers
        made(run.optimizer).step()


def _option_changed(run: Run) -> None:
    name = run.draw.choice(list(drawn_options(run.draw)))
    run.draw.choice(run.optimizer.param_groups)[name] = drawn_options(run.draw)[name]


def _memory_changed(run: Run) -> None:
    p = run.draw.choice([p for p in run.model.parameters() if p.ndim])
    p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1) if run.draw.random() < 0.5 else p.data.clone()


def _frozen_or_not(run: Run) -> None:
    trained = [n for n in run.followed if run.case.known[n].is_trained]
    if trained:
        p = run.model.get_parameter(run.draw.choice(trained))
        p.requires_grad_(not p.requires_grad)


def _trains_or_not(run: Run) -> None:
    run.model.train(not run.model.training)


def _dtypes_moved(run: Run) -> None:
    run.model.float()
    run.model.double()
    run.read()


def _replaced(run: Run) -> None:
    for p in run.model.parameters():
        p.data = p.data * 0.5
    run.read()


def _nothing(run: Run) -> None:
    pass


EVENTS: tuple[Callable[[Run], None], ...] = (
    *(_resumed, _copied, _option_changed, _option_changed, _memory_changed, _frozen_or_not),
    *(_trains_or_not, _dtypes_moved, _replaced, _nothing, _pickled, _taken_out, _scheduled),
)


def _gradients(run: Run) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in run.model.named_parameters():
        if not p.requires_grad or run.draw.random() < 0.1:
            continue
        g = torch.randn(p.shape, dtype=p.dtype) * 10 ** run.draw.uniform(-4, 2)
        if run.case.known[name].norm == "rows" and p.ndim > 1:
            g = g * (torch.rand(*p.shape[:-1], 1) < 0.6)
        g = g if run.draw.random() < 0.95 else torch.zeros_like(g)
        if p.ndim and run.draw.random() < 0.2:  # of other strides, or one memory for several entries
            g = g[:1].expand_as(p) if run.draw.random() < 0.5 else g.transpose(0, -1).contiguous().transpose(0, -1)
        found[name] = g
    if run.draw.random() < 0.2:  # gradients that were cleared and not dropped
        kept = {name: torch.zeros_like(p) for name, p in run.model.named_parameters() if p.grad is not None}
        return kept | found
    return found


def _step(run: Run, gradients: dict[str, torch.Tensor]) -> None:
    def closure() -> float:
        run.model.zero_grad()
        for name, g in gradients.items():
            run.model.get_parameter(name).grad = g if 0 in g.stride() else g.clone()
        return 1.5

    how = run.draw.random()
    has_any = any(name in gradients for group in run.optimizer.param_groups for name in group["param_names"])
    if how < 0.3:
        assert run.optimizer.step(closure) == 1.5
    elif how < 0.45 and has_any:  # of none a scaler asks how it should know of overflows
        closure()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(torch.zeros(()))
        for p in run.model.parameters():
            p.grad = None if p.grad is None else p.grad * 2.0**10
        scaler.step(run.optimizer)
        scaler.update()
    else:
        closure()
        run.optimizer.step()


def steps(case: Case) -> str | None:
    """Five steps are those of the formulas, with events between them; a step that cannot be taken is an error of ours and changes nothing."""
    run = _started(case)
    if isinstance(run, str):
        return run
    for number in range(5):
        event = run.draw.choice(EVENTS)
        event(run)
        run.log.append(event.__name__)
        if run.draw.random() < 0.3 and (problem := _refused(run, run.draw.choice(REFUSED))) is not None:
            return f"{problem}, after {run.log}"
        gradients = _gradients(run)
        _step(run, gradients)
        for name, followed in run.followed.items():
            group = run.group(name)
            if name in gradients and group is not None and followed.target:
                followed.step(gradients[name].numpy(), group)
            difference = abs(_copy(run.model.get_parameter(name)) - followed.value).max(initial=0)
            if not difference < 1e-8:
                return (
                    f"{name} is {difference:.3g} from the formulas after step {number}, {run.log}, blocks={run.blocks}, {group}"
                )
    return None


# -- what is refused ------------------------------------------------------------------------------------------------------------


def _of_nan(run: Run, moved: list[str]) -> None:
    run.model.get_parameter(moved[-1]).grad.view(-1)[0] = run.draw.choice((math.nan, math.inf))
    run.optimizer.step()


def _of_sparse(run: Run, moved: list[str]) -> None:
    p = run.model.get_parameter(moved[-1])
    p.grad = p.grad.to_sparse()
    run.optimizer.step()


def _of_missing(run: Run, moved: list[str]) -> None:
    run.model.get_parameter(moved[-1]).grad = None
    run.optimizer.missing_grads = "error"
    try:
        run.optimizer.step()
    finally:
        run.optimizer.missing_grads = "skip"


def _of_options(run: Run, moved: list[str]) -> None:
    group, (name, value) = run.group(moved[-1]), run.draw.choice([("lr", -1.0), ("lr", math.nan), ("momentum", 1.0), ("weight_decay", -0.1), ("nesterov", 1), ("noise_adaptation", 2.0), ("lr", "1")])  # fmt: skip
    before, group[name] = group[name], value
    try:
        run.optimizer.step()
    finally:
        group[name] = before


def _of_shape(run: Run, moved: list[str]) -> None:
    p = run.model.get_parameter(moved[-1])
    data, grad = p.data, p.grad
    p.grad = None
    p.data = torch.cat([data, data]) if data.ndim else data.expand(2).clone()
    p.grad = torch.ones_like(p)
    try:
        run.optimizer.step()
    finally:
        p.grad = None
        p.data = data
        p.grad = grad


def _of_replaced(run: Run, moved: list[str]) -> None:
    of, _, attribute = moved[-1].rpartition(".")
    module, old = run.model.get_submodule(of), run.model.get_parameter(moved[-1])
    if "parametrizations" in moved[-1]:
        raise ThunderNormError("not to be replaced")
    grad, old.grad = old.grad, None
    new = torch.nn.Parameter(old.detach().clone())
    new.grad = grad
    setattr(module, attribute, new)
    try:
        run.optimizer.step()
    finally:
        setattr(module, attribute, old)


def _of_retied(run: Run, moved: list[str]) -> None:
    """A parameter gives its place to another one, of its shape, that trains."""
    of, _, attribute = moved[-1].rpartition(".")
    old = run.model.get_parameter(moved[-1])
    others = [n for n, p in run.model.named_parameters() if p.shape == old.shape and p is not old and p.requires_grad]
    if "parametrizations" in moved[-1] or not others:
        raise ThunderNormError("there is no other")
    grad, old.grad = old.grad, None
    setattr(run.model.get_submodule(of), attribute, run.model.get_parameter(others[0]))
    try:
        run.optimizer.step()
    finally:
        setattr(run.model.get_submodule(of), attribute, old)
        old.grad = grad


def _of_added(run: Run, moved: list[str]) -> None:
    """A parameter that an optimizer of all parameters does not know."""
    optimizer = ModularOptimizer(run.optimizer.norm, lr=0.1, missing_grads="skip")
    run.model.added = torch.nn.Parameter(torch.ones(3))
    run.model.added.grad = torch.ones(3)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    try:
        optimizer.step()
    finally:
        assert same(before, {name: p.detach() for name, p in run.model.named_parameters()}), "something has changed"
        del run.model.added


def _of_another_state(run: Run, moved: list[str]) -> None:
    other = torch.optim.AdamW([p for g in run.optimizer.param_groups for p in g["params"]])
    run.optimizer.load_state_dict(other.state_dict())


def _of_another_shape(run: Run, moved: list[str]) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    some = [s for s in saved["state"].values() if "momentum_buffer" in s and s["momentum_buffer"].ndim]
    if not some:
        raise ThunderNormError("nothing is saved")
    some[-1]["momentum_buffer"] = some[-1]["momentum_buffer"][:0]
    run.optimizer.load_state_dict(saved)


def _of_fewer(run: Run, moved: list[str]) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    group = saved["param_groups"][-1]
    group["params"], group["param_names"] = group["params"][:-1], group["param_names"][:-1]
    try:
        run.optimizer.load_state_dict(saved)
    except ValueError as e:  # torch's own, with its own text
        raise ThunderNormError(str(e)) from e


def _of_unknown(run: Run, moved: list[str]) -> None:
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def _of_foreign_options(run: Run, moved: list[str]) -> None:
    name = run.draw.choice(("capturable", "foreach", "betas", "maximize", "weight_decy", "fused", "eps"))
    ModularOptimizer(run.model, run.case.inputs, lr=0.1, **{name: True})


def _of_closure(run: Run, moved: list[str]) -> None:
    def closure() -> None:
        raise ThunderNormError("the program's own")

    run.optimizer.step(closure)


REFUSED: tuple[Callable[[Run, list[str]], None], ...] = (
    *(_of_nan, _of_sparse, _of_missing, _of_options, _of_shape, _of_replaced, _of_retied, _of_added),
    *(_of_another_state, _of_another_shape),
    *(_of_fewer, _of_unknown, _of_foreign_options, _of_closure),
)


def _state(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}, copy.deepcopy(run.optimizer.state_dict())


def _refused(run: Run, what: Callable[[Run, list[str]], None]) -> str | None:
    """What is wrong with a refusal."""
    moved = [
        n for n, f in run.followed.items() if f.target and run.group(n) is not None and run.model.get_parameter(n).requires_grad
    ]
    if not moved:
        return None
    run.draw.shuffle(moved)
    for p in run.model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    before = _state(run)
    try:
        what(run, moved)
    except ThunderNormError:
        pass
    else:
        return f"{what.__name__} is not refused"
    after = _state(run)
    if not same(before, after):
        return f"{what.__name__} is refused, and something has changed"
    run.model.zero_grad()
    return None


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# -- steps of real gradients ------------------------------------------------------------------------------------------------------


def _trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, case: Case, number: int) -> torch.Tensor:
    inputs = case.inputs
    generator = torch.Generator().manual_seed(number)
    if inputs.is_floating_point():
        inputs = torch.randn(inputs.shape, generator=generator).to(next(model.parameters()).dtype)
    else:
        inputs = torch.randint(11, inputs.shape, generator=generator)
    optimizer.zero_grad()
    torch.manual_seed(number)  # of dropout
    loss = total(model(inputs))
    loss.backward()
    optimizer.step()
    return loss.detach()


def saved(case: Case) -> str | None:
    """What goes on from a state that was saved goes on to the bit."""
    draw = case.draw
    dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    model = case.model.to(dtype)
    inputs = case.inputs.to(dtype) if case.inputs.is_floating_point() else case.inputs
    options = drawn_options(draw) | {
        "missing_grads": "skip",
        "method": draw.choice(("newton_schulz", "newton_schulz_bf16", "svd")),
    }
    options["lr"] = 0.05
    norm = ModularNorm(model, inputs, mode="typical", blocks=draw.choice((False, True)))
    _ = norm.roles
    optimizer = ModularOptimizer(norm, **options)
    for number in range(draw.choice((0, 1, 2))):
        _trained(model, optimizer, case, number)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    of_model, of_optimizer = torch.load(file, weights_only=True)
    model_2, norm_2 = copy.deepcopy((model, norm))
    optimizer_2 = ModularOptimizer(norm_2, **options | {"lr": 1.0, "momentum": 0.3})
    model_2.load_state_dict(of_model)
    optimizer_2.load_state_dict(of_optimizer)
    for number in range(3):
        losses = [_trained(m, o, case, 10 + number) for m, o in ((model, optimizer), (model_2, optimizer_2))]
        if not same(losses[0].nan_to_num(), losses[1].nan_to_num()):
            return f"the loss of step {number} after loading is {losses[1]}, not {losses[0]}, {dtype}, {options}"
    if not same(model.state_dict(), model_2.state_dict()) or not same(
        optimizer.state_dict()["state"], optimizer_2.state_dict()["state"]
    ):
        return f"parameters or state differ after loading, {dtype}, {options}"
    return None


def inexact(case: Case) -> str | None:
    """A step by Newton-Schulz is the exact one to 1 %, in the parameters' precision."""
    draw = case.draw
    dtype, method, accuracy = draw.choice([
        (torch.float32, "newton_schulz", 0.007), (torch.float64, "newton_schulz", 0.007), (torch.float32, "newton_schulz_bf16", 0.02),
        (torch.bfloat16, "newton_schulz", 0.007), (torch.float16, "newton_schulz", 0.007),
    ])  # fmt: skip
    model = case.model.to(dtype)
    inputs = case.inputs.to(dtype) if case.inputs.is_floating_point() else case.inputs
    blocks = draw.choice((False, True, "heads"))
    optimizer = ModularOptimizer(model, inputs, lr=1.0, momentum=0.0, blocks=blocks, method=method, missing_grads="skip")
    largest = math.log10(torch.finfo(dtype).max)
    scale = 10 ** draw.uniform(-0.9 * largest if dtype != torch.float16 else -3, 0.9 * largest) if draw.random() < 0.5 else 1.0
    for p in model.parameters():
        p.grad = torch.randn_like(p) * scale if p.requires_grad else None
        p.data.zero_()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    for name, g in gradients.items():
        known, target = case.known[name], optimizer.norm.targets[name]
        if not known.norm or not target:
            continue
        exact = -target * known.steepest(_copy(g / scale), blocks)
        found = _copy(model.get_parameter(name))
        for at in known.units(tuple(g.shape), blocks):
            of_g, unit, wanted = _copy(g / scale).reshape(-1)[at], found.reshape(-1)[at], exact.reshape(-1)[at]
            if unit.ndim == 2 and np.linalg.svd(of_g, compute_uv=False)[-1] < 0.02 * np.linalg.norm(of_g):
                continue
            rounding = 2 * torch.finfo(dtype).eps * math.sqrt(unit.size) * abs(wanted).max()
            size = np.linalg.norm(wanted, 2) if unit.ndim == 2 else np.linalg.norm(wanted)
            if np.linalg.norm(unit - wanted, 2) > (accuracy if unit.ndim == 2 else 1e-5) * size + rounding:
                return f"{name}: {np.linalg.norm(unit - wanted, 2) / size:.3g} of the step away from the exact one, {dtype}, {method}, blocks={blocks}"
    return None
