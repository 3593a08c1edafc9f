# SPDX-License-Identifier: Apache-2.0
"""The velocity network for pictures and language: a prefix that reads the observation once, and an action expert.

The prefix is a transformer over tokens of pictures, vectors and the instruction. The expert's tokens are the actions of
the noisy chunk; in each of its blocks they attend to the prefix and to each other. The prefix never sees them, so its
keys and values serve all denoising steps of a chunk. After pi0 (Black et al. 2024, arXiv:2410.24164), but the expert
reads the prefix's last states in every block, not those of its own level, so that the two may differ in depth.

Axes: B batch, S noisy chunks per observation, H chunk, A action_dim, T tokens of the prefix, W width, D = W / heads,
L expert_depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.flow.config import CNNTokens, FlowConfig, TimmTokens, TorchvisionTokens, TransformerVelocity, ViTTokens
from policies.flow.networks import TIME_WAVES, time_waves
from policies.parts import make_encoder
from robo_rl.errors import ConfigError
from robo_rl.nn.attention import Block, ContextBlock
from robo_rl.nn.encoder import check_keys, module_name
from robo_rl.nn.text import WordTokens
from robo_rl.nn.vision import Backbone, GridCNN, PatchViT, check_picture_spec, check_pictures, positions
from robo_rl.types import IMAGES, TASK_ID, EnvSpec, Obs


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the expert knows of B observations.

    Attributes:
        tokens: (B, T, W), the last states.
        present: (B, T) bool, False at padding; None: there is none.
        keys, values: (L, B, heads, T, D), one layer for each of the expert's blocks.
    """

    tokens: Tensor
    present: Tensor | None
    keys: Tensor
    values: Tensor


class TransformerNetwork(nn.Module):
    """Tokens of the observation, a prefix transformer over them, and an action expert that reads it."""

    def __init__(self, config: FlowConfig, spec: EnvSpec, action_dim: int):
        super().__init__()
        settings = config.network
        assert isinstance(settings, TransformerVelocity)
        width, heads = settings.width, settings.heads
        if width % heads:
            raise ConfigError(
                f"policy.network.width = {width} cannot be divided among policy.network.heads = {heads}. Use a "
                "multiple of it."
            )
        self.chunk, self.width, self.feature_dim, self.heads = config.chunk, width, width, heads
        self.encoder = ObsTokens(config, spec, settings)
        self.prefix = nn.ModuleList(Block(width, heads) for _ in range(settings.depth))
        self.prefix_norm = nn.LayerNorm(width)
        self.keys_values = nn.Linear(width, 2 * settings.expert_depth * width)
        self.action_in = nn.Linear(action_dim, width)
        self.place = positions(config.chunk, width)
        self.time = nn.Sequential(nn.Linear(2 * TIME_WAVES, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.expert = nn.ModuleList(ContextBlock(width, heads) for _ in range(settings.expert_depth))
        self.out_norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, action_dim)

    def features(self, obs: Obs) -> Prefix:
        tokens, present = self.encoder(obs)
        bias = None if present is None else hidden_bias(present)
        for block in self.prefix:
            tokens = block(tokens, bias)
        tokens = self.prefix_norm(tokens)
        # (B, T, 2 L W) -> 2 L times (B, heads, T, D)
        parts = self.keys_values(tokens).unflatten(-1, (2, -1, self.heads, self.width // self.heads))
        keys, values = parts.permute(2, 3, 0, 4, 1, 5)
        return Prefix(tokens, present, keys, values)

    def pooled(self, features: Prefix) -> Tensor:
        """(B, feature_dim), for a critic on the encoder: the mean of the tokens that are not padding."""
        if features.present is None:
            return features.tokens.mean(1)
        weight = features.present.to(features.tokens.dtype)
        return (features.tokens * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)

    def forward(self, features: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity (B * S, H, A) at `x` (B * S, H, A) and `t` (B * S,); hidden states (B * S, H, W). The S chunks of
        one observation are neighbours, and share its prefix without copies."""
        batch = len(features.tokens)
        several = len(x) // batch
        tokens = (self.action_in(x) + self.place).view(batch, several * self.chunk, self.width)
        condition = self.time(time_waves(t, TIME_WAVES)).view(batch, several, self.width)
        context_bias = None if features.present is None else hidden_bias(features.present)
        own_bias = None if several == 1 else separate_bias(several, self.chunk, x.device)
        for block, keys, values in zip(self.expert, features.keys, features.values, strict=True):
            tokens = block(tokens, condition, keys, values, context_bias, own_bias)
        hidden = self.out_norm(tokens).view(-1, self.chunk, self.width)
        return self.out(hidden), hidden


class ObsTokens(nn.Module):
    """The tokens (B, T, W) of the configured observation keys, in their order: those of each camera's encoder, one of
    each vector, and for `task_id` the words of its instruction."""

    def __init__(self, config: FlowConfig, spec: EnvSpec, settings: TransformerVelocity):
        super().__init__()
        check_keys(spec.obs, config.obs_keys)
        self.keys, width = config.obs_keys, settings.width
        self.shapes = {key: spec.obs[key].shape for key in self.keys}
        self.cameras, self.linear = nn.ModuleDict(), nn.ModuleDict()
        for key in (k for k in self.keys if k.startswith(IMAGES)):
            check_picture_spec(key, spec.obs[key])
            self.cameras[module_name(key)] = make_camera(settings, self.shapes[key])
        vectors = tuple(k for k in self.keys if not k.startswith(IMAGES) and k != TASK_ID)
        self.vectors = make_encoder(config, spec, vectors, config.min_std)
        for key in vectors:
            self.linear[module_name(key)] = nn.Linear(self.shapes[key][0], width)
        self.words = WordTokens(spec.tasks, width) if TASK_ID in self.keys else None

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor | None]:
        """Tokens, and which of them are no padding (B, T) bool; None where all are."""
        parts, present = [], []
        for key in self.keys:
            here = None
            if key.startswith(IMAGES):
                pictures = check_pictures(key, obs[key], self.shapes[key])
                tokens = self.cameras[module_name(key)](pictures)
            elif key == TASK_ID:
                assert self.words is not None
                tokens, here = self.words(obs[key])
            else:
                tokens = self.linear[module_name(key)](self.vectors.encode(key, obs[key]))[:, None]
            parts.append(tokens)
            present.append(tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if here is None else here)
        padded = self.words is not None and self.words.padded
        return torch.cat(parts, 1), torch.cat(present, 1) if padded else None

    def update_statistics(self, obs: Obs) -> None:
        """Merge fresh observations (B, ...) into the vectors' normalisers."""
        self.vectors.update_statistics(obs)


def make_camera(settings: TransformerVelocity, shape: Sequence[int]) -> nn.Module:
    """An encoder of one camera's pictures (B, height, width, 3) uint8 into tokens (B, tokens, W)."""
    size, width = tuple(shape), settings.width
    match settings.encoder:
        case CNNTokens(channels=channels):
            return GridCNN(size, width, channels)
        case ViTTokens(patch=patch, depth=depth):
            return PatchViT(size, width, patch, depth, settings.heads)
        case TimmTokens(kind=package, name=name, weights=weights):
            return Backbone(size, width, package, name, weights)
        case TorchvisionTokens(kind=package, name=name, weights=weights):
            return Backbone(size, width, package, name, weights)


def hidden_bias(present: Tensor) -> Tensor:
    """(B, T) bool -> (B, 1, 1, T), added to logits: nobody attends to what is not there."""
    return torch.zeros_like(present, dtype=torch.float32).masked_fill_(~present, float("-inf"))[:, None, None]


def separate_bias(several: int, chunk: int, device: torch.device) -> Tensor:
    """(S * H, S * H), added to logits: the actions of one chunk attend to each other, not to another chunk's."""
    number = torch.arange(several, device=device).repeat_interleave(chunk)
    return hidden_bias(number[:, None] == number)[:, 0, 0]
