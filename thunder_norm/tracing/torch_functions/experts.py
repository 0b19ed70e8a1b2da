"""Experts of transformers that get the tokens sent to them: in a trace every expert gets all tokens, and a mask leaves the others out.

How many tokens an expert gets depends on their values, and so would the shapes of what it computes.  All other mixtures of experts in
transformers run another implementation by default, which compilers can follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.tracing.lookasides import instead_of_named
from thunder.core.interpreter import _interpret_call


def _mixture(
    experts: list[Callable[[torch.Tensor], torch.Tensor]], tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The sum over experts of what each makes of the tokens that chose it, times their weights.

    Args:
        experts: from [tokens, width] to the same.
        tokens: [tokens, width].
        chosen: [tokens, choices, experts], other than 0 where a choice of a token is that expert.
        weights: [tokens, choices].
    """
    total = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        choices = chosen[:, :, number] != 0
        own = torch.where(choices, weights, torch.zeros_like(weights)).sum(-1, keepdim=True)
        found = expert(tokens) * own
        total = total + torch.where(choices.any(-1)[:, None], found, torch.zeros_like(found)).to(tokens.dtype)
    return total


def _of_switch(
    self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    experts = [self[f"expert_{i}"] for i in range(self.num_experts)]
    return _mixture(experts, hidden_states, selected_experts, routing_weights)


def _of_nllb(self: Any, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor) -> torch.Tensor:
    def dropped(expert: Callable, states: torch.Tensor) -> torch.Tensor:
        found = expert(states)
        if self.moe_token_dropout > 0:
            found = self.token_dropout(found) if self.training else found * (1 - self.moe_token_dropout)
        return found

    experts = [functools.partial(dropped, self[f"expert_{i}"]) for i in range(self.num_experts)]
    chosen = F.one_hot(router_mask, num_classes=self.num_experts)
    return _mixture(experts, hidden_states, chosen, router_probs[:, : chosen.shape[1]])


def _of_dbrx(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    tokens = hidden_states.reshape(-1, self.hidden_size)
    v1, w1, w2 = (w.view(-1, self.ffn_hidden_size, self.hidden_size) for w in (self.mlp.v1, self.mlp.w1, self.mlp.w2))

    def expert(number: int, states: torch.Tensor) -> torch.Tensor:
        return self.mlp(states, w1[number], v1[number], w2[number]).view(-1, self.hidden_size)

    experts = [functools.partial(expert, i) for i in range(self.num_experts)]
    chosen = F.one_hot(top_k_index, num_classes=self.num_experts)
    return _mixture(experts, tokens, chosen, top_k_weights).view(hidden_states.shape[0], -1, self.hidden_size)


def _of_longcat(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    def expert(number: int, states: torch.Tensor) -> torch.Tensor:
        if number >= self.num_routed_experts or self.gate_up_proj is None:
            return self.identity_expert(states)
        gate, up = F.linear(states, self.gate_up_proj[number]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[number])

    experts = [functools.partial(expert, i) for i in range(self.total_experts)]
    chosen = F.one_hot(top_k_index, num_classes=self.total_experts)
    return _mixture(experts, hidden_states, chosen, top_k_weights)


def _of_privacy_filter(
    self: Any, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    def expert(number: int, states: torch.Tensor) -> torch.Tensor:
        gate_up = states @ self.gate_up_proj[number].float() + self.gate_up_proj_bias[number].float()
        return self._apply_gate(gate_up).float() @ self.down_proj[number].float() + self.down_proj_bias[number].float()

    experts = [functools.partial(expert, i) for i in range(self.num_experts)]
    chosen = F.one_hot(router_indices, num_classes=self.num_experts)
    return _mixture(experts, hidden_states.float(), chosen, routing_weights.float()).to(hidden_states.dtype)


_MODULES = {
    "switch_transformers.modeling_switch_transformers": ("SwitchTransformersExperts", _of_switch),
    "nllb_moe.modeling_nllb_moe": ("NllbMoeExperts", _of_nllb),
    "dbrx.modeling_dbrx": ("DbrxExperts", _of_dbrx),
    "longcat_flash.modeling_longcat_flash": ("LongcatFlashExperts", _of_longcat),
    "openai_privacy_filter.modeling_openai_privacy_filter": ("OpenAIPrivacyFilterExperts", _of_privacy_filter),
}

for _module, (_class, _instead) in _MODULES.items():
    instead_of_named(f"transformers.models.{_module}", f"{_class}.forward")(functools.partial(_interpret_call, _instead))
