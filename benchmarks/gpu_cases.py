"""What is timed on a GPU: models in real and normed mode, norm maps, wrapper subclasses, the optimizer, per-sample gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import function_transforms, models
from benchmarks.devices import Device
from benchmarks.normed import given_norms
from thunder_norm import RMSTensor, build_norm_map, executors, normed, transforms
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

EAGER, THUNDER, REAL, COMPILED = "eager", "thunder.jit", "thunder.jit + NormTransform", "torch.compile"
OURS_COMPILED = "NormTransform, executors.inductor"
INPUT_SETS = 4


@dataclass(frozen=True)
class Amount:
    """Where, how large and how often."""

    device: Device
    is_quick: bool
    rounds: int


@dataclass(frozen=True)
class Comparison:
    """Candidates by name, each made (compiled, warmed up) by a function that returns the call to time; ratios are to the peer."""

    name: str
    peer: str
    candidates: Mapping[str, Callable[[], Callable[[], Any]]]


def cycling(f: Callable[[Any], Any], inputs: list[Any]) -> Callable[[], Any]:
    """Calls of `f` on one input set after the other."""
    following = itertools.cycle(inputs)
    return lambda: f(next(following))


@dataclass(frozen=True)
class Model:
    """A model of transformers, and inputs for it."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], torch.Tensor]


def transformers_models(amount: Amount) -> dict[str, Model]:
    """Layers of GPT-2 small, of a Llama of 1B parameters in bf16, and of ViT-B; on CPU or quickly, two small ones of each."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

    device, is_quick = amount.device.name, amount.is_quick
    layers, tokens, batch = (2, 16, 2) if is_quick else (6, 512, 8)

    def ids(vocabulary: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (batch, tokens), device=device)

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    small = {"n_embd": 64, "n_head": 4, "vocab_size": 128} if is_quick else {}
    gpt2 = GPT2Config(n_layer=layers, **no_dropout, **small)

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    if not is_quick:
        shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
        shape |= {"vocab_size": 32768}
    llama = LlamaConfig(**shape, num_hidden_layers=2, use_cache=False)

    small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32} if is_quick else {}
    vit = ViTConfig(num_hidden_layers=layers, **small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    images = (2 if is_quick else 32, 3, vit.image_size, vit.image_size)
    return {
        "gpt2": Model(
            f"GPT-2 small, {layers} of its layers, float32",
            lambda: GPT2LMHeadModel(gpt2).to(device),
            lambda: ids(gpt2.vocab_size),
        ),
        "llama": Model(
            f"Llama, {llama.num_hidden_layers} blocks of 1B, bf16",
            lambda: LlamaForCausalLM(llama).to(device, torch.bfloat16),
            lambda: ids(llama.vocab_size),
        ),
        "vit": Model(
            f"ViT-B, {layers} of its layers, float32",
            lambda: ViTForImageClassification(vit).to(device),
            lambda: torch.randn(images, device=device),
        ),
    }


def real_mode(key: str, amount: Amount) -> Iterator[Comparison]:
    """Plain tensors: as if the transform were not there."""
    described = transformers_models(amount)[key]
    torch.manual_seed(0)
    model, inputs = described.make().eval(), [described.example() for _ in range(INPUT_SETS)]
    jitted: dict[str, Callable[[], Any]] = {
        EAGER: lambda: model,
        THUNDER: lambda: thunder.jit(model),
        REAL: lambda: thunder.jit(model, transforms=[NormTransform()]),
        OURS_COMPILED: lambda: thunder.jit(model, transforms=[NormTransform()], executors=[executors.inductor]),
        COMPILED: lambda: torch.compile(model),
    }
    yield Comparison(
        f"{described.name}: forward", THUNDER, {k: lambda f=f: cycling(torch.no_grad()(f()), inputs) for k, f in jitted.items()}
    )
    yield Comparison(
        f"{described.name}: forward and backward",
        THUNDER,
        {k: lambda f=f: cycling(_backward(f()), inputs) for k, f in jitted.items()},
    )


# Thunder's executors by name, in their order; None are its defaults, nvFuser with sdpa and cuDNN where they are installed
_LISTS: dict[str, Any] = {
    "defaults": None,
    "torch": [],
    "sdpa": ["sdpa"],
    "cudnn": ["cudnn"],
    "torchcompile": ["torchcompile"],
    "inductor": [executors.inductor],
}


def executor_lists(backward: bool, amount: Amount) -> Iterator[Comparison]:
    """Real mode with one list of executors after the other, each without us and with us; the forward as CUDA graphs too."""
    from thunder.transforms.cudagraph import CUDAGraphTransform

    described = transformers_models(amount)["llama"]
    torch.manual_seed(0)
    model, inputs = described.make().eval(), [described.example() for _ in range(INPUT_SETS)]
    jitted: dict[str, Callable[[], Any]] = {COMPILED: lambda: torch.compile(model)}
    for title, chosen in _LISTS.items():
        for who, given in {"plain": [], "ours": [NormTransform()]}.items():
            jitted[f"{title}: {who}"] = lambda chosen=chosen, given=given: thunder.jit(model, transforms=given, executors=chosen)
    what = "forward and backward" if backward else "forward"
    if amount.device.is_cuda and not backward:
        jitted |= {
            f"{COMPILED}, CUDA graphs": lambda: torch.compile(model, mode="reduce-overhead"),
            "CUDA graphs: plain": lambda: thunder.jit(model, transforms=[CUDAGraphTransform()]),
            "CUDA graphs: ours": lambda: thunder.jit(model, transforms=[NormTransform(), CUDAGraphTransform()]),
        }
    around = _backward if backward else torch.no_grad()
    yield Comparison(
        f"executors, {described.name}: {what}", COMPILED, {k: lambda f=f: cycling(around(f()), inputs) for k, f in jitted.items()}
    )


def _backward(f: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda x: f(x).logits.float().square().mean().backward()


def normed_mode(amount: Amount) -> Iterator[Comparison]:
    """Norms beside the real tensors."""
    described = transformers_models(amount)["gpt2"]
    torch.manual_seed(0)
    model, inputs = described.make().eval(), [described.example() for _ in range(INPUT_SETS)]
    candidates: dict[str, Callable[[], Any]] = {
        "thunder.jit, no norms": lambda: thunder.jit(model),
        "normed, unit parameters": lambda: normed(
            thunder.jit(model, transforms=[NormTransform(parameters="unit", mode="typical")])
        ),
        "normed, measured parameters": lambda: normed(thunder.jit(model, transforms=[NormTransform(mode="typical")])),
    }
    yield Comparison(
        f"{described.name}: forward",
        "thunder.jit, no norms",
        {k: lambda f=f: cycling(torch.no_grad()(f()), inputs) for k, f in candidates.items()},
    )


def norm_maps(amount: Amount) -> Iterator[Comparison]:
    """A call is the arithmetic of norms alone, on 0-dim tensors of the device: a few kernels, whatever the depth."""
    device = amount.device.name
    depths = (4, 16) if amount.is_quick else (4, 16, 64)
    maps = {}
    for depth in depths:
        model = models.mlp(depth)
        given = {k: type(n)(n.norm_size.detach().to(device), elem_dims=n.elem_dims) for k, n in given_norms(model).items()}
        maps[f"depth {depth}"] = _norm_map(model.to(device), given, device)
    yield Comparison("norm map of (linear, relu) by depth", f"depth {depths[0]}", maps)


def _norm_map(model: nn.Module, given: dict, device: str) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        norm_map = build_norm_map(model, torch.randn(16, 64, device=device))
        sizes = [RMSTensor(torch.tensor(float(i + 1), dtype=torch.float64, device=device)) for i in range(INPUT_SETS)]
        return cycling(lambda size: norm_map(size, normed_state_dict=given).norm_size, sizes)

    return make


def wrappers(amount: Amount) -> Iterator[Comparison]:
    """Subclasses that know nothing of norms: torch's TwoTensor, torchao's float8."""
    from torch.testing._internal.two_tensor import TwoTensor

    device = amount.device.name
    ours, ours_compiled = "SubclassTransform", "SubclassTransform, executors.inductor"
    for depth, width, batch in ((4, 64, 16),) if amount.is_quick else ((4, 1024, 1024), (16, 1024, 1024), (16, 256, 128)):
        model = models.mlp(depth, width).to(device)
        made = [
            TwoTensor(torch.randn(batch, width, device=device), torch.randn(batch, width, device=device))
            for _ in range(INPUT_SETS)
        ]
        by_hand = [(t.a, t.b) for t in made]

        def hand(model: nn.Module = model, inputs: list = by_hand) -> Callable[[], Any]:
            f = thunder.jit(lambda a, b: (model(a), model(b)))
            return cycling(lambda pair: f(*pair), inputs)

        candidates = {
            "thunder.jit, by hand": hand,
            EAGER: lambda model=model, made=made: cycling(model, made),
            ours: lambda model=model, made=made: cycling(thunder.jit(model, transforms=[SubclassTransform()]), made),
            ours_compiled: lambda model=model, made=made: cycling(
                thunder.jit(model, transforms=[SubclassTransform()], executors=[executors.inductor]), made
            ),
            COMPILED: lambda model=model, made=made: cycling(torch.compile(model, fullgraph=True), made),
        }
        yield Comparison(
            f"TwoTensor, {depth} layers of {width}, batch {batch}: forward",
            "thunder.jit, by hand",
            {k: lambda make=make: torch.no_grad()(make()) for k, make in candidates.items()},
        )
    yield _float8(amount)


def _float8(amount: Amount) -> Comparison:
    """torchao's float8 training layers: real fp8 products on CUDA, emulated elsewhere."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    device = amount.device
    width, batch = (64, 16) if amount.is_quick else (4096, 4096)
    config = Float8LinearConfig(emulate=not device.is_cuda)

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU(), nn.Linear(width, width, bias=False))
        return layers.to(device.name, torch.bfloat16)

    def call(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        inputs = [
            torch.randn(batch, width, device=device.name, dtype=torch.bfloat16, requires_grad=True) for _ in range(INPUT_SETS)
        ]
        return cycling(lambda x: f(x).float().square().mean().backward(), inputs)

    return Comparison(
        f"float8 MLP, 2 layers of {width}, batch {batch}: forward and backward",
        COMPILED,
        {
            "bf16, eager": lambda: call(model()),
            EAGER: lambda: call(convert_to_float8_training(model(), config=config)),
            "SubclassTransform": lambda: call(
                thunder.jit(convert_to_float8_training(model(), config=config), transforms=[SubclassTransform()])
            ),
            "SubclassTransform, executors.inductor": lambda: call(
                thunder.jit(
                    convert_to_float8_training(model(), config=config),
                    transforms=[SubclassTransform()],
                    executors=[executors.inductor],
                )
            ),
            COMPILED: lambda: call(torch.compile(convert_to_float8_training(model(), config=config))),
        },
    )


def optimizer(amount: Amount) -> Iterator[Comparison]:
    """One step of ModularOptimizer, of Muon with AdamW for what it does not take, and of AdamW, on GPT-2 small's parameters."""
    described = transformers_models(amount)["gpt2"]
    torch.manual_seed(0)
    norm = ModularNorm(described.make(), described.example(), light=0.1, mode="modula")

    def with_gradients() -> nn.Module:
        model = described.make()
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        return model

    def ours(method: Any = "newton_schulz") -> Callable[[], Any]:
        for p in norm.model.parameters():
            p.grad = torch.randn_like(p)
        return ModularOptimizer(norm, lr=1e-3, method=method).step

    def muon() -> Callable[[], Any]:
        parameters = dict(with_gradients().named_parameters())
        hidden = {k for k, p in parameters.items() if p.ndim == 2 and "wte" not in k and "wpe" not in k}
        both = (
            torch.optim.Muon([parameters[k] for k in hidden], lr=1e-3),
            torch.optim.AdamW([p for k, p in parameters.items() if k not in hidden], lr=1e-3),
        )
        return lambda: [o.step() for o in both]

    yield Comparison(
        f"optimizer step, {described.name}",
        "Muon, AdamW for the rest",
        {
            "Muon, AdamW for the rest": muon,
            "ModularOptimizer": ours,
            "ModularOptimizer, bf16 products": lambda: ours("newton_schulz_bf16"),
            "AdamW": lambda: torch.optim.AdamW(with_gradients().parameters(), lr=1e-3).step,
        },
    )


def per_sample_gradients(amount: Amount) -> Iterator[Comparison]:
    """vmap(grad) of a model's loss: ours with and without a fusing executor, torch.func in eager and compiled."""
    device = amount.device.name
    for model, shape, batches in (
        (function_transforms.mlp(), (32,), (64,) if amount.is_quick else (64, 4096)),
        (function_transforms.Transformer(), (16, 32), (8,) if amount.is_quick else (64, 1024)),
    ):
        model.to(device)
        parameters, loss = function_transforms.loss_of(model)
        for batch in batches:
            made = [tuple(t.to(device) for t in function_transforms.samples(batch, shape)) for _ in range(INPUT_SETS)]

            def transformed(library: Any, loss: Callable = loss) -> Callable:
                return library.vmap(library.grad(loss), in_dims=(None, 0, 0))

            def call(f: Callable, parameters: dict = parameters, made: list = made) -> Callable[[], Any]:
                return torch.no_grad()(cycling(lambda sample: f(parameters, *sample), made))

            yield Comparison(
                f"per-sample gradients, {type(model).__name__}, batch {batch}",
                "torch.func",
                {
                    "torch.func": lambda: call(transformed(torch.func)),
                    "thunder_norm": lambda: call(transformed(transforms)),
                    "thunder_norm, torch.compile executor": lambda: call(
                        thunder.jit(transformed(transforms), executors=["torchcompile"])
                    ),
                    "thunder_norm, executors.inductor": lambda: call(
                        thunder.jit(transformed(transforms), executors=[executors.inductor])
                    ),
                    "torch.compile of torch.func": lambda: call(torch.compile(transformed(torch.func), dynamic=False)),
                },
            )


CASES: dict[str, Callable[[Amount], Iterator[Comparison]]] = {
    **{f"real_mode_{key}": functools.partial(real_mode, key) for key in ("gpt2", "llama", "vit")},
    "executors_forward": functools.partial(executor_lists, False),
    "executors_backward": functools.partial(executor_lists, True),
    "normed_mode": normed_mode,
    "norm_maps": norm_maps,
    "wrappers": wrappers,
    "optimizer": optimizer,
    "per_sample_gradients": per_sample_gradients,
}
