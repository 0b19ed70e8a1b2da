"""Programs that raise: what each call raises, and what is in objects, inputs and random generators then, is eager mode's (more: ``tests.fuzz state``)."""

import pytest
import torch

import thunder_norm.errors as errors
from tests.fuzz.state import State
from thunder_norm.transforms import NormTransform
import thunder

_KEPT = ("self.mem = self.mem * 2 + x", "self.sub.count += 1", "self.held.items.append(y)")
PROGRAMS = {
    "known": (*_KEPT, "raise OverflowError(self.sub.count)"),
    "known, after what is asserted": (
        *_KEPT,
        "assert x.sum() > 0, 'small'",
        "self.count += 1",
        "raise OverflowError(self.count)",
    ),
    "asserted, with numbers before and after": (
        "y = y + torch.rand(2) + torch.rand(2, generator=self.generator)",
        *_KEPT,
        "assert x.sum() > 0, 'small'",
        "y = y + torch.rand(2) + torch.rand(2, generator=self.generator)",
        "self.count += 1",
    ),
    "asserted, with writes in place": (
        "self.list[0].mem.add_(1)",
        "x.add_(1)",
        "self.mem.data = self.mem * 2",
        "torch.add(x, 1, out=self.sub.mem)",
        "if x.sum() > 3: raise ValueError('large')",
        "x.mul_(2)",
    ),
    "of an operation": ("self.sub.count += 1", "y = y + torch.ones(2)[(y.detach() * 0 + 7).long()]"),
    "of what an operation is given": (*_KEPT, "y = y + torch.ones(3)"),
    "numbers without a tensor": (
        "self.past.append(1)",
        "assert x.sum() > 0, 'small'",
        "self.past.insert(0, x)",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_done_before_an_exception_stays(name):
    outcome = State(PROGRAMS[name], "NormTransform()", has_gradients=name != "known").run()
    assert outcome.kind == "right", outcome.detail


def test_what_cannot_be_written_is_said():
    """An input is written into before an operation raises: the program cannot run again."""

    class Model(torch.nn.Module):
        count = 0

        def forward(self, x, i):
            x.add_(1)
            self.count += 1
            return x * 2 + torch.ones(3)[i]

    jm = thunder.jit(Model(), transforms=[NormTransform()])
    with pytest.raises(
        errors.UnsupportedOpError, match=r"has raised IndexError(.|\n)*at .*torch.ones\(3\)\[i\](.|\n)*written twice"
    ):
        jm(torch.ones(2), torch.tensor([0, 5]))


def test_a_call_whose_trace_alone_raises_is_run_by_python():
    """An operator fails once; what the program keeps is kept once."""
    failures = [MemoryError("none left")]

    @torch.library.custom_op("test_raising::scarce", mutates_args=())
    def scarce(x: torch.Tensor) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return x * 2

    scarce.register_fake(torch.empty_like)

    class Model(torch.nn.Module):
        count = 0

        def forward(self, x):
            self.count += 1
            return scarce(x) * self.count

    jm = thunder.jit(model := Model(), transforms=[NormTransform()])
    with pytest.warns(errors.RunByPythonWarning, match="MemoryError(.|\n)*none left"):
        assert jm(torch.ones(2)).tolist() == [2, 2]
    assert jm(torch.ones(2)).tolist() == [4, 4] and model.count == 2


class Failing(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] > 2:
            raise ValueError("long")
        return x * 2


class Hooked(torch.nn.Module):
    """Modules inside that fail, before their own code and in it, with hooks that are called all the same."""

    def __init__(self, log):
        super().__init__()
        self.log, self.inner, self.checked = log, Failing(), torch.nn.Identity()
        for m in (self.inner, self.checked):
            m.register_forward_hook(lambda m, args, result: log.append(("always", result is None)), always_call=True)
            m.register_forward_hook(lambda m, args, result: log.append("after what returns"))
        self.checked.register_forward_pre_hook(self.check)

    def check(self, module, args):
        if args[0].shape[0] > 3:
            raise KeyError("longer")

    def forward(self, x):
        for m in (self.inner, self.checked):
            try:
                x = m(x)
            except (ValueError, KeyError) as e:
                self.log.append(str(e))
        return x


@pytest.mark.parametrize("kind", [Hooked, Failing])
def test_hooks_for_exceptions_are_called_after_exceptions(kind):
    logs, said = ([], []), ([], [])
    ours, theirs = (Hooked(log) if kind is Hooked else Failing() for log in logs)
    jitted = thunder.jit(ours, transforms=[NormTransform()])
    for log, found, model, called in zip(logs, said, (ours, theirs), (jitted, theirs), strict=True):
        note = lambda m, args, result, log=log: log.append(("outer", type(m).__name__, result is None))  # noqa: E731
        model.register_forward_hook(note, always_call=True)
        for length in (1, 3, 4, 3, 1):
            try:
                found.append(called(torch.ones(length)).tolist())
            except ValueError as e:
                found.append(str(e))
    assert said[0] == said[1]
    assert logs[0] == logs[1]
