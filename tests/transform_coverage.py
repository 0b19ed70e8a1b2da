"""Which of torch's own operators the function transforms carry, in agreement with torch.

    python -m tests.transform_coverage vmap --write     measure all operators, one by one, and write tests/transform_coverage/vmap.txt
    python -m tests.transform_coverage vmap NAME ...    measure those whose name contains one of the words; --write replaces their rows

Tried is every differentiable operator of torch's database that Thunder traces right, with its first two sample inputs, in float64.
It passed if the transform agrees with the reference, is refused if one of our errors says why, and fails otherwise.

    grad        the gradient of a scalar function of the results with respect to all floating tensors; reference torch.func.grad
    jvp         in a random direction of all floating tensors; reference torch.func.jvp, or two reverse modes where it has no rule
    vmap        over all tensors, over the first one, over the last one; reference one sample after the other
    vmap_grad   that gradient over a batch; reference torch.func.grad of one sample after the other

Second derivatives, and first ones in complex128, are tried of each differentiable operator whether Thunder traces it or not, with its
first sample; ``python -m tests.fuzz op_db`` does it for all of them. References are torch.func's, or two reverse modes for jvp.  Where
torch's own second derivative is doubted, differences of its first derivatives decide.

    jvp_grad      the gradient in a random direction: forward over reverse
    vjp_jvp       gradients of results and tangents: reverse over forward
    hessian       of that scalar function with respect to the first floating tensor, of a sample where that is small
    grad_complex  the gradient of a scalar function of the results of complex tensors
    jvp_complex   in a random direction of complex tensors
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from thunder_norm.errors import ThunderNormError

if __name__ == "__main__":
    from tests import op_coverage
    from tests.op_coverage import Case, op_name, program
    from tests.transform_trials import ROUNDING, SMALL, TRIALS, inputs, is_traced_right, tensors_of, without_seeds
else:
    from tests import op_coverage
    from tests.op_coverage import Case, op_name, program
    from tests.transform_trials import ROUNDING, SMALL, TRIALS, inputs, is_traced_right, tensors_of, without_seeds

LISTS = Path(__file__).parent / "transform_coverage"
cases = functools.partial(op_coverage.cases, dtype=torch.float64)

# Tried whether Thunder traces the operator or not, with one sample
SECOND = ("jvp_grad", "vjp_jvp", "hessian", "grad_complex", "jvp_complex")


def dtype_of(transform: str) -> torch.dtype:
    """What a transform is tried in."""
    return torch.complex128 if transform.endswith("complex") else torch.float64


def _cases(transform: str, op: Any) -> list[Case]:
    if transform not in SECOND:
        return [case for case in cases(op) if is_traced_right(case)]
    found = op_coverage.cases(op, dtype_of(transform), samples=12 if transform == "hessian" else 2)
    if transform == "hessian":
        found = [c for c in found if next((t.numel() for t in inputs(c) if t.is_floating_point()), SMALL + 1) <= SMALL]
    return [case for case in found if is_repeatable(case)][:1]


def is_repeatable(case: Case) -> bool:
    """Whether eager gives the same result twice, with a tensor in it."""
    try:
        with without_seeds(), torch.no_grad():
            first, second = (tensors_of(program([case])(*inputs(case))) for _ in range(2))
        return bool(first) and all(
            torch.equal(a, b) or torch.allclose(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)
        )
    except Exception:  # noqa: BLE001 - whatever goes wrong is eager's
        return False


def measure(transform: str, op: Any) -> tuple[str, str]:
    """(verdict, reason) for one operator: "skipped" where there is nothing to try, "passed", "refused" or "failed"."""
    traced = _cases(transform, op)
    if not traced:
        return "skipped", ""
    worst = ("skipped", "")
    for trial in itertools.chain.from_iterable(map(TRIALS[transform], traced)):
        try:
            if trial.check(ROUNDING.get(op_name(op))) and worst[0] == "skipped":
                worst = ("passed", "")
        except ThunderNormError as e:
            worst = ("refused", described(e))
        except Exception as e:  # noqa: BLE001 - any failure is a result here
            return "failed", described(e)
    return worst


def described(error: Exception) -> str:
    """The headline of an error; the rest says where, which is not the operator's."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def is_tried(op: Any, transform: str = "grad") -> bool:
    """Whether an operator is differentiable on the CPU in what the transform is tried in."""
    return op.supports_autograd and op.supports_dtype(dtype_of(transform), "cpu")


def write(transform: str, results: dict[str, tuple[str, str]]) -> None:
    """Write what was found about these operators into the list, and count again."""
    rows = {name: f"{verdict}  ({reason})" if reason else verdict for name, (verdict, reason) in results.items()}
    rows = {name: row for name, row in (listed_rows(transform) | rows).items() if row != "skipped"}
    counts = [
        f"{sum(row.split()[0] == verdict for row in rows.values())} {verdict}" for verdict in ("passed", "refused", "failed")
    ]
    lines = [f"# {transform}: {len(rows)} operators tried, {', '.join(counts)}"]
    lines += [f"{name}: {row}" for name, row in sorted(rows.items())]
    LISTS.mkdir(exist_ok=True)
    (LISTS / f"{transform}.txt").write_text("\n".join(lines) + "\n")


def listed_rows(transform: str) -> dict[str, str]:
    """What the list says of each operator."""
    path = LISTS / f"{transform}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split(": ", 1) for line in lines if not line.startswith("#"))


def listed(transform: str, verdict: str) -> list[str]:
    """The names of the operators that the list gives this verdict."""
    return [name for name, row in listed_rows(transform).items() if row.split()[0] == verdict]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transform", choices=TRIALS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    known = listed_rows(options.transform) if options.go_on else {}
    for op in op_db:
        name = op_name(op)
        if is_tried(op, options.transform) and name not in known and (not options.names or any(n in name for n in options.names)):
            start = time.time()
            results[name] = measure(options.transform, op)
            if options.write or options.go_on:
                write(options.transform, {name: results[name]})
            if results[name][0] in ("failed", "refused") or options.names:
                print(f"{name}: {': '.join(results[name])}  [{time.time() - start:.1f} s]", file=sys.stderr, flush=True)
    for verdict in ("passed", "refused", "failed"):
        print(f"{sum(r[0] == verdict for r in results.values())} {verdict}")


if __name__ == "__main__":
    main()
