"""Arguments, modes and the state of the process that may be others in the next call."""

from __future__ import annotations

from .changing_parts import Part

CALLS = (
    Part("values", "", ("x = torch.randn(3, 4)", "x = x * 2")),
    Part("a dtype of the input", "", ("x = x.double()", "x = x.to(torch.float32)", "x = x.to(torch.float16)", "x = x.float()")),
    Part(
        "strides of the input",
        "x = x * (2 if x0.is_contiguous() else 3) + x0.stride(0)",
        ("x = x.t().contiguous().t()", "x = x.contiguous()", "x = torch.cat([x, x], 1)[:, ::2]"),
    ),
    Part("strides that decide a view", "x = x.reshape(12).view(3, 4)", ("x = x.t().contiguous().t()", "x = x.contiguous()")),
    Part(
        "requires_grad of the input",
        "x = x * 2 if x0.requires_grad else x",
        ("x = x.detach().requires_grad_()", "x = x.detach()"),
    ),
    Part(
        "a leaf",
        "x = x * 2 if x0.is_leaf else x",
        ("x = x.detach().requires_grad_()", "x = x.detach().requires_grad_() * 1", "x = x.detach()"),
    ),
    Part("rows of the input", "x = x * x.shape[0]", ("x = torch.randn(3, 4)", "x = torch.randn(3, 4)[:3]")),
    Part(
        "a second input",
        "x = x if y is None else x * y",
        (
            "y = torch.ones(4)",
            "y = torch.ones(3, 1)",
            "y = None",
            "y = 2.0",
            "y = torch.tensor(3.0)",
            "y = torch.ones(4, dtype=torch.int64)",
        ),
    ),
    Part(
        "rows of a second input",
        "x = x + y.sum() * y.shape[0] if isinstance(y, torch.Tensor) else x",
        ("y = torch.ones(4)", "y = torch.ones(5)", "y = torch.ones(1)", "y = torch.ones(0)"),
    ),
    Part("an input twice", "x = x * (2 if y is x0 else 3)", ("y = x", "y = x.clone()", "y = x")),
    Part(
        "an input's memory",
        "x = x + (y if isinstance(y, torch.Tensor) and y.dim() else 1.0)",
        ("y = x[0]", "y = x.clone()[0]", "y = x.view(3, 4)"),
    ),
    Part(
        "a number",
        "x = x * k",
        ("k = 3", "k = 3.0", "k = True", "k = -0.0", "k = float('nan')", "k = 0.0", "k = torch.tensor(2.0)"),
    ),
    Part("a number's sign", "x = x * math.copysign(1.0, k)", ("k = -0.0", "k = 0.0", "k = 0", "k = -1")),
    Part(
        "a number's class",
        "x = x * (2 if isinstance(k, bool) else 3 if isinstance(k, int) else 5)",
        ("k = 1", "k = True", "k = 1.0"),
    ),
    Part(
        "an object",
        "x = x if o is None else x * o['k']",
        ("o = dict(k=2.0)", "o = dict(k=torch.ones(4))", "o = collections.OrderedDict(k=3)", "o = None"),
    ),
    Part(
        "a list given",
        "for v in o if isinstance(o, (list, tuple)) else (): x = x * v",
        ("o = [1.0, 2.0]", "o = (1.0, 3.0)", "o = [torch.ones(4)]", "o = []"),
    ),
    Part(
        "a function given",
        "x = o(x) if callable(o) else x",
        ("o = torch.sin", "o = lambda x: x * 3", "o = None", "o = functools.partial(torch.mul, other=4)"),
    ),
    Part(
        "a named tuple given",
        "x = x * o.u if isinstance(o, Point) else x",
        ("o = Point(2, 3)", "o = Point(4, 3)", "o = Point(torch.ones(4), 1)"),
    ),
    Part(
        "grad mode",
        "x = x * 2 if torch.is_grad_enabled() else x",
        ("modes = [torch.no_grad]", "modes = []", "modes = [torch.enable_grad]"),
    ),
    Part(
        "inference mode",
        "x = x * 2 if torch.is_inference_mode_enabled() else x",
        ("modes = [torch.inference_mode]", "modes = []", "modes = [torch.no_grad]"),
    ),
    Part(
        "autocast",
        "x = (x @ torch.ones(4, 4)).float() * 1.001",
        (
            "modes = [lambda: torch.autocast('cpu', torch.bfloat16)]",
            "modes = []",
            "modes = [lambda: torch.autocast('cpu', torch.float16)]",
            "modes = [lambda: torch.autocast('cpu', enabled=False)]",
        ),
    ),
    Part(
        "whether autocast is on",
        "x = x * 2 if torch.is_autocast_enabled('cpu') else x",
        ("modes = [lambda: torch.autocast('cpu', torch.bfloat16)]", "modes = []"),
    ),
    Part(
        "the default dtype",
        "x = (x + torch.ones(4)) * (2 if torch.tensor(1.0).dtype == torch.float64 else 3)",
        (
            "torch.set_default_dtype(torch.float64)",
            "torch.set_default_dtype(torch.float32)",
            "torch.set_default_dtype(torch.bfloat16)",
        ),
    ),
    Part(
        "the default dtype, asked",
        "x = x * (2 if torch.get_default_dtype() == torch.float64 else 3)",
        ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    ),
    Part(
        "deterministic algorithms, asked",
        "x = x * (2 if torch.are_deterministic_algorithms_enabled() else 3)",
        ("torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)"),
    ),
    Part(
        "precision of products",
        "x = x * len(torch.get_float32_matmul_precision())",
        ("torch.set_float32_matmul_precision('medium')", "torch.set_float32_matmul_precision('highest')"),
    ),
    Part(
        "gradients that are off inside",
        "with torch.set_grad_enabled(self.g{n}): z = x * 2\n        x = x + z",
        ("m.g{n} = False", "m.g{n} = True"),
        "self.g{n} = True",
    ),
    Part(
        "whether it is a tensor",
        "x = x * 2 if isinstance(y, torch.Tensor) else x",
        ("y = torch.ones(2)", "y = 2.0", "y = None", "y = nn.Parameter(torch.ones(2))"),
    ),
    Part(
        "whether it is a parameter",
        "x = x * 2 if isinstance(y, nn.Parameter) else x",
        ("y = torch.ones(2)", "y = nn.Parameter(torch.ones(2))", "y = torch.ones(2, requires_grad=True)"),
    ),
    Part(
        "a shape as text",
        "x = x * len(str(tuple(y.shape))) if y is not None else x",
        ("y = torch.ones(2)", "y = torch.ones(10)", "y = torch.ones(1, 1)"),
    ),
    Part(
        "metadata of an input",
        "x = x * (y.ndim + 2 * len(y) + y.numel() + y.element_size()) if isinstance(y, torch.Tensor) and y.ndim else x",
        ("y = torch.ones(2)", "y = torch.ones(3, 2)", "y = torch.ones(2, dtype=torch.float64)"),
    ),
    Part(
        "a dtype compared",
        "x = x * 2 if isinstance(y, torch.Tensor) and y.dtype == torch.float32 else x",
        ("y = torch.ones(2)", "y = torch.ones(2, dtype=torch.float64)", "y = torch.ones(2)"),
    ),
    Part(
        "a memory format",
        "x = x * 2 if isinstance(y, torch.Tensor) and y.ndim == 4 and y.is_contiguous(memory_format=torch.channels_last) else x",
        ("y = torch.ones(1, 2, 3, 3)", "y = torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)"),
    ),
    Part(
        "where an input comes from",
        "x = x * 2 if y is not None and y.grad_fn is None else x",
        ("y = torch.ones(2, requires_grad=True)", "y = torch.ones(2, requires_grad=True) * 1", "y = torch.ones(2)"),
    ),
)
