# SPDX-License-Identifier: Apache-2.0
"""Train from data: configuration in, run directory out. Today that is cloning; the data are collected first where
the configuration says how."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import policies
import sims
from policies import PolicyConfig
from robo_rl import checkpoint
from robo_rl.algorithms.bc import BC, BCConfig
from robo_rl.app.collect import CollectConfig, collect
from robo_rl.app.cpu import cpu_seconds
from robo_rl.app.evaluate import EvaluationConfig, chunked_for, evaluation_env, run_evaluation
from robo_rl.config import dump, to_dict
from robo_rl.data.dataset import EpisodeDataset
from robo_rl.errors import ConfigError
from robo_rl.tracking.run_dir import RunDir, versions
from robo_rl.tracking.tracker import Tracker
from robo_rl.types import Metrics
from sims import SimConfig


@dataclass(frozen=True)
class DemonstrationsConfig:
    """Episodes to learn from: a folder, or the recipe to collect them."""

    path: str | None = None
    """A folder that `collect` wrote; None: collect now, into the run directory."""
    episodes: int = 20
    """How many to use (the first ones of the folder)."""
    actor: str = "expert"
    """Who acts where they are collected: `expert`, a run or a checkpoint directory."""
    successful_only: bool = True
    noise: float = 0.1
    """Disturbs what is executed while collecting, never what is written; see `CollectConfig`."""
    seed: int = 0
    """Which sequence of training initial states to collect on."""


@dataclass(frozen=True)
class TrainOfflineConfig:
    env: SimConfig
    """Where demonstrations are collected and the policy is evaluated."""
    policy: PolicyConfig
    algorithm: BCConfig = field(default_factory=BCConfig)
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    seed: int = 0
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    torch_threads: int = 1
    device: str = "cpu"


def train_offline(config: TrainOfflineConfig, run_dir: Path, live: bool | None = None) -> dict[str, Any]:
    """Collect if needed, train, evaluate, and write the run directory with one checkpoint.

    Returns:
        What `result.json` holds.

    Raises:
        ConfigError: the demonstrations are of another environment, or too few.
        NonFiniteError: a gradient is not finite.
    """
    start, cpu_start = time.perf_counter(), cpu_seconds()
    directory = RunDir.create(run_dir, dump(config))
    torch.set_num_threads(config.torch_threads)
    torch.manual_seed(config.seed)
    dataset = _demonstrations(config, run_dir)
    env = evaluation_env(config.env, config.evaluation, config.seed)
    tracker = Tracker(directory, config.algorithm.gradient_steps, live)
    metrics: Metrics = {}
    try:
        spec = env.spec
        checkpoint.check_fits(dataset.spec, spec, tuple(config.policy.obs_keys))
        policy: Any = policies.make(config.policy, spec).to(config.device)
        algorithm = BC(policy, config.algorithm, window=getattr(config.policy, "chunk", 1))
        for metrics in algorithm.fit(dataset, torch.Generator().manual_seed(config.seed)):
            tracker.log(int(metrics["train/gradient_steps"]), metrics)
        train_cpu_s = cpu_seconds() - cpu_start
        step = config.algorithm.gradient_steps
        parts = {"policy": policy.state_dict()}
        saved = {"env": checkpoint.env_spec_dict(spec), "policy": to_dict(config.policy), "versions": versions()}
        checkpoint.save(run_dir / "checkpoints", step, parts, {"cpu_s": train_cpu_s}, saved)
        video = run_dir / "video" / f"step_{step:012d}.mp4" if config.evaluation.video else None
        final = run_evaluation(chunked_for(env, policy), policy, config.evaluation, video)
        tracker.log(step, final.metrics(spec))
    finally:
        env.close()
        tracker.close()
    return directory.write_result(
        {
            "metrics": metrics | final.metrics(spec),
            **final.counts(spec),
            "demonstrations": dataset.num_episodes,
            "demonstration_steps": len(dataset),
            "train_cpu_s": train_cpu_s,
            "wall_s": time.perf_counter() - start,
            "cpu_s": cpu_seconds() - cpu_start,
            "seed": config.seed,
            "counters": dict(env.counters),
        }
    )


def dry_run(config: TrainOfflineConfig) -> str:
    """Build environment and policy, and describe them; collects and trains nothing."""
    env = sims.make(replace(config.env, num_envs=1), config.seed)
    try:
        policy: Any = policies.make(config.policy, env.spec)
        sample = policy.act(env.reset())
        count = sum(p.numel() for p in policy.parameters())
        lines = [f"environment     {env.spec.name} at {env.spec.control_hz} Hz, {env.spec.simulator}"]
        lines += [f"  {k}  {v.shape} {v.dtype}" for k, v in env.spec.obs.items()]
        lines += [f"action          {tuple(sample.action.shape[1:])} {env.spec.action}"]
        lines += [f"demonstrations  {config.demonstrations.episodes} from {config.demonstrations.path or 'now'}"]
        lines += [f"policy          {config.policy.kind}, {count:,} parameters on {config.device}"]
        lines += [f"algorithm       {config.algorithm.kind}, {config.algorithm.gradient_steps:,} gradient steps"]
    finally:
        env.close()
    return "\n".join(lines)


def _demonstrations(config: TrainOfflineConfig, run_dir: Path) -> EpisodeDataset:
    wanted = config.demonstrations
    folder = run_dir / "demonstrations"
    if wanted.path is not None:
        folder = Path(wanted.path)
        if not folder.exists():
            raise ConfigError(
                f"demonstrations.path: there is no folder `{folder}`. Write one with launch/collect.py, or leave the "
                "path out to collect now."
            )
    else:
        env = replace(config.env, num_envs=min(config.env.num_envs, wanted.episodes))
        collect(
            CollectConfig(
                env, wanted.actor, wanted.episodes, wanted.successful_only, noise=wanted.noise, seed=wanted.seed
            ),
            folder,
        )
    return EpisodeDataset.load(folder, wanted.successful_only, wanted.episodes)
