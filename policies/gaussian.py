# SPDX-License-Identifier: Apache-2.0
"""Diagonal-Gaussian policies for continuous actions: MLP or CNN, free or state-dependent std, tanh-squashed or not.

The network works in the unit box: its variable u is scaled from [-1, 1] to the action's bounds. Without squashing u is
clipped to the bounds on the way out, and the density is that of u before clipping. With squashing the action is
tanh(u), and the density is exact: that of u less the log-determinant of tanh.

Axes: B batch, A action_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import hardtanh

from policies.parts import action_box, make_encoder
from robo_rl.errors import ConfigError
from robo_rl.functional import gaussian
from robo_rl.nn.mlp import Activation, mlp
from robo_rl.types import IMAGES, ActionSample, Continuous, EnvSpec, Evaluation, Obs


@dataclass(frozen=True)
class GaussianConfig:
    kind: Literal["gaussian"] = "gaussian"
    obs_keys: tuple[str, ...] = ("observation.state",)
    """What the actor sees, in this order."""
    critic_obs_keys: tuple[str, ...] = ()
    """What the critic sees; empty: the same. Listing privileged keys makes the critic asymmetric."""
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers, actor and critic alike."""
    activation: Activation = "elu"
    image_features: int = 64
    """Features per camera."""
    share_encoder: bool = False
    """Actor and critic share the image encoder (only where both see the same keys)."""
    normalize_obs: bool = True
    """Scale vectors by running statistics of the training observations; frozen in evaluation."""
    obs_clip: float = 10.0
    """Normalised observations are clipped to this many standard deviations."""
    log_std_init: float = -0.7
    state_dependent_std: bool = False
    """Std from the network rather than one free number per action dimension."""
    log_std_min: float = -2.5
    log_std_max: float = 0.5
    mean_limit: float | None = None
    """Softly bound the mean of u to this magnitude (the action's bounds are at 1); None: unbounded. A mean far outside
    the bounds keeps all noise outside too, and the policy never finds out that the opposite is better."""
    squash: bool = False
    """tanh-squash the action, with exact log-probs."""


class GaussianPolicy(nn.Module):
    """Actor and critic, two separate networks over the encoded observation. A `Policy`."""

    low: Tensor
    high: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, config: GaussianConfig, spec: EnvSpec):
        super().__init__()
        if not isinstance(spec.action, Continuous):
            raise ConfigError(
                f"policy.kind `gaussian` needs a continuous action; `{spec.name}` has {spec.action.n} discrete ones. "
                "Use policy.kind `categorical`."
            )
        self.config = config
        dim = spec.action.dim
        critic_keys = config.critic_obs_keys or config.obs_keys
        self.actor_encoder = make_encoder(config, spec, config.obs_keys)
        # One encoder serves both where it has nothing to learn, or where sharing is asked for.
        learns = any(k.startswith(IMAGES) for k in critic_keys)
        self.shared = critic_keys == config.obs_keys and (config.share_encoder or not learns)
        self.critic_encoder = self.actor_encoder if self.shared else make_encoder(config, spec, critic_keys)
        outputs = 2 * dim if config.state_dependent_std else dim
        self.actor = mlp(self.actor_encoder.out_dim, config.hidden, outputs, config.activation, out_gain=0.01)
        self.critic = mlp(self.critic_encoder.out_dim, config.hidden, 1, config.activation, out_gain=1.0)
        if not config.state_dependent_std:
            self.log_std = nn.Parameter(torch.full((dim,), config.log_std_init))
        for name, value in action_box(spec.action).items():
            self.register_buffer(name, value)
        if config.squash and not bool((self.low.isfinite() & self.high.isfinite()).all()):
            raise ConfigError(f"policy.squash needs bounded actions; `{spec.name}` has {self.low} to {self.high}.")

    @torch.no_grad()
    def act(self, obs: Obs, *, deterministic: bool = False, generator: Generator | None = None) -> ActionSample:
        """Actions (B, A) within the bounds, with log_prob and value (B,); `trace` holds u, mean and std (B, A)."""
        features = self.actor_encoder(obs)
        mean, log_std = self._distribution(features)
        std = log_std.exp().expand_as(mean)
        if deterministic:
            unit = mean
        else:
            # Drawn on the CPU, so that a seed gives the same actions on every device.
            noise = torch.randn(mean.shape, generator=generator).to(mean.device)
            unit = mean + std * noise
        return ActionSample(
            action=self._to_action(unit),
            log_prob=self._log_prob(unit, mean, log_std),
            value=self._value(obs, features),
            trace={"unit": unit, "mean": mean, "std": std},
        )

    def evaluate(self, obs: Obs, sample: ActionSample) -> Evaluation:
        """The density of `sample.trace["unit"]` now. Entropy is that of u: exact where not squashed."""
        features = self.actor_encoder(obs)
        mean, log_std = self._distribution(features)
        return Evaluation(
            log_prob=self._log_prob(sample.trace["unit"], mean, log_std),
            entropy=gaussian.entropy(log_std).expand(mean.shape[0]),
            value=self._value(obs, features),
            mean=mean,
            std=log_std.exp().expand_as(mean),
        )

    def value(self, obs: Obs) -> Tensor:
        return self.critic(self.critic_encoder(obs)).squeeze(-1)

    def update_statistics(self, obs: Obs) -> None:
        self.actor_encoder.update_statistics(obs)
        if not self.shared:
            self.critic_encoder.update_statistics(obs)

    def reset(self, rows: Tensor | None = None) -> None:
        """Nothing is remembered between steps."""

    def _value(self, obs: Obs, features: Tensor) -> Tensor:
        if not self.shared:
            features = self.critic_encoder(obs)
        return self.critic(features).squeeze(-1)

    def _distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (B, A) and log std, (B, A) or (A,) where it does not depend on the state."""
        out = self.actor(features)
        if self.config.state_dependent_std:
            mean, log_std = out.chunk(2, -1)
            log_std = log_std + self.config.log_std_init
        else:
            mean, log_std = out, self.log_std
        if self.config.mean_limit is not None:
            mean = self.config.mean_limit * torch.tanh(mean / self.config.mean_limit)
        return mean, hardtanh(log_std, self.config.log_std_min, self.config.log_std_max)

    def _log_prob(self, unit: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        log_prob = gaussian.log_prob(unit, mean, log_std)
        # The constant log-determinant of the scaling to the bounds cancels in every ratio and is left out.
        return log_prob - gaussian.tanh_log_det(unit) if self.config.squash else log_prob

    def _to_action(self, unit: Tensor) -> Tensor:
        if self.config.squash:
            unit = unit.tanh()
        return (self.offset + self.scale * unit).clamp(self.low, self.high)
