# SPDX-License-Identifier: Apache-2.0
"""Collect episodes with any actor: the scripted expert or a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sims
from policies.chunks import ChunkQueue
from robo_rl.app.cpu import cpu_seconds
from robo_rl.app.evaluate import EvaluateConfig, make_actor
from robo_rl.config import to_dict
from robo_rl.data.episodes import EpisodeWriter
from robo_rl.errors import ConfigError
from robo_rl.seeding import first_training_episode
from robo_rl.types import Actor, Continuous, EnvSpec, VecEnv
from sims import SimConfig


@dataclass(frozen=True)
class CollectConfig:
    env: SimConfig
    actor: str = "expert"
    """A run or checkpoint directory, or `expert` (the simulator's scripted one)."""
    episodes: int = 100
    """Episodes to write."""
    successful_only: bool = False
    """Keep only episodes that succeed at some step; the others are counted."""
    max_attempts: int = 0
    """Give up after this many episodes; 0: ten times `episodes`."""
    deterministic: bool = True
    noise: float = 0.0
    """Std of Gaussian noise on the executed actions, as a fraction of half their range; the actor's own action is what
    is written. Shows how to come back from small errors (DART, Laskey et al. 2017, arXiv:1703.09327)."""
    seed: int = 0
    """Which sequence of training initial states; evaluation states are never collected."""


@dataclass
class _Open:
    """An episode that is still running in one row."""

    init: tuple[int, int]
    obs: list[dict[str, np.ndarray]]
    steps: list[dict[str, np.ndarray]] = field(default_factory=list)
    valid: bool = True

    def arrays(self) -> dict[str, np.ndarray]:
        out = {k: np.stack([o[k] for o in self.obs]) for k in self.obs[0]}
        return out | {k: np.stack([s[k] for s in self.steps]) for k in self.steps[0]}


@dataclass
class _Progress:
    """Which training episodes were run, so that another call can go on: each is run once, whoever was killed when."""

    next: int
    """The first episode that was never begun."""
    attempted: int = 0
    successes: int = 0
    unfinished: list[int] = field(default_factory=list)
    """Begun and not ended."""

    def __post_init__(self) -> None:
        self._again = list(self.unfinished)

    def take(self, count: int) -> list[int]:
        """The next `count` episodes to run; those that an earlier call left unfinished come first."""
        again, self._again = self._again[:count], self._again[count:]
        new = list(range(self.next, self.next + count - len(again)))
        self.next += len(new)
        self.unfinished += new
        return again + new

    def finish(self, episode: int, success: bool) -> None:
        self.unfinished.remove(episode)
        self.attempted += 1
        self.successes += success


def collect(config: CollectConfig, out: Path) -> dict[str, Any]:
    """Write `config.episodes` episodes to the folder `out`. A folder that an earlier call with the same settings left
    (killed, interrupted, or with fewer episodes asked for) is continued.

    Returns:
        written, attempted and successful counts, mean length and steps, over all calls; the cost of this one.

    Raises:
        ConfigError: `out` holds something else, or episodes of other settings; or fewer than asked for were found
            within `max_attempts`, and what was found is kept.
    """
    start, cpu_start = time.perf_counter(), cpu_seconds()
    env = sims.make(config.env, config.seed)
    limit = config.max_attempts or 10 * config.episodes
    settings = {k: v for k, v in to_dict(config).items() if k not in ("episodes", "max_attempts")}
    try:
        actor, _ = make_actor(EvaluateConfig(env=config.env, actor=config.actor), env.spec)
        if hasattr(getattr(actor, "config", None), "executed"):
            actor = ChunkQueue(actor)
        with EpisodeWriter(out, env.spec, config.actor, settings) as writer:
            progress = _Progress(**(writer.progress or {"next": first_training_episode(config.seed)}))
            episodes = _episodes(env, actor, config, progress)
            while len(writer.episodes) < config.episodes and progress.attempted < limit:
                episode = next(episodes)
                arrays = episode.arrays()
                success = bool(arrays["success"].any()) and episode.valid
                progress.finish(episode.init[1], success)
                writer.progress = asdict(progress)
                if episode.valid and (success or not config.successful_only):
                    writer.add(arrays, *episode.init)
    finally:
        env.close()
    lengths = [episode["length"] for episode in writer.episodes]
    if len(lengths) < config.episodes:
        raise ConfigError(
            f"Only {len(lengths)} of {config.episodes} episodes were found in {progress.attempted} attempts "
            f"({progress.successes} successful); they are in `{out}`. Use a better actor or raise max_attempts."
        )
    return {
        "written": len(lengths),
        "attempted": progress.attempted,
        "successes": progress.successes,
        "mean_length": float(np.mean(lengths)),
        "env_steps": int(np.sum(lengths)),
        "wall_s": time.perf_counter() - start,
        "cpu_s": cpu_seconds() - cpu_start,
    }


def _episodes(env: VecEnv, actor: Actor, config: CollectConfig, progress: _Progress) -> Iterator[_Open]:
    """Endless finished episodes, in the order in which they end; every initial state of the sequence once."""
    env.autoreset = False
    generator = torch.Generator().manual_seed(config.seed + progress.attempted)  # going on: not the same noise again
    num_tasks = len(env.spec.tasks)

    def start(rows: torch.Tensor):
        episodes = torch.tensor(progress.take(len(rows)))
        init = torch.stack([episodes % num_tasks, episodes], dim=1)
        obs = env.reset(rows=rows, init=init)
        for row, (task, episode) in zip(rows.tolist(), init.tolist(), strict=True):
            running[row] = _Open((task, episode), [_row(obs, row)])
        return obs

    running: dict[int, _Open] = {}
    obs = start(torch.arange(env.spec.num_envs))
    while True:
        sample = actor.act(obs, deterministic=config.deterministic, generator=generator)
        step = env.step(_disturbed(sample.action, env.spec, config.noise, generator))
        ended = step.terminated | step.truncated
        fields = {
            "action": sample.action,
            "reward": step.reward,
            "terminated": step.terminated,
            "truncated": step.truncated,
            "success": step.info["success"],
        }
        for row, episode in running.items():
            episode.obs.append(_row(step.final_obs, row))
            episode.steps.append(_row(fields, row))
            episode.valid &= bool(step.valid[row])
        obs = step.obs
        rows = (ended | ~step.valid).nonzero().squeeze(-1)
        if len(rows):
            finished = [running.pop(row) for row in rows.tolist()]
            actor.reset(rows)
            obs = start(rows)
            yield from finished


def _disturbed(action: torch.Tensor, spec: EnvSpec, noise: float, generator: torch.Generator) -> torch.Tensor:
    if noise == 0.0:
        return action
    if not isinstance(spec.action, Continuous):
        raise ConfigError(f"`noise` is for continuous actions; `{spec.name}` has discrete ones.")
    low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
    drawn = torch.randn(action.shape, generator=generator)
    return (action + noise * (high - low) / 2 * drawn).clamp(low, high)


def _row(tensors: dict[str, torch.Tensor], row: int) -> dict[str, np.ndarray]:
    return {k: v[row].cpu().numpy().copy() for k, v in tensors.items()}
