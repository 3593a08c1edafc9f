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

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn

from robo_rl.batch import Rollout, minibatches
from robo_rl.errors import ConfigError, NonFiniteError
from robo_rl.functional import gaussian
from robo_rl.functional.advantages import fold_chunk, gae, to_go_within_chunk
from robo_rl.functional.losses import clipped_surrogate, explained_variance, kl_k3, value_loss
from robo_rl.nn.flat import flatten_parameters
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
        # One flat parameter for each learning rate.
        separate = config.critic_learning_rate is not None
        groups = [
            [p for name, p in trained if (separate and name.startswith("critic")) == flag] for flag in (False, True)
        ]
        self.parameters = [flatten_parameters(group) for group in groups if group]
        self.optimizer = torch.optim.Adam(
            [{"params": [p], "lr": config.learning_rate} for p in self.parameters], eps=config.adam_epsilon, fused=True
        )
        device = self.parameters[0].device
        self.reward_scaler = RewardScaler(num_envs).to(device) if config.scale_reward else None
        self.updates = 0
        self.learning_rate = config.learning_rate
        self._set_learning_rate(config.learning_rate)

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
            self._set_learning_rate(config.learning_rate * (1 - progress))
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
            "train/learning_rate": self.learning_rate,
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
                self._zero_gradients()
                return kls[-1]
            (loss / config.gradient_accumulation if config.gradient_accumulation > 1 else loss).backward()
            if i % config.gradient_accumulation == 0 or i == count:
                norm = self._clip_gradients()
                # A NaN anywhere in the loss or its gradient makes the norm NaN: one check covers all.
                if not math.isfinite(norm):
                    self._zero_gradients()
                    raise NonFiniteError(
                        f"PPO's gradient norm is {norm} (loss {float(loss.detach())}). The policy is "
                        "as it was before this step. Look for extreme rewards or observations in the saved minibatch.",
                        flat_tensors(minibatch),
                    )
                self.optimizer.step()
                self._zero_gradients()
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
        advantage, log_ratio, weight = self._ratio(batch, evaluation)
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
            metrics |= self._measure(batch, evaluation, log_ratio)
        for term in self.terms:
            extra, extra_metrics = term(self.policy, batch, evaluation)
            loss = loss + extra
            metrics |= extra_metrics if measure else {}
        return loss, metrics

    @torch.no_grad()
    def _measure(self, batch: Rollout, evaluation: Evaluation, log_ratio: Tensor) -> dict[str, Tensor]:
        """How far the policy has moved from the one that collected, and its entropy."""
        config, old = self.config, batch.sample.trace
        low, high = math.log(1 - config.clip), math.log(1 + (config.clip_high or config.clip))
        metrics = {
            "entropy_loss": -evaluation.entropy.mean(),
            "approx_kl": kl_k3(log_ratio).mean(),
            "clip_fraction": ((log_ratio < low) | (log_ratio > high)).float().mean(),
        }
        if config.target_kl is not None and evaluation.mean is not None and evaluation.std is not None:
            metrics["kl"] = gaussian.kl(old["mean"], old["std"], evaluation.mean, evaluation.std).mean()
        return metrics

    def _ratio(self, batch: Rollout, evaluation: Evaluation) -> tuple[Tensor, Tensor, Tensor | None]:
        """Advantage and log-ratio, (B,) or (B, H) each, and the weights (B, H) of actions where they are apart.

        Actions of a chunk that were not executed have log-ratio 0.
        """
        assert batch.advantage is not None and batch.sample.log_prob is not None
        log_ratio = evaluation.log_prob - batch.sample.log_prob
        if log_ratio.ndim == 1:
            return batch.advantage, log_ratio, None
        log_ratio = log_ratio * batch.valid
        if self.config.ratio == "chunk":
            return batch.advantage, log_ratio.sum(-1), None
        advantage = batch.advantage if batch.advantage.ndim == 2 else batch.advantage[:, None]
        return advantage.expand_as(log_ratio), log_ratio, batch.valid.to(log_ratio.dtype)

    def actor(self) -> Policy:
        return self.policy

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser moments, learning rate and reward statistics as flat tensors; the policy saves its own weights."""
        state = {
            "learning_rate": torch.tensor(self.learning_rate, dtype=torch.float64),
            "updates": torch.tensor(self.updates),
        }
        for index, moments in self.optimizer.state_dict()["state"].items():
            state |= {f"adam/{index}/{name}": value for name, value in moments.items()}
        if self.reward_scaler is not None:
            state |= {f"reward_scaler/{k}": v for k, v in self.reward_scaler.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict` of the same configuration."""
        moments: dict[int, dict[str, Tensor]] = defaultdict(dict)
        scaler = {}
        for key, value in state.items():
            kind, _, rest = key.partition("/")
            if kind == "adam":
                index, name = rest.split("/")
                moments[int(index)][name] = value
            elif kind == "reward_scaler":
                scaler[rest] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": dict(moments), "param_groups": groups})
        if self.reward_scaler is not None:
            self.reward_scaler.load_state_dict(scaler)
        self._set_learning_rate(float(state["learning_rate"]))
        self.updates = int(state["updates"])

    def _clip_gradients(self) -> float:
        """Scale all gradients to a common norm of at most `max_grad_norm`; returns the norm before."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = math.hypot(*(grad.norm().item() for grad in grads))
        if norm > self.config.max_grad_norm:
            for grad in grads:
                grad.mul_(self.config.max_grad_norm / (norm + 1e-6))
        return norm

    def _zero_gradients(self) -> None:
        for p in self.parameters:
            assert p.grad is not None  # flatten_parameters made it
            p.grad.zero_()

    def _adapt_learning_rate(self, kl: float) -> None:
        config = self.config
        assert config.target_kl is not None  # refused in __init__
        if kl > 2 * config.target_kl:
            self._set_learning_rate(max(config.learning_rate_min, self.learning_rate / 1.5))
        elif kl < config.target_kl / 2:
            self._set_learning_rate(min(config.learning_rate_max, self.learning_rate * 1.5))

    def _set_learning_rate(self, rate: float) -> None:
        self.learning_rate = rate
        config = self.config
        ratio = 1.0 if config.critic_learning_rate is None else config.critic_learning_rate / config.learning_rate
        for group, factor in zip(self.optimizer.param_groups, (1.0, ratio), strict=False):
            group["lr"] = rate * factor


def _standardize(x: Tensor, over: Tensor) -> Tensor:
    """`x` shifted and scaled by the mean and std of `over`."""
    std, mean = torch.std_mean(over)
    return (x - mean) / (std + 1e-8)


def flat_tensors(batch: Rollout) -> dict[str, Tensor]:
    """A batch as one flat dict of its own tensors, for saving."""
    out = {f"obs/{k}": v for k, v in batch.obs.items()} | {f"trace/{k}": v for k, v in batch.sample.trace.items()}
    out["action"] = batch.sample.action
    named = {"log_prob": batch.sample.log_prob, "value": batch.sample.value}
    for name in ("reward", "terminated", "truncated", "valid", "next_value", "ids", "advantage", "value_target"):
        named[name] = getattr(batch, name)
    out |= {k: v for k, v in named.items() if v is not None}
    return {k: v.detach().contiguous().clone() for k, v in out.items()}
