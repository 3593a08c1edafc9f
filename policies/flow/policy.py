# SPDX-License-Identifier: Apache-2.0
"""A flow-matching policy that imitates, acts, and can be judged again: piRL's Flow-SDE and Flow-Noise.

From noise x_0 the velocity network walks K denoising steps to an action chunk. In training one of them (or all) is
random, a Gaussian around the step that `functional.flow.denoise_step` gives; its log-density is the policy's log-prob,
and PPO needs to know nothing else. Acting and evaluating call the same `_step`.

Axes: B batch, H chunk, E executed actions of it, A action_dim, K denoise_steps, S random steps (1 or K).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn

from policies.flow.config import FlowConfig, TransformerVelocity
from policies.flow.networks import MLPNetwork
from policies.flow.transformer import TransformerNetwork
from policies.parts import action_box, make_encoder
from robo_rl.errors import ConfigError, ContractError
from robo_rl.functional import flow
from robo_rl.nn.encoder import ObsEncoder
from robo_rl.nn.mlp import mlp
from robo_rl.nn.vision import random_shift
from robo_rl.types import IMAGES, ActionSample, Continuous, EnvSpec, Evaluation, Metrics, Obs


class FlowPolicy(nn.Module):
    """A `Policy` and an `Imitator`. Normalised actions live in [-1, 1], give or take."""

    low: Tensor
    high: Tensor
    scale: Tensor
    offset: Tensor
    fitted: Tensor

    def __init__(self, config: FlowConfig, spec: EnvSpec):
        """Raises ConfigError where the settings contradict each other or do not fit the environment."""
        super().__init__()
        _check(config, spec)
        assert isinstance(spec.action, Continuous)
        self.config, self.action_dim = config, spec.action.dim
        network = TransformerNetwork if isinstance(config.network, TransformerVelocity) else MLPNetwork
        self.network = network(config, spec, self.action_dim)
        if config.sampler == "noise":
            self.noise_head = mlp(self.network.width, (128, 64), config.chunk * self.action_dim, "tanh", out_gain=0.01)
        self.critic_encoder: ObsEncoder | None = None
        critic_in = {"encoder": self.network.feature_dim, "expert": self.network.width}.get(config.critic)
        if config.critic == "obs":
            keys = config.critic_obs_keys or config.obs_keys
            self.critic_encoder = make_encoder(config, spec, keys, config.min_std)
            critic_in = self.critic_encoder.out_dim
        self.critic: nn.Module | None = None
        if critic_in is not None:
            self.critic = mlp(critic_in, config.critic_hidden, 1, "elu", out_gain=1.0)
        for name, value in action_box(spec.action).items():
            self.register_buffer(name, value)
        self.register_buffer("fitted", torch.tensor(False))
        for name, parameter in self.named_parameters():
            if any(name.removeprefix("network.").startswith(prefix) for prefix in config.frozen):
                parameter.requires_grad_(False)

    # --- acting ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, obs: Obs, *, deterministic: bool = False, generator: Generator | None = None) -> ActionSample:
        """Chunks of actions (B, E, A) within the bounds; log_prob (B, E), value (B,) where there is a critic.

        `deterministic` walks the ODE from random noise; there is then no log-prob. `trace` holds the random steps:
        states before and after `x`, `next` (B, S, H, A), `step` (B, S), and `mean`, `std` (B, S * E * A).
        """
        config, steps = self.config, self.config.denoise_steps
        features = self.network.features(obs)
        batch = next(iter(obs.values())).shape[0]

        def noise() -> Tensor:
            # Drawn on the CPU, so that a seed gives the same actions on every device.
            drawn = torch.randn(batch, config.chunk, self.action_dim, generator=generator)
            return drawn.to(self.scale.device)

        x = noise()
        random = self._random_steps(deterministic, generator)
        kept: dict[str, list[Tensor]] = {name: [] for name in ("x", "next", "step", "mean", "std")}
        log_prob, hidden_states = [], []
        for k in range(steps):
            index = torch.full((batch,), k)
            mean, std, hidden = self._step(features, x, index, exact=k not in random)
            following = mean
            if k in random:
                following = mean + std * noise()
                log_prob.append(self._log_prob(following, mean, std))
                values = (x, following, index, self._executed(mean), self._executed(std.expand_as(mean)))
                for name, value in zip(kept, values, strict=True):
                    kept[name].append(value)
            hidden_states.append(hidden)
            x = following
        action = (self.offset + self.scale * x[:, : config.executed]).clamp(self.low, self.high)
        if not random:
            return ActionSample(action=action)
        trace = {name: torch.stack(tensors, dim=1) for name, tensors in kept.items()}
        trace |= {name: trace[name].flatten(1) for name in ("mean", "std")}
        return ActionSample(
            action=action,
            log_prob=self._reduce(torch.stack(log_prob, dim=1)),
            value=self._value(obs, features, torch.stack(hidden_states, dim=1)),
            trace=trace,
        )

    def _random_steps(self, deterministic: bool, generator: Generator | None) -> tuple[int, ...]:
        config, steps = self.config, self.config.denoise_steps
        if deterministic:
            return ()
        # The last step of `cps` is exact, and has no density.
        candidates = steps - 1 if config.sampler == "cps" or config.ignore_last else steps
        if config.stochastic_steps == "all":
            return tuple(range(candidates))
        return (int(torch.randint(candidates, (), generator=generator)),)

    # --- being judged ------------------------------------------------------------------------------------------

    def evaluate(self, obs: Obs, sample: ActionSample) -> Evaluation:
        """The density of the stored random steps now; one pass of the encoder, S of the action expert."""
        trace = sample.trace
        batch, random = trace["step"].shape
        features = self.network.features(obs)
        mean, std, hidden = self._step(features, trace["x"].flatten(0, 1), trace["step"].flatten())
        log_prob = self._log_prob(trace["next"].flatten(0, 1), mean, std).unflatten(0, (batch, random))
        std = std.expand_as(mean)
        # Of Flow-Noise, per element, averaged; the others have a constant std, whose entropy would teach nothing.
        entropy = torch.zeros(batch, device=mean.device)
        if self.config.sampler == "noise":
            entropy = (std.log() + 0.5 + flow.LOG_SQRT_2PI).unflatten(0, (batch, random)).flatten(1).mean(1)
        return Evaluation(
            log_prob=self._reduce(log_prob),
            entropy=entropy,
            value=self._value(obs, features, hidden.unflatten(0, (batch, random))),
            mean=self._executed(mean).unflatten(0, (batch, random)).flatten(1),
            std=self._executed(std).unflatten(0, (batch, random)).flatten(1),
        )

    def _step(self, features: Any, x: Tensor, index: Tensor, exact: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and std of the state after step `index` (B * S,) from `x` (B * S, H, A), and the expert's hidden states.
        `features` are what the network made of B observations; only the network looks into them."""
        config = self.config
        t = flow.grid_time(index, config.denoise_steps).to(x.device)
        velocity, hidden = self.network(features, x, t)
        std = None
        if config.sampler == "noise" and not exact:
            raw = self.noise_head(hidden.mean(1)).view_as(x)
            std = flow.learned_std(raw, *config.noise_std)
        sampler = "ode" if exact else config.sampler
        mean, std = flow.denoise_step(x, velocity, index, config.denoise_steps, sampler, config.level, std)
        return mean, std, hidden

    def _log_prob(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """(B, E): the density of the executed actions' part; padding and the rest of the chunk have no say."""
        return flow.log_prob_terms(x, mean, std)[:, : self.config.executed].sum(-1)

    def _reduce(self, log_prob: Tensor) -> Tensor:
        """(B, S, E) -> (B, E)."""
        return log_prob.sum(1) if self.config.joint == "sum" else log_prob.mean(1)

    def _executed(self, x: Tensor) -> Tensor:
        """(B, H, A) -> (B, E * A)."""
        return x[:, : self.config.executed].flatten(1)

    # --- the critic --------------------------------------------------------------------------------------------

    def value(self, obs: Obs) -> Tensor:
        """(B,). Raises ContractError where the policy has no critic."""
        if self.config.critic == "expert":
            # A chunk has to be denoised to have hidden states; from the same noise each time, so that V is a function.
            value = self.act(obs, generator=Generator().manual_seed(0)).value
        else:
            value = self._value(obs, self.network.features(obs) if self.config.critic == "encoder" else None, None)
        if value is None:
            raise ContractError("This policy has no value: its policy.critic is `none`. Choose another, or use GRPO.")
        return value

    def _value(self, obs: Obs, features: Any, hidden: Tensor | None) -> Tensor | None:
        """(B,) from observations, features, or hidden states (B, S, tokens, W), as configured; or None."""
        if self.critic is None:
            return None
        if self.critic_encoder is not None:
            return self.critic(self.critic_encoder(obs)).squeeze(-1)
        if self.config.critic == "encoder":
            assert features is not None
            return self.critic(self.network.pooled(features).detach()).squeeze(-1)
        assert hidden is not None
        return self.critic(hidden.mean(2).detach()).squeeze(-1).mean(1)

    # --- imitation ---------------------------------------------------------------------------------------------

    def imitation_loss(self, batch: Any, generator: Generator | None = None) -> tuple[Tensor, Metrics]:
        """Conditional flow matching (Lipman et al. 2023, arXiv:2210.02747, eq. 14) on chunks of demonstrations.

        Args:
            batch: `obs`, `action` (B, H, A) in the environment's units, `valid` (B, H) False beyond an episode's end.

        Returns:
            the mean squared error of the velocity over valid actions, and the same as a metric.
        """
        action = (batch.action - self.offset) / self.scale
        noise = torch.randn(action.shape, generator=generator).to(action.device)
        t = flow.draw_time(action.shape[0], generator).to(action.device)
        obs = self._shifted(batch.obs, generator) if self.config.image_shift else batch.obs
        velocity, _ = self.network(self.network.features(obs), flow.interpolate(action, noise, t), t)
        error = ((velocity - (noise - action)) ** 2).mean(-1)
        loss = (error * batch.valid).sum() / batch.valid.sum()
        return loss, {"flow_matching_loss": float(loss.detach())}

    def _shifted(self, obs: Obs, generator: Generator | None) -> Obs:
        """The observations with each camera's pictures shifted at random."""
        limit, cameras = self.config.image_shift, [k for k in self.config.obs_keys if k.startswith(IMAGES)]
        return obs | {key: random_shift(obs[key], limit, generator) for key in cameras}

    @torch.no_grad()
    def fit_statistics(self, obs: Obs, action: Tensor) -> None:
        """Take the normalisers' statistics from demonstrations: observations (M, ...), actions (M, A). Frozen then."""
        self.network.encoder.update_statistics(obs)
        if self.critic_encoder is not None:
            self.critic_encoder.update_statistics(obs)
        kind = self.config.action_normalization
        if kind == "mean_std":
            self.offset.copy_(action.mean(0))
            self.scale.copy_(action.std(0).clamp_min(1e-6))
        elif kind == "quantile":
            low, high = torch.quantile(action, torch.tensor([0.01, 0.99]), dim=0)
            self.offset.copy_((high + low) / 2)
            self.scale.copy_(((high - low) / 2).clamp_min(1e-6))
        self.fitted.fill_(True)

    def update_statistics(self, obs: Obs) -> None:
        """The actor's are those of its demonstrations; the critic's go on, since its observations may go further."""
        if not self.fitted:
            self.network.encoder.update_statistics(obs)
        if self.critic_encoder is not None:
            self.critic_encoder.update_statistics(obs)

    def reset(self, rows: Tensor | None = None) -> None:
        """Nothing is remembered between chunks."""


def _check(config: FlowConfig, spec: EnvSpec) -> None:
    if not isinstance(spec.action, Continuous):
        raise ConfigError(
            f"policy.kind `flow` needs a continuous action; `{spec.name}` has {spec.action.n} discrete ones. "
            "Use policy.kind `categorical`."
        )
    if not 1 <= config.executed <= config.chunk:
        raise ConfigError(
            f"policy.executed = {config.executed} of policy.chunk = {config.chunk} predicted actions: it must be "
            "between 1 and policy.chunk."
        )
    if config.sampler == "noise" and config.stochastic_steps != "all":
        raise ConfigError(
            "policy.sampler `noise` needs policy.stochastic_steps `all`: its density is the whole chain's."
        )
    if config.denoise_steps < 1 or (config.denoise_steps == 1 and (config.sampler == "cps" or config.ignore_last)):
        raise ConfigError(
            f"policy.denoise_steps = {config.denoise_steps} leaves no random step: the last one is exact with sampler "
            "`cps` or ignore_last. Use 2 or more."
        )
    if config.critic != "obs" and config.critic_obs_keys:
        raise ConfigError(
            "policy.critic_obs_keys are for policy.critic `obs`; the other critics see what the actor sees."
        )
