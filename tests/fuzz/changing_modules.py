"""Parameters, buffers, layers and hooks that may be others in the next call."""

from __future__ import annotations

from .changing_parts import Part

MODULES = (
    Part(
        "a parameter",
        "x = x * self.p{n}",
        (
            "m.p{n} = nn.Parameter(torch.full((4,), 3.0))",
            "m.p{n}.data = torch.full((4,), 4.0)",
            "m.p{n}.requires_grad_(False)",
            "m.p{n}.requires_grad_(True)",
            "m.p{n} = nn.Parameter(torch.ones(4, dtype=torch.float64))",
            "m.p{n} = None if 0 else nn.Parameter(torch.ones(3, 1))",
        ),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "a parameter that may be none",
        "x = x if self.p{n} is None else x * self.p{n}",
        ("m.p{n} = None", "m.p{n} = nn.Parameter(torch.full((4,), 3.0))"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "a parameter's attribute",
        "x = x * getattr(self.p{n}, 'k', 2.0) * self.p{n}",
        ("m.p{n}.k = 3.0", "m.p{n}.k = 4.0", "del m.p{n}.k"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "a parameter's gradient",
        "x = x if self.p{n}.grad is None else x * 2",
        ("m.p{n}.grad = torch.ones(4)", "m.p{n}.grad = None"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "whether a parameter requires grad",
        "x = x * 2 if self.p{n}.requires_grad else x",
        ("m.p{n}.requires_grad_(False)", "m.p{n}.requires_grad_(True)"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0))",
    ),
    Part(
        "a tied parameter",
        "x = x * self.p{n} + self.q{n}; x = x * (2 if self.p{n} is self.q{n} else 3)",
        ("m.q{n} = nn.Parameter(torch.ones(4))", "m.q{n} = m.p{n}"),
        "self.p{n} = nn.Parameter(torch.full((4,), 2.0)); self.q{n} = self.p{n}",
    ),
    Part(
        "a buffer",
        "x = x * self.b{n}",
        (
            "m.b{n} = torch.full((4,), 3.0)",
            "m.b{n}.mul_(2)",
            "m.b{n} = torch.ones(3, 1)",
            "m.b{n} = torch.ones(4, dtype=torch.int64)",
            "m.b{n} = torch.ones(4, requires_grad=True)",
        ),
        "self.register_buffer('b{n}', torch.full((4,), 2.0))",
    ),
    Part(
        "a buffer that may be none",
        "x = x if self.b{n} is None else x * self.b{n}",
        ("m.b{n} = torch.full((4,), 3.0)", "m.b{n} = None"),
        "self.register_buffer('b{n}', None)",
    ),
    Part(
        "a layer",
        "x = self.l{n}(x)",
        (
            "m.l{n} = nn.Linear(4, 4, bias=False)",
            "m.l{n} = nn.Tanh()",
            "m.l{n} = nn.Linear(4, 4)",
            "m.l{n}.double().float()",
            "m.l{n}.requires_grad_(False)",
            "m.l{n} = torch.sin if 0 else nn.ReLU()",
        ),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "a bias",
        "x = self.l{n}(x)",
        ("m.l{n}.bias = None", "m.l{n}.bias = nn.Parameter(torch.ones(4))", "m.l{n}.weight = nn.Parameter(torch.eye(4))"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "a sequence",
        "x = self.s{n}(x)",
        (
            "m.s{n}.append(nn.Tanh())",
            "m.s{n}[0] = nn.Sigmoid()",
            "m.s{n}.insert(0, nn.ReLU())",
            "del m.s{n}[0]",
            "m.s{n}.register_forward_hook(lambda m, a, y: y * 2)",
        ),
        "self.s{n} = nn.Sequential(nn.Linear(4, 4), nn.Softplus())",
    ),
    Part(
        "a list of layers",
        "for l in self.s{n}: x = l(x)",
        (
            "m.s{n}.append(nn.Tanh())",
            "m.s{n}[0] = nn.Sigmoid()",
            "m.s{n} = nn.ModuleList(list(m.s{n})[::-1])",
            "m.s{n} = list(m.s{n}) if 0 else nn.ModuleList()",
        ),
        "self.s{n} = nn.ModuleList([nn.Tanh(), nn.Softplus()])",
    ),
    Part(
        "a dict of layers",
        "for k, l in self.s{n}.items(): x = l(x) * len(k)",
        ("m.s{n}['bb'] = nn.Tanh()", "m.s{n}['a'] = nn.Sigmoid()", "del m.s{n}['a']", "m.s{n}['a'] = nn.ReLU()"),
        "self.s{n} = nn.ModuleDict(dict(a=nn.Tanh()))",
    ),
    Part(
        "a list of parameters",
        "for p in self.s{n}: x = x * p",
        ("m.s{n}.append(nn.Parameter(torch.full((4,), 3.0)))", "m.s{n}[0] = nn.Parameter(torch.full((1,), 3.0))"),
        "self.s{n} = nn.ParameterList([torch.full((4,), 2.0)])",
    ),
    Part(
        "all parameters",
        "for k, p in self.l{n}.named_parameters(): x = x * p.sum() + len(k)",
        ("m.l{n}.register_parameter('extra', nn.Parameter(torch.full((4,), 3.0)))", "m.l{n}.bias = None"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "all modules",
        "x = x * len(list(self.l{n}.modules()))",
        ("m.l{n}.add_module('a', nn.Tanh())", "m.l{n}.add_module('b', nn.Tanh())"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "a dropped layer",
        "x = self.l{n}(x)",
        ("m.l{n} = nn.Identity()", "m.l{n} = nn.Dropout(0.0)", "m.l{n} = nn.Threshold(0.1, 20)"),
        "self.l{n} = nn.Tanh()",
    ),
    Part(
        "a layer's number",
        "x = self.l{n}(x)",
        ("m.l{n}.negative_slope = 0.5", "m.l{n}.negative_slope = -0.0", "m.l{n}.inplace = False", "m.l{n}.negative_slope = 2"),
        "self.l{n} = nn.LeakyReLU(0.1)",
    ),
    Part(
        "a normalization's eps",
        "x = self.l{n}(x)",
        ("m.l{n}.eps = 0.5", "m.l{n}.eps = 2.0", "m.l{n}.weight = None", "m.l{n}.bias = None", "m.l{n}.normalized_shape = (4,)"),
        "self.l{n} = nn.LayerNorm(4)",
    ),
    Part(
        "a batch norm",
        "x = self.l{n}(x)",
        ("m.l{n}.eps = 0.5", "m.l{n}.running_mean.add_(1)", "m.l{n}.running_var.mul_(3)", "m.l{n}.weight = None"),
        "self.l{n} = nn.BatchNorm1d(4).eval()",
    ),
    Part(
        "a class of a layer",
        "x = self.l{n}(x)",
        ("m.l{n}.__class__ = nn.Tanh", "m.l{n}.__class__ = nn.Sigmoid"),
        "self.l{n} = nn.Sigmoid()",
    ),
    Part(
        "forward of an instance",
        "x = self.l{n}(x)",
        ("m.l{n}.forward = torch.sin", "m.l{n}.forward = lambda x: x * 4", "m.l{n}.__dict__.pop('forward', None)"),
        "self.l{n} = nn.Sigmoid()",
    ),
    Part(
        "forward of a class",
        "x = self.l{n}(x)",
        ("Layer.forward = lambda self, x: x * 5", "Layer.forward = lambda self, x: x.sin()"),
        "self.l{n} = Layer()",
    ),
    Part(
        "a hook",
        "x = self.l{n}(x)",
        (
            "h{n} = m.l{n}.register_forward_hook(lambda m, a, y: y * 2)",
            "m.l{n}._forward_hooks.clear()",
            "m.l{n}.register_forward_pre_hook(lambda m, a: (a[0] * 3,))",
            "m.l{n}._forward_pre_hooks.clear()",
        ),
        "self.l{n} = nn.Sigmoid()",
    ),
    Part(
        "a hook of the module",
        "x = x",
        (
            "m.register_forward_hook(lambda m, a, y: y * 2)",
            "m._forward_hooks.clear()",
            "m.register_forward_pre_hook(lambda m, a: (a[0] * 3,))",
            "m._forward_pre_hooks.clear()",
        ),
    ),
    Part("training", "x = x * 2 if self.training else x", ("m.eval()", "m.train()")),
    Part(
        "training of a layer",
        "x = x * 2 if self.l{n}.training else x",
        ("m.l{n}.eval()", "m.l{n}.train()", "m.eval()"),
        "self.l{n} = nn.Sigmoid()",
    ),
    Part(
        "a parametrization",
        "x = self.l{n}(x)",
        (
            "nn.utils.parametrize.register_parametrization(m.l{n}, 'weight', Halved())",
            "nn.utils.parametrize.is_parametrized(m.l{n}) and nn.utils.parametrize.remove_parametrizations(m.l{n}, 'weight')",
        ),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "a state dict",
        "x = self.l{n}(x)",
        (
            "m.l{n}.load_state_dict(dict(weight=torch.ones(4, 4), bias=torch.ones(4)))",
            "m.l{n}.load_state_dict(dict(weight=torch.eye(4), bias=torch.ones(4)), assign=True)",
        ),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "strict state",
        "x = x * len(self.l{n}.state_dict())",
        ("m.l{n}.bias = None", "m.l{n}.register_buffer('c', torch.ones(2))"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "the order of parameters",
        "for i, p in enumerate(self.l{n}.parameters()): x = x * p.sum() + i",
        ("m.l{n}.bias = nn.Parameter(torch.ones(4))", "m.l{n}.weight = m.l{n}.weight"),
        "self.l{n} = nn.Linear(4, 4)",
    ),
    Part(
        "the order of buffers",
        "for k, b in self.l{n}.named_buffers(): x = x * len(k) + b.sum()",
        ("m.l{n}.register_buffer('c', torch.ones(2))", "m.l{n}.running_mean.add_(1)"),
        "self.l{n} = nn.BatchNorm1d(4)",
    ),
    Part(
        "whether parameters are one",
        "x = x * 2 if self.p{n} is self.q{n} else x * 3",
        ("m.q{n} = m.p{n}", "m.q{n} = nn.Parameter(torch.ones(2))"),
        "self.p{n} = nn.Parameter(torch.ones(2)); self.q{n} = nn.Parameter(torch.ones(2))",
    ),
)
