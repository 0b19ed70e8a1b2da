"""How far can GPT-2's output move?  The bound for all inputs, the bound at this input, and the truth at this input.

    python examples/local_sensitivity.py [--depths 1 2 4 8] [--width 128]

A layer_norm has no useful constant for all inputs: near 0 its slope is 1 / sqrt(eps) = 316, and a deep model multiplies
them.  `NormTransform(sensitivity="local")` takes the data at hand: its bounds hold to first order, at this input.  The truth is the
norm of the Jacobian there, found by power iteration, so at most a little below it.
"""

from __future__ import annotations

import argparse

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    table = Table(
        title=f"GPT-2 of width {options.width} at initialisation: sensitivity of the last hidden state to the embeddings"
    )
    for name in ("embeddings", "layers", "all inputs", "at this input", "Jacobian norm"):
        table.add_column(name, justify="right")
    settings = [
        (name, scale, depth) for name, scale in (("as drawn, RMS 0.02", 1.0), ("RMS 1", 50.0)) for depth in options.depths
    ]
    for name, scale, depth in track(settings, "measuring"):
        table.add_row(name, str(depth), *(f"{v:.3g}" for v in measure(depth, options.width, scale)))
    Console().print(table)


if __name__ == "__main__":
    main()
