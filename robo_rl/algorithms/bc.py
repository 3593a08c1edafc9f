# SPDX-License-Identifier: Apache-2.0
"""Behaviour cloning: gradient steps on the policy's own imitation loss (likelihood, flow matching, cross-entropy).

Axes: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Generator, Tensor, nn

from robo_rl.data.dataset import EpisodeDataset
from robo_rl.errors import NonFiniteError
from robo_rl.types import Imitator, Metrics


@dataclass(frozen=True)
class BCConfig:
    kind: Literal["bc"] = "bc"
    gradient_steps: int = 1000
    batch_size: int = 512
    learning_rate: float = 1e-3
    """At the start; falls to 0 along half a cosine."""
    warmup: int = 50
    """Gradient steps in which the learning rate rises from 0."""
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    log_every: int = 100
    """Gradient steps between two lines of metrics."""


class ImitationPolicy(Imitator, Protocol):
    """What cloning asks of a policy beside its loss."""

    def fit_statistics(self, obs: dict[str, Tensor], action: Tensor) -> None: ...


class BC:
    """`fit(dataset, generator)` yields metrics every `log_every` steps until all gradient steps are made."""

    def __init__(self, policy: nn.Module, config: BCConfig, window: int):
        """`window` is the number of actions that the policy predicts at once."""
        self.policy, self.config, self.window = policy, config, window
        self.imitator: ImitationPolicy = policy  # type: ignore[assignment]  # a module with the protocol's methods
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )

    def fit(self, dataset: EpisodeDataset, generator: Generator) -> Iterator[Metrics]:
        """Clone the data set.

        Raises:
            NonFiniteError: a gradient is not finite; the policy is as it was before that step.
        """
        config = self.config
        self.imitator.fit_statistics(dataset.obs, dataset.action)
        losses: list[Metrics] = []
        for step in range(1, config.gradient_steps + 1):
            batch = dataset.sample(config.batch_size, self.window, generator)
            loss, metrics = self.imitator.imitation_loss(batch, generator)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
            if not torch.isfinite(norm):
                self.optimizer.zero_grad()
                tensors = batch.obs | {"action": batch.action, "valid": batch.valid}
                raise NonFiniteError(f"Cloning's gradient norm is {float(norm)} at gradient step {step}.", tensors)
            for group in self.optimizer.param_groups:
                group["lr"] = config.learning_rate * self._schedule(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(metrics | {"grad_norm": float(norm)})
            if step % config.log_every == 0 or step == config.gradient_steps:
                yield {f"train/{k}": sum(m[k] for m in losses) / len(losses) for k in losses[0]} | {
                    "train/gradient_steps": float(step)
                }
                losses.clear()

    def _schedule(self, step: int) -> float:
        config = self.config
        return min(1.0, step / config.warmup) * 0.5 * (1 + math.cos(math.pi * step / config.gradient_steps))
