"""How far can GPT-2's output move?  The bound for all inputs, the bound at this input, and the truth at this input.

    python examples/local_sensitivity.py [--depths 1 2 4 8] [--width 128] [--results FILE]

A layer_norm has no useful constant for all inputs: near 0 its slope is 1 / sqrt(eps) = 316, and a deep model multiplies
them.  `NormTransform(sensitivity="local")` takes the data at hand: its bounds hold to first order, at this input.  The truth is the
norm of the Jacobian there, found by power iteration, so at most a little below it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2Config, GPT2Model

from thunder_norm import RMSTensor, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.progress import track


def jacobian_norm(f, x: torch.Tensor, starts: int = 3, steps: int = 20) -> float:
    """Largest ``|J u| / |u|``, both the largest RMS of a token: power iteration with that norm's dual maps."""
    output, pull_back = torch.func.vjp(f, x)
    best = 0.0
    for i in range(starts):
        u = torch.randn(x.shape, generator=torch.Generator().manual_seed(i))
        for _ in range(steps):
            u = u / u.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)  # every token as large as allowed
            _, moved = torch.func.jvp(f, (x,), (u,))
            sizes = moved.square().mean(-1).sqrt()
            best = max(best, sizes.max().item())
            # the output's norm is that of its worst token: push that one
            worst = torch.zeros_like(moved).view(-1, moved.shape[-1])
            worst[sizes.argmax()] = moved.view(-1, moved.shape[-1])[sizes.argmax()]
            (u,) = pull_back(worst.view_as(output))
    return best


def measure(depth: int, width: int, scale: float) -> tuple[float, float, float]:
    """(bound for all inputs, bound at this input, Jacobian norm) for a GPT-2 of this depth at initialisation."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=depth, n_embd=width, n_head=4, n_positions=64, vocab_size=512)
    model = GPT2Model(config).eval().requires_grad_(False)
    tokens = torch.randint(512, (1, 32))
    embedded = model.wte(tokens) * scale
    bounds = []
    for scope in ("global", "local"):
        x = with_perturbation(RMSTensor.of(embedded))
        with norm_sensitivity(scope):
            y = model(inputs_embeds=x, use_cache=False).last_hidden_state
        bounds.append(sensitivities(y, x).item())
    with sdpa_kernel(SDPBackend.MATH):  # the one with forward derivatives on a CPU
        true = jacobian_norm(lambda t: model(inputs_embeds=t, use_cache=False).last_hidden_state, embedded)
    return bounds[0], bounds[1], true


SETTINGS = (("as drawn, RMS 0.02", 1.0), ("RMS 1", 50.0))  # of embeddings, and the factor that makes them so
HEADS = {
    "embeddings": "embeddings",
    "layers": "layers",
    "global": "all inputs",
    "local": "at this input",
    "jacobian": "Jacobian norm (power iteration)",
}


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of results as text."""
    return [f"{value:.3g}" if isinstance(value, float) else str(value) for value in (row[key] for key in HEADS)]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/local_sensitivity.md."""
    lines = [list(HEADS.values()), ["---", *["---:"] * (len(HEADS) - 1)], *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--results", type=Path, help="a JSON file for what was measured")
    options = parser.parse_args()
    table = Table(
        title=f"GPT-2 of width {options.width} at initialisation: sensitivity of the last hidden state to the embeddings"
    )
    for head in HEADS.values():
        table.add_column(head, justify="right")
    rows = []
    for (name, scale), depth in track([(s, depth) for s in SETTINGS for depth in options.depths], "measuring"):
        measured = dict(zip(("global", "local", "jacobian"), measure(depth, options.width, scale), strict=True))
        rows.append({"embeddings": name, "layers": depth, **measured})
        table.add_row(*cells(rows[-1]))
    Console().print(table)
    if options.results:
        result = {"torch": torch.__version__.split("+")[0], "width": options.width, "rows": rows}
        options.results.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
