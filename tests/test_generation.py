"""Caches of keys and values as inputs and outputs of jitted programs: transformers' own, and classes written by hand."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict, defaultdict, deque

import pytest
import torch

from thunder_norm import LinfTensor, NormedTensor, RMSTensor, normed
from thunder_norm.errors import ThunderNormError, UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder

transformers = pytest.importorskip("transformers")

BATCH, PROMPT, LENGTH = 2, 6, 8
STEPS = ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, LENGTH))


# -- models -------------------------------------------------------------------------------------------------------------


def _gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _llama():
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        vocab_size=32,
        num_hidden_layers=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


MODELS = {"gpt2": _gpt2, "llama": _llama}


@functools.cache
def _model(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


@functools.cache
def _ids():
    return torch.randint(0, 32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def _jit(model):
    return thunder.jit(model, transforms=[NormTransform()])


def _made_by_program(model):
    return None


def _dynamic(model):
    return transformers.DynamicCache()


def _static(model):
    try:
        return transformers.StaticCache(
            config=model.config, max_cache_len=12, max_batch_size=BATCH, device="cpu", dtype=torch.float32
        )
    except TypeError:  # 5
        return transformers.StaticCache(config=model.config, max_cache_len=12)


def _generate(call, cache, *, positions=False):
    """Prefill and two steps: the logits, what the cache held after each, and its lengths."""
    logits, held, lengths = [], [], []
    for first, last in STEPS:
        options = {} if cache is None else {"past_key_values": cache}
        if positions:
            options["cache_position"] = torch.arange(first, last)
        out = call(input_ids=_ids()[:, first:last], use_cache=True, **options)
        logits.append(out.logits)
        cache = out.past_key_values if cache is None or isinstance(cache, tuple) else cache
        held.append([t if isinstance(t, NormedTensor) else t.clone() for t in _keys_and_values(cache)])
        lengths.append(None if isinstance(cache, tuple) else int(cache.get_seq_length()))
    return logits, held, lengths


def _keys_and_values(cache):
    if isinstance(cache, tuple):
        return [t for layer in cache for t in layer]
    if hasattr(cache, "layers"):
        return [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return [*cache.key_cache, *cache.value_cache]


def _actual(t):
    """The norm that a normed tensor's data have, written out."""
    x, dims = t.backing.double(), t.elem_dims
    if isinstance(t, LinfTensor) or not dims:
        return x.abs().max()
    assert isinstance(t, RMSTensor)
    return x.square().mean(dims).sqrt().max()


def _check_bounds(tensors):
    for t in tensors:
        assert isinstance(t, NormedTensor)
        assert _actual(t) <= t.norm_size * (1 + 1e-6)


# -- transformers' caches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [_made_by_program, _dynamic])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_dynamic_in_real_mode(name, make):
    model = _model(name)
    jitted = _jit(model)
    expected = _generate(model, make(model))
    torch.testing.assert_close(_generate(jitted, make(model)), expected)
    misses = thunder.cache_misses(jitted)
    torch.testing.assert_close(_generate(jitted, make(model)), expected)
    assert thunder.cache_misses(jitted) == misses  # caches of the lengths that were met have their programs


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_dynamic_in_normed_mode(name):
    model = _model(name)
    logits, held, lengths = _generate(normed(_jit(model)), _dynamic(model))
    expected_logits, expected_held, expected_lengths = _generate(model, _dynamic(model))
    torch.testing.assert_close([t.backing for t in logits], expected_logits)
    torch.testing.assert_close([[t.backing for t in step] for step in held], expected_held)
    assert lengths == expected_lengths
    _check_bounds(logits)
    for step in held:
        _check_bounds(step)


@torch.no_grad()
def test_made_by_program_in_normed_mode():
    model = _model("llama")
    logits, held, _ = _generate(normed(_jit(model)), None)
    torch.testing.assert_close([t.backing for t in logits], _generate(model, None)[0])
    _check_bounds([*logits, *held[0], *held[1], *held[2]])


@torch.no_grad()
def test_plain_cache_in_normed_mode():
    """Keys and values that are given without norms are measured."""
    model = _model("llama")
    jitted, cache = _jit(model), _dynamic(model)
    jitted(input_ids=_ids()[:, :PROMPT], past_key_values=cache, use_cache=True)
    assert not any(isinstance(t, NormedTensor) for t in _keys_and_values(cache))
    out = normed(jitted)(input_ids=_ids()[:, PROMPT : PROMPT + 1], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(out.logits.backing, _generate(model, _dynamic(model))[0][1])
    _check_bounds([out.logits, *_keys_and_values(cache)])


def test_norms_along_a_generation_have_gradients():
    model = _model("llama")
    cache, call = _dynamic(model), normed(_jit(model))
    for first, last in STEPS:
        out = call(input_ids=_ids()[:, first:last], past_key_values=cache, use_cache=True)
    sizes = [out.logits.norm_size, *(t.norm_size for t in _keys_and_values(cache))]
    parameter = model.model.layers[0].self_attn.k_proj.weight
    keys = next(t for t in _keys_and_values(cache))
    (of_keys,) = torch.autograd.grad(keys.norm_size, parameter, retain_graph=True)
    assert of_keys.isfinite().all() and of_keys.abs().sum() > 0
    (of_logits,) = torch.autograd.grad(sizes[0], model.lm_head.weight)
    assert of_logits.isfinite().all() and of_logits.abs().sum() > 0


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_static_in_real_mode(name):
    """With positions that are given: transformers 4 would count them by the values in the cache."""
    model = _model(name)
    jitted, mine, theirs = _jit(model), _static(model), _static(model)
    found = _generate(jitted, mine, positions=True)
    torch.testing.assert_close(found, _generate(model, theirs, positions=True))
    assert thunder.cache_misses(jitted) == 2  # the steps share a program


@torch.no_grad()
def test_static_without_positions():
    model = _model("llama")
    mine, theirs = _static(model), _static(model)
    expected = _generate(model, theirs)
    if int(transformers.__version__.partition(".")[0]) < 5:
        with pytest.raises(ThunderNormError, match=r"torch\.arange"):
            _generate(_jit(model), mine)
        assert int(mine.get_seq_length()) in (0, PROMPT)  # 4.57 knows that an empty one is empty
    else:
        torch.testing.assert_close(_generate(_jit(model), mine), expected)


@torch.no_grad()
def test_static_in_normed_mode_is_refused():
    model = _model("llama")
    cache = _static(model)
    with pytest.raises(UnsupportedOpError, match=r"in-place .* with a NormedTensor"):
        _generate(normed(_jit(model)), cache, positions=True)
    assert int(cache.get_seq_length()) == 0


@torch.no_grad()
def test_keys_and_values_that_share_memory():
    """Those of GPT-2 are views of one projection, which Thunder takes for one tensor."""
    model = _model("gpt2")
    torch.manual_seed(0)
    layers = [torch.randn(BATCH, PROMPT, 2, 2, 8).permute(2, 0, 3, 1, 4).unbind() for _ in range(2)]
    options = {"input_ids": _ids()[:, PROMPT : PROMPT + 1], "use_cache": True}

    def step(call):
        cache = transformers.DynamicCache()
        for i, (k, v) in enumerate(layers):
            cache.update(k, v, i)
        return call(past_key_values=cache, **options).logits

    expected = step(model)
    torch.testing.assert_close(step(_jit(model)), expected)
    if hasattr(transformers.DynamicCache, "from_legacy_cache"):
        torch.testing.assert_close(_jit(lambda layers: model(past_key_values=layers, **options).logits)(tuple(layers)), expected)


# -- classes written by hand --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Entry:
    key: torch.Tensor
    value: torch.Tensor
    at: int


class Slotted:
    __slots__ = ("t", "unset")

    def __init__(self, t):
        self.t = t


class Named(OrderedDict):
    """A dict with an attribute."""


class Cache:
    def __init__(self, owner):
        self.keys, self.entries, self.length = [], [], 0
        self.owner, self.itself = owner, self
        self.by_length, self.recent, self.counts = {}, deque(maxlen=2), defaultdict(int)

    def add(self, k, v):
        self.keys.append(k)
        self.length += k.shape[0]
        self.by_length[self.length] = v
        self.recent.append(k)
        self.counts["adds"] += 1
        self.entries = [*self.entries, Entry(k, v, self.length)]
        self.last = self.entries[-1]
        self.slotted = Slotted(v)
        self.named = Named(k=k)
        self.named.note = ("v", v)


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.v = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.settings = Slotted(None)

    def forward(self, x, cache=None):
        if cache is None:
            cache = Cache(self.settings)
        k, v = self.k(x), self.v(x).relu()
        cache.add(k, v)
        return torch.cat(cache.keys).sum(0), cache, [cache, cache.last]


def _plain(t):
    return t.backing if isinstance(t, NormedTensor) else t


def _assert_same_cache(found, expected, owner):
    assert type(found) is Cache and found.itself is found and found.owner is owner
    assert (found.length, list(found.by_length), found.counts) == (expected.length, list(expected.by_length), expected.counts)
    assert found.recent.maxlen == 2 and found.recent[-1] is found.keys[-1]
    assert found.last is found.entries[-1] and found.last.key is found.keys[-1]
    assert isinstance(found.slotted, Slotted) and not hasattr(found.slotted, "unset")
    assert type(found.named) is Named and found.named.note[1] is found.slotted.t
    pairs = [
        (found.keys, expected.keys),
        (found.by_length.values(), expected.by_length.values()),
        ([e.value for e in found.entries], [e.value for e in expected.entries]),
        (found.named.values(), expected.named.values()),
    ]
    for mine, theirs in pairs:
        torch.testing.assert_close([_plain(t) for t in mine], list(theirs))


@pytest.mark.parametrize("mode", ["real", "normed"])
def test_class_of_the_user(mode):
    torch.manual_seed(0)
    model = Step()
    jitted = _jit(model)
    call = normed(jitted) if mode == "normed" else jitted
    made = []
    for _ in range(2):  # the second time from Thunder's cache
        x = torch.randn(3, 4)
        total, cache, (again, last) = call(x)
        expected_total, expected, _ = model(x)
        for _ in range(3):
            assert again is cache and last is cache.last
            torch.testing.assert_close(_plain(total), expected_total)
            _assert_same_cache(cache, expected, model.settings)
            if mode == "normed":
                _check_bounds([*cache.keys, *cache.by_length.values()])
            x = torch.randn(2, 4)
            total, same, (again, last) = call(x, cache)
            expected_total, expected, _ = model(x, expected)
            assert same is cache
        made.append(cache)
    assert made[0] is not made[1] and made[0].keys is not made[1].keys
    assert thunder.cache_misses(jitted) == 4


def test_gradients_through_a_returned_object():
    model = Step()
    x = torch.randn(3, 4)
    _jit(model)(x)[1].last.value.sum().backward()
    found = model.v.weight.grad
    model.zero_grad()
    model(x)[1].last.value.sum().backward()
    torch.testing.assert_close(found, model.v.weight.grad)


def test_what_an_argument_holds_stays_the_arguments():
    class Pair:
        def __init__(self, x, other):
            self.x, self.other = x, other

    def pair(x, other):
        return Pair(x + 1, other)

    jitted = _jit(pair)
    for _ in range(2):
        other, x = Entry(torch.ones(2), torch.zeros(2), 1), torch.randn(2)
        found = jitted(x, other)
        assert found.other is other
        torch.testing.assert_close(found.x, x + 1)


def test_made_object_in_an_argument():
    class Holder:
        pass

    def fill(holder, x):
        holder.entry = Entry(x + 1, x * 2, 3)
        holder.entries = [holder.entry]
        return holder.entry, x.sin()

    jitted, kept = _jit(fill), []
    for x in (torch.randn(2), torch.randn(2)):
        holder = Holder()
        entry, _ = jitted(holder, x)
        assert holder.entry is entry and holder.entries[0] is entry
        torch.testing.assert_close(entry.key, x + 1)
        kept.append(entry)
    assert kept[0] is not kept[1]


def test_each_call_writes_into_its_own_argument():
    def fill(held, x):
        held["list"].append(x + 1)
        held["numbers"].append(x.shape[0])
        held["set"].add("seen")
        return x * 2

    jitted = _jit(fill)
    caches = [{"list": [], "numbers": [], "set": set()} for _ in range(3)]
    for cache in caches:
        x = torch.randn(2)
        jitted(cache, x)
        assert cache["numbers"] == [2] and cache["set"] == {"seen"} and len(cache["list"]) == 1
        torch.testing.assert_close(cache["list"][0], x + 1)
    assert thunder.cache_misses(jitted) == 1
    caches[0]["list"].clear()
    caches[0]["numbers"].clear()
    caches[0]["set"].clear()
    jitted(caches[1], torch.randn(2))
    assert caches[1]["numbers"] == [2, 2] and not caches[0]["list"]


def test_the_module_keeps_plain_tensors():
    class Remembers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.seen = torch.nn.Linear(4, 4), {}

        def forward(self, x):
            y = self.fc(x)
            self.seen["entry"] = Entry(y, y, 1)
            return y

    model, x = Remembers(), torch.randn(3, 4)
    out = normed(_jit(model))(x)
    entry = model.seen["entry"]
    assert type(entry.key) is torch.Tensor and entry.key is entry.value
    torch.testing.assert_close(entry.key, out.backing)


def test_what_cannot_be_made_anew_is_refused():
    class Locked:
        pass

    def make(x):
        held = Locked()
        held.x, held.event = x + 1, threading.Condition()
        return held

    def closure(x):
        y = x + 1
        return lambda: y

    for program in (make, closure):
        with pytest.raises(UnsupportedOpError, match="cannot be made anew"):
            _jit(program)(torch.randn(2))
