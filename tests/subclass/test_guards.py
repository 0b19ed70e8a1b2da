"""A cached trace serves exactly the inputs it was made for, and nothing else changes what Thunder does."""

import threading

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError, VersionError
from thunder_norm.tracing import hooks
from thunder_norm.tracing.hooks import disable_autocast
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder
from thunder.transforms import autocast


def two(*shape, dtype=torch.float32):
    return TwoTensor(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype))


def jit(f, transform=SubclassTransform):
    return thunder.jit(f, transforms=[transform()])


def test_plain_and_wrapped_inputs_have_traces_of_their_own():
    jf = jit(lambda x: x * 2)
    assert type(jf(torch.ones(3))) is torch.Tensor
    assert type(jf(two(3))) is TwoTensor
    assert type(jf(torch.ones(3))) is torch.Tensor and type(jf(two(3))) is TwoTensor
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (2, 2)


def test_class_shape_dtype_and_context_are_guarded():
    jf = jit(lambda x: x * 2, NormTransform)
    t = torch.randn(2, 3)
    for x in (RMSTensor.of(t), LinfTensor.of(t), RMSTensor.of(t, (0,)), RMSTensor.of(t.double()), RMSTensor.of(t.T)):
        misses = thunder.cache_misses(jf)
        y = jf(x)
        assert thunder.cache_misses(jf) == misses + 1
        assert (type(y), y.elem_dims, y.shape, y.dtype) == (type(x), x.elem_dims, x.shape, x.dtype)
    jf(RMSTensor.of(torch.randn(2, 3)))
    assert thunder.cache_misses(jf) == 5


def test_inner_requires_grad_is_guarded():
    jf = jit(lambda x: x * 2, NormTransform)
    t = torch.randn(3)
    assert not jf(RMSTensor(1.0, backing=t)).norm_size.requires_grad
    assert jf(RMSTensor(1.0, backing=t, norm_size_requires_grad=True)).norm_size.requires_grad


class NoFlatten(torch.Tensor):
    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_a_class_that_cannot_be_taken_apart_is_refused():
    with pytest.raises(UnsupportedSubclassError, match="__tensor_flatten__"):
        jit(lambda x: x + 1)(NoFlatten(torch.ones(2)))


def test_after_a_failure_the_function_works():
    jf = jit(lambda x: x * all(v > 0 for v in (x.sum(),)))  # C code asks what is true
    for _ in range(2):
        with pytest.raises(UnsupportedOpError, match="data-dependent") as error:
            jf(two(3))
        assert "test_guards.py" in str(error.value)
    jg = jit(lambda x, flag: x * all(v > 0 for v in (x.sum(),)) if flag else x + 1)
    with pytest.raises(UnsupportedOpError, match="used as a condition"):
        jg(two(3), True)
    assert type(jg(two(3), False)) is TwoTensor


def test_gradients_reach_inner_tensors_through_0_dim_operands():
    n = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 4, dtype=torch.float64)

    def f(x, w):
        s = x.norm_size
        return ((w / w.sum()) * s + w * w.mean() - torch.maximum(w, w.mean()) + torch.where(w > 0, w, s)).sum()

    jit(f, NormTransform)(RMSTensor(n, backing=b), w).backward()
    wn, ww = n.detach().requires_grad_(), w.detach().requires_grad_()
    f(RMSTensor(wn, backing=b), ww).backward()
    torch.testing.assert_close((n.grad, w.grad), (wn.grad, ww.grad))


def test_patch_points_are_those_of_the_installed_thunder(monkeypatch):
    hooks.check_patch_points()
    monkeypatch.setattr(hooks.REPLACED[0], "original", lambda y: y)
    with pytest.raises(VersionError):
        hooks.check_patch_points()


def test_real_mode_has_the_operations_of_plain_thunder():
    m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    names = []
    for transforms in ([], [NormTransform()]):
        jm = thunder.jit(m, transforms=transforms)
        with torch.no_grad():  # gradients are those that torch has kernels for
            jm(torch.randn(3, 4))
        names.append([[b.sym.name for b in t.bound_symbols] for t in thunder.last_traces(jm)])
    assert names[0][0] == names[1][0] and names[0][-1] == names[1][-1]


def test_other_threads_are_not_concerned():
    found = {}

    def plain():
        jf = thunder.jit(lambda x: isinstance(x, TwoTensor))
        found["stock"] = jf(two(2))

    jf = jit(lambda x: isinstance(x, TwoTensor))
    thread = threading.Thread(target=plain)
    thread.start()
    found["ours"] = jf(two(2))
    thread.join()
    assert found == {"stock": False, "ours": True}


def test_functions_with_and_without_the_transform_in_turns_and_in_threads():
    """Each keeps its own cache entries and results, whoever else traces at the same time."""

    def f(x, y):
        return (x * y).relu() + x

    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            torch.manual_seed(seeded(seed))
            ours, plain = jit(f), thunder.jit(f)
            x, t = two(3), torch.randn(3)
            for _ in range(3):
                got, want = ours(x, x), f(x, x)
                assert type(got) is TwoTensor and torch.equal(got.a, want.a) and torch.equal(got.b, want.b)
                assert torch.equal(plain(t, t), f(t, t)) and torch.equal(ours(t, t), f(t, t))
            assert (thunder.cache_misses(ours), thunder.cache_misses(plain)) == (2, 1)
        except BaseException as e:  # noqa: BLE001 - raised in the main thread
            errors.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_autocast_is_left_out_in_the_thread_that_says_so_alone():
    """What two threads leave out at the same time is back when both are done, in whatever order."""
    entered, other_left, states = threading.Event(), threading.Event(), {}

    def work() -> None:
        with disable_autocast():
            states["inside"] = autocast.is_autocast_enabled()
            entered.set()
            other_left.wait(10)
        states["after"] = autocast.is_autocast_enabled()

    jit(lambda x: x + 1)(two(2))  # the first use
    thread = threading.Thread(target=work)
    with disable_autocast():
        thread.start()
        assert entered.wait(10)
    assert autocast.is_autocast_enabled()
    other_left.set()
    thread.join()
    assert states == {"inside": False, "after": True} and autocast.is_autocast_enabled()
