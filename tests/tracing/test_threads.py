"""Threads that call one jitted function: each has its own grad mode, and programs that are compiled by it."""

from __future__ import annotations

import threading

import torch

from thunder_norm.transforms import SubclassTransform
import thunder

_meeting: list = []  # what is done while the operation runs


@torch.library.custom_op("thunder_norm_threads::meet", mutates_args=())
def _meet(x: torch.Tensor) -> torch.Tensor:
    if _meeting:
        _meeting.pop()()
    return x.clone()


@_meet.register_fake
def _(x):
    return torch.empty_like(x)


def _in_a_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_without_gradients_leaves_others_theirs():
    jf = thunder.jit(lambda x, y: torch.ops.thunder_norm_threads.meet(x) * y, transforms=[SubclassTransform()])
    found = []

    def without_gradients():
        with torch.no_grad():
            found.append(jf(torch.ones(3), torch.ones(3, requires_grad=True)).requires_grad)
            found.append(torch.is_grad_enabled())

    y = torch.ones(2, requires_grad=True)
    for _ in range(3):  # the first two go Thunder's way
        _meeting.append(lambda: _in_a_thread(without_gradients))
        assert jf(torch.ones(2), y).requires_grad
        assert torch.is_grad_enabled()
    assert found == [False] * 6


def test_threads_compile_at_once():
    jf = thunder.jit(lambda x: x.sin() * 2, transforms=[SubclassTransform()])
    wrong = []

    def call(n):
        for i in range(4):
            with torch.set_grad_enabled((n + i) % 2 == 0):
                x = torch.full((1 + (n + i) % 3,), float(n), requires_grad=True)
                y, is_enabled = jf(x), torch.is_grad_enabled()
                if y.requires_grad is not is_enabled or not torch.equal(y, x.sin() * 2):
                    wrong.append((n, i))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
