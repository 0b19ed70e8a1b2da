"""Files of norm maps and reports: cut short, altered, of another format, and those that somebody wrote to do harm."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.norms.norm_map_models import Net, state
from tests.seeds import LONG, seeded
from thunder_norm import RMSTensor, build_norm_map, load_norm_map, load_norm_report, norm_report, with_perturbation
from thunder_norm.core import registry
from thunder_norm.errors import SavedFileError, ThunderNormError
from thunder_norm.norms.maps.norm_map import NormMap
from thunder_norm.norms.saving import files, values
from thunder_norm.report.rules import RuleName

FIRST = b"thunder_norm file, format 1\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A file that only is read."""
    torch.manual_seed(seeded(1))
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    norm_map = build_norm_map(model, torch.empty(4, 6), dynamic_shapes=({0: "batch"},))
    norm_map(with_perturbation(RMSTensor(1.0, norm_size_requires_grad=True)))
    path = tmp_path_factory.mktemp("saved") / "map"
    norm_map.save(path)
    return path


def parts(path: Path) -> tuple[dict, bytes]:
    """The header of a file and the bytes of its tensors."""
    body = path.read_bytes()[len(FIRST) + 32 :]
    (length,) = struct.unpack_from("<Q", body)
    return json.loads(body[8 : 8 + length]), body[8 + length :]


def written(path: Path, header: dict | bytes, tensors: bytes = b"", first: bytes = FIRST) -> Path:
    """A file with this header, and the checksum of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text + tensors
    path.write_bytes(first + hashlib.sha256(body).digest() + body)
    return path


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in JSON with every key or index in it."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places(data[key])


# -- accidents ---------------------------------------------------------------------------------------------------------------


def test_a_file_that_ends_early_is_refused(saved, tmp_path):
    raw = saved.read_bytes()
    for length in [*range(60), *range(60, len(raw), len(raw) // 40), len(raw) - 1]:
        (tmp_path / "cut").write_bytes(raw[:length])
        with pytest.raises(SavedFileError, match="damaged|no file of thunder_norm"):
            load_norm_map(tmp_path / "cut")
    (tmp_path / "longer").write_bytes(raw + b"\0")
    with pytest.raises(SavedFileError, match="damaged"):
        load_norm_map(tmp_path / "longer")


def test_a_file_with_another_byte_is_refused(saved, tmp_path):
    raw, draw = bytearray(saved.read_bytes()), random.Random(seeded(0))
    for position in [*range(len(FIRST) + 32), *(draw.randrange(len(raw)) for _ in range(100))]:
        altered = bytearray(raw)
        altered[position] ^= 1 << draw.randrange(8)
        (tmp_path / "altered").write_bytes(altered)
        with pytest.raises(SavedFileError):
            load_norm_map(tmp_path / "altered")


def test_a_newer_format_is_named(saved, tmp_path):
    header, tensors = parts(saved)
    path = written(tmp_path / "newer", header, tensors, b"thunder_norm file, format 2\n")
    with pytest.raises(SavedFileError, match=r"newer format(.|\n)*format +2"):
        load_norm_map(path)
    with pytest.raises(SavedFileError, match="damaged"):
        load_norm_map(written(tmp_path / "older", header, tensors, b"thunder_norm file, format 0\n"))


def test_other_files_are_refused(saved, tmp_path):
    other = tmp_path / "other"
    for content in (b"", b"{}", pickle.dumps({"a": 1}), os.urandom(1000), b"thunder_norm file, format x\n"):
        other.write_bytes(content)
        with pytest.raises(SavedFileError, match="no file of thunder_norm"):
            load_norm_map(other)
    torch.save({"a": torch.ones(2)}, other)
    with pytest.raises(SavedFileError, match="no file of thunder_norm"):
        load_norm_map(other)
    with pytest.raises(SavedFileError, match="holds a norm map, not a norm report"):
        load_norm_report(saved)
    with pytest.raises(FileNotFoundError):
        load_norm_map(tmp_path / "nothing")


def test_a_file_says_what_it_was_made_with(saved):
    made_with = load_norm_map(saved).made_with
    assert made_with["torch"] == torch.__version__ and {"thunder_norm", "lightning-thunder", "python"} < made_with.keys()


def test_saving_leaves_one_file_and_what_was_there_if_it_fails(saved, tmp_path, monkeypatch):
    norm_map = load_norm_map(saved)
    path = tmp_path / "map"
    norm_map.save(path)
    before = path.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        norm_map.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    norm_map.save(path)
    assert list(tmp_path.iterdir()) == [path]


# -- intent ------------------------------------------------------------------------------------------------------------------


def altered(saved: Path, tmp_path: Path, change: Callable[[dict], Any]) -> Path:
    header, tensors = parts(saved)
    change(header["data"])
    return written(tmp_path / "changed", header, tensors)


def statements(data: dict, of: str = "computation") -> list[dict]:
    return data["programs"][0][1][of]["statements"]


@pytest.mark.parametrize(
    "operation, message",
    [
        (["torch", "no_such_thing"], "not known here: torch no_such_thing"),
        (["nobody", "add"], "not known here: nobody add"),
        (["python", "check_type"], "not known here"),
        (["prim", "UNPACK_ATTR"], "not known here"),
        (["prim", "PRINT"], "not known here"),
        (["thunder", "torch.add"], "cannot run"),
        (["function", "torch.Tensor.numpy", [True], "no form"], "not known here"),
        (["function", "torch.load", [True], "kernel"], "not known here"),
        (["function", "os.system", [True], "kernel"], "not known here"),
        (["function", "aten.from_file.default", [True], "kernel"], "not known here"),
        (["function", "aten.add_.Tensor", [True], "kernel"], "not known here"),
        (["boundary", "check_results_0"], "not known here"),
    ],
)
def test_an_operation_that_is_not_known_is_named(saved, tmp_path, operation, message):
    def change(data: dict) -> None:
        next(s for s in statements(data) if "operation" in s and s["operation"][0] == "torch")["operation"] = operation

    with pytest.raises(SavedFileError, match=message):
        load_norm_map(altered(saved, tmp_path, change))


_CODE = "__import__('os').system('true')"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["programs"][0][1]["computation"].update(name=f"f(): {_CODE}\ndef computation"),
        lambda data: data["programs"][0][1]["computation"]["arguments"].append(f"x={_CODE}"),
        lambda data: data["programs"][0][1]["computation"]["proxies"].update({_CODE: "collection"}),
        lambda data: data["programs"][0][1]["computation"]["proxies"].update({"__class__": "collection"}),
        lambda data: statements(data)[-1]["args"].append(f"'); {_CODE} #"),
        lambda data: statements(data)[-1].update(kwargs={f"{_CODE}, a": 1}),
        lambda data: statements(data)[-1]["args"].append({"dict": [[_CODE, 1]]}),
        lambda data: data["programs"][0][1]["sources"].__setitem__(0, {"argument": 0, "attribute": "__class__"}),
        lambda data: data["programs"][0][1].update(returned={"node": "os.system", "context": None, "children": []}),
        lambda data: data["programs"][0][1].update(returned={"node": "builtins.list", "context": None, "children": []}),
        lambda data: data["programs"][0][1].update(
            returned={"node": "collections.defaultdict", "context": "os.system", "children": []}
        ),
    ],
)
def test_code_in_a_file_is_refused(saved, tmp_path, change):
    with pytest.raises(SavedFileError):
        load_norm_map(altered(saved, tmp_path, change))


_WRONG = (None, 0, -1, 2**70, 0.5, "", "x", _CODE, [], [[]], {}, {"proxy": "x"}, {"tuple": [1]}, {"float": "inf"}, True)


@pytest.mark.slow
def test_a_file_that_says_anything_else_is_a_norm_map_or_refused(saved, tmp_path):
    """Whatever stands at any place of the JSON: an error of ours, or a norm map; never another error, never code that runs."""
    header, tensors = parts(saved)
    draw = random.Random(seeded(0))
    count = len(list(places(header)))
    for position in [*range(40), *(draw.randrange(count) for _ in range(200 if LONG else 80))]:
        changed = copy.deepcopy(header)
        container, key = list(places(changed))[position]
        container[key] = draw.choice(_WRONG)
        path = written(tmp_path / "wrong", changed, tensors)
        try:
            found = load_norm_map(path)
        except ThunderNormError:
            continue
        assert isinstance(found, NormMap)
    for text in (b"", b"null", b"[" * 100_000, b'{"kind": NaN}', b"\xff"):
        with pytest.raises(SavedFileError):
            load_norm_map(written(tmp_path / "wrong", text))


def test_tensors_that_are_not_in_the_file_are_refused(saved, tmp_path):
    header, tensors = parts(saved)
    (name, entry), *_ = header["tensors"].items()
    for wrong in (
        {"shape": [2**40, 6]},
        {"offset": -8},
        {"stride": [1, 1, 1]},
        {"dtype": "qint8"},
        {"device": "cuda:77"},
        {"shape": [1.5, 6]},
    ):
        header["tensors"][name] = entry | wrong
        with pytest.raises(SavedFileError):
            load_norm_map(written(tmp_path / "wrong", header, tensors))


# -- values ------------------------------------------------------------------------------------------------------------------


VALUES = [
    None,
    True,
    -3,
    2**80,
    -0.0,
    1e-310,
    0.1,
    float("inf"),
    float("-inf"),
    complex(1, float("inf")),
    "text with ' and \" and \u2028",
    [1, (2, [3]), {"a": 1, 2: (None,)}],
    torch.Size([2, 3]),
    slice(1, None, -1),
    ...,
    torch.bfloat16,
    torch.device("cpu"),
    torch.channels_last,
    RMSTensor,
    int,
    type(None),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_what_they_were(value):
    found = values.decode(json.loads(json.dumps(values.encode(value), allow_nan=False)))
    assert found == value and type(found) is type(value) and repr(found) == repr(value)


@pytest.mark.parametrize(
    "value", [object(), Net(), lambda: 1, {1, 2}, os.system, b"bytes", RMSTensor(1.0)], ids=lambda v: type(v).__name__
)
def test_other_values_have_no_name(value):
    with pytest.raises(SavedFileError, match="cannot be saved"):
        values.encode(value)


TENSORS = {
    "transposed": torch.randn(3, 4).t(),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "a part": torch.randn(6, 8)[1:4, ::2],
    "empty": torch.empty(0, 3),
    "a number": torch.tensor(2.0, dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(3).bfloat16(),
    "complex": torch.randn(2, dtype=torch.complex64),
    "integers": torch.arange(5),
    "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_tensors_are_what_they_were(case, is_parameter, tmp_path):
    t = TENSORS[case]
    if is_parameter:
        t = nn.Parameter(t, requires_grad=t.is_floating_point() and case != "float8")
    files.write(tmp_path / "file", "test", [], {"t": t})
    found = files.read(tmp_path / "file", "test").tensors["t"]
    assert type(found) is type(t) and found.dtype == t.dtype and found.requires_grad == t.requires_grad
    assert found.shape == t.shape and found.stride() == t.stride()
    same = [x.detach().contiguous().view(torch.uint8) if x.numel() and x.ndim else x.detach().clone() for x in (found, t)]
    assert torch.equal(*same)


@pytest.mark.parametrize("t", [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.ones(2, dtype=torch.cfloat).conj()])
def test_tensors_that_are_no_plain_ones_are_refused(t, tmp_path):
    with pytest.raises(SavedFileError, match="only plain tensors"):
        files.write(tmp_path / "file", "test", [], {"t": t})


# -- reports -----------------------------------------------------------------------------------------------------------------


def test_a_report_is_what_it_was(tmp_path):
    torch.manual_seed(seeded(1))
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    model[3].weight = model[0].weight
    norm_map = build_norm_map(model, torch.zeros(2, 3, dtype=torch.long))
    norm_map(torch.zeros(2, 3, dtype=torch.long))
    report = norm_report(norm_map, explain=True)
    report.save(tmp_path / "report")
    others = [load_norm_report(tmp_path / "report"), pickle.loads(pickle.dumps(report)), copy.deepcopy(report), copy.copy(report)]
    for other in others:
        assert other == report and str(other) == str(report) and type(other) is type(report)
        assert [r.rule for r in other] == [r.rule for r in report]  # the functions themselves, where they are registered


def test_each_registered_rule_is_found_by_its_name():
    """Many are made by one function, in a loop: they have a place and a docstring in common."""
    rules = {rule.fn: None for op in registry.registered_ops().values() for rule in op.rules}
    lost = [fn for fn in rules if RuleName.of(fn).find() is not fn]
    assert len(rules) > 1000 and not lost


def test_a_report_with_rules_of_ones_own(tmp_path, monkeypatch):
    from thunder_norm import normed_op
    from thunder_norm.transforms import NormTransform
    import thunder

    @normed_op
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @tripled.register_norm
    def _(x: RMSTensor) -> RMSTensor:
        """3 x.

        Value:       3 |x|
        """
        return RMSTensor(3 * x.norm_size, elem_dims=x.elem_dims, sensitivity={"x": 3.0})

    report = norm_report(thunder.jit(lambda x: tripled(x), transforms=[NormTransform()]), RMSTensor.of(torch.ones(2, 3)))
    report.save(tmp_path / "report")
    pickled = pickle.dumps(report)
    assert load_norm_report(tmp_path / "report") == pickle.loads(pickled) == report
    monkeypatch.setattr(registry, "_registry", {})  # a process where the rule is not registered
    for other in (load_norm_report(tmp_path / "report"), pickle.loads(pickled)):
        assert other.explain() == report.explain() and "3 |x|" in other.explain()
        assert pickle.loads(pickle.dumps(other)) == other
        with pytest.raises(NotImplementedError, match="not registered in this process"):
            other.rows[0].rule()


def test_a_damaged_report_is_refused(tmp_path):
    norm_map = build_norm_map(Net(), torch.empty(4, 6))
    norm_map(RMSTensor(1.0), normed_state_dict=state())
    norm_report(norm_map).save(tmp_path / "report")
    with pytest.raises(SavedFileError, match="holds a norm report, not a norm map"):
        load_norm_map(tmp_path / "report")
    header, _ = parts(tmp_path / "report")
    header["data"][0][0] = "other"
    with pytest.raises(SavedFileError, match="damaged"):
        load_norm_report(written(tmp_path / "report", header))
