"""What eager PyTorch runs and a trace does not hold is refused with the user's line, and leaves the inputs as they were."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder
from thunder.core import interpreter


def _backward(x):
    x.sin().sum().backward()
    return x * 2


def _backward_of_several(x):
    torch.autograd.backward([x.sin().sum(), x.cos().sum()])
    return x * 2


def _backward_to_a_leaf_of_its_own(x):
    w = torch.ones(3, requires_grad=True)
    (x.detach() * w).sum().backward()
    return x * 2


def _thread(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return found


def _pool_of_threads(x):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return list(pool.map(lambda n: x * n, range(3)))


def _dual_numbers(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones(3)).sin()).tangent


PLAIN = {
    "a thread": _thread,
    "a pool of threads": _pool_of_threads,
    "torch.autograd.forward_ad": _dual_numbers,
    ".backward()": _backward,
    "torch.autograd.backward": _backward_of_several,
    ".backward() to a leaf of the program": _backward_to_a_leaf_of_its_own,
    "a quantized tensor": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize(),
    "quantized by channel": lambda x: torch.quantize_per_channel(
        x.detach(), torch.ones(3), torch.zeros(3), 0, torch.qint8
    ).int_repr(),
    "a parameter that it makes": lambda x: torch.nn.Parameter(x.detach() * 2) * x,
}
WRAPPED = (".backward()", "torch.autograd.backward", ".backward() to a leaf of the program")
CASES = [(name, t, False) for name in PLAIN for t in (SubclassTransform, NormTransform)]
CASES += [(name, CheckpointTransform, False) for name in ("a parameter that it makes", "a thread", "torch.autograd.forward_ad")]
CASES += [(name, SubclassTransform, True) for name in WRAPPED]


@pytest.mark.parametrize("name, transform, is_wrapped", CASES)
def test_they_are_refused_with_the_line_and_inputs_are_untouched(name, transform, is_wrapped):
    torch.manual_seed(seeded(0))
    data = torch.randn(3)

    def made():
        return (TwoTensor(data.clone(), data.clone()) if is_wrapped else data.clone()).requires_grad_()

    PLAIN[name](made())  # eager mode runs it
    x = made()
    with pytest.raises(UnsupportedOpError, match=r"test_refused_programs.py:"):
        thunder.jit(PLAIN[name], transforms=[transform()])(x)
    assert x.grad is None
    for t in (x.a, x.b) if is_wrapped else (x.detach(),):
        assert torch.equal(t, data)


def test_an_instruction_that_the_interpreter_lacks_is_refused(monkeypatch):
    def f(x):
        return x * len(f"a{x.ndim}")

    monkeypatch.delitem(interpreter._default_opcode_handler_map, "BUILD_STRING")
    with pytest.raises(
        UnsupportedOpError, match=r"an instruction that is unknown\n  at .*test_refused_programs.py:(.|\n)*BUILD_STRING"
    ):
        thunder.jit(f, transforms=[SubclassTransform()])(torch.ones(1))
