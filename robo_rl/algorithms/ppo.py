# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) for any `Policy`.

One `update` takes a rollout, scales its rewards, estimates advantages, and makes several passes of minibatch steps on
the clipped surrogate, a value loss and an entropy bonus. The policy says what its log-prob means; PPO does not know
whether it is a Gaussian, a denoising step or a token sequence. Extra loss terms `(policy, batch, evaluation) -> (loss,
metrics)` are added to the sum (a distillation term makes it RPD).

Differences from the paper: GAE with exact truncation, optional dual clip, value clip and Huber loss, KL-adaptive
learning rate and KL stop (the last two after rsl_rl and Stable-Baselines3), reward scaling.

Axes: T num_steps, N num_envs, B minibatch, H actions of a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn

from robo_rl.algorithms.flat_adam import FlatAdam
from robo_rl.batch import Rollout, minibatches
from robo_rl.errors import ConfigError
from robo_rl.functional.advantages import fold_chunk, gae, to_go_within_chunk
from robo_rl.functional.losses import chunk_ratio, clipped_surrogate, explained_variance, policy_shift, value_loss
from robo_rl.nn.normalizer import RewardScaler
from robo_rl.types import Evaluation, Metrics, Policy

MEASURED = 8  # minibatches of a pass whose metrics are taken, where there are more

LossTerm: TypeAlias = Callable[[Policy, Rollout, Evaluation], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class PPOConfig:
    kind: Literal["ppo"] = "ppo"
    num_steps: int = 32
    """Steps of each environment between two updates."""
    epochs: int = 5
    """Passes over each rollout."""
    minibatch_size: int = 2048
    gradient_accumulation: int = 1
    """Minibatches whose gradients are averaged into one optimiser step."""
    learning_rate: float = 1e-3
    critic_learning_rate: float | None = None
    """Learning rate of the critic's own parameters; None: the same."""
    critic_warmup: int = 0
    """First updates in which only the critic learns: a cloned policy is not to follow an untrained one."""
    schedule: Literal["constant", "linear", "kl_adaptive"] = "kl_adaptive"
    """linear falls to 0 at the end of training; kl_adaptive steps by 1.5 to keep an update's KL near `target_kl`."""
    learning_rate_min: float = 1e-4
    learning_rate_max: float = 3e-3
    target_kl: float | None = 0.015
    """KL between the collecting policy and the updated one that an update aims at, in nats."""
    kl_stop: float | None = 2.0
    """Stop an update's passes once the KL exceeds this many times `target_kl`; None: never."""
    kl_stop_at: Literal["epoch", "minibatch"] = "epoch"
    """Judge by the mean KL of each pass, or by every minibatch before its step."""
    gamma: float = 0.97
    gae_lambda: float = 0.95
    discount: Literal["step", "chunk"] = "step"
    """With action chunks: what `gamma` is the discount of."""
    ratio: Literal["chunk", "action"] = "chunk"
    """With action chunks: one clipped ratio for the chunk, or one for each of its actions."""
    credit: Literal["chunk", "action"] = "chunk"
    """With `ratio: action`: every action gets the chunk's advantage, or that less the rewards of earlier actions."""
    clip: float = 0.2
    clip_high: float | None = None
    """Upper clip where it differs from the lower one."""
    dual_clip: float | None = None
    value_clip: float | None = None
    huber_delta: float | None = None
    """Huber's loss for the critic; None: half the squared error."""
    value_coef: float = 1.0
    entropy_coef: float = 0.0
    max_grad_norm: float = 1.0
    adam_epsilon: float = 1e-5
    normalize_advantage: Literal["rollout", "minibatch", "none"] = "rollout"
    scale_reward: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""


class PPO:
    """`update(rollout, generator)` makes all gradient steps that one rollout deserves."""

    def __init__(self, policy: nn.Module, config: PPOConfig, num_envs: int, terms: Sequence[LossTerm] = ()):
        if config.credit == "action" and config.ratio == "chunk":
            raise ConfigError("algorithm.credit `action` needs algorithm.ratio `action`: one ratio has one advantage.")
        if config.schedule == "kl_adaptive" and config.target_kl is None:
            raise ConfigError("algorithm.schedule `kl_adaptive` needs algorithm.target_kl, for example 0.015.")
        self.policy: Policy = policy  # type: ignore[assignment]  # a module with the protocol's methods
        self.config, self.terms = config, tuple(terms)
        trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
        groups = [([p for _, p in trained], config.learning_rate)]
        if config.critic_learning_rate is not None:
            critic = [p for name, p in trained if name.startswith("critic")]
            others = [p for name, p in trained if not name.startswith("critic")]
            groups = [(others, config.learning_rate), (critic, config.critic_learning_rate)]
        self.optimizer = FlatAdam(groups, config.max_grad_norm, config.adam_epsilon)
        self.reward_scaler = RewardScaler(num_envs).to(trained[0][1].device) if config.scale_reward else None
        self.updates = 0

    def update(self, rollout: Rollout, generator: Generator, progress: float = 0.0) -> Metrics:
        """Improve the policy by one rollout (T, N).

        Args:
            generator: draws the order of minibatches; on the CPU.
            progress: share of the training done, 0 to 1, for the linear schedule.

        Returns:
            Means over the minibatches, named as Stable-Baselines3 names them.

        Raises:
            NonFiniteError: a loss or gradient is not finite; the policy is as it was before that step.
        """
        config = self.config
        if config.schedule == "linear":
            self.optimizer.set_learning_rate(config.learning_rate * (1 - progress))
        rollout = self.with_advantages(rollout)
        batch = rollout.flatten()
        if not bool(batch.usable.all()):
            batch = batch[batch.usable]
        assert batch.sample.value is not None and batch.value_target is not None
        totals: dict[str, list[Tensor]] = defaultdict(list)
        kl = torch.zeros(())
        for epoch in range(1, config.epochs + 1):
            kl = self._epoch(batch, generator, totals)
            totals["epochs"] = [torch.tensor(float(epoch))]
            if self._too_far(kl):
                break
        self.updates += 1
        if config.schedule == "kl_adaptive":
            self._adapt_learning_rate(float(kl))
        metrics = {f"train/{k}": float(torch.stack(v).mean()) for k, v in totals.items()}
        return metrics | {
            "train/explained_variance": float(explained_variance(batch.sample.value, batch.value_target)),
            "train/learning_rate": self.optimizer.learning_rate,
        }

    def with_advantages(self, rollout: Rollout) -> Rollout:
        """The rollout with scaled rewards, advantages and value targets, all (T, N)."""
        config = self.config
        reward, usable = rollout.reward, rollout.usable
        gamma = torch.full_like(rollout.next_value, config.gamma)
        per_step = config.gamma if config.discount == "step" else 1.0
        if reward.ndim == 3:
            reward, executed = fold_chunk(reward, rollout.valid, per_step)
            if config.discount == "step":
                gamma = gamma**executed
        if self.reward_scaler is not None:
            reward = self.reward_scaler(reward, gamma, rollout.terminated | rollout.truncated, usable)
        assert rollout.sample.value is not None
        advantage, value_target = gae(
            reward,
            rollout.sample.value,
            rollout.next_value,
            rollout.terminated,
            rollout.truncated,
            gamma,
            config.gae_lambda,
            usable,
        )
        if config.credit == "action" and rollout.reward.ndim == 3:
            scale = self.reward_scaler.statistics.scale if self.reward_scaler is not None else 1.0
            advantage = to_go_within_chunk(advantage, rollout.reward * scale, rollout.valid, per_step)
            usable = rollout.valid
        if config.normalize_advantage == "rollout":
            advantage = _standardize(advantage, advantage[usable])
        return replace(rollout, advantage=advantage, value_target=value_target)

    def _too_far(self, kl: Tensor) -> bool:
        config = self.config
        limit = None if config.kl_stop is None or config.target_kl is None else config.kl_stop * config.target_kl
        return limit is not None and bool(kl > limit)

    def _epoch(self, batch: Rollout, generator: Generator, totals: dict[str, list[Tensor]]) -> Tensor:
        """One pass of gradient steps; returns its mean KL."""
        config = self.config
        kls = []
        # Where minibatches are many, a few of each pass are measured: metrics cost as much as the loss itself.
        count = -(-batch.reward.shape[0] // config.minibatch_size)
        every = 1 if config.kl_stop_at == "minibatch" else max(1, count // MEASURED)
        for i, minibatch in enumerate(minibatches(batch, config.minibatch_size, generator), start=1):
            loss, metrics = self.loss(minibatch, measure=i % every == 0)
            if metrics:
                kls.append(metrics.get("kl", metrics["approx_kl"]))
            if config.kl_stop_at == "minibatch" and self._too_far(kls[-1]):
                self.optimizer.zero_grad()
                return kls[-1]
            (loss / config.gradient_accumulation if config.gradient_accumulation > 1 else loss).backward()
            if i % config.gradient_accumulation == 0 or i == count:
                norm = self.optimizer.step("PPO", loss, minibatch)
                totals["grad_norm"].append(torch.tensor(norm))
            for name, value in metrics.items():
                totals[name].append(value)
        return torch.stack(kls).mean()

    def loss(self, batch: Rollout, measure: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss of a flat minibatch (B, ...), and if asked for what it is made of."""
        config = self.config
        sample = batch.sample
        assert sample.log_prob is not None and batch.advantage is not None and batch.value_target is not None
        evaluation = self.policy.evaluate(batch.obs, sample)
        assert evaluation.value is not None
        advantage, log_ratio, weight = chunk_ratio(
            evaluation.log_prob, sample.log_prob, batch.advantage, batch.valid, config.ratio
        )
        if config.normalize_advantage == "minibatch":
            advantage = _standardize(advantage, advantage)
        clip_high = config.clip if config.clip_high is None else config.clip_high
        surrogate = clipped_surrogate(log_ratio, advantage, config.clip, clip_high, config.dual_clip)
        policy_loss = surrogate.mean() if weight is None else (surrogate * weight).sum() / weight.sum()
        critic_loss = value_loss(
            evaluation.value, batch.value_target, sample.value, config.value_clip, config.huber_delta
        ).mean()
        loss = config.value_coef * critic_loss
        if self.updates >= config.critic_warmup:
            loss = loss + policy_loss
        if config.entropy_coef and self.updates >= config.critic_warmup:
            loss = loss - config.entropy_coef * evaluation.entropy.mean()
        metrics: dict[str, Tensor] = {}
        if measure:
            metrics = {"policy_gradient_loss": policy_loss.detach(), "value_loss": critic_loss.detach()}
            exact = config.target_kl is not None
            metrics |= policy_shift(evaluation, sample, log_ratio, config.clip, clip_high, exact)
        for term in self.terms:
            extra, extra_metrics = term(self.policy, batch, evaluation)
            loss = loss + extra
            metrics |= extra_metrics if measure else {}
        return loss, metrics

    def actor(self) -> Policy:
        return self.policy

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser moments, learning rate and reward statistics as flat tensors; the policy saves its own weights."""
        state = self.optimizer.state_dict() | {"updates": torch.tensor(self.updates)}
        if self.reward_scaler is not None:
            state |= {f"reward_scaler/{k}": v for k, v in self.reward_scaler.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict` of the same configuration."""
        self.optimizer.load_state_dict(state)
        self.updates = int(state["updates"])
        if self.reward_scaler is not None:
            prefix = "reward_scaler/"
            scaler = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            self.reward_scaler.load_state_dict(scaler)

    def _adapt_learning_rate(self, kl: float) -> None:
        config, rate = self.config, self.optimizer.learning_rate
        assert config.target_kl is not None  # refused in __init__
        if kl > 2 * config.target_kl:
            self.optimizer.set_learning_rate(max(config.learning_rate_min, rate / 1.5))
        elif kl < config.target_kl / 2:
            self.optimizer.set_learning_rate(min(config.learning_rate_max, rate * 1.5))


def _standardize(x: Tensor, over: Tensor) -> Tensor:
    """`x` shifted and scaled by the mean and std of `over`."""
    std, mean = torch.std_mean(over)
    return (x - mean) / (std + 1e-8)
