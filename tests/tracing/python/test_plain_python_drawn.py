"""Random programs of lists and dicts, traced: they do what they do in eager mode."""

from __future__ import annotations

import bisect
import collections
import heapq
import itertools
import random

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.transforms import NormTransform
import thunder

_OF_LISTS = (
    *("v.sort()", "v.sort(reverse=True)", "v.sort(key=lambda e: -e % 5)", "v.reverse()", "v.append({a})", "v.insert({i}, {a})"),
    *(
        "v.extend([{a}, {b}])",
        "v *= {n}",
        "v += [{a}]",
        "v = sorted(v, key=lambda e: (e % 3, e))",
        "v = list(map(lambda e: e + {a}, v))",
    ),
    *("v = v[{i}:]", "v[{i}:{j}] = [{a}]", "v = [e for e in v if e % 2] or [{a}]", "out += v.count({a})", "out += {a} in v"),
    *("out += max(v, default=1)", "out += min(v + [{b}], key=lambda e: e * {n})", "v = list(filter(lambda e: e != {a}, v))"),
    *(
        "out += v.index({a}, {i}) if {a} in v[{i}:] else -1",
        "out += v.pop() if v else 3",
        "out += v.pop({n}) if len(v) > {n} else 5",
    ),
    *("v.remove({a}) if {a} in v else v.clear()", "out += sum(itertools.accumulate(v, lambda p, q: p - q))", "del v[:{n}]"),
    *(
        "heapq.heapify(v)",
        "heapq.heappush(v, {a})",
        "out += heapq.heappushpop(v, {b})",
        "bisect.insort(v, {a})",
        "out += heapq.nlargest(2, v + [{a}])[-1]",
    ),
)
_OF_DICTS = (
    *("d[{a}] = {b}", "out += d.get({a}, {n})", "out += d.pop({a}, {b})", "d.update({{{a}: {n}}})", "d.setdefault({b}, {a})"),
    *("out += len(d.keys())", "out += sum(d.values())", "out += sum(k * q for k, q in d.items())", "out += {a} in d.keys()"),
    *(
        "out += d.popitem()[1] if d else 2",
        "out += bool(d.items())",
        "out += d.keys() == {{{a}, {b}}}",
        "out += ({a}, {b}) in d.items()",
    ),
    *(
        "out += next(reversed(d.values()), 9)",
        "d = {{**d, {a}: {n}}}",
        "d = dict(sorted(d.items(), key=lambda i: i[1]))",
        "out += {n} in d.values()",
    ),
    *(
        "d.clear() if len(d) > 3 else None",
        "out += max(d, key=d.get, default=4)",
        "out += len(d.keys() & {{{a}, {b}, {n}}})",
        "d |= {{{b}: {a}}}",
    ),
    *("out += len(d.keys() | v)", "out += collections.Counter(v)[{a}]", "out += len(collections.Counter(v).most_common(2))"),
)


def _drawn(rng: random.Random) -> str:
    lines = ["def f(x):", "    v, d, out = [3, 1, 2], {1: 2}, 0"]
    for template in rng.choices(_OF_LISTS + _OF_DICTS, k=14):
        numbers = {name: rng.randint(0, 4) for name in ("a", "b")}
        line = template.format(**numbers, i=rng.randint(-3, 3), j=rng.randint(-3, 3), n=rng.randint(1, 2))
        lines.append(f"    {line}")
    return "\n".join([*lines, "    return x * out + sum((i + 1) * e for i, e in enumerate(v)) + sum(d) * 3"])


@pytest.mark.parametrize("n", range(12))
def test_drawn_programs_of_lists_and_dicts_do_what_they_do_in_eager_mode(n, tmp_path):
    source = _drawn(random.Random(seeded(n)))
    file = tmp_path / "drawn.py"
    file.write_text(source)
    names = {"itertools": itertools, "collections": collections, "heapq": heapq, "bisect": bisect}
    exec(compile(source, str(file), "exec"), names)
    f, x = names["f"], torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert torch.equal(thunder.jit(f, transforms=[NormTransform()])(x), f(x)), source
