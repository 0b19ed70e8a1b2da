"""Real subclasses, of torch and of torchao: what eager gives, or a refusal that says why."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from benchmarks.parts import exchanged
from tests.subclasses import assert_same
from tests.zoo import ZOO, Case, built, gradients, page
from tests.zoo.case import OPAQUE
from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording.trace import OperationId
from thunder_norm.tracing.guarding.bindable import executor as boundary_executor
from thunder_norm.transforms import SubclassTransform
import thunder

REFUSALS = (UnsupportedOpError, UnsupportedSubclassError)


@pytest.fixture(autouse=True)
def process_group_of_one(nothing_left_over: None) -> Iterator[None]:
    """What cases with a DTensor start is ended."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def rows(entries) -> dict:
    entries = [entry for entry in entries if entry.available]
    return {"argvalues": entries, "ids": [entry.name for entry in entries]}


def jit(function, options):
    return thunder.jit(function, transforms=[SubclassTransform(**options)])


@pytest.mark.parametrize("entry", **rows(c for c in ZOO.values() if c.works[0]))
def test_forward_is_eager_s(entry: Case):
    function, args = built(entry)
    with torch.no_grad():
        expected = function(*args)
        own, own_args = built(entry)
        jf = jit(own, entry.options)
        for _ in range(2):
            assert_same(jf(*own_args), expected)
            assert_same(own_args, args)
            _, own_args = built(entry)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)
    assert_plain(thunder.last_traces(jf)[-1])


def assert_plain(trace) -> None:
    """No wrapper and nothing that makes or opens one is left."""
    assert trace.bound_symbols
    for bsym in trace.bound_symbols:
        assert not any(isinstance(p, SubclassProxy) for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)), bsym
        assert bsym.sym.executor is not boundary_executor and not isinstance(bsym.sym.id, OperationId), bsym


@pytest.mark.parametrize("entry", **rows(c for c in ZOO.values() if c.forward_refusal is not None))
def test_forward_is_refused_with_the_reason(entry: Case):
    function, args = built(entry)
    with torch.no_grad():
        function(*args)  # eager can
        own, own_args = built(entry)
        with pytest.raises(REFUSALS, match=entry.forward_refusal):
            jit(own, entry.options)(*own_args)


@pytest.mark.parametrize("entry", **rows(c for c in ZOO.values() if OPAQUE in c.roles))
def test_what_cannot_be_taken_apart_is_run_on_demand_only(entry: Case):
    own, own_args = built(entry)
    with torch.no_grad(), pytest.raises(UnsupportedSubclassError, match="cannot be interpreted|_make_wrapper_subclass"):
        jit(own, {})(*own_args)


@pytest.mark.parametrize("entry", **rows(c for c in ZOO.values() if c.works[1]))
def test_gradients_are_eager_s(entry: Case):
    function, args = built(entry)
    expected, expected_gradients = gradients(function, args, function)
    assert any(g is not None for g in expected_gradients)
    own, own_args = built(entry)
    jf = jit(own, entry.options)
    result, found = gradients(own, own_args, jf)
    assert_same(result, expected)
    assert_same(found, expected_gradients)
    for p in own.parameters() if isinstance(own, torch.nn.Module) else ():
        p.grad = None
    _, own_args = built(entry)
    _, found = gradients(own, own_args, jf)
    assert_same(found, expected_gradients)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)


def test_the_page_says_what_is_tested():
    rows = {row.name: row for row in page.rows_of(page.PAGE.read_text())}
    assert list(rows) == list(ZOO)
    for name, entry in ZOO.items():
        forward, backward = rows[name].ours
        assert (forward == "yes", backward == "yes") == entry.works, name
        assert entry.forward_refusal is None or re.search(entry.forward_refusal, forward), name
        assert (backward == "-") == (not entry.backward), name


def test_the_table_of_the_page_is_read_as_it_is_written():
    row = page.Row("x", "input, returned", ("yes", "-"), ("refused: no", "-"))
    assert page.rows_of(exchanged("before", page.BEGIN, page.render([row]))) == [row]
