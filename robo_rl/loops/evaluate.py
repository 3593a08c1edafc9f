# SPDX-License-Identifier: Apache-2.0
"""Evaluation: a fixed list of initial states, each run exactly once. Axes: E episodes, N num_envs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Generator, Tensor

from robo_rl.batch import per_row
from robo_rl.errors import ConfigError, ContractError
from robo_rl.seeding import TUNING_EPISODES
from robo_rl.types import Actor, EnvSpec, Metrics, Step, VecEnv


@dataclass(frozen=True)
class EvaluationResult:
    """One row per initial state, in the order of the list; all (E,).

    An episode with an invalid step (broken physics, a dead worker) has `valid` False and counts as a failure.
    """

    init: Tensor
    returns: Tensor
    lengths: Tensor
    success_once: Tensor
    success_end: Tensor
    valid: Tensor

    def success(self, spec: EnvSpec) -> Tensor:
        """(E,) bool, what the task calls success: at any step of the episode, or at its last."""
        return self.success_end if spec.success is not None and spec.success.at == "end" else self.success_once

    def metrics(self, spec: EnvSpec) -> Metrics:
        """Floats named as Stable-Baselines3 names them; no success where the environment defines none."""
        metrics = {
            "eval/mean_reward": float(self.returns.mean()),
            "eval/std_reward": float(self.returns.std(correction=0)),
            "eval/mean_ep_length": float(self.lengths.float().mean()),
        }
        if spec.success is not None:
            metrics |= {
                "eval/success_rate": float(self.success(spec).float().mean()),
                "eval/success_once": float(self.success_once.float().mean()),
                "eval/success_end": float(self.success_end.float().mean()),
            }
        return metrics

    def counts(self, spec: EnvSpec) -> dict[str, Any]:
        """Integers for `result.json`: episodes, invalid ones among them, and successes with their interval."""
        counts: dict[str, Any] = {"episodes": len(self.valid), "invalid": int((~self.valid).sum())}
        if spec.success is not None:
            successes = int(self.success(spec).sum())
            counts |= {"successes": successes, "interval": wilson(successes, len(self.valid))}
        return counts


def concatenate(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """The episodes of several evaluations (seeds, tasks) as one."""
    return EvaluationResult(*(torch.cat([getattr(r, f.name) for r in results]) for f in fields(EvaluationResult)))


def initial_states(episodes: int, num_tasks: int = 1, tuning: bool = False) -> Tensor:
    """(episodes, 2) int64 of `(task_id, episode)`, the tasks in turn; never a state that training sees."""
    number = torch.arange(episodes) + (TUNING_EPISODES if tuning else 0)
    return torch.stack([torch.arange(episodes) % num_tasks, number], dim=1)


def wilson(successes: int, episodes: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95 % by default.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953. Unlike the normal interval it is right at 0 and 1.
    """
    if episodes == 0:
        return 0.0, 1.0
    p = successes / episodes
    centre = p + z * z / (2 * episodes)
    spread = z * math.sqrt(p * (1 - p) / episodes + z * z / (4 * episodes**2))
    scale = 1 + z * z / episodes
    # Exact at the ends, where rounding would leave 1e-16.
    low = (centre - spread) / scale if successes > 0 else 0.0
    high = (centre + spread) / scale if successes < episodes else 1.0
    return low, high


@torch.no_grad()
def evaluate(
    env: VecEnv,
    actor: Actor,
    init: Tensor,
    *,
    deterministic: bool = True,
    generator: Generator | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> EvaluationResult:
    """Run `actor` from every initial state of `init` (E, 2), each exactly once; rows are refilled as they end.

    Args:
        on_step: called with every step, for videos.

    Raises:
        ConfigError: `init` is no (E, 2) int64 list of at least one state.
        ContractError: an episode outlasts twice the environment's own limit.
    """
    if init.ndim != 2 or init.shape[1] != 2 or init.dtype != torch.int64 or len(init) == 0:
        raise ConfigError(
            f"Evaluation needs at least one initial state, (episodes, 2) int64 of (task_id, episode); got shape "
            f"{tuple(init.shape)} of {init.dtype}. Make the list with initial_states(episodes), episodes at least 1."
        )
    total, num_envs = len(init), env.spec.num_envs
    device = env.spec.device
    returns = torch.zeros(total)
    lengths = torch.zeros(total, dtype=torch.int64)
    once, end = torch.zeros(2, total, dtype=torch.bool)
    valid = torch.ones(total, dtype=torch.bool)
    autoreset, env.autoreset = env.autoreset, False
    try:
        running = torch.full((num_envs,), -1)  # which episode of the list each row runs; -1: idle
        first = min(total, num_envs)
        running[:first] = torch.arange(first)
        # Rows beyond the list idle on the first state: a simulator has no empty row.
        start = torch.cat([init[:first], init[:1].expand(num_envs - first, 2)])
        obs = env.reset(rows=torch.arange(num_envs), init=start)
        actor.reset()
        handed_out = first
        while bool((running >= 0).any()):
            step = env.step(actor.act(obs, deterministic=deterministic, generator=generator).action)
            obs = step.obs
            rows = (running >= 0).nonzero().squeeze(-1)
            episode = running[rows]
            reward, executed, ok = (x.cpu()[rows] for x in per_row(step))
            success = step.info["success"].cpu()[rows]
            returns[episode] += reward
            lengths[episode] += executed
            once[episode] |= step.info.get("success_once", step.info["success"]).cpu()[rows] & ok
            end[episode] = success & ok
            valid[episode] &= ok
            if on_step is not None:
                on_step(step)
            if int(lengths.max()) > 2 * env.spec.max_episode_steps:
                raise ContractError(
                    f"An episode of `{env.spec.name}` did not end within {2 * env.spec.max_episode_steps} steps, twice "
                    "its declared max_episode_steps."
                )
            ended = (step.terminated | step.truncated).cpu()[rows] | ~ok
            free = rows[ended]
            running[free] = -1
            refill = free[: total - handed_out]
            if len(refill):
                running[refill] = torch.arange(handed_out, handed_out + len(refill))
                obs = env.reset(rows=refill.to(device), init=init[running[refill]])
                actor.reset(refill)
                handed_out += len(refill)
    finally:
        env.autoreset = autoreset
    once, end = once & valid, end & valid
    return EvaluationResult(init, returns, lengths, once, end, valid)
