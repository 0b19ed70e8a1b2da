"""Saved norm maps: what was saved is what is loaded, to the last bit; anything else is refused."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.norms.norm_map_models import Net, count_acquisitions, formula, state
from tests.norms.saved_elsewhere import elsewhere, seen
from tests.programs import grown
from tests.seeds import LONG, seeded
from thunder_norm import (
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSConvTensor,
    RMSToRMSTensor,
    annotate,
    build_norm_map,
    load_norm_map,
    load_norm_report,
    norm_report,
    normed_op,
    with_perturbation,
)
from thunder_norm.errors import NormMapKeyError, NormMismatchError, SavedFileError
from thunder_norm.norms.maps.function_of_sizes import function_of_sizes
from thunder_norm.norms.maps.norm_map import NormMap
from thunder_norm.transforms import grad, vmap


class Parts(nn.Module):
    """Layers whose norms are measured in different ways, and a result of many parts."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 10), nn.LayerNorm(10)
        self.last = nn.Linear(10, 3, bias=False)
        self.conv = nn.Conv1d(1, 2, 3)
        self.register_buffer("scale", torch.full((10,), 0.5))
        self.tied = nn.Linear(3, 10)
        self.tied.weight = nn.Parameter(self.last.weight.detach().t())  # not contiguous

    def forward(self, x):
        h = self.norm(F.gelu(self.first(x))) * self.scale
        y = self.last(h)
        return {"y": y, "again": [y, (x, 3, None, "text", float("inf"))], "conv": self.conv(x[:, None]), "z": self.tied(y)}


def moving(size: float = 1.25, **options: Any) -> NormedTensor:
    return with_perturbation(RMSTensor(size, norm_size_requires_grad=True, **options))


def given() -> dict[str, NormedTensor]:
    return {name: with_perturbation(v) for name, v in state(norm_size_requires_grad=True).items()}


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    annotate(model[2], bias=L2Tensor)
    return model


def partly(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.Linear(6, 2))


BATCH = ({0: "batch"},)
EXAMPLE = (torch.empty(4, 6),)

# the model, the options of build_norm_map, and calls: arguments and normed_state_dict
CASES: dict[str, tuple[Any, dict, list[tuple[tuple, Any]]]] = {
    "measured": (Parts, {}, [((moving(),), None), ((RMSTensor(2.0),), None)]),
    "unit": (Parts, {"parameters": "unit"}, [((moving(),), None)]),
    "typical": (Parts, {"mode": "typical"}, [((moving(),), None)]),
    "given": (Net, {}, [((moving(),), given()), ((LinfTensor(1.0),), state())]),
    "given to the norm map": (
        Net,
        {"parameters": {"w1": RMSToRMSTensor(2.0, norm_size_requires_grad=True), "b1": 0.5}},
        [((moving(),), None), ((RMSTensor(1.0),), {"w2": 3.0, "scale": 0.5})],
    ),
    "given as tensors": (Net, {"parameters": {"w1": torch.tensor(1.5, requires_grad=True)}}, [((moving(),), None)]),
    "dynamic": (
        Parts,
        {"dynamic_shapes": BATCH},
        [((moving(backing=torch.empty(n, 6)),), None) for n in (4, 1, 9)],
    ),
    "tied": (tied_model, {}, [((moving(),), None)]),
    "partly unit": (partly, {"parameters": {"0.weight": 1.0}}, [((moving(),), None)]),
    "frozen": (lambda: Parts().requires_grad_(False), {}, [((moving(),), None), ((RMSTensor(1.0),), None)]),
    "half": (lambda: nn.Linear(6, 3).to(torch.bfloat16), {}, [((moving(),), None)]),
}


_SLOW = ("typical", "dynamic", "frozen")


@functools.cache
def _made(case: str) -> tuple[nn.Module, NormMap, list[list[Any]]]:
    """The model of a case, its norm map, called already, and what the calls give."""
    make, options, calls = CASES[case]
    torch.manual_seed(seeded(1))
    model = make()
    norm_map = build_norm_map(model, *EXAMPLE, **options)
    for args, norms in calls:
        norm_map(*args, normed_state_dict=norms)
    return model, norm_map, [seen(norm_map, *call) for call in calls]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in _SLOW)) for c in CASES])
def test_a_loaded_norm_map_gives_what_the_saved_one_gives(case, tmp_path, monkeypatch):
    calls = CASES[case][2]
    model, norm_map, want = _made(case)
    path = tmp_path / "map"
    norm_map.save(path)
    load_norm_map(path).save(tmp_path / "again")
    acquired = count_acquisitions(monkeypatch)
    ways = {
        "loaded": lambda: load_norm_map(path),
        "loaded with its model": lambda: load_norm_map(path, model),
        "unpickled": lambda: pickle.loads(pickle.dumps(norm_map)),
        "copied": lambda: copy.copy(norm_map),
        "copied deeply": lambda: copy.deepcopy(norm_map),
        "loaded and unpickled": lambda: pickle.loads(pickle.dumps(load_norm_map(path))),
        "saved again": lambda: load_norm_map(tmp_path / "again"),
    }
    # by turns: what each case is about is in the file
    at = list(CASES).index(case)
    chosen = ways if LONG else ["loaded", *(list(ways)[1 + (at + i) % (len(ways) - 1)] for i in (0, 3))]
    for name in chosen:
        other = ways[name]()
        assert [seen(other, *call) for call in calls] == want, name
    assert acquired == []
    assert load_norm_map(path).made_with["torch"] == torch.__version__


@pytest.mark.slow
def test_in_another_process(tmp_path):
    calls, want = [], []
    for i, (case, (_, _, given_calls)) in enumerate(CASES.items()):
        _, norm_map, found = _made(case)
        norm_map.save(tmp_path / f"map {i}")
        calls += [(tmp_path / f"map {i}", args, norms) for args, norms in given_calls]
        want += found
    assert elsewhere(calls, tmp_path) == want


@pytest.mark.slow
def test_random_programs_in_another_process(tmp_path):
    """Straight-line programs over all operations with rules: saved here, loaded there."""
    calls, want = [], []
    for number in range(14):
        program = grown(number, 2 + number % 9)
        if not program.is_traced:
            continue
        points = program.points(0, torch.Generator().manual_seed(seeded(0)))
        norm_map = build_norm_map(program.function(), *points, *program.plain.values())
        inputs = [
            with_perturbation(b.kind(b.norm_size, backing=p, elem_dims=b.dims, norm_size_requires_grad=True))
            for b, p in zip(program.balls, points, strict=True)
        ]
        args = (*inputs, *program.plain.values())
        want.append(seen(norm_map, args, None))
        norm_map.save(tmp_path / f"program {number}")
        calls.append((tmp_path / f"program {number}", args, None))
    assert len(calls) > 5 and elsewhere(calls, tmp_path) == want


def test_the_norm_of_a_loaded_map_is_that_of_the_formula(tmp_path):
    norm_map = build_norm_map(Net(), *EXAMPLE)
    norm_map(RMSTensor(1.0), normed_state_dict=state())
    norm_map.save(tmp_path / "map")
    found = load_norm_map(tmp_path / "map")(RMSTensor(1.25), normed_state_dict=state())
    sizes = {name: v.norm_size.item() for name, v in state().items()}
    assert found.norm_size.item() == pytest.approx(formula(1.25, **sizes), rel=1e-13)


def test_a_loaded_map_reads_its_own_tensors_or_those_of_a_model(tmp_path):
    norm_map = build_norm_map(nn.Linear(6, 3, bias=False), *EXAMPLE)
    norm_map(RMSTensor(1.0))
    norm_map.save(tmp_path / "map")
    other = nn.Linear(6, 3, bias=False)
    assert (
        load_norm_map(tmp_path / "map", other)(RMSTensor(1.0)).norm_size
        == build_norm_map(other, *EXAMPLE)(RMSTensor(1.0)).norm_size
    )
    loaded = load_norm_map(tmp_path / "map")
    before = loaded(RMSTensor(1.0)).norm_size.item()
    with torch.no_grad():
        loaded.tensors["weight"].mul_(2)
    assert loaded(RMSTensor(1.0)).norm_size.item() == pytest.approx(2 * before)
    assert norm_map(RMSTensor(1.0)).norm_size.item() == before


def test_norms_of_grouped_kernels_are_in_files(tmp_path):
    """Their kinds are made for each number of groups."""
    torch.manual_seed(seeded(0))
    model, x = nn.Conv1d(4, 4, 2, groups=2), RMSTensor(2.0, elem_dims=(-2,))
    kernel = RMSToRMSConvTensor.grouped(2)(3.0)
    norm_map = build_norm_map(model, torch.ones(2, 4, 5), parameters={"weight": kernel, "bias": 0.5})
    measured = build_norm_map(model, torch.ones(2, 4, 5))
    found = norm_map(x), measured(x, normed_state_dict={"weight": kernel, "bias": 0.5})
    for m, expected in zip((norm_map, measured), found, strict=True):
        m.save(tmp_path / "map")
        loaded, given = (
            load_norm_map(tmp_path / "map"),
            {} if m is norm_map else {"normed_state_dict": {"weight": kernel, "bias": 0.5}},
        )
        assert torch.equal(loaded(x, **given).norm_size, expected.norm_size) and expected.norm_size.item() == pytest.approx(
            2 * 3 + 0.5
        )
    report = norm_report(measured, x)
    report.save(tmp_path / "report")
    assert load_norm_report(tmp_path / "report") == report
    text = (tmp_path / "map").read_bytes().replace(b"RMSToRMSConvTensor_groups2", b"RMSToRMSConvTensor_groups_")
    (tmp_path / "map").write_bytes(text)
    with pytest.raises(SavedFileError):
        load_norm_map(tmp_path / "map")


def test_a_deep_copy_reads_the_tensors_of_the_copied_model():
    norm_map = build_norm_map(nn.Linear(6, 3, bias=False), *EXAMPLE)
    before = norm_map(RMSTensor(1.0)).norm_size.item()
    for copied in (copy.deepcopy(norm_map), pickle.loads(pickle.dumps(norm_map))):
        with torch.no_grad():
            copied.model.weight.mul_(2)
        assert copied(RMSTensor(1.0)).norm_size.item() == pytest.approx(2 * before)
        y = copied(RMSTensor(1.0)).norm_size
        y.backward()
        assert copied.model.weight.grad is not None and norm_map.model.weight.grad is None
    assert norm_map(RMSTensor(1.0)).norm_size.item() == before


@pytest.mark.slow
def test_with_its_model_a_loaded_map_acquires_what_it_lacks(tmp_path, monkeypatch):
    torch.manual_seed(seeded(1))
    model = Parts()
    norm_map = build_norm_map(model, *EXAMPLE)
    norm_map(RMSTensor(1.0))
    norm_map.save(tmp_path / "map")
    acquired = count_acquisitions(monkeypatch)
    loaded = load_norm_map(tmp_path / "map", model)
    loaded(RMSTensor(3.0))
    assert len(acquired) == 0
    assert seen(loaded, (LinfTensor(1.0),), None) == seen(norm_map, (LinfTensor(1.0),), None) and len(acquired) == 2
    assert len(norm_report(loaded).rows) == len(norm_report(norm_map).rows)


def test_without_its_model_a_loaded_map_says_what_it_lacks(tmp_path):
    norm_map = build_norm_map(Net(), *EXAMPLE)
    norm_map(RMSTensor(1.0), normed_state_dict=state())
    norm_map.save(tmp_path / "map")
    loaded = load_norm_map(tmp_path / "map")
    for args, norms in (((LinfTensor(1.0),), state()), ((RMSTensor(1.0),), None), ((RMSTensor(1.0),), {**state(), "b9": 1.0})):
        with pytest.raises(NormMismatchError, match="loaded without its model"):
            loaded(*args, normed_state_dict=norms)
    with pytest.raises(NormMismatchError, match="loaded without its model"):
        norm_report(loaded)
    with pytest.raises(NormMismatchError, match="the example was of shape"):
        loaded(RMSTensor(1.0, backing=torch.empty(4, 7)), normed_state_dict=state())


def test_a_map_loaded_without_gradients_is_differentiable_afterwards(tmp_path):
    norm_map = build_norm_map(Parts(), *EXAMPLE)
    call = (moving(),), None
    norm_map(*call[0])
    norm_map.save(tmp_path / "map")
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            loaded = load_norm_map(tmp_path / "map")
        assert seen(loaded, *call) == seen(norm_map, *call)


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    norm_map = build_norm_map(nn.Linear(6, 3, bias=False), *EXAMPLE)
    norm_map(RMSTensor(1.0))
    norm_map.save(tmp_path / "map")
    with pytest.raises(NormMapKeyError, match="'weight', which the model does not have"):
        load_norm_map(tmp_path / "map", nn.ReLU())
    for other in (nn.Linear(6, 4), nn.Linear(6, 3).double(), nn.Linear(6, 3).requires_grad_(False)):
        with pytest.raises(NormMismatchError, match="'weight' is other"):
            load_norm_map(tmp_path / "map", other)


def test_transforms_of_a_loaded_program(tmp_path):
    norm_map = build_norm_map(Net(), *EXAMPLE)
    args, norms = (RMSTensor(1.25),), state()
    norm_map(*args, normed_state_dict=norms)
    norm_map.save(tmp_path / "map")
    found = []
    for each in (norm_map, load_norm_map(tmp_path / "map")):
        function, sizes = function_of_sizes(each, *args, normed_state_dict=norms)
        batch = {name: torch.stack([t, 2 * t]) for name, t in sizes.items()}
        found.append((vmap(function)(batch)[0], grad(lambda s, f=function: f(s)[0])(sizes)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])
    (one, two) = found[1][0].tolist()
    values = {name: v.norm_size.item() for name, v in norms.items()}
    assert one == pytest.approx(formula(1.25, **values)) and two == pytest.approx(
        formula(2.5, **{name: 2 * v for name, v in values.items()})
    )


# -- what cannot be saved ----------------------------------------------------------------------------------------------------


class OwnKind(RMSTensor):
    """A kind that only this process has."""


@dataclass
class Result:
    """A class that torch's pytrees do not know."""

    y: Any


def opaque(x):
    return Result(x.relu())


@normed_op
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_norm
def _(x: RMSTensor) -> RMSTensor:
    return RMSTensor(x.norm_size / 2, elem_dims=x.elem_dims, sensitivity={"x": 0.5})


REFUSED = {
    "a class of results": (opaque, (RMSTensor(1.0),), r"what the model returns: a .*Result cannot be saved"),
    "a kind of one's own": (lambda x: x.relu(), (OwnKind(1.0),), r"OwnKind"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_and_the_file_stays(case, tmp_path):
    f, args, message = REFUSED[case]
    norm_map = build_norm_map(f, *EXAMPLE)
    norm_map(*args)
    path = tmp_path / "map"
    path.write_text("what was there")
    with pytest.raises(SavedFileError, match=message):
        norm_map.save(path)
    assert path.read_text() == "what was there" and list(tmp_path.iterdir()) == [path]


def test_an_argument_that_cannot_be_saved_is_refused(tmp_path):
    norm_map = build_norm_map(lambda x, f: f(x), *EXAMPLE, F.relu)
    norm_map(RMSTensor(1.0), F.relu)
    with pytest.raises(SavedFileError, match="argument 1: a builtins.function cannot be saved"):
        norm_map.save(tmp_path / "map")


def test_a_norm_map_that_was_not_called_has_nothing_to_save(tmp_path):
    with pytest.raises(SavedFileError, match="not been called yet"):
        build_norm_map(Net(), *EXAMPLE).save(tmp_path / "map")
    assert seen(pickle.loads(pickle.dumps(build_norm_map(nn.ReLU(), *EXAMPLE))), (RMSTensor(1.0),), None)


def test_a_rule_of_ones_own_is_saved_as_the_arithmetic_that_it_is(tmp_path):
    norm_map = build_norm_map(lambda x: halved(x) + 1, *EXAMPLE)
    norm_map(moving(3.0))
    norm_map.save(tmp_path / "map")
    assert load_norm_map(tmp_path / "map")(moving(3.0)).norm_size.item() == 2.5


def test_what_cannot_be_saved_is_acquired_again_where_a_pickle_is_read():
    norm_map = build_norm_map(opaque, *EXAMPLE)
    norm_map(RMSTensor(1.0))
    read = pickle.loads(pickle.dumps(norm_map))
    assert read._programs == {} and read(RMSTensor(3.0)).y.norm_size.item() == 3


def test_a_parameter_that_was_replaced_is_read_anew_where_a_pickle_is_read():
    norm_map = build_norm_map(nn.Linear(6, 3, bias=False), *EXAMPLE)
    norm_map(RMSTensor(1.0))
    norm_map.model.weight = nn.Parameter(2 * norm_map.model.weight.detach())
    read = pickle.loads(pickle.dumps(norm_map))
    assert read._programs == {}


def test_what_a_model_returns_beside_norms_may_not_depend_on_a_dynamic_dimension():
    norm_map = build_norm_map(lambda x: (x.relu(), x.shape[0]), *EXAMPLE, dynamic_shapes=BATCH)
    with pytest.raises(NormMismatchError, match="beside norms depends on the size of the dynamic dimension 'batch'"):
        norm_map(RMSTensor(1.0))
    fine = build_norm_map(lambda x: (x.relu(), x.shape[1], {"a": float("nan")}), *EXAMPLE, dynamic_shapes=BATCH)
    assert fine(RMSTensor(1.0, backing=torch.empty(9, 6)))[1] == 6


def test_plain_results_are_meta_tensors_also_of_a_loaded_one(tmp_path):
    class WithMask(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            return y, {"mask": y > 0, "places": y.argmax(-1)}

    norm_map = build_norm_map(WithMask(), torch.empty(3, 4), dynamic_shapes=({0: "batch"},))
    norm_map(RMSTensor(1.0))
    norm_map.save(tmp_path / "map")
    for found in (norm_map, load_norm_map(tmp_path / "map")):
        for size in (3, 5):
            y, others = found(RMSTensor.of(torch.ones(size, 4)))
            assert y.shape == (size, 4) and torch.isfinite(y.norm_size)
            assert {k: (v.device.type, v.dtype, tuple(v.shape)) for k, v in others.items()} == {
                "mask": ("meta", torch.bool, (size, 4)),
                "places": ("meta", torch.int64, (size,)),
            }
