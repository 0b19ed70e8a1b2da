"""What ``super()`` finds is another in a later call: eager mode's answer, not the first call's."""

from collections.abc import Callable

import pytest
import torch

from thunder_norm.transforms import NormTransform
import thunder


def _classes() -> tuple[type, type, type]:
    class Above:
        data = 2.0

        def method(self, x):
            return x * 2

        @classmethod
        def of_class(cls, x):
            return x * cls.data

        @staticmethod
        def static(x):
            return x + 3

        @property
        def computed(self):
            return 5.0

    class Between(Above):
        pass

    class Below(Between):
        def f(self, x, what):
            match what:
                case "data":
                    return x * super().data
                case "getattr":
                    return x * getattr(super(), "data")  # noqa: B009
                case "further up":
                    return x * super(Between, self).data
                case "method":
                    return super().method(x)
                case "of_class":
                    return super().of_class(x)
                case "static":
                    return super().static(x)
                case _:
                    return x * super().computed

    return Above, Between, Below


_NEW: dict[str, object] = {
    "data": 7.0,
    "method": lambda self, x: x * 11,
    "of_class": classmethod(lambda cls, x: x * 13),
    "static": staticmethod(lambda x: x * 14),
    "computed": property(lambda self: 15.0),
}


@pytest.mark.parametrize("place", [0, 1], ids=["where it was", "between"])
@pytest.mark.parametrize("what", ["data", "getattr", "further up", "method", "of_class", "static", "computed"])
def test_changed_above(what: str, place: int) -> None:
    classes = _classes()
    f: Callable = classes[2]().f
    jf, x = thunder.jit(f, transforms=[NormTransform()]), torch.arange(1.0, 4)
    torch.testing.assert_close(jf(x, what), f(x, what))
    torch.testing.assert_close(jf(x, what), f(x, what))
    assert thunder.cache_misses(jf) == 1
    name = what if what in _NEW else "data"
    setattr(classes[place], name, _NEW[name])
    torch.testing.assert_close(jf(x, what), f(x, what))
