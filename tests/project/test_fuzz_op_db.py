"""The tester of torch's operator database: what it tries, and a few operators under each nest; `make fuzz` tries all."""

from __future__ import annotations

import pytest

from tests.fuzz.op_db import Operator, programs
from tests.transform_coverage import SECOND

FEW = {
    "jvp_grad": "linalg.solve",
    "vjp_jvp": "sinh",
    "hessian": "linalg.inv",
    "grad_complex": "asinh",
    "jvp_complex": "std.unbiased",
}


def test_every_differentiable_operator_is_tried_under_every_nest():
    listed = programs()
    assert len(listed) > 2000
    assert {p.transform for p in listed} == set(SECOND) == set(FEW)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", SECOND)
def test_an_operator_under_each_nest(transform: str):
    outcome = Operator(transform, FEW[transform]).run()
    assert outcome.kind == "right", outcome.detail
