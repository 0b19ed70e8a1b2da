"""Attention logits that explode, and the same run with QK-clip.

One attention learns to copy the token of an earlier place, with steps of a fixed size on every matrix (Muon).  The sharper the softmax the
lower the loss, and nothing stops queries and keys from growing: their logits grow with the square of the number of steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from thunder_norm.modular import QKClip, param_groups

TAU = 20.0


class Copying(nn.Module):
    """Places look for one another by their tokens."""

    def __init__(self, tokens: int = 32, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.table = heads, nn.Embedding(tokens, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, tokens)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the token before each token's own first place."""
        q, k, v = self.qkv(F.rms_norm(self.table(ids), (self.table.embedding_dim,))).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        v = v.roll(1, dims=-2)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def train(steps: int, tau: float | None) -> tuple[list[float], float]:
    """The largest logits after each ten steps, and the last loss."""
    torch.manual_seed(0)
    model = Copying()
    draw = torch.Generator().manual_seed(0)

    def batch() -> torch.Tensor:
        return torch.stack([torch.randperm(32, generator=draw)[:16] for _ in range(16)])

    groups = param_groups(model, batch(), split=True)
    muon = torch.optim.Muon([g for g in groups if g["algorithm"] == "muon"], lr=0.1, weight_decay=0.0)
    adamw = torch.optim.AdamW([g for g in groups if g["algorithm"] == "adamw"], lr=1e-2)
    watch = QKClip(model, batch(), tau=1e9 if tau is None else tau)
    watch.attach(muon)
    largest, loss = [], torch.zeros(())
    for step in range(steps):
        ids = batch()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, dims=1).flatten())
        model.zero_grad()
        loss.backward()
        adamw.step()
        muon.step()
        if step % 10 == 9:
            largest.append(watch.largest_logits(ids).amax().item())
    return largest, loss.item()


def main(steps: int = 100) -> None:
    """Both runs."""
    for tau in (None, TAU):
        largest, loss = train(steps, tau)
        print(f"tau {tau}: largest logits {', '.join(f'{s:.1f}' for s in largest)}; loss {loss:.3f}")


if __name__ == "__main__":
    main()
