"""What modules keep: results and what is in all objects after each of three calls are eager mode's (more of it: ``python -m tests.fuzz state``)."""

import pytest

from tests.fuzz.state import State

PROGRAMS = {
    "kept and returned": ("self.mem = x * 3",),
    "a buffer set twice, an attribute in between": ("self.mem = x * 2", "self.extra = self.mem * 2", "self.mem = x * 3"),
    "buffers under other names": (
        "y = self.mem * 2",
        "self.register_buffer('mem', y)",
        "self.sub._buffers['mem'] = y + self.mem",
    ),
    "a property of what is changed": (
        "self.mem.add_(1)",
        "y = self.twice",
        "self.sub._buffers['mem'] = y",
        "y = y + self.sub.twice",
    ),
    "attributes deleted": (
        "self.sub.extra = x",
        "y = self.sub.extra * 2",
        "del self.sub.extra",
        "del self.count",
        "self.count = 4",
    ),
    "asked for": ("y = y + hasattr(self, 'extra')", "self.extra = x", "y = y + 2 * hasattr(self, 'extra')", "del self.extra"),
    "a buffer deleted": ("y = self.sub.mem + x", "del self.sub.mem", "self.sub.register_buffer('mem', y)"),
    "a buffer that is an attribute then": ("del self.sub.mem", "self.sub.mem = x * 2"),
    "the dict itself": (
        "vars(self.sub)['count'] += 2",
        "self.sub.__dict__['extra'] = x * 2",
        "y = y * self.sub.count + self.sub.extra",
    ),
    "updated": ("self.held.__dict__.update(n=self.held.n + 1, t=x)", "self.__dict__.pop('extra', None)", "self.extra = x"),
    "lists that grow": ("self.past = self.past + [x * 1]", "self.sub.past = (self.sub.past * 2)[-2:]", "y = sum(self.past)"),
    "a state that steps": (
        "y = self.named['a'].bound(x)",
        "self.list[1].twice = y",
        "self.named['a'].reset()",
        "y = self.list[1].step(y)",
    ),
}


@pytest.mark.parametrize("transform", ["NormTransform()", "SubclassTransform()"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_is_eager_modes(name, transform):

    outcome = State(PROGRAMS[name], transform, has_gradients=True).run()
    assert outcome.kind == "right", outcome.detail
