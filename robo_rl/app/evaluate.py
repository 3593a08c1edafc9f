# SPDX-License-Identifier: Apache-2.0
"""Evaluate any actor over a fixed list of initial states: a checkpoint, a scripted expert, a Stable-Baselines3 zip."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import policies
import sims
from policies import PolicyConfig
from robo_rl import checkpoint
from robo_rl.app.cpu import cpu_seconds
from robo_rl.batch import per_row
from robo_rl.config import build
from robo_rl.errors import ConfigError
from robo_rl.loops.evaluate import EvaluationResult, concatenate, initial_states
from robo_rl.loops.evaluate import evaluate as evaluate_actor
from robo_rl.tracking.video import VideoWriter
from robo_rl.types import Actor, EnvSpec, Step, VecEnv
from sims import SimConfig
from sims.chunked import ChunkedEnv

VIDEO_TILES = 16


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = 0
    """Environment steps between evaluations during training; 0: only at the end."""
    episodes: int = 200
    """Fixed initial states, each run exactly once."""
    num_envs: int | None = None
    """Environments stepped together; None: as many as in training, at most `episodes`."""
    deterministic: bool = True
    tuning: bool = False
    """Take the initial states kept for tuning, never those that results are reported on."""
    video: bool = False
    """Save a tiled video of the first episodes."""


def evaluation_env(env: SimConfig, config: EvaluationConfig, seed: int = 0) -> VecEnv:
    """A simulator to evaluate in; the caller closes it."""
    return sims.make(replace(env, num_envs=min(config.num_envs or env.num_envs, config.episodes)), seed)


def chunked_for(env: VecEnv, actor: Any) -> VecEnv:
    """`env` itself, or stepped in chunks where the actor's configuration says that it predicts some."""
    executed = getattr(getattr(actor, "config", None), "executed", None)
    return env if executed is None else ChunkedEnv(env, executed)


def run_evaluation(
    env: VecEnv,
    actor: Actor,
    config: EvaluationConfig,
    video_path: Path | None = None,
    generator: torch.Generator | None = None,
) -> EvaluationResult:
    """`actor` once over the configured initial states of every task of `env`; a video of the first rows if asked."""
    generator = generator or torch.Generator().manual_seed(0)
    init = initial_states(config.episodes, len(env.spec.tasks), tuning=config.tuning)
    result = evaluate_actor(env, actor, init, deterministic=config.deterministic, generator=generator)
    if video_path is not None:
        record_video(env, actor, init[: min(VIDEO_TILES, env.spec.num_envs)], video_path, config.deterministic)
    return result


def record_video(env: VecEnv, actor: Actor, init: torch.Tensor, path: Path, deterministic: bool = True) -> None:
    """One tiled video of the episodes `init` (M, 2), M at most `num_envs`; each tile shows its running return and
    success, and keeps those of its end until the longest episode is over."""
    rows = torch.arange(len(init))
    returns = torch.zeros(len(init))
    success = torch.zeros(len(init), dtype=torch.bool)
    running = torch.ones(len(init), dtype=torch.bool)

    def on_step(step: Step) -> None:
        nonlocal success, running
        reward, _, ok = (x[rows].cpu() for x in per_row(step))
        returns.add_(torch.where(running, reward, 0.0))
        success = torch.where(running, step.info["success"][rows].cpu() & ok, success)
        running = running & ok & ~(step.terminated | step.truncated)[rows].cpu()  # as `evaluate` ends an episode
        video.add(env.render(rows), list(zip(returns.tolist(), success.tolist(), strict=True)))

    with VideoWriter(path, fps=env.spec.control_hz) as video:
        evaluate_actor(env, actor, init, deterministic=deterministic, on_step=on_step)


def load_policy(saved: checkpoint.Checkpoint) -> tuple[Any, EnvSpec]:
    """The policy of a checkpoint, and the environment it was trained in."""
    spec = saved.env_spec
    config = build(PolicyConfig, saved.spec["policy"], where=str(saved.path / "spec.json"), key="policy")
    policy = policies.make(config, spec)
    policy.load_state_dict(saved.parts["policy"])
    return policy, spec


@dataclass(frozen=True)
class EvaluateConfig:
    env: SimConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    actor: str = ""
    """A run or checkpoint directory, `expert` (the simulator's scripted one), or a zip of Stable-Baselines3."""
    sb3_obs_keys: tuple[str, ...] = ("observation.state",)
    """For a zip: the observation vectors that it was trained on, in their order."""
    vecnormalize: str | None = None
    """For a zip: the `vecnormalize.pkl` that was saved beside it."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the actor's own randomness; one evaluation each (one is enough where deterministic)."""


def evaluate(config: EvaluateConfig, out: Path | None = None) -> dict[str, Any]:
    """Evaluate `config.actor`; writes a video to `out` where one is asked for.

    Returns:
        metrics and integer counts with their interval over the episodes of all seeds, each seed's own, cost.

    Raises:
        ContractError: the checkpoint does not fit the environment (both values in the message).
    """
    start, cpu_start = time.perf_counter(), cpu_seconds()
    env = evaluation_env(config.env, config.evaluation)
    try:
        actor, warnings = make_actor(config, env.spec)
        results = []
        for seed in config.seeds:
            video = (out or Path()) / f"seed_{seed}.mp4" if config.evaluation.video else None
            generator = torch.Generator().manual_seed(seed)
            results.append(run_evaluation(chunked_for(env, actor), actor, config.evaluation, video, generator))
        counters = dict(env.counters)
    finally:
        env.close()
    pooled = concatenate(results)
    return {
        "metrics": pooled.metrics(env.spec),
        **pooled.counts(env.spec),
        "seeds": list(config.seeds),
        "per_seed": [r.metrics(env.spec) | r.counts(env.spec) for r in results],
        "warnings": warnings,
        "counters": counters,
        "env_steps": int(pooled.lengths.sum()),
        "wall_s": time.perf_counter() - start,
        "cpu_s": cpu_seconds() - cpu_start,
    }


def make_actor(config: EvaluateConfig, spec: EnvSpec) -> tuple[Actor, list[str]]:
    """The actor that a configuration names, and warnings about how it fits `spec`."""
    name = config.actor
    if name == "expert":
        return make_expert(config.env, spec), []
    path = Path(name)
    if not name or not path.exists():
        raise ConfigError(f"There is no actor `{name}`. Give a run or checkpoint directory, `expert`, or an SB3 zip.")
    if path.suffix == ".zip":
        from policies.sb3 import load_sb3

        vecnormalize = None if config.vecnormalize is None else Path(config.vecnormalize)
        return load_sb3(path, spec, config.sb3_obs_keys, vecnormalize), []
    if config.vecnormalize is not None:
        raise ConfigError("`vecnormalize` goes with a zip of Stable-Baselines3; our checkpoints hold their statistics.")
    policy, trained = load_policy(checkpoint.load(path))
    keys = policy.config.obs_keys + (policy.config.critic_obs_keys or ())
    return policy, checkpoint.check_fits(trained, spec, keys)


def make_expert(env: SimConfig, spec: EnvSpec) -> Actor:
    """The scripted expert of a simulator."""
    if env.kind == "tabletop":
        from sims.experts.tabletop import TabletopExpert

        return TabletopExpert(spec)
    raise ConfigError(f"There is no scripted expert for simulator `{env.kind}`. Known: `tabletop`.")
