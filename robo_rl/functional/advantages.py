# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators. Axes: T num_steps, N num_envs."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_chunk(reward: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """What a chunk of actions earned, sum of gamma^i r_i over its executed actions, and how many those were.

    `reward`, `valid` (..., H); returns (...) float and (...) int64, at least 1. With gamma = 1 a chunk counts as one
    step of the decision process (piRL, arXiv:2510.25889, section 4.2); else discount what follows by gamma ** executed.
    """
    discount = gamma ** torch.arange(reward.shape[-1], dtype=reward.dtype, device=reward.device)
    return (reward * valid * discount).sum(-1), valid.sum(-1).clamp_min(1)


def to_go_within_chunk(advantage: Tensor, reward: Tensor, valid: Tensor, gamma: float) -> Tensor:
    """Advantages (..., H) of each action of a chunk from that of the chunk (...): what came before it is taken off.

    An action cannot have caused the rewards of earlier ones; dropping them leaves the gradient unbiased.
    """
    discount = gamma ** torch.arange(reward.shape[-1], dtype=reward.dtype, device=reward.device)
    earned = reward * valid * discount
    return advantage[..., None] - (earned.cumsum(-1) - earned)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float | Tensor,
    gae_lambda: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the value targets they imply.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16. Differences from the paper: episode ends. A terminated
    step has no value beyond it; a truncated one bootstraps from `next_value`, the value of the observation the episode
    was cut at; no sum runs across either, nor across an invalid row.

    Args:
        reward, value: (T, N) float.
        next_value: (T, N) value of each step's true next observation (`Step.final_obs`), whatever was reset.
        terminated, truncated: (T, N) bool; terminated wins where both are set.
        gamma: discount of one step, or (T, N) where steps last differently (chunks: `gamma ** executed`).
        valid: (T, N) bool, False for rows that nobody learns from; their estimates are meaningless.

    Returns:
        advantage, value_target: (T, N) each.

    Example: one environment, two steps, no end, gamma = gae_lambda = 0.5
        delta = [1 + 0.5 * 4 - 2, 3 + 0.5 * 6 - 4] = [1, 2];  advantage = [1 + 0.25 * 2, 2] = [1.5, 2]
    """
    going = (~(terminated | truncated)).to(reward.dtype)
    delta = reward + gamma * next_value * ~terminated - value
    decay = gamma * gae_lambda * going
    if valid is not None:
        decay = decay * torch.cat([valid[1:], torch.ones_like(valid[:1])])  # nothing flows back from an invalid row
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in range(delta.shape[0] - 1, -1, -1):
        running = delta[t] + decay[t] * running
        advantage[t] = running
    return advantage, advantage + value
