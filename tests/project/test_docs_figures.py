"""Figures that the documentation quotes are those of the files they come from."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests import ROOT

LISTS = ROOT / "tests" / "transform_coverage"


def text_of(name: str) -> str:
    """A file with its line breaks as spaces: a sentence may be broken anywhere."""
    return re.sub(r"\s+", " ", (ROOT / name).read_text())


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")


def test_programs_with_subclasses():
    page = text_of("docs/subclasses.md")
    programs, gradients = re.search(r"(\d+) programs that run in eager mode, (\d+) of them with gradients", page).groups()
    forward, backward = re.search(r"\| thunder_norm \| (\d+) \| (\d+) \|", page).groups()
    quoted = f"lists {programs} programs with classes of torch and torchao: {forward} run, and {backward} of {gradients} have gradients."
    assert quoted in text_of("README.md"), quoted


def test_what_calls_cost():
    page, readme = text_of("docs/benchmarks.md"), text_of("README.md")
    of_calls = [float(r) for r in re.findall(r"\| depth \d+: forward[^|]*\| [\d.]+ [mu]s \| ([\d.]+) \([\d. to]+\) \|", page)]
    quoted = f"takes {min(of_calls):.2f} to {max(of_calls):.2f} times as long as Thunder's call without them"
    assert len(of_calls) == 6 and quoted in readme, quoted
    found = re.findall(r"\| [^|]+ \| [\d.]+ s \| ([\d.]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| [\d.]+ \|", page)
    real, normed = ([float(row[i]) for row in found] for i in (0, 1))
    quoted = (
        f"{min(real):.2f} to {max(real):.2f} of plain Thunder's time, with norms {min(normed):.2f} to {max(normed):.2f} ([first"
    )
    assert len(found) == 7 and quoted in readme, quoted


def test_octaves_of_the_best_learning_rate(examples):
    views = importlib.import_module("transfer_views")
    sweeps = [s for s in views.load(ROOT / "docs" / "learning_rate_transfer.json") if not s.variant]
    spreads: dict[tuple[str, int], list[float]] = {}
    for (_, _, optimizer), pair in views.lines(sweeps).items():
        for which, line in enumerate(pair):
            if len(line.sweeps) > 1:
                spreads.setdefault((optimizer, which), []).append(line.spread)
    octaves = {key: f"{min(values):.1f} to {max(values):.1f}" for key, values in spreads.items()}
    widths, depths = ([octaves[name, which] for name in ("ModularOptimizer", "AdamW", "Muon")] for which in (0, 1))
    quoted = f"moves by {widths[0]} octaves (AdamW's by {widths[1]}, Muon's by {widths[2]})"
    assert quoted in text_of("README.md"), quoted
    quoted = f"over depths 2 to 8 by {depths[0]} (AdamW's by {depths[1]}, Muon's by {depths[2]})"
    assert quoted in text_of("README.md"), quoted


def _jackknife(seeds: Sequence[Any], value: Callable[[Sequence[Any]], float]) -> float:
    """The standard error of what is found of all seeds, from what is found without each."""
    without = [value([*seeds[:i], *seeds[i + 1 :]]) for i in range(len(seeds))]
    mean = sum(without) / len(without)
    return math.sqrt((len(seeds) - 1) / len(seeds) * sum((v - mean) ** 2 for v in without))


def test_how_sure_the_best_rates_of_models_of_transformers_are(examples):
    views = importlib.import_module("transfer_views")
    sweeps = {(s.task, s.variant, s.width): s for s in views.load(ROOT / "docs" / "learning_rate_noise.json")}

    def best(seeds: Sequence[tuple[float, ...]], of: Any) -> float:
        return replace(of, losses=list(zip(*seeds, strict=True))).curve().best

    def columns(s: Any) -> list[tuple[float, ...]]:
        return list(zip(*s.losses, strict=True))

    page, rows = text_of("docs/learning_rate_transfer.md"), []
    for task, title in (("gpt2", "GPT-2"), ("llama", "Llama")):
        narrow, wide = sweeps[task, "", 16], sweeps[task, "", 256]
        error = math.hypot(*(_jackknife(columns(s), lambda seeds, s=s: best(seeds, s)) for s in (narrow, wide)))
        fall, curve = narrow.curve().best - wide.curve().best, wide.curve()
        above = 100 * (curve.at(narrow.curve().best) / curve.at(curve.best) - 1)
        counts = ", ".join(str(len(s.losses[0])) for s in (narrow, wide))
        rows.append(f"| {title} | {counts} | {fall:.2f} ± {error:.2f} | {above:.2f} % |")
    for (task, variant, width), longer in sweeps.items():
        if variant:
            pairs = list(zip(columns(longer), columns(sweeps[task, "", width]), strict=False))

            def moved(pairs: Sequence[Any], longer: Any = longer, usual: Any = sweeps[task, "", width]) -> float:
                losses, usual_losses = zip(*pairs, strict=True)
                return best(losses, longer) - best(usual_losses, usual)

            rows.append(f"| {variant} | {width} | {moved(pairs):+.2f} ± {_jackknife(pairs, moved):.2f} |")
    for row in rows:
        assert row in page, row


def test_what_moves_the_best_rates_of_models_with_gates(examples):
    views = importlib.import_module("transfer_views")
    sweeps = {(s.task, s.depth, s.variant, s.width): s for s in views.load(ROOT / "docs" / "learning_rate_gates.json")}
    page, rows, titles = text_of("docs/learning_rate_transfer.md"), [], {"gpt2": "GPT-2", "llama": "Llama"}

    def lowest(losses: Any, of: Any) -> tuple[float, float]:
        curve = replace(of, losses=list(zip(*losses, strict=True))).curve()
        assert curve.is_inside
        return curve.best, curve.at(curve.best)

    def seeds(s: Any) -> list[tuple[float, ...]]:
        return list(zip(*s.losses, strict=True))

    for task, depth, variant in dict.fromkeys(key[:3] for key in sweeps):
        line = {w: s for (*key, w), s in sweeps.items() if key == [task, depth, variant] and w in (16, 32, 64, 128)}
        if len(line) == 4:
            best = {
                w: (lowest(seeds(s), s)[0], _jackknife(seeds(s), lambda some, s=s: lowest(some, s)[0])) for w, s in line.items()
            }
            cells = " | ".join(f"{value:.2f} ± {error:.2f}" for value, error in best.values())
            counts = ", ".join(str(len(seeds(s))) for s in line.values())
            spread = max(v for v, _ in best.values()) - min(v for v, _ in best.values())
            rows.append(f"| {titles[task]} | {variant or 'none'} | {counts} | {cells} | {spread:.2f} |")
    for (task, depth, variant, width), s in sweeps.items():
        if variant:
            usual = sweeps[task, depth, "", width]
            pairs = list(zip(seeds(s), seeds(usual), strict=False))

            def change(pairs: Sequence[Any], which: int, s: Any = s, usual: Any = usual) -> float:
                (best, loss), (usual_best, usual_loss) = map(lowest, zip(*pairs, strict=True), (s, usual))
                return (best - usual_best, 100 * (loss / usual_loss - 1))[which]

            cells = [f"{change(pairs, i):+.2f} ± {_jackknife(pairs, lambda some, i=i: change(some, i)):.2f}" for i in (0, 1)]  # noqa: B023
            rows.append(f"| {titles[task]} | {depth} | {width} | {variant} | {len(pairs)} | {cells[0]} | {cells[1]} % |")
    missing = [row for row in rows if row not in page]
    assert not missing, "\n".join(missing)


def test_how_far_the_best_rate_moves_from_depth_2_to_16(examples):
    views = importlib.import_module("transfer_views")
    sweeps = {(s.task, s.depth): s for s in views.load(ROOT / "docs" / "learning_rate_depths.json")}
    page, moves, above = text_of("docs/learning_rate_transfer.md"), [], []
    for task in ("gpt2", "llama"):
        shallow, deep = sweeps[task, 2], sweeps[task, 16]

        def moved(seeds: Sequence[Any], of: Any = (shallow, deep)) -> float:
            best = [replace(s, losses=[[row[i] for i in seeds] for row in s.losses]).curve().best for s in of]
            return best[1] - best[0]

        seeds, curve = [*range(8)], deep.curve()
        moves.append(f"{moved(seeds):.2f} ± {_jackknife(seeds, moved):.2f} octaves")
        above.append(f"{100 * (curve.at(shallow.curve().best) / curve.at(curve.best) - 1):.2f} %")
    quoted = f"From depth 2 to 16 the best rate moves by {moves[0]} on GPT-2 and by {moves[1]} on Llama."
    assert quoted in page, quoted
    quoted = f"the model of depth 16 ends {above[0]} above its best on GPT-2, {above[1]} on Llama."
    assert quoted in page, quoted


def test_the_vision_transformer_of_width_64_beside_muon(examples):
    views = importlib.import_module("transfer_views")
    sweeps = {(s.optimizer, s.variant): s for s in views.load(ROOT / "docs" / "learning_rate_vit.json")}
    page, seeds = text_of("docs/learning_rate_transfer.md"), [*range(len(sweeps["Muon", ""].losses[0]))]

    def lowest(s: Any, some: Sequence[int]) -> float:
        curve = replace(s, losses=[[row[i] for i in some] for row in s.losses]).curve()
        assert curve.is_inside
        return curve.at(curve.best)

    usual, muon = sweeps["ModularOptimizer with noise adaptation", ""], sweeps["Muon", ""]

    def above(some: Sequence[int]) -> float:
        return 100 * (lowest(usual, some) / lowest(muon, some) - 1)

    losses = ", ".join(f"{lowest(s, seeds):.4f}" for s in (usual, muon))
    quoted = f"{losses}, a difference of {above(seeds):+.1f} ± {_jackknife(seeds, above):.1f} %, with {len(seeds)} seeds"
    assert quoted in page, quoted
    for (_, variant), s in sweeps.items():
        if variant:
            paired = [*range(len(s.losses[0]))]

            def change(some: Sequence[int], s: Any = s) -> float:
                pairs = [
                    (row[i], usual.losses[usual.lrs.index(lr)][i]) for lr, row in zip(s.lrs, s.losses, strict=True) for i in some
                ]
                return 100 * (math.exp(sum(math.log(a / b) for a, b in pairs) / len(pairs)) - 1)

            row = f"| {variant} | {len(paired)} | {change(paired):+.1f} ± {_jackknife(paired, change):.1f} % |"
            assert row in page, row


def _beside(s: Any, usual: Any) -> str:
    """How many seeds there are, and by how much losses differ from others with the same, starts and batches too."""
    logs = [math.log(a / b) for a, b in zip(s.losses[0], usual.losses[0], strict=False)]
    mean = sum(logs) / len(logs)
    error = math.sqrt(sum((v - mean) ** 2 for v in logs) / (len(logs) - 1) / len(logs))
    return f"{len(logs)} | {100 * mean:+.2f} ± {100 * error:.2f} %"


def test_what_other_steps_do_to_the_gpt(examples):
    views = importlib.import_module("transfer_views")
    usual, muon, *others = views.load(ROOT / "docs" / "learning_rate_gpt.json")
    assert not usual.variant and muon.optimizer == "Muon"
    page = text_of("docs/learning_rate_transfer.md")
    rows = [f"| {s.variant or s.optimizer} | {_beside(s, usual)} |" for s in (muon, *others)]
    rows.append("beside".join(f" {s.curve().losses[0]:.4f} " for s in (usual, muon)).strip())
    missing = [row for row in rows if row not in page]
    assert not missing, "\n".join(missing)


def test_what_shorter_steps_of_positions_do(examples):
    views = importlib.import_module("transfer_views")
    kept = views.load(ROOT / "docs" / "learning_rate_positions.json")
    sweeps = {(s.task, s.width, s.variant): s for s in kept if len(s.lrs) == 1}
    titles = {"text": "transformer", "gpt": "GPT of 4 layers", "gpt2": "GPT-2", "llama": "Llama"}
    page, rows = text_of("docs/learning_rate_transfer.md"), []
    for (task, width, variant), s in sweeps.items():
        if variant:
            rows.append(f"| {titles[task]}, {width} | {variant} | {_beside(s, sweeps[task, width, ''])} |")
    muon = {s.task: min(s.curve().losses) for s in kept if s.optimizer == "Muon"}
    for task in ("text", "gpt"):
        of = [sweeps[task, 128, v].curve().losses[0] for v in ("positions: 0.3", "positions: 0.3, head by entries")]
        rows.append(
            f"the {titles[task]} of width 128 ends at {of[0]:.4f}, with the head by entries at {of[1]:.4f}, with Muon at {muon[task]:.4f}"
        )
    best = {(s.width, s.variant): s.curve().best for s in kept if len(s.lrs) == 3}
    moved = [abs(best[16, v] - best[128, v]) for v in ("", "positions: 0.3, head by entries")]
    rows.append(f"by {moved[1]:.2f} octaves with the head by entries and by {moved[0]:.2f} without")
    missing = [row for row in rows if row not in page]
    assert not missing, "\n".join(missing)


def test_the_table_of_local_sensitivities(examples):
    example = importlib.import_module("local_sensitivity")
    result = json.loads((ROOT / "docs" / "local_sensitivity.json").read_text())
    page = (ROOT / "docs" / "local_sensitivity.md").read_text()
    assert example.markdown(result["rows"]) in page
    assert f"GPT-2 of width {result['width']}" in page and f"torch {result['torch']}, CPU" in page


def test_operators_that_the_transforms_carry():
    page = text_of("CONTRIBUTING.md")
    names = {
        "grad": "grad",
        "jvp": "jvp",
        "vmap": "vmap",
        "vmap_grad": "vmap of grad",
        "grad_complex": "gradients through complex numbers",
        "jvp_complex": "tangents of complex numbers",
        "jvp_grad": "forward over reverse",
        "vjp_jvp": "reverse over forward",
        "hessian": "Hessians",
    }
    assert {path.stem for path in LISTS.glob("*.txt")} == set(names)
    assert "None is wrong." in page
    for stem, name in names.items():
        head, *rows = (LISTS / f"{stem}.txt").read_text().splitlines()
        found = re.match(r"# \w+: (\d+) operators tried, (\d+) passed, (\d+) refused, (\d+) failed", head)
        tried, passed, refused, failed = map(int, found.groups())
        assert tried == passed + refused == len(rows) and not failed
        assert f"{name} {tried}, {passed}, {refused}" in page, head


def test_versions():
    from thunder_norm._versions import TESTED_THUNDER, TESTED_TORCH

    quoted = f"torch {TESTED_TORCH[0]} to {TESTED_TORCH[-1]}"
    for page in ("README.md", "docs/versions.md"):
        assert quoted in text_of(page) and f"lightning-thunder {TESTED_THUNDER[0]}" in text_of(page), page
