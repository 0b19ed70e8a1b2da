"""Annotations of parameters: the class attribute, instances before classes, names, tied tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import (
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    annotate,
    build_norm_map,
    norm_report,
    normed,
)
from thunder_norm.errors import NormMapKeyError, NormMismatchError
from thunder_norm.norms.lifts.annotations import Annotation, named_annotations
from thunder_norm.transforms import NormTransform
import thunder


class Rows(nn.Linear):
    """A weight known by its rows."""

    norm_annotations = {"weight": (RMSTensor, (-1,)), "bias": LinfTensor}


class Outer(nn.Module):
    """A module inside a module."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5, bias=False), Rows(5, 3, bias=False)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


def kinds(model: nn.Module) -> dict[str, tuple[type[NormedTensor] | None, tuple[int, ...] | None]]:
    return {name: (a.kind, a.elem_dims) for name, a in named_annotations(model).items()}


def test_a_class_annotates_all_of_its_instances_wherever_they_are():
    assert kinds(Outer()) == {"last.weight": (RMSTensor, (-1,))}
    assert kinds(Rows(2, 2)) == {"weight": (RMSTensor, (-1,)), "bias": (LinfTensor, None)}
    assert kinds(nn.Linear(2, 2)) == {}


def test_a_class_attribute_decides_in_eager_traced_and_norm_map_runs():
    torch.manual_seed(seeded(1))
    model = Outer()
    x = RMSTensor.of(torch.randn(2, 4))
    jm = thunder.jit(model, transforms=[NormTransform()])
    y = jm(x)
    first, rows = RMSToRMSTensor.of(model.first.weight).norm_size, RMSTensor.of(model.last.weight).norm_size
    expected = (x.norm_size * first * 5 * rows).item()  # an un-embedding: the largest of dot products of 5 entries
    assert type(y) is LinfTensor and y.norm_size.item() == pytest.approx(expected, rel=1e-6)
    report = norm_report(jm, x, sensitivity="global")
    assert report.rows[-1].norm_size == pytest.approx(expected, rel=1e-6)
    assert report.parameters["last.weight"].kind == "RMSTensor"
    z = build_norm_map(model, torch.empty(2, 4))(RMSTensor(1.0), normed_state_dict={"first.weight": 2.0, "last.weight": 3.0})
    assert type(z) is LinfTensor and z.norm_size.item() == 2 * 5 * 3


def test_derived_classes_add_replace_and_take_back():
    class Derived(Rows):
        norm_annotations = {"weight": RMSToRMSTensor}

    class Back(Rows):
        norm_annotations = {"weight": None}

    class Same(Rows):
        pass

    assert kinds(Derived(2, 2)) == {"weight": (RMSToRMSTensor, None), "bias": (LinfTensor, None)}
    assert kinds(Back(2, 2)) == {"bias": (LinfTensor, None)}
    assert kinds(Same(2, 2)) == kinds(Rows(2, 2))


def test_an_instance_goes_before_its_class():
    model = Outer()
    annotate(model.last, weight=RMSToRMSTensor)
    assert kinds(model) == {"last.weight": (RMSToRMSTensor, None)}
    x = RMSTensor.of(torch.randn(2, 4))
    assert type(thunder.jit(model, transforms=[NormTransform()])(x)) is RMSTensor


def test_dotted_names_reach_submodules_and_go_before_their_classes():
    class Outermost(nn.Module):
        norm_annotations = {"inner.last.weight": RMSToRMSTensor, "inner.first.weight": RMSTensor}

        def __init__(self):
            super().__init__()
            self.inner = Outer()

    model = Outermost()
    assert kinds(model) == {"inner.last.weight": (RMSToRMSTensor, None), "inner.first.weight": (RMSTensor, None)}
    annotate(model.inner.last, weight=LinfTensor)
    assert kinds(model)["inner.last.weight"] == (LinfTensor, None)


def test_a_parameter_that_was_left_out_is_no_mistake_and_an_unknown_one_is():
    assert "bias" not in kinds(Rows(2, 2, bias=False))

    class Wrong(nn.Linear):
        norm_annotations = {"wieght": RMSTensor}

    class Lost(nn.Linear):
        norm_annotations = {"inner.weight": RMSTensor}

    message = r"Wrong.norm_annotations names 'wieght', but Wrong has no parameter or buffer 'wieght' .* \['bias', 'weight'\]"
    with pytest.raises(NormMapKeyError, match=message):
        thunder.jit(nn.Sequential(Wrong(2, 2)), transforms=[NormTransform()])
    with pytest.raises(NormMapKeyError, match=message):
        build_norm_map(Wrong(2, 2), torch.empty(2, 2))
    with pytest.raises(NormMapKeyError, match=r"Lost has no submodule 'inner'"):
        named_annotations(Lost(2, 2))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"weight": "rms"}, r"M.norm_annotations: the kind of 'weight' must be a kind of NormedTensor, got 'rms'"),
        ({"weight": NormedTensor}, "must be a kind"),
        ({"weight": (RMSTensor, -1)}, "elem_dims of 'weight' must be a tuple of numbers, got -1"),
        ({"weight": (RMSTensor, ("x",))}, "must be a tuple of numbers"),
        ({"weight": (RMSTensor, (-1,), 2)}, "must be a kind"),
        ([("weight", RMSTensor)], "must be a mapping from parameter names to kinds"),
    ],
)
def test_mistakes_in_a_class_attribute_are_refused(said, message):
    module = type("M", (nn.Linear,), {"norm_annotations": said})(2, 2)
    with pytest.raises(NormMismatchError, match=message):
        named_annotations(module)


def test_elem_dims_that_do_not_fit_are_refused_where_the_parameter_is_used():
    class M(nn.Linear):
        norm_annotations = {"weight": (RMSTensor, (-3,))}

    x = RMSTensor.of(torch.randn(2, 4))
    with pytest.raises(NormMismatchError, match=r"the norm stated for parameter 'weight' does not fit it.*-3 is out of range"):
        thunder.jit(M(4, 3), transforms=[NormTransform()])(x)
    with pytest.raises(NormMismatchError, match=r"the norm stated for parameter 'weight' does not fit it.*-3 is out of range"):
        norm_report(thunder.jit(M(4, 3), transforms=[NormTransform()]), x)


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self, head: type[nn.Linear] = nn.Linear, table: type[nn.Embedding] = nn.Embedding):
        super().__init__()
        self.embedding, self.head = table(7, 6), head(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


class Table(nn.Embedding):
    norm_annotations = {"weight": RMSToRMSTensor}


@pytest.mark.parametrize("name", ["embedding", "head"])
def test_a_tied_parameter_is_annotated_under_any_of_its_names(name):
    model = Tied()
    annotate(getattr(model, name), weight=RMSTensor)
    assert named_annotations(model) == dict.fromkeys(("embedding.weight", "head.weight"), Annotation(RMSTensor))
    jm = thunder.jit(model, transforms=[NormTransform()])
    y = normed(jm)(torch.tensor([[1, 2]]))
    assert type(y) is LinfTensor
    assert norm_report(jm, torch.tensor([[1, 2]])).rows[-1].kind == "LinfTensor"


def test_a_tied_parameter_annotated_in_two_ways_needs_a_decision():
    model = Tied(Rows, Table)
    with pytest.raises(NormMismatchError) as e:
        named_annotations(model)
    for part in ("annotated differently", "embedding.weight: RMSToRMSTensor, by Table", "head.weight: RMSTensor over dims (-1,)"):
        assert part in str(e.value)
    annotate(model.head, weight=RMSTensor)
    assert set(kinds(model).values()) == {(RMSTensor, None)}
    annotate(model.embedding, weight=RMSToRMSTensor)
    with pytest.raises(NormMismatchError, match="by annotate on embedding"):
        named_annotations(model)
