"""Arguments for a model, from the signature of its `forward`: candidates, of which the first that eager PyTorch accepts is taken."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.seeds import seeded

from .shrunk import FIRST_WORD, IMAGE, VOCABULARY

BATCH, WORDS, FRAMES = 2, 8, 16
PATCHES = 4  # along each side of an image that is given as a row of patches
MOST_CANDIDATES = 120  # of one set of arguments
Arguments = dict[str, Any]


class NoArgumentsError(Exception):
    """No candidate runs: what eager PyTorch said of each."""


def entry(config: Any, *names: str, default: Any) -> Any:
    """The first of these entries that a configuration, or one within it, has."""
    within = [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]
    for name, c in itertools.product(names, within):
        value = getattr(c, name, None)
        if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
            return value[-1] if isinstance(value, (list, tuple)) else value
    return default


def words(_: Any) -> torch.Tensor:
    return torch.randint(FIRST_WORD, VOCABULARY, (BATCH, WORDS))


def words_with_image(places: int) -> Callable[[Any], torch.Tensor]:
    """Words of which so many stand for the image's features, after the token that says so if there is one."""

    def make(config: Any) -> torch.Tensor:
        token = entry(config, "image_token_id", "image_token_index", default=None)
        if token is None:
            raise ValueError("no token for images")
        start = entry(config, "vision_start_token_id", "image_start_token_id", default=FIRST_WORD)
        image = torch.full((BATCH, places), token)
        return torch.cat([words(config)[:, :3], torch.full((BATCH, 1), start), image, words(config)[:, :3]], 1)

    return make


def shapes(*made: Callable[[Any], tuple[int, ...]]) -> list[Callable[[Any], torch.Tensor]]:
    return [lambda config, shape=shape: torch.randn(shape(config)) for shape in made]


def _image(config: Any) -> int:
    return entry(config, "image_size", "img_size", default=IMAGE)


def _channels(config: Any) -> int:
    return entry(config, "num_channels", "in_channels", "in_chans", default=3)


def _mels(config: Any) -> int:
    return entry(config, "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", default=16)


def _patches(channels: Callable[[Any], int]) -> Callable[[Any], tuple[int, ...]]:
    """Patches of the two images that `grid_thw` says, one after the other."""
    return lambda c: (BATCH * PATCHES**2, channels(c) * entry(c, "patch_size", default=16) ** 2)


def grids(_: Any) -> torch.Tensor:
    return torch.tensor([[1, PATCHES, PATCHES]] * BATCH)


# what each argument may be, in the order in which it is tried
MAKERS: dict[str, list[Callable[[Any], torch.Tensor]]] = {
    "input_ids": [
        words,
        lambda c: torch.randint(FIRST_WORD, VOCABULARY, (BATCH, WORDS, entry(c, "num_codebooks", default=4))),
        *map(words_with_image, (4, 16, 64, 1, 8, 2, 5, 17)),
    ],
    "decoder_input_ids": [words],
    "pixel_values": shapes(
        lambda c: (BATCH, _channels(c), _image(c), _image(c)),
        lambda c: (BATCH, entry(c, "num_frames", default=2), _channels(c), _image(c), _image(c)),
        lambda c: (BATCH, 3, 2 * IMAGE, 2 * IMAGE),
        lambda c: (BATCH, 3, 224, 224),
        _patches(lambda c: _channels(c) * entry(c, "temporal_patch_size", default=2)),
        _patches(_channels),
        lambda c: (BATCH * PATCHES**2, _channels(c), entry(c, "patch_size", default=16), entry(c, "patch_size", default=16)),
        lambda c: (BATCH, PATCHES**2, _channels(c) * entry(c, "patch_size", default=16) ** 2),
    ),
    "grid_thw": [grids],
    "image_grid_thw": [grids],
    "merge_sizes": [lambda c: torch.full((BATCH,), entry(c, "spatial_merge_size", default=1))],
    "spatial_shapes": [lambda _: torch.tensor([[PATCHES, PATCHES]] * BATCH)],
    "pixel_position_ids": [lambda _: torch.cartesian_prod(*[torch.arange(PATCHES)] * 2).expand(BATCH, -1, -1)],
    "latents": shapes(
        lambda c: (BATCH, entry(c, "hidden_size", default=32), WORDS),
        lambda c: (BATCH, WORDS, entry(c, "hidden_size", default=32)),
    ),
    "audio_mel": shapes(lambda c: (BATCH, 64, _mels(c))),
    "audio_mel_mask": [lambda _: torch.zeros(BATCH, 64, dtype=torch.bool)],
    "input_features_mask": [
        lambda c: torch.ones(BATCH, 2 * entry(c, "max_source_positions", default=FRAMES), dtype=torch.long),
        lambda _: torch.ones(BATCH, 64, dtype=torch.long),
    ],
    "pixel_attention_mask": [lambda _: torch.ones(BATCH, PATCHES**2, dtype=torch.long)],
    "pixel_values_videos": shapes(lambda c: (BATCH, entry(c, "frames_per_clip", default=2), 3, _image(c), _image(c))),
    "input_values": shapes(
        lambda c: (BATCH, 4000),
        lambda c: (BATCH, 1, 4000),
        lambda c: (BATCH, entry(c, "max_length", default=FRAMES), _mels(c)),
        lambda c: (BATCH, FRAMES, _mels(c)),
        lambda c: (BATCH, WORDS, entry(c, "hidden_size", default=32)),  # what its front end makes of them
    ),
    "decoder_input_values": shapes(lambda c: (BATCH, WORDS, entry(c, "hidden_size", default=32))),
    "states": shapes(lambda c: (BATCH, WORDS, entry(c, "state_dim", default=8))),
    "actions": shapes(lambda c: (BATCH, WORDS, entry(c, "act_dim", default=4))),
    "rewards": shapes(lambda _: (BATCH, WORDS, 1)),
    "returns_to_go": shapes(lambda _: (BATCH, WORDS, 1)),
    "timesteps": [lambda _: torch.arange(WORDS).expand(BATCH, WORDS)],
    "task_inputs": [lambda c: torch.randint(0, VOCABULARY, (BATCH, entry(c, "task_seq_len", default=WORDS)))],
    "past_values_padding": [lambda c: torch.zeros(BATCH, entry(c, "context_length", default=FRAMES), dtype=torch.long)],
    "freq": [lambda _: torch.zeros(BATCH, 1, dtype=torch.long)],
    "input_features": shapes(
        lambda c: (BATCH, 2 * entry(c, "max_source_positions", default=FRAMES), _mels(c)),
        lambda c: (BATCH, _mels(c), 2 * entry(c, "max_source_positions", default=FRAMES)),
        lambda c: (BATCH, 64, _mels(c)),
        lambda c: (BATCH, 1, 64, _mels(c)),
    ),
    "past_values": shapes(
        lambda c: (BATCH, entry(c, "context_length", default=FRAMES), entry(c, "num_input_channels", default=3)),
        lambda c: (BATCH, entry(c, "context_length", default=FRAMES) + 7),
        lambda c: (BATCH, entry(c, "context_length", default=FRAMES)),
    ),
    "past_time_features": shapes(lambda c: (BATCH, entry(c, "context_length", default=FRAMES) + 7, 1)),
    "past_observed_mask": [lambda c: torch.ones(BATCH, entry(c, "context_length", default=FRAMES) + 7)],
    "bbox": [lambda c: torch.arange(4).repeat(BATCH, WORDS, 1)],
    "inputs_embeds": shapes(lambda c: (BATCH, WORDS, entry(c, "hidden_size", "d_model", default=32))),
    "hidden_states": shapes(
        lambda c: (BATCH, WORDS, entry(c, "hidden_size", "d_model", default=32)),
        lambda c: (BATCH, entry(c, "hidden_size", default=32), WORDS),
        _patches(lambda c: _channels(c) * entry(c, "temporal_patch_size", default=2)),
        _patches(_channels),
    ),
    "attention_mask": [lambda c: torch.ones(BATCH, WORDS, dtype=torch.long)],
    "encoder_hidden_states": shapes(lambda c: (BATCH, WORDS, entry(c, "encoder_hidden_size", "hidden_size", default=32))),
    "noisy_input_ids": [words],
    "visual_feats": shapes(lambda c: (BATCH, PATCHES, entry(c, "visual_feat_dim", default=32))),
    "visual_pos": shapes(lambda c: (BATCH, PATCHES, entry(c, "visual_pos_dim", default=4))),
    "audio_codes": [lambda c: torch.randint(0, VOCABULARY, (BATCH, entry(c, "num_quantizers", default=2), WORDS))],
    "input_coords": shapes(lambda c: (BATCH, WORDS, 2)),
    "inputs": [words, *shapes(lambda c: (BATCH, WORDS, entry(c, "d_model", default=32)))],
}
# arguments of other names, by what their names end in
ENDINGS: dict[str, str] = {
    "prompt_masks": "pixel_values",
    "pixel_values": "pixel_values",
    "input_ids": "input_ids",
    "embeds": "inputs_embeds",
    "hidden_states": "inputs_embeds",
}


def makers(name: str) -> list[Callable[[Any], torch.Tensor]]:
    """What an argument may be; nothing for a name that says nothing."""
    if name in MAKERS:
        return MAKERS[name]
    return next((MAKERS[known][:2] for ending, known in ENDINGS.items() if name.endswith(ending)), [])


# what a model is run on: sets of arguments, the first that the signature has
SETS: list[tuple[str, ...]] = [
    ("input_ids", "pixel_values", "image_grid_thw"),
    ("input_ids", "pixel_values"),
    ("input_ids", "input_features"),
    ("input_ids", "visual_feats", "visual_pos"),
    ("input_ids",),
    ("pixel_values", "prompt_pixel_values"),
    ("pixel_values",),
    ("latents",),
    ("audio_mel",),
    ("noise_embeds",),
    ("action_embeds",),
    ("query_embeds",),
    ("input_values",),
    ("input_features",),
    ("pixel_values_videos",),
    ("past_values",),
    ("inputs",),
    ("hidden_states",),
    ("inputs_embeds",),
    ("audio_codes",),
    ("states", "actions", "rewards", "returns_to_go", "timesteps"),
]


def candidates(model: nn.Module, config: Any) -> Iterator[Arguments]:
    """What the model may be run on, likely ones first."""
    parameters = inspect.signature(model.forward).parameters
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name != "self"
    ]
    extra = [
        n
        for n in ("decoder_input_ids", "decoder_input_values", "bbox")
        if n in parameters and (n == "bbox" or config.is_encoder_decoder)
    ]
    sets = [s for s in SETS if set(s) <= set(parameters)]
    first = [s for s in sets if len(s) > 1 or getattr(model, "main_input_name", None) in s]
    for chosen in (*first, *(s for s in sets if s not in first)):
        for more in (
            (*extra, *needed),
            (*needed,),
            (*extra, *needed, "attention_mask", "past_time_features", "past_observed_mask"),
            (*needed, "encoder_hidden_states"),
            (*extra, *needed, "input_features_mask", "pixel_attention_mask", "spatial_shapes"),
        ):
            names = list(dict.fromkeys(n for n in (*chosen, *more) if n in parameters))
            if all(map(makers, names)):
                yield from _made(names, config)


def _made(names: list[str], config: Any) -> Iterator[Arguments]:
    for made in itertools.islice(itertools.product(*map(makers, names)), MOST_CANDIDATES):
        try:
            yield {name: make(config) for name, make in zip(names, made, strict=True)}
        except (ValueError, TypeError):  # the configuration has no token for images, or no number where one is needed
            continue


def arguments(model: nn.Module, config: Any) -> Arguments:
    """The first candidate with which the model runs in eager PyTorch, in eval mode."""
    said: dict[str, None] = {}
    for kwargs in candidates(model, config):
        torch.manual_seed(seeded(0))
        try:
            with torch.no_grad():
                model.eval()(**kwargs)
        except Exception as e:  # noqa: BLE001 - any error says that these are not its arguments
            line = (str(e).strip().splitlines() or [""])[0]
            said[f"{type(e).__name__}: {line} ({', '.join(f'{n} {[*t.shape]}' for n, t in kwargs.items())})"] = None
        else:
            return kwargs
    raise NoArgumentsError(" / ".join(said) or f"none for {inspect.signature(model.forward)}")
