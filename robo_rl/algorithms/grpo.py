# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) for any `Policy`; no critic.

Episodes come in groups that start from the same state. Each is judged by its score against its group's, and every step
of it gets that advantage; PPO's clipped surrogate does the rest. A critic that the policy has is left as it is.

Differences from the paper: no KL to a reference policy (SimpleVLA-RL, piRL and DAPO leave it out too); clip-higher and
the group filter as in DAPO (Yu et al. 2025, arXiv:2503.14476) and SimpleVLA-RL (arXiv:2509.09674); a KL limit.

Axes: T num_steps, N num_envs, B minibatch, H actions of a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from robo_rl.algorithms.flat_adam import FlatAdam
from robo_rl.batch import Rollout, minibatches
from robo_rl.errors import ConfigError
from robo_rl.functional.groups import differ, group_advantage, mean_within
from robo_rl.functional.losses import chunk_ratio, clipped_surrogate, policy_shift
from robo_rl.types import Metrics, Policy


@dataclass(frozen=True)
class GRPOConfig:
    kind: Literal["grpo"] = "grpo"
    group_size: int = 8
    """Episodes that start from the same state; must divide `env.num_envs`."""
    score: Literal["success", "return"] = "success"
    """What an episode is judged by: 1 or 0, or the undiscounted sum of its rewards."""
    keep: tuple[float, float] | None = (0.1, 0.9)
    """Learn from groups whose mean success lies within; None: from all whose scores differ."""
    max_resamples: int = 4
    """Where no group of a rollout can be learned from: how often to try other initial states before skipping the
    update."""
    epochs: int = 2
    """Passes over each rollout."""
    minibatch_size: int = 1024
    gradient_accumulation: int = 1
    """Minibatches whose gradients are averaged into one optimiser step."""
    learning_rate: float = 1e-4
    schedule: Literal["constant", "linear"] = "constant"
    """linear falls to 0 at the end of training."""
    max_kl: float | None = None
    """Stop an update before a minibatch whose KL from the collecting policy exceeds this [nats]; None: never."""
    ratio: Literal["chunk", "action"] = "chunk"
    """With action chunks: one clipped ratio for the chunk, or one for each of its actions."""
    average: Literal["step", "episode"] = "step"
    """Every step weighs the same, or every episode does however long it is. Matters where success ends episodes."""
    clip: float = 0.2
    clip_high: float | None = 0.28
    """Upper clip where it differs from the lower one: higher, so that what is unlikely can become likelier."""
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    max_grad_norm: float = 1.0
    adam_epsilon: float = 1e-5


class GRPO:
    """`update(rollout, generator)` makes all gradient steps that one rollout of whole episodes deserves.

    Rollouts are `loops.groups`': rows of a group lie side by side, `valid` is False after an episode's end and for the
    whole row where something broke, and `extras["success"]` (T, N) is the episode's outcome.
    """

    def __init__(self, policy: nn.Module, config: GRPOConfig):
        self.policy: Policy = policy  # type: ignore[assignment]  # a module with the protocol's methods
        self.config = config
        trained = [p for name, p in policy.named_parameters() if p.requires_grad and not name.startswith("critic")]
        self.optimizer = FlatAdam([(trained, config.learning_rate)], config.max_grad_norm, config.adam_epsilon)

    def update(self, rollout: Rollout, generator: Generator, progress: float = 0.0) -> Metrics:
        """Improve the policy by one rollout (T, N); does nothing where no group can be learned from.

        Args:
            generator: draws the order of minibatches; on the CPU.
            progress: share of the training done, 0 to 1, for the linear schedule.

        Returns:
            Means over the minibatches, named as PPO's; `train/kept` is the share of episodes learned from.

        Raises:
            NonFiniteError: a loss or gradient is not finite; the policy is as it was before that step.
        """
        config = self.config
        if config.schedule == "linear":
            self.optimizer.set_learning_rate(config.learning_rate * (1 - progress))
        kept = self.kept(rollout)
        metrics = {
            "train/kept": float(kept.float().mean()),
            "train/learning_rate": self.optimizer.learning_rate,
            "train/epochs": 0.0,
        }
        if not bool(kept.any()):
            return metrics
        batch = self.with_advantages(rollout).flatten()
        batch = batch[batch.usable]
        totals: dict[str, list[Tensor]] = defaultdict(list)
        for epoch in range(1, config.epochs + 1):
            metrics["train/epochs"] = float(epoch)
            if not self._epoch(batch, generator, totals):
                break
        return metrics | {f"train/{k}": float(torch.stack(v).mean()) for k, v in totals.items()}

    def kept(self, rollout: Rollout) -> Tensor:
        """(N,) bool, the episodes to learn from: those of groups whose scores differ and whose mean success is within
        `keep`."""
        size, valid = self.config.group_size, rollout.usable.any(0)
        kept = differ(self.score(rollout), size, valid)
        if self.config.keep is not None:
            kept = kept & mean_within(_success(rollout), size, *self.config.keep, valid)
        return kept

    def score(self, rollout: Rollout) -> Tensor:
        """(N,) float32, what each episode is judged by."""
        if self.config.score == "success":
            return _success(rollout).float()
        return torch.where(rollout.valid, rollout.reward, 0.0).transpose(0, 1).flatten(1).sum(1)

    def with_advantages(self, rollout: Rollout) -> Rollout:
        """The rollout with advantages (T, N), the weight of each row in `extras`, and only kept episodes valid."""
        usable, kept = rollout.usable, self.kept(rollout)
        advantage = group_advantage(self.score(rollout), self.config.group_size, usable.any(0))
        weight = torch.ones_like(advantage)
        if self.config.average == "episode":
            weight = 1.0 / usable.sum(0).clamp_min(1)
        return replace(
            rollout,
            valid=rollout.valid & (kept if rollout.valid.ndim == 2 else kept[:, None]),
            advantage=advantage.expand(usable.shape),
            extras={**(rollout.extras or {}), "weight": weight.expand(usable.shape)},
        )

    def _epoch(self, batch: Rollout, generator: Generator, totals: dict[str, list[Tensor]]) -> bool:
        """One pass of gradient steps; False where the KL stopped it."""
        config = self.config
        count = -(-batch.reward.shape[0] // config.minibatch_size)
        for i, minibatch in enumerate(minibatches(batch, config.minibatch_size, generator), start=1):
            loss, metrics = self.loss(minibatch)
            for name, value in metrics.items():
                totals[name].append(value)
            if config.max_kl is not None and bool(metrics.get("kl", metrics["approx_kl"]) > config.max_kl):
                self.optimizer.zero_grad()
                return False
            (loss / config.gradient_accumulation).backward()
            if i % config.gradient_accumulation == 0 or i == count:
                totals["grad_norm"].append(torch.tensor(self.optimizer.step("GRPO", loss, minibatch)))
        return True

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss of a flat minibatch (B, ...), and what it is made of."""
        config, sample = self.config, batch.sample
        assert sample.log_prob is not None and batch.advantage is not None and batch.extras is not None
        evaluation = self.policy.evaluate(batch.obs, sample)
        advantage, log_ratio, executed = chunk_ratio(
            evaluation.log_prob, sample.log_prob, batch.advantage, batch.valid, config.ratio
        )
        clip_high = config.clip if config.clip_high is None else config.clip_high
        surrogate = clipped_surrogate(log_ratio, advantage, config.clip, clip_high, config.dual_clip)
        weight = batch.extras["weight"] if executed is None else batch.extras["weight"][:, None] * executed
        loss = policy_loss = (surrogate * weight).sum() / weight.sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * evaluation.entropy.mean()
        metrics = policy_shift(evaluation, sample, log_ratio, config.clip, clip_high, config.max_kl is not None)
        return loss, metrics | {"policy_gradient_loss": policy_loss.detach()}

    def actor(self) -> Policy:
        return self.policy

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser moments and learning rate as flat tensors; the policy saves its own weights."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict` of the same configuration."""
        self.optimizer.load_state_dict(state)


def _success(rollout: Rollout) -> Tensor:
    """(N,) bool, which episodes succeeded."""
    if not rollout.extras or "success" not in rollout.extras:
        raise ConfigError(
            "This environment defines no success to judge episodes by. Set algorithm.score to `return` and "
            "algorithm.keep to null."
        )
    return rollout.extras["success"][0]
