"""What a program overwrites with the same, or takes away where nothing is: a call that finds something else there changes it, as eager mode does."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.seeds import crossed
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

# what the program does, what others do between the calls with a number v, and what is looked at
PROGRAMS = {
    "a class": ("Class.a = 2", "Class.a = v", "Class.a"),
    "a class by setattr": ("setattr(Class, 'a', 2)", "Class.a = v", "Class.a"),
    "a class of a metaclass": ("Meta.a = 2", "Meta.a = v", "Meta.a"),
    "a class, not there": ("Class.new = 2", "Class.__dict__.get('new') and delattr(Class, 'new')", "Class.new"),
    "a class, deleted": ("if 'b' in vars(Class): del Class.b", "Class.b = v", "hasattr(Class, 'b')"),
    "a function": ("function.a = 2", "function.a = v", "function.a"),
    "a module": ("module.a = 2", "module.a = v", "module.a"),
    "a module, not there": ("module.new = 2", "vars(module).pop('new', None)", "module.new"),
    "a slot": ("slots.a = 2", "slots.a = v", "slots.a"),
    "an attribute": ("obj.a = 2", "obj.a = v", "obj.a"),
    "vars": ("vars(obj).update(a=2)", "obj.a = v", "obj.a"),
    "a global": ("global number; number = 2", "global number; number = v", "number"),
    "globals()": ("globals()['number'] = 2", "global number; number = v", "number"),
    "an object in a class": ("Class.a = None", "Class.a = v if v > 5 else None", "Class.a"),
    "a list in a class": ("Class.a = [2, 3]", "Class.a[0] = v", "Class.a"),
    "a dict": ("d['a'] = 2", "d['a'] = v", "d"),
    "a dict, None": ("d['a'] = None", "d['a'] = v if v > 5 else None", "d"),
    "a dict, updated": ("d.update(a=2)", "d['a'] = v", "d"),
    "a dict, popped": ("d.pop('b', None)", "d.update(b=v) if v > 5 else None", "d"),
    "a dict, cleared": ("d.clear()", "d.update(b=v) if v > 5 else None", "d"),
    "a dict, by default": ("d.setdefault('b', 2)", "d.pop('b', None) if v > 5 else None", "d"),
    "a defaultdict": ("defaults['a'] = 2", "defaults['a'] = v", "defaults"),
    "an OrderedDict": (
        "ordered.move_to_end('a')",
        "ordered.clear(); ordered.update(zip('ab' if v > 5 else 'ba', (1, 2)))",
        "ordered",
    ),
    "a UserDict": ("user['a'] = 2", "user['a'] = v", "user"),
    "a Counter": ("counter['a'] = 2", "counter['a'] = v", "counter"),
    "a list": ("items[0] = 2", "items[0] = v", "items"),
    "a list, by slice": ("items[:] = [2]", "items[:] = [v]", "items"),
    "a list, emptied": ("items.clear()", "items.append(v) if v > 5 else None", "items"),
    "a list, sorted": ("items.sort()", "items[:] = [5, v]", "items"),
    "a set": ("s.add(2)", "s.clear(); s.add(v)", "s"),
    "a set, without": ("s.discard(7)", "s.clear(); s.add(v)", "s"),
    "a deque": ("queue[0] = 2", "queue[0] = v", "queue"),
}
TRANSFORMS = {t.__name__: t for t in (NormTransform, SubclassTransform, CheckpointTransform)}
VALUES = (2, 2, 7, 9, 2, 11, 7)


def _scope(name, program):
    write, between, _ = program
    scope = {"__name__": "overwriting"}

    class Meta(type):
        pass

    class Class:
        a = 1

    class Slots:
        __slots__ = ("a",)

    for cls in (Meta, Class, Slots):
        cls.__module__ = "overwriting"
    scope |= {
        **{
            "Class": Class,
            "Meta": Meta("Meta", (), {"a": 1, "__module__": "overwriting"}),
            "slots": Slots(),
            "obj": SimpleNamespace(a=1),
        },
        **{"module": ModuleType("overwritten_settings"), "number": 1, "d": {"a": 1}, "defaults": defaultdict(int, a=1)},
        **{
            "ordered": OrderedDict(a=1, b=2),
            "user": UserDict(a=1),
            "counter": Counter(a=1),
            "items": [1],
            "s": {1},
            "queue": deque([1]),
        },
    }
    scope["slots"].a = scope["module"].a = 1
    if name == "a list in a class":
        Class.a = [2, 3]
    lines = ["def function(x):", *(f"    {part.strip()}" for part in write.split(";")), "    return x + 1"]
    lines += ["def between(v):", *(f"    {part.strip()}" for part in between.split(";"))]
    exec("\n".join(lines), scope)
    return scope


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.AcquiredAnewWarning")
@pytest.mark.parametrize(("name", "transform"), crossed(PROGRAMS, TRANSFORMS))
def test_what_changes_nothing_in_one_call_changes_what_another_finds(name, transform):
    program = PROGRAMS[name]
    theirs, ours = _scope(name, program), _scope(name, program)
    call = thunder.jit(ours["function"], transforms=[TRANSFORMS[transform]()])
    for v in VALUES:
        for scope, f in ((theirs, theirs["function"]), (ours, call)):
            scope["between"](v)
            f(torch.ones(2))
        assert repr(eval(program[2], ours)) == repr(eval(program[2], theirs)), v
