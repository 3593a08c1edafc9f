# SPDX-License-Identifier: Apache-2.0
"""Categorical policies for discrete actions, MLP or CNN. Axes: B batch, n actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from policies.parts import make_encoder
from robo_rl.errors import ConfigError
from robo_rl.nn.mlp import Activation, mlp
from robo_rl.types import ActionSample, Discrete, EnvSpec, Evaluation, Obs


@dataclass(frozen=True)
class CategoricalConfig:
    kind: Literal["categorical"] = "categorical"
    obs_keys: tuple[str, ...] = ("observation.state",)
    """What the actor sees, in this order."""
    critic_obs_keys: tuple[str, ...] = ()
    """What the critic sees; empty: the same."""
    hidden: tuple[int, ...] = (128, 128)
    activation: Activation = "elu"
    image_features: int = 64
    normalize_obs: bool = True
    obs_clip: float = 10.0


class CategoricalPolicy(nn.Module):
    """Actor and critic over separately encoded observations. A `Policy`."""

    def __init__(self, config: CategoricalConfig, spec: EnvSpec):
        super().__init__()
        if not isinstance(spec.action, Discrete):
            raise ConfigError(
                f"policy.kind `categorical` needs discrete actions; `{spec.name}` has {spec.action.dim} continuous "
                "dimensions. Use policy.kind `gaussian`."
            )
        self.config = config
        self.actor_encoder = make_encoder(config, spec, config.obs_keys)
        self.critic_encoder = make_encoder(config, spec, config.critic_obs_keys or config.obs_keys)
        self.actor = mlp(self.actor_encoder.out_dim, config.hidden, spec.action.n, config.activation, out_gain=0.01)
        self.critic = mlp(self.critic_encoder.out_dim, config.hidden, 1, config.activation, out_gain=1.0)

    @torch.no_grad()
    def act(self, obs: Obs, *, deterministic: bool = False, generator: Generator | None = None) -> ActionSample:
        """Actions (B,) int64 with log_prob and value (B,)."""
        log_probs = self._log_probs(obs)
        if deterministic:
            action = log_probs.argmax(-1)
        else:
            # Drawn on the CPU, so that a seed gives the same actions on every device.
            action = torch.multinomial(log_probs.exp().cpu(), 1, generator=generator).squeeze(-1).to(log_probs.device)
        log_prob = log_probs.gather(-1, action[:, None]).squeeze(-1)
        return ActionSample(action=action, log_prob=log_prob, value=self.value(obs))

    def evaluate(self, obs: Obs, sample: ActionSample) -> Evaluation:
        log_probs = self._log_probs(obs)
        return Evaluation(
            log_prob=log_probs.gather(-1, sample.action[:, None]).squeeze(-1),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            value=self.value(obs),
        )

    def value(self, obs: Obs) -> Tensor:
        return self.critic(self.critic_encoder(obs)).squeeze(-1)

    def update_statistics(self, obs: Obs) -> None:
        self.actor_encoder.update_statistics(obs)
        self.critic_encoder.update_statistics(obs)

    def reset(self, rows: Tensor | None = None) -> None:
        """Nothing is remembered between steps."""

    def _log_probs(self, obs: Obs) -> Tensor:
        return self.actor(self.actor_encoder(obs)).log_softmax(-1)
