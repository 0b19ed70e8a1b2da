"""Train a classifier of digits with ModularOptimizer on several processes: sharded parameters, and a checkpoint to go on from.

    torchrun --nproc-per-node 2 examples/sharded_training.py [--steps 60] [--width 256] [--checkpoint digits]

The model is made on the meta device, so that no process ever has all of its weights, and `fully_shard` gives each a shard of them.
Derived from the model on meta, the modular norm says how large steps may be and draws the weights.  Each matrix is orthogonalized by one
process.  With --checkpoint the program saves at its end, and goes on from what it finds there, saved by as many processes or others.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from thunder_norm.modular import ModularNorm, ModularOptimizer


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="to be made in all, those before a checkpoint included")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128, help="of all processes together")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save in")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    if not dist.is_initialized():
        dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    images, labels = (torch.tensor(t, device=device) for t in load_digits(return_X_y=True))
    images = images.float() / 8 - 1  # entries at most 1

    with torch.device("meta"):
        sizes = (64, args.width, args.width, 10)
        model = nn.Sequential(*(part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())))[:-1]
    norm = ModularNorm(model, torch.empty(1, 64, device="meta"), mode="typical", light=0.1)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    norm.initialize_(torch.Generator().manual_seed(0))
    optimizer = ModularOptimizer(norm, lr=0.2)

    done = torch.zeros((), dtype=torch.long)
    if args.checkpoint and args.checkpoint.exists():
        saved = state(model, optimizer, done)
        dcp.load(saved, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    loss = torch.zeros(())
    for step in range(int(done), args.steps):
        drawn = torch.randint(len(images), (args.batch,), generator=torch.Generator().manual_seed(step))
        mine = drawn[rank::world]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(10 * model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    if args.checkpoint:
        dcp.save(state(model, optimizer, torch.tensor(args.steps)), checkpoint_id=args.checkpoint)
    if rank == 0:
        held = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
        print(f"{world} processes, {held:.0%} of the weights here; steps {int(done)} to {args.steps}, accuracy {accuracy:.3f}")
    return accuracy


def state(model: nn.Module, optimizer: ModularOptimizer, done: torch.Tensor) -> dict:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "done": done}


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
