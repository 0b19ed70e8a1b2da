"""docs/benchmarks.md and other pages: what stands between markers is written from the results, by the command that measures.

A part begins with ``<!-- results: SUITE -->`` and ends with ``<!-- end -->``; the text around is written by hand and has no figures.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts import exchanged
from benchmarks.timing import duration

RESULTS = Path(__file__).parent / "results"
PAGES = tuple(Path(__file__).parents[1] / "docs" / f"{name}.md" for name in ("benchmarks", "bounds", "monitor", "reports"))
BEGIN = re.compile(r"<!-- results: (\w+) -->")

Row = Mapping[str, Any]
Cases = dict[str, dict[str, Row]]  # rows by case and candidate


def write() -> None:
    """Write the pages anew from the results that are kept."""
    for page in PAGES:
        page.write_text(rendered(page.read_text()))


def rendered(page: str) -> str:
    """The page with the part of each suite exchanged."""
    for begin in BEGIN.finditer(page):
        page = exchanged(page, begin[0], part(begin[1]))
    return page


def part(suite: str) -> str:
    """What the page says of a suite's results."""
    path = RESULTS / f"{suite}.json"
    if not path.exists():
        return f"Not measured yet; `python -m benchmarks {suite}` does it."
    result = json.loads(path.read_text())
    predicted = result.get("predictions", ())
    return "\n\n".join([_measured(result), *_PARTS[suite](_cases(result["rows"])), *_predicted(_cases(predicted))])


def _measured(result: Mapping[str, Any]) -> str:
    """By which command, on what, and how busy that was."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "lightning-thunder", "transformers"))
    method = f" {result['method']}" if "method" in result else ""
    others = "".join(f", {name} {version}" for name, version in result.get("peers", {}).items())
    threads = "one thread" if machine["torch_threads"] == 1 else f"{machine['torch_threads']} threads"
    on_gpu = f"{machine['device']}, CUDA {machine['cuda']}, driver {machine['driver']}, " if "cuda" in machine else ""
    return (
        f"Measured by `{result['command']}` at commit {machine['commit']}: {on_gpu}{machine['cores']} cores of {machine['cpu']}, "
        f"{machine['system']}, {threads}, load {machine['load_average'][0]:.1f} at the start; {versions}{others}.{method}"
    )


def _cases(rows: Iterable[Row]) -> Cases:
    found: Cases = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["candidate"]] = row
    return found


def _peer(rows: Mapping[str, Row]) -> str:
    """The candidate that ratios of a case are taken to."""
    return next(iter(rows.values()))["peer"]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _time(row: Row) -> str:
    return duration(row["median_us"])


def _ratio(row: Row | None) -> str:
    """The median of the rounds' ratios, with quartiles."""
    if row is None:
        return ""
    quartiles = row.get("ratio_quartiles")
    return f"{row['ratio']:.2f}" + ("" if quartiles is None else " ({:.2f} to {:.2f})".format(*quartiles))


def _range(values: Iterable[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    ordered = sorted(values)
    low, high = form(ordered[0]), form(ordered[-1])
    return low if low == high else f"{low} to {high}"


# -- suite by suite ----------------------------------------------------------------------------------------------------


def _real_mode(cases: Cases) -> list[str]:
    heads = ["", "thunder.jit", "with NormTransform", "ratio of medians", "of minima", "quartiles of the rounds", "rounds"]
    rows = []
    with_inductor = {case: rows for case, rows in cases.items() if _peer(rows) == "torch.compile"}
    cases = {case: rows for case, rows in cases.items() if case not in with_inductor}
    for case, (peer, ours) in ((case, tuple(rows.values())) for case, rows in cases.items()):
        ratio, minima = ours["median_us"] / peer["median_us"], ours["ratio_of_minima"]
        quartiles = "{:.2f} to {:.2f}".format(*ours["ratio_quartiles"]) if "ratio_quartiles" in ours else ""
        rows.append([case, _time(peer), _time(ours), f"{ratio:.2f}", f"{minima:.2f}", quartiles, str(ours["rounds"])])
    if not with_inductor:
        return [_table(heads, rows)]
    lines = [[case, _time(of["torch.compile"]), _ratio(of["executors.inductor"])] for case, of in with_inductor.items()]
    compared = _table(["processor's time", "torch.compile", "the executor `inductor`, to that"], lines)
    return [_table(heads, rows), "The [executor](executors.md) `inductor` and `torch.compile`:", compared]


def _first_calls(cases: Cases) -> list[str]:
    imported, cases = cases["imports"], {case: rows for case, rows in cases.items() if case != "imports"}
    both = imported["thunder_norm and thunder"]
    ours = {case: rows["real mode"] for case, rows in cases.items()}
    heads = ["", "`thunder.jit`", "real mode", "its acquisition", "the rest of it", "normed mode", "aot_eager", "inductor"]
    lines = []
    for case, rows in cases.items():
        peer, ratios = rows["thunder.jit"], {name: f"{row['ratio']:.2f}" for name, row in rows.items()}
        rest = [row["median_us"] - row["acquisition_us"] for row in (ours[case], peer)]
        parts = [f"{ours[case]['acquisition_us'] / peer['acquisition_us']:.2f}", f"{rest[0] / rest[1]:.2f}"]
        others = [ratios[name] for name in ("normed mode", "torch.compile(aot_eager)", "torch.compile(inductor)")]
        lines.append([case, _time(peer), ratios["real mode"], *parts, *others])
    shares = [row["acquisition_us"] / row["median_us"] for row in ours.values()]
    return [
        _table(heads, lines),
        f"Real mode takes {_range(row['ratio'] for row in ours.values())} of plain Thunder's time; of its own, "
        f"{_range(shares, '{:.0%}'.format)} goes into the acquisition.",
        f"`import thunder`, with torch, takes {_time(imported['thunder'])}; with `thunder_norm` {_time(both)}, {_ratio(both)} of it.",
    ]


def _other_sizes(cases: Cases) -> list[str]:
    heads = ["", "first call", "of it the acquisition", "another batch size, to that", "of it the acquisition"]
    lines, ratios = [], []
    for case, rows in cases.items():
        first, other = rows["first call"], rows["another batch size"]
        shares = [f"{row['acquisition_us'] / row['median_us']:.0%}" for row in (first, other)]
        lines.append([case, _time(first), shares[0], _ratio(other), shares[1]])
        ratios.append(other["acquisition_us"] / first["median_us"])
    return [
        _table(heads, lines),
        f"The acquisition for another batch size alone takes {_range(ratios)} of the time of the first call.",
    ]


def _norms(cases: Cases) -> list[str]:
    maps, modes, firsts = [], [], []
    measured = [name for name in _NORM_MAPS if any(name in rows for rows in cases.values())]
    for case, rows in cases.items():
        kind, _, what = case.partition(", ")
        if what.endswith(": first call"):
            firsts.append(
                f"The first call of {what.removesuffix(': first call')} takes {_time(rows[kind])}: Thunder acquires the trace."
            )
        elif kind == "norm map":
            maps.append([what, *(_time(rows[name]) if name in rows else "" for name in measured)])
        else:
            ours = rows["normed mode"]
            to_real = _ratio(ours) if ours["peer"] != ours["candidate"] else "Thunder alone cannot trace it"
            modes.append([what, _time(ours), to_real, _ratio(rows.get("rules, plain PyTorch"))])
    return [
        _table(["norm map of", *(_NORM_MAPS[name] for name in measured)], maps),
        *firsts,
        _table(["normed mode of", "time", "to `thunder.jit` without norms", "rules in plain PyTorch to the same"], modes),
    ]


_NORM_MAPS = {
    "norm map": "dict of norms",
    "autograd alone": "autograd alone",
    "by hand in torch": "by hand",
    "norm map, NormVector": "`NormVector`",
    "autograd alone, one vector": "autograd alone, one vector",
    "norm map, sizes from one vector": "dict of `vector.unbind()`",
}


_FUSED = "SubclassTransform, inductor executor"
_WRAPPERS = {
    "eager dispatch": "eager dispatch",
    "SubclassTransform": "`SubclassTransform`",
    "SubclassTransform, torch.compile executor": "with torch.compile's executor",
    _FUSED: "with the executor `inductor`",
    "torch.compile(aot_eager)": "aot_eager",
    "torch.compile(inductor)": "inductor",
}


def _subclasses(cases: Cases) -> list[str]:
    calls = {
        kind: {case.removesuffix(f": {kind}"): rows for case, rows in cases.items() if case.endswith(f": {kind}")}
        for kind in ("forward", "forward and backward")
    }
    parts = []
    heads = {name: head for name, head in _WRAPPERS.items() if all(name in rows for of in calls.values() for rows in of.values())}
    for kind, of_kind in calls.items():
        parts.append(f"{kind.capitalize()}:")
        lines = [[case, *(f"{rows[name]['ratio']:.2f}" for name in heads)] for case, rows in of_kind.items()]
        parts.append(_table(["", *heads.values()], lines))
    lines = [(kind, rows) for kind, of_kind in calls.items() for rows in of_kind.values()]
    within = [f"{sum(_ours(rows) <= 1.1 for rows in of.values())} of {len(of)}" for of in calls.values()]
    ahead = {
        name: sum(rows[name]["ratio"] < _ours(rows) for _, rows in lines)
        for name in ("torch.compile(aot_eager)", "torch.compile(inductor)")
    }
    fused = [rows[_FUSED]["ratio"] / min(rows[name]["ratio"] for name in ahead) for _, rows in lines if _FUSED in rows]
    firsts = [rows for case, rows in cases.items() if case.endswith(": first call")]
    compiled = [rows["torch.compile(inductor)"]["median_us"] for rows in firsts]
    ours = [rows["SubclassTransform"] for rows in firsts]
    parts += [
        f"`SubclassTransform` is within 1.1 of the work by hand in {within[0]} forward passes and {within[1]} with a backward; "
        f"aot_eager is faster in {ahead['torch.compile(aot_eager)']} of the {len(lines)} lines, "
        f"inductor in {ahead['torch.compile(inductor)']}.",
        f"With the executor `inductor` it takes {_range(fused)} of the time of the faster of these two, less in {sum(r < 1 for r in fused)} of "
        f"{len(fused)} lines.",
        f"The first call takes {_range(row['ratio'] for row in ours)} of that of plain `thunder.jit` on the unchanged model, "
        f"{_range((row['median_us'] for row in ours), duration)}; torch.compile's (inductor) {_range(compiled, duration)}.",
    ]
    return parts


def _ours(rows: Mapping[str, Row]) -> float:
    return rows["SubclassTransform"]["ratio"]


def _profile(cases: Cases) -> list[str]:
    names = list(next(iter(cases.values())))
    rows = []
    for name in names:
        line = [name]
        for of_case in cases.values():
            row, peer = of_case[name], of_case[_peer(of_case)]
            is_peer = row is peer
            line.append(_time(row) if is_peer else _ratio(row))
            line.append(f"{row['flops']:,}" if is_peer else _difference(row["flops"], peer["flops"]))
        rows.append(line)
    return [_table(["", *(f"{case}: {what}" for case in cases for what in ("time", "FLOPs"))], rows)]


def _difference(flops: int, of_peer: int) -> str:
    return "equal" if flops == of_peer else f"{flops / of_peer - 1:+.2%}"


def _against_a_peer(cases: Cases, *counted: str) -> list[str]:
    """One table, case after case; with what was `counted` of each candidate."""
    lines, counts = [], [*counted, "rounds"]
    for case, rows in cases.items():
        for name, row in rows.items():
            ratio = "1" if name == _peer(rows) else _ratio(row)
            lines.append([case, name, _time(row), ratio, *(str(row[count]) for count in counts)])
    return [_table(["", "", "time", "ratio", *counts], lines)]


def _on_gpu(cases: Cases) -> list[str]:
    return _against_a_peer(cases, "kernels")


def _predicted(cases: Cases) -> list[str]:
    """What was said before a program ran, beside what was measured."""
    lines = [
        [case, name, f"{row['predicted']:.4g} {row['unit']}", f"{row['measured']:.4g} {row['unit']}", f"{row['ratio']:.3f}"]
        for case, rows in cases.items()
        for name, row in rows.items()
    ]
    return [_table(["", "", "predicted", "measured", "ratio"], lines)] if lines else []


def _function_transforms(cases: Cases) -> list[str]:
    calls = {case.removesuffix(": call"): rows for case, rows in cases.items() if case.endswith(": call")}
    columns = {
        "ours": "thunder_norm",
        "ours, `executors.inductor`": "executors.inductor",
        "torch.compile": "of torch.func",
        "ours, Thunder's torch.compile executor": " executor",
    }
    lines = []
    for case, rows in calls.items():
        by_column = {
            c: next((r for name, r in rows.items() if name == end or name.endswith(end)), None) for c, end in columns.items()
        }
        lines.append([case, _time(rows["torch.func"]), *map(_ratio, by_column.values())])
    firsts: dict[str, list[float]] = {}
    for case, rows in cases.items():
        for name, row in rows.items() if case.endswith(": first call") else ():
            firsts.setdefault(name, []).append(row["median_us"])
    half = [case for case, rows in calls.items() if rows["thunder_norm"]["ratio"] <= 0.5]
    return [
        _table(["call", "`torch.func`", *columns], lines),
        f"Ours takes half the time of `torch.func` or less in {len(half)} of {len(calls)} lines. First calls: "
        + "; ".join(f"{name} {_range(times, duration)}" for name, times in firsts.items())
        + ".",
    ]


_BOUNDS = ("composed", "composed, no search", "ECLipsE-Fast", "product")


def _bounds(cases: Cases) -> list[str]:
    lines = []
    for case, rows in cases.items():
        found = rows["composed"]["found"]
        shown = [rows.get(name) for name in _BOUNDS]
        bounds, times = (["" if r is None else of(r) for r in shown] for of in (lambda r: _figure(r["bound"]), _time))
        lines.append([case, _figure(found), *bounds, *times])
    names = ["product of norms" if name == "product" else name for name in _BOUNDS]
    heads = ["", "found", *names, *(f"time: {name}" for name in names)]
    return [_table(heads, lines)]


def _precision(cases: Cases) -> list[str]:
    lines = []
    for case, rows in cases.items():
        for name, row in rows.items():
            if "precision" in row:
                found = row["precision"]
                ratio = found["typical"] / found["measured_typical"] if found["measured_typical"] else 1.0
                sizes = [_figure(found[k]) for k in ("typical", "measured_typical")]
                lines.append([case, name, *sizes, f"{ratio:.2f}", _figure(found["bound"]), _ratio(row)])
    heads = ["", "", "predicted", "measured", "ratio", "bound", "time, to a report without precision"]
    return [_table(heads, lines)]


def _margins(cases: Cases) -> list[str]:
    lines, radii = [], []
    for rows in cases.values():
        for name, row in rows.items():
            radii = [f"certified at {r}" for r in row["certified"]]
            lines.append([name, f"{row['clean']:.3f}", *(f"{v:.3f}" for v in row["certified"].values()), _time(row)])
    return [_table(["trained by", "right", *radii, "time of a step"], lines)]


def _certified(cases: Cases) -> list[str]:
    lines, heads = [], []
    for case, rows in cases.items():
        for name, row in rows.items():
            heads = [f"certified at {r}" for r in row["certified"]]
            shares = ["" if name == "found" else f"{share:.2f}" for share in row["certified"].values()]
            lines.append([f"{case}, {row['images']} images", name, f"{row['radius']:.3f}", *shares, _time(row)])
    return [_table(["", "by", "mean radius", *heads, "time of an image"], lines)]


def _monitor(cases: Cases) -> list[str]:
    lines = []
    for case, rows in cases.items():
        sampled, plain = rows["sampled"], rows["without"]
        cost, every = f"{100 * sampled['cost']:.1f} %", math.ceil((sampled["ratio"] - 1) / 0.03)
        lines.append([case, _time(plain), _time(sampled), cost, str(every), _ratio(rows["not sampled"])])
    heads = [
        "",
        "a step without",
        "a sampled step",
        "cost of one in 50",
        "at most 3 % from every=",
        "other steps, to those without",
    ]
    return [_table(heads, lines)]


def _figure(value: float) -> str:
    return f"{value:.4g}"


_PARTS: dict[str, Callable[[Cases], list[str]]] = {
    "real_mode": _real_mode,
    "first_calls": _first_calls,
    "other_sizes": _other_sizes,
    "normed": _norms,
    "subclasses": _subclasses,
    "profile": _profile,
    "modular": _against_a_peer,
    "orthogonalization": _against_a_peer,
    "optimizer_steps": _against_a_peer,
    "function_transforms": _function_transforms,
    "gpu": _on_gpu,
    "gpu_busy": _on_gpu,
    "bounds": _bounds,
    "precision": _precision,
    "margins": _margins,
    "certified": _certified,
    "monitor": _monitor,
}
