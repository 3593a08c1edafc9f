# SPDX-License-Identifier: Apache-2.0
"""The velocity network for states, and what every velocity network has: `features(obs)`, asked for once per chunk,
`forward(features, x, t)` at every denoising step, `pooled(features)`, `encoder`, `feature_dim` and `width`.

Axes: B batch, S noisy chunks per observation, H chunk, A action_dim, W the width of the action expert's hidden states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from policies.flow.config import FlowConfig
from policies.parts import make_encoder
from robo_rl.nn.mlp import mlp
from robo_rl.types import EnvSpec, Obs


class MLPNetwork(nn.Module):
    """(features, flat noisy chunk, time) through an MLP; the last hidden layer is the expert's hidden state."""

    def __init__(self, config: FlowConfig, spec: EnvSpec, action_dim: int):
        super().__init__()
        hidden = config.network.hidden  # type: ignore[union-attr]
        self.chunk, self.action_dim, self.width = config.chunk, action_dim, hidden[-1]
        self.encoder = make_encoder(config, spec, config.obs_keys, config.min_std)
        self.feature_dim = self.encoder.out_dim
        flat = config.chunk * action_dim
        self.trunk = mlp(self.feature_dim + flat + 2 * TIME_WAVES, hidden[:-1], hidden[-1], "silu", out_gain=2**0.5)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(hidden[-1], flat))

    def features(self, obs: Obs) -> Tensor:
        return self.encoder(obs)

    def pooled(self, features: Tensor) -> Tensor:
        """(B, feature_dim), for a critic on the encoder."""
        return features

    def forward(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity (B * S, H, A) at `x` (B * S, H, A) and `t` (B * S,); hidden states (B * S, 1, W). The S chunks of
        one observation are neighbours."""
        if len(x) != len(features):
            features = features.repeat_interleave(len(x) // len(features), dim=0)
        hidden = self.trunk(torch.cat([features, x.flatten(1), time_waves(t)], dim=1))
        return self.out(hidden).view(-1, self.chunk, self.action_dim), hidden[:, None]


TIME_WAVES = 4


def time_waves(t: Tensor, count: int = TIME_WAVES) -> Tensor:
    """(B, 2 * count): sine and cosine of 2^k pi t."""
    angle = t[:, None] * math.pi * 2.0 ** torch.arange(count, device=t.device)
    return torch.cat([angle.sin(), angle.cos()], dim=1)
