"""Norms through GPT-2, unchanged, on real text.

Runs a small GPT-2 (random weights, as no model hub is needed) on text that ships with Python, in real mode and in normed mode,
prints the report and draws the norm by depth:

    python examples/gpt2_norms.py [--layers 2] [--width 64] [--sensitivity local] [--out gpt2_norms.png]

Sensitivities are those at the data at hand ("local"); "global" ones hold for all tensors within the norms, and multiply what each
layer norm may do at worst: 316 times, whatever the depth.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from thunder_norm import norm_report, normed
from thunder_norm.transforms import NormTransform
import thunder


def read_text(length: int) -> str:
    """Real text from an installed package: the license of transformers or, failing that, its metadata."""
    folder = Path(transformers.__file__).parent
    candidates = [
        *folder.parent.glob("transformers-*.dist-info/**/LICENSE*"),
        *folder.parent.glob("transformers-*.dist-info/METADATA"),
    ]
    text = candidates[0].read_text(encoding="utf-8", errors="replace")
    return " ".join(text.split())[:length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="characters of text")
    parser.add_argument("--sensitivity", choices=["local", "global"], default="local")
    parser.add_argument("--out", type=Path, default=Path("gpt2_norms.png"))
    options = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=options.layers,
        n_head=4,
        n_embd=options.width,
        vocab_size=256,
        n_positions=options.length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).eval()
    text = read_text(options.length)
    ids = torch.tensor([list(text.encode("latin-1", errors="replace"))])

    jm = thunder.jit(model, transforms=[NormTransform(sensitivity=options.sensitivity)])
    with torch.no_grad():
        started = time.perf_counter()
        logits = jm(ids).logits
        print(f"real mode    logits {list(logits.shape)}, equal to PyTorch's: {torch.equal(logits, model(ids).logits)}", end="")
        print(f"   ({time.perf_counter() - started:.1f} s, most of it tracing)")

        started = time.perf_counter()
        y = normed(jm)(ids).logits
        print(f"normed mode  {y}   ({time.perf_counter() - started:.1f} s)")
        print(f"             actual norm {type(y).of(y.backing, y.elem_dims).norm_size:.6g}, at most the bound\n")

    print("The first operations of the normed program:")
    lines = str(thunder.last_traces(jm)[0]).splitlines()
    print("\n".join(line for line in lines if " = RMS" in line or "# /" in line)[:1500], "\n")

    report = norm_report(jm, ids)
    print(report.table(width=150))
    print("Sensitivity of the logits to each parameter, largest first:")
    for name, row in sorted(report.parameters.items(), key=lambda item: -item[1].sensitivity)[:8]:
        print(f"  {name:40} {row.kind:18} norm {row.norm_size:10.4g}   sensitivity {row.sensitivity:10.4g}")
    report.plot(options.out)
    print(f"\nNorm by depth: {options.out}")


if __name__ == "__main__":
    main()
