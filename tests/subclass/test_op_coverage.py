"""The operators that the list says run through a wrapper in Thunder still do, and agree with eager."""

from __future__ import annotations

import re
from itertools import islice

import pytest
import torch
from packaging.version import Version
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.subclasses import WrapperSubclass

from tests import op_coverage_page
from tests.op_coverage import Disagreement, cases, check, listed, op_name, runs_in_eager
from tests.seeds import seeded
from thunder_norm.transforms import SubclassTransform
import thunder

SHARDS = 24
OPS = {op_name(op): op for op in op_db}
NEW = frozenset(  # what older torch has not, or asks the value of a tensor for
    "bmm.triton_optimized combinations linalg.matrix_sqrth linalg.polar nanquantile native_group_norm quantile "
    "nn.functional.linear_cross_entropy nn.functional.linear_cross_entropy.chunked "
    "nn.functional.linear_cross_entropy.chunked_none torch.ops.aten._scaled_dot_product_flash_attention_for_cpu".split()
)
IS_NEWEST = Version(torch.__version__) >= Version("2.15.0")  # with which the list was written
LISTED = [name for name in listed("yes") if name in OPS and (IS_NEWEST or name not in NEW)]


def test_the_list_does_not_shrink():
    assert len(listed("yes")) >= 640
    assert {name for name in listed("yes") if name not in OPS} <= (set() if IS_NEWEST else NEW)


def test_the_page_has_the_list():
    page = op_coverage_page.PAGE.read_text().partition(op_coverage_page.BEGIN)[2]
    assert f"{len(listed('yes'))} of {len(listed('yes')) + len(listed('no'))} operators agree" in page
    assert re.findall(r"^\| (\S+) \| (?:yes|fails)", page, re.M) == listed("no")


def test_a_transform_that_eager_mode_computes_wrongly_through_a_wrapper():
    x = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(seeded(0)))
    got = thunder.jit(torch.fft.hfftn, transforms=[SubclassTransform()])(WrapperSubclass(x.clone()), norm="ortho")
    exact = torch.fft.hfftn(x.to(torch.complex128), norm="ortho")
    torch.testing.assert_close(got.a.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_listed_operators_agree_with_eager(shard: int):
    several = [case for name in LISTED[shard::SHARDS] for case in islice(filter(runs_in_eager, cases(OPS[name])), 1)]
    assert len({case.name for case in several}) == len(LISTED[shard::SHARDS])
    try:
        check(several)
    except Disagreement:
        raise
    except Exception:
        for case in several:  # one by one, to say which
            check([case])
        raise
