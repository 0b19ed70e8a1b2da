"""A class of tensors that know what kind they are: one of the objects of this module, which their methods name and programs do not."""

import torch


class Kind:
    def __init__(self, size: int):
        self.shape = torch.Size([size])


class Point(Kind):
    def other(self, x):
        return Vector(x.as_subclass(torch.Tensor) * 2, DIRECTION)


class Direction(Kind):
    def other(self, x):
        return Vector(x.as_subclass(torch.Tensor) / 2, POINT)


POINT, DIRECTION = Point(3), Direction(3)


class Vector(torch.Tensor):
    kind: Kind

    @staticmethod
    def __new__(cls, x, kind):
        return torch.Tensor.as_subclass(x, cls)

    def __init__(self, x, kind):
        assert x.shape[-1:] == kind.shape
        self.kind = kind

    def other(self):
        return self.kind.other(self)
