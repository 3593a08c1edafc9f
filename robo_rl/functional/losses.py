# SPDX-License-Identifier: Apache-2.0
"""Losses of ratio-based policy gradients, and KL estimators. All are per element (B,); the caller averages.

Axes: B batch, H actions of a chunk.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from robo_rl.functional import gaussian
from robo_rl.types import ActionSample, Evaluation


def chunk_ratio(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, valid: Tensor, ratio: Literal["chunk", "action"]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One log-ratio per chunk of actions, or one per action.

    Args:
        log_prob, old_log_prob: (B,), or (B, H) with a column per action of a chunk.
        advantage: (B,), or (B, H) where each action has its own.
        valid: as `log_prob`, False for actions that were not executed; their log-ratio is 0.

    Returns:
        advantage and log-ratio, (B,) or (B, H) each, and the weights (B, H) of actions where they are apart, else None.
    """
    log_ratio = log_prob - old_log_prob
    if log_ratio.ndim == 1:
        return advantage, log_ratio, None
    log_ratio = log_ratio * valid
    if ratio == "chunk":
        return advantage, log_ratio.sum(-1), None
    advantage = advantage if advantage.ndim == 2 else advantage[:, None]
    return advantage.expand_as(log_ratio), log_ratio, valid.to(log_ratio.dtype)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """PPO's loss of each sample, to be minimised.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7. `clip_high` above `clip_low` is DAPO's clip-higher (Yu et
    al. 2025, arXiv:2503.14476, eq. 8). `dual_clip` c > 1 bounds the loss by c |A| where the advantage is negative (Ye
    et al. 2020, arXiv:1912.09729, eq. 5): without it a ratio of 100 on a bad action gives a gradient a hundredfold.
    """
    ratio = log_ratio.exp()
    with torch.no_grad():
        # The larger of the two losses, A r and A clip(r) with their signs turned. Where the clipped one is larger it is
        # a constant, and so is the dual clip: writing it so costs a third of what max's and clamp's gradients do.
        limit = ratio.clamp(1 - clip_low, 1 + clip_high)
        constant = advantage * ratio > advantage * limit
        if dual_clip is not None:
            bounded = (advantage < 0) & (ratio > dual_clip)
            limit, constant = torch.where(bounded, dual_clip, limit), constant | bounded
    return -advantage * torch.where(constant, limit, ratio)


def value_loss(
    value: Tensor,
    value_target: Tensor,
    old_value: Tensor | None = None,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> Tensor:
    """Half the squared error, or Huber's loss with `huber_delta`.

    With `clip`, the larger of the losses at `value` and at `value` kept within `clip` of `old_value` (the PPO code of
    Dhariwal et al. 2017, not in the paper).
    """

    def error(v: Tensor) -> Tensor:
        if huber_delta is None:
            return 0.5 * (v - value_target).square()
        return huber_loss(v, value_target, reduction="none", delta=huber_delta)

    if clip is None:
        return error(value)
    if old_value is None:
        raise ValueError("value_loss with `clip` needs `old_value`.")
    return torch.maximum(error(value), error(old_value + (value - old_value).clamp(-clip, clip)))


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator of KL(old || new) per sample: exp(r) - 1 - r >= 0, unbiased (joschu.net/blog/kl-approx)."""
    return log_ratio.exp() - 1 - log_ratio


@torch.no_grad()
def policy_shift(
    evaluation: Evaluation, sample: ActionSample, log_ratio: Tensor, clip_low: float, clip_high: float, exact_kl: bool
) -> dict[str, Tensor]:
    """How far a policy has moved from the one that collected `sample`, and its entropy; scalars, KL in nats.

    `kl`, the exact one of the Gaussians, is there if asked for with `exact_kl` and if the policy is one.
    """
    low, high = math.log(1 - clip_low), math.log(1 + clip_high)
    metrics = {
        "entropy_loss": -evaluation.entropy.mean(),
        "approx_kl": kl_k3(log_ratio).mean(),
        "clip_fraction": ((log_ratio < low) | (log_ratio > high)).float().mean(),
    }
    if exact_kl and evaluation.mean is not None and evaluation.std is not None:
        old = sample.trace
        metrics["kl"] = gaussian.kl(old["mean"], old["std"], evaluation.mean, evaluation.std).mean()
    return metrics


def explained_variance(value: Tensor, value_target: Tensor) -> Tensor:
    """1 - Var(target - value) / Var(target); 1 is a perfect critic, 0 no better than a constant."""
    return 1 - (value_target - value).var() / value_target.var().clamp_min(1e-12)
