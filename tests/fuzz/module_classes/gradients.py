"""Where gradients stop, are computed again, or are the user's own."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class NoGrad(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.no_grad():
            y = self.body(x)
        return 2 * y


class NoGradDecorated(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    @torch.no_grad()
    def forward(self, x):
        return self.body(x)


class InferenceRegion(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.inference_mode():
            y = self.body(x)
        return x + y.clone()


class GradAgain(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.no_grad():
            y = 2 * x
            with torch.enable_grad():
                return self.body(y)


class Detached(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x).detach()


class StopGradient(nn.Module):
    """Half of the value has a gradient."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        y = self.body(x)
        return y + y.detach()


class StraightThrough(nn.Module):
    def forward(self, x):
        return x + (x.sign() - x).detach()


class Frozen(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body.requires_grad_(False)

    def forward(self, x):
        return self.body(x)


class Checkpointed(nn.Module):
    def __init__(self, body, reentrant=False, **options):
        super().__init__()
        self.body, self.options = body, {"use_reentrant": reentrant, **options}

    def forward(self, x):
        return checkpoint(self.body, x, **self.options)


class CheckpointedInParts(nn.Module):
    def __init__(self, *bodies, reentrant=False):
        super().__init__()
        self.bodies, self.reentrant = nn.Sequential(*bodies), reentrant

    def forward(self, x):
        return checkpoint_sequential(self.bodies, len(self.bodies), x, use_reentrant=self.reentrant)


class CheckpointedFunction(nn.Module):
    """A checkpoint around a function of several arguments."""

    def __init__(self, body, reentrant=False):
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x):
        def run(a, scale, b=None):
            y = self.body(a) * scale
            return y, (y if b is None else y + b)

        first, second = checkpoint(run, x, 0.5, x, use_reentrant=self.reentrant)
        return first + second


class InAutocast(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return self.body(x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * x**2 * g, None


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x * w, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return g * w + h, (g * x).flatten(0, -2).sum(0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Cubed(nn.Module):
    def forward(self, x):
        return Cube.apply(x, 0.5)


class ScaledBy(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(c))

    def forward(self, x):
        return Scaled.apply(x, self.gain)[0]


class ReversedGradient(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return Reversed.apply(self.body(x))
