"""Every registered rule is searched, a little on each run and long by `make audit`, whose results are committed."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from tests import ROOT
from tests.core.first_cases import first_cases
from tests.seeds import seeded
from thunder_norm import LinfTensor, NormedTensor, RMSTensor
from thunder_norm.audit import Effort
from thunder_norm.audit.rules import Record, Searched, auditable, identity, op_title, searched, section
from thunder_norm.audit.table import _shown, kept, library_rules, render
from thunder_norm.core.registry import registered_ops
from thunder_norm.errors import MissingNormRuleError, ThunderNormError

DOCS = ROOT / "docs"
AUDIT = kept(DOCS / "audit.json")
RECORDS = {(r.op, r.rule, r.file, r.kinds): r for r in AUDIT.rules}
OPS = [op for op in registered_ops().values() if {id(r) for r in auditable(op)} & {id(r) for r in library_rules(op)}]
LITTLE = Effort(cases=1, restarts=1, steps=4, seed=seeded())


def rules():
    return [(op, rule) for op in OPS for rule in library_rules(op) if rule in auditable(op)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=op_title)
def test_a_short_search_finds_nothing_above_a_claim(op):
    for rule in auditable(op):
        record = searched(op, rule, first_cases(op, rule), LITTLE)
        assert record.is_sound, str(record)


# -- the committed results of the long search -----------------------------------------------------------------------------------


def test_every_rule_was_searched():
    """One that was not says why."""
    missing = [identity(op, rule) for op, rule in rules() if identity(op, rule) not in RECORDS]
    assert not missing, f"run `make audit`: {missing}"
    assert len(RECORDS) == len(AUDIT.rules)
    assert not [key for key, r in RECORDS.items() if not r.cases and not r.note]


def test_a_rule_that_is_not_attained_says_why():
    silent = []
    for op, rule in rules():
        record = RECORDS[identity(op, rule)]
        attained = min([record.value, *record.sensitivity.values()])
        if record.cases and attained < 0.9 and not section(rule.fn.__doc__ or "", "Gap"):
            silent.append((*identity(op, rule), attained))
    assert not silent, f"state the reason as 'Gap:' in the docstrings of {silent}"


def test_the_table_of_rules_is_what_make_audit_writes():
    assert (DOCS / "rules.md").read_text() == render(DOCS / "audit.json")


def test_the_table_shows_the_spread_over_cases():
    record = Record(
        "op", "rule", searches=[Searched("a", 0.5, (1.0, 0.25)), Searched("b", math.nan, ()), Searched("c", 1.0, (0.75,))]
    )
    assert (_shown(record.values), _shown(record.slopes)) == ("0.500, 0.750, 1.000", "0.250, 0.500, 0.750")
    assert (record.value, record.sensitivity, record.worst) == (1.0, {"0": 1.0, "1": 0.25}, "a")
    assert _shown([math.nan]) == "-"


def test_formulas_keep_their_case():
    """A docstring that begins with a formula begins with its letter: `a b`, never `A b`."""
    docs = [rule.fn.__doc__ or "" for op in registered_ops().values() for rule in library_rules(op)]
    assert [doc for doc in docs if re.match(r"[A-Z] ([-+*/=]|[a-z]\b)", doc)] == []


# -- coverage -----------------------------------------------------------------------------------------------------------------

# Linear algebra, FFT, sparse, complex and random operators: what norm rules leave to others.  (The jiterator needs CUDA.)
OUT_OF_SCOPE = (
    "linalg", "fft", "sparse", "rand", "normal", "empty", "bernoulli", "dropout", "cholesky", "svd", "qr", "lu", "geqrf", "ormqr",
    "complex", "polar", "view_as_real", "view_as_complex", "stft", "istft", "pca_lowrank", "svd_lowrank", "cauchy", "exponential",
    "geometric", "log_normal", "uniform", "multinomial", "signal", "logdet", "pinverse", "tensorinv", "triangular", "rrelu", "eig",
    "histogramdd", "matrix_exp", "jiterator",
)  # fmt: skip


def in_scope():
    for op in op_db:
        is_out = any(name in op.name for name in OUT_OF_SCOPE) and op.name != "nn.functional.normalize"
        if not is_out and op.supports_dtype(torch.float64, "cpu"):
            yield op


def has_floating(tree):
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in tree_leaves(tree))


def lifted(tree, kind):
    def lift(v):
        if not isinstance(v, torch.Tensor) or not v.is_floating_point():
            return v
        return kind.of(v, (-1,) if v.ndim and kind is RMSTensor else ())

    return tree_map(lift, tree)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", list(in_scope()), ids=lambda op: f"{op.name}.{op.variant_test_name}".strip("."))
def test_every_operator_has_a_rule_or_is_refused_with_a_reason(op):
    """A reason is an error of ours other than "no rule"; one sample is enough to see which."""
    for sample, _ in zip(op.sample_inputs("cpu", torch.float64), range(4), strict=False):
        if not has_floating(sample.input) or not has_floating(op.op(sample.input, *sample.args, **sample.kwargs)):
            continue
        for kind in (RMSTensor, LinfTensor):
            try:
                out = op.op(lifted(sample.input, kind), *sample.args, **sample.kwargs)
            except MissingNormRuleError:
                raise
            except ThunderNormError as e:
                assert len(str(e).partition("\n")[0]) > 20
                continue
            # torch.masked.argmax makes floats of its indices
            is_index = op.name.startswith("masked.arg")
            assert any(isinstance(v, NormedTensor) for v in tree_leaves(out)) or not has_floating(out) or is_index
            return
