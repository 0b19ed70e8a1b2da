"""The operators that the list says run through a wrapper in Thunder still do, and agree with eager."""

from __future__ import annotations

import pytest
from op_coverage import Disagreement, cases, check, listed, op_name, runs_in_eager
from torch.testing._internal.common_methods_invocations import op_db

SHARDS = 24
OPS = {op_name(op): op for op in op_db}
REMOVED = {"cholesky", "qr"}  # in torch 2.15, where linalg has them
LISTED = [name for name in listed("yes") if name in OPS]


def test_the_list_does_not_shrink():
    assert len(listed("yes")) >= 592
    assert not [name for name in listed("yes") if name not in OPS and name not in REMOVED]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_listed_operators_agree_with_eager(shard: int):
    several = [case for name in LISTED[shard::SHARDS] for case in cases(OPS[name])[:1] if runs_in_eager(case)]
    assert len({case.name for case in several}) == len(LISTED[shard::SHARDS])
    try:
        check(several)
    except Disagreement:
        raise
    except Exception:
        for case in several:  # one by one, to say which
            check([case])
        raise
