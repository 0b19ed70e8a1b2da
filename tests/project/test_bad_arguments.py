"""What is given wrong to a public function is refused by an error of ours, at once, and not by what Python or torch makes of it later."""

import math

import pytest
import torch

import thunder_norm
from thunder_norm import LipschitzMargin, NormVector, RMSTensor, annotate, build_norm_map, certified_radii, norm_report
from thunder_norm import transforms as tf
from thunder_norm.errors import ThunderNormError
from thunder_norm.modular import (
    ModularNorm,
    ModularOptimizer,
    TrainingMonitor,
    ball,
    find_roles,
    mup_scales,
    orthogonalize,
    split,
)

X = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]])
TARGET = torch.tensor([0, 1])
BAD = {
    "None": None,
    "string": "a",
    "NaN": math.nan,
    "negative": -1.0,
    "truth value": True,
    "number": 3,
    "list": [],
    "dict": {},
    "object": object(),
    "tensor": torch.ones(2, 3),
    "class": torch.nn.Linear,
    "complex": torch.ones(2, dtype=torch.complex64),
}
VALUES = ("None", "string", "list", "dict", "object", "tensor", "class", "complex")
NO_NUMBERS = tuple(name for name in BAD if name != "number")
NO_FUNCTIONS = tuple(name for name in BAD if name != "class")
OR_NONE = tuple(name for name in NO_NUMBERS if name != "None")


def linear():
    return torch.nn.Linear(3, 2)


def square(x):
    return (x * x).sum()


@thunder_norm.normed_op
def own(x: torch.Tensor) -> torch.Tensor:
    return x


def optimizer(**options):
    return ModularOptimizer(linear(), X, **{"lr": 0.1, **options})


CALLS = {
    "LipschitzMargin(radius)": (lambda v: LipschitzMargin(linear(), X, v), NO_NUMBERS),
    "LipschitzMargin()(logits)": (lambda v: LipschitzMargin(linear(), X, 0.1)(v, TARGET), tuple(BAD)),
    "LipschitzMargin()(_, target)": (lambda v: LipschitzMargin(linear(), X, 0.1)(torch.ones(2, 2), v), tuple(BAD)),
    "certified_radii(steps)": (lambda v: certified_radii(linear(), X, TARGET, steps=v), NO_NUMBERS),
    "NormVector()": (NormVector, tuple(name for name in BAD if name != "dict")),
    "annotate()": (annotate, tuple(BAD)),
    "annotate(mass)": (lambda v: annotate(linear(), mass=v), OR_NONE),
    "annotate(elem_dims)": (
        lambda v: annotate(linear(), weight=RMSTensor, elem_dims=v),
        ("string", "number", "object", "tensor"),
    ),
    "annotate(elem_dims of one)": (
        lambda v: annotate(linear(), weight=RMSTensor, elem_dims={"weight": v}),
        ("string", "NaN", "number", "dict", "object", "tensor", "class"),
    ),
    "build_norm_map()": (lambda v: build_norm_map(v, X), NO_FUNCTIONS),
    "normed_state_dict": (
        lambda v: build_norm_map(linear(), X)(RMSTensor(1.0), normed_state_dict=v),
        ("string", "number", "list", "object", "tensor", "class"),
    ),
    "function_of_sizes()": (tf.function_of_sizes, tuple(BAD)),
    "norm_report(radius)": (lambda v: norm_report(linear(), X, radius=v), OR_NONE),
    "with_perturbation(radius)": (lambda v: thunder_norm.with_perturbation(RMSTensor.of(X), v), NO_NUMBERS),
    "normed_op()": (thunder_norm.normed_op, NO_FUNCTIONS),
    "register_norm()": (own.register_norm, tuple(name for name in NO_FUNCTIONS if name != "None")),
    "register_norm(allow_plain_tensors)": (
        lambda v: own.register_norm(allow_plain_tensors=v),
        ("None", "string", "NaN", "number", "list", "object"),
    ),
    "register_norm(mode)": (lambda v: own.register_norm(mode=v), ("string", "NaN", "number", "list", "object")),
    "ModularNorm(attention)": (lambda v: ModularNorm(linear(), X, attention=v), OR_NONE),
    "ModularOptimizer()": (lambda v: ModularOptimizer(v, X, lr=0.1), tuple(BAD)),
    "ModularOptimizer(nesterov)": (lambda v: optimizer(nesterov=v), (*VALUES, "number")),
    "ModularOptimizer(project)": (lambda v: optimizer(project=v), (*VALUES, "number")),
    "ModularNorm.initialize_()": (
        lambda v: ModularNorm(linear(), X).initialize_(v),
        tuple(name for name in BAD if name != "None"),
    ),
    "find_roles(roles)": (lambda v: find_roles(linear(), X, roles=v), ("string", "number", "list", "object", "tensor", "class")),
    "mup_scales()": (lambda v: mup_scales(v, linear()), tuple(BAD)),
    "mup_scales(_, base_model)": (lambda v: mup_scales(linear(), v), tuple(BAD)),
    "orthogonalize()": (orthogonalize, tuple(name for name in BAD if name != "tensor")),
    "split()": (split, tuple(BAD)),
    "split(axis)": (lambda v: split([2, 2], v), NO_NUMBERS),
    "split(roles)": (lambda v: split([2, 2], roles=v), ("None", "string", "NaN", "number", "object", "tensor", "class")),
    "TrainingMonitor(keep)": (lambda v: TrainingMonitor(linear(), keep=v), OR_NONE),
    "ball()": (lambda v: ball(v, (-1,), X.shape), tuple(BAD)),
    "CheckpointTransform()": (tf.CheckpointTransform, tuple(name for name in BAD if name != "None")),
    "CheckpointTransform(memory_budget)": (lambda v: tf.CheckpointTransform(memory_budget=v), OR_NONE),
    "Device(peak_flops)": (lambda v: tf.Device("own", v, 1e9), NO_NUMBERS),
    "Device(bandwidth)": (lambda v: tf.Device("own", {torch.float32: 1e9}, v), NO_NUMBERS),
    "measure_cpu(size)": (lambda v: tf.measure_cpu(size=v), NO_NUMBERS),
    "measure_gpu()": (tf.measure_gpu, (*VALUES, "NaN", "negative")),
    "profile(backward)": (lambda v: tf.profile(linear(), X, backward=v), (*VALUES, "number")),
    "profile(executors)": (lambda v: tf.profile(linear(), X, executors=v), ("number", "NaN", "object", "class")),
    "profile(device)": (lambda v: tf.profile(linear(), X, device=v), ("string", "NaN", "list", "object", "tensor", "class")),
    "check_vjp()": (lambda v: tf.check_vjp(v, X), NO_FUNCTIONS),
    "check_vjp(num_directions)": (lambda v: tf.check_vjp(square, X.double(), num_directions=v), NO_NUMBERS),
    "check_jvp(rtol)": (lambda v: tf.check_jvp(square, X.double(), rtol=v), OR_NONE),
    "jacrev(randomness)": (lambda v: tf.jacrev(square, randomness=v), tuple(BAD)),
    "jacfwd(chunk_size)": (lambda v: tf.jacfwd(square, chunk_size=v), OR_NONE),
    "vmap(chunk_size)": (lambda v: tf.vmap(square, chunk_size=v), OR_NONE),
    "log(file)": (lambda v: tf.log(square, file=v), tuple(name for name in BAD if name != "None")),
    "self_adjoint()": (tf.self_adjoint, NO_FUNCTIONS),
    "split_bias()": (tf.split_bias, tuple(BAD)),
    "register_vjp()()": (lambda v: tf.register_vjp(torch.special.zeta)(v, v), NO_FUNCTIONS),
    "register_jvp()()": (lambda v: tf.register_jvp(torch.special.zeta)(v), NO_FUNCTIONS),
    "register_batching()()": (lambda v: tf.register_batching(torch.special.zeta)(v), NO_FUNCTIONS),
    "register_flop_rule()()": (lambda v: tf.register_flop_rule(torch.special.zeta)(v), NO_FUNCTIONS),
    "register_shape_rule()()": (lambda v: tf.register_shape_rule(torch.special.zeta)(v), NO_FUNCTIONS),
    "register_lookaside()": (tf.register_lookaside, NO_FUNCTIONS),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_wrong_is_refused_by_an_error_of_ours(name):
    call, wrong = CALLS[name]
    accepted, foreign = [], {}
    for value in wrong:
        try:
            call(BAD[value])
            accepted.append(value)
        except ThunderNormError:
            continue
        except Exception as e:  # noqa: BLE001 - which class it is is the question
            foreign[value] = repr(e)
    assert not accepted and not foreign
