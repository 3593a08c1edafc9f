# SPDX-License-Identifier: Apache-2.0
"""Does our PPO learn as Stable-Baselines3's does? HalfCheetah-v5, one million steps, same settings, five seeds each.

Each run is one command (`--algo ours --seeds 3`) and leaves one record; a run whose record exists is not repeated.
Both are judged alike: the last policy, deterministic, over the same 50 initial states of our batched environment
(never seen in training), return over 1,000 steps.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import sims
from robo_rl.app import results
from robo_rl.app.bench import CHEETAH, PEER_ENVS, SB3_LIKE, SB3_LIKE_POLICY, BenchConfig, sb3_ppo
from robo_rl.app.cpu import cpu_seconds
from robo_rl.app.train_sim import TrainSimConfig, make_run
from robo_rl.loops.evaluate import evaluate, initial_states
from robo_rl.types import STATE, ActionSample, Obs
from sims.mujoco.gym_tasks import MujocoConfig

PAGE = "ppo_parity"
TOTAL_STEPS = 1_000_000
EVAL_EPISODES = 50


def ppo_parity(config: BenchConfig) -> list[results.Row]:
    """Make the runs that are missing, then compare what there is."""
    algos = ("ours", "sb3") if config.algo == "both" else (config.algo,)
    records = results.load_records(PAGE) if not config.quick else {}
    for algo in algos:
        seeds = config.seeds or (0, 1, 2, 3, 4)
        for seed in seeds[:1] if config.quick else seeds:
            name = f"{algo}_seed{seed}"
            if name in records:
                print(f"{name}: already there, return {records[name]['eval_return']:.0f}")
                continue
            records[name] = run(algo, seed, 20_000 if config.quick else TOTAL_STEPS)
            made = records[name]
            print(f"{name}: return {made['eval_return']:.0f} after {made['cpu_s']:.0f} CPU-s", flush=True)
            if config.write and not config.quick:
                results.save_record(PAGE, name, records[name])
    return [compare(records)]


def run(algo: str, seed: int, total_steps: int) -> dict[str, Any]:
    """Train and evaluate once; what the record holds."""
    start, cpu = time.perf_counter(), cpu_seconds()
    if algo == "ours":
        env = MujocoConfig(task=CHEETAH, num_envs=PEER_ENVS)
        loop = make_run(TrainSimConfig(env, SB3_LIKE_POLICY, SB3_LIKE, seed=seed)).loop
        metrics = {}
        while loop.env_steps < total_steps:
            metrics = next(loop)
        steps, train_return, actor = loop.env_steps, metrics["rollout/ep_rew_mean"], loop.policy
    else:
        model = sb3_ppo(CHEETAH, SB3_LIKE, "dummy", seed)
        model.learn(total_steps)
        steps, actor = model.num_timesteps, _SB3Actor(model)
        train_return = statistics.fmean(episode["r"] for episode in model.ep_info_buffer)
    wall_s, cpu_s = time.perf_counter() - start, cpu_seconds() - cpu
    env = sims.make(MujocoConfig(task=CHEETAH, num_envs=EVAL_EPISODES))
    evaluated = evaluate(env, actor, initial_states(EVAL_EPISODES)).metrics(env.spec)
    env.close()
    return {
        "algo": algo,
        "seed": seed,
        "env_steps": steps,
        "eval_return": evaluated["eval/mean_reward"],
        "eval_std": evaluated["eval/std_reward"],
        "train_return": train_return,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "commit": results.commit(),
        "command": f"python launch/bench.py ppo-parity --algo {algo} --seeds {seed} --write",
    }


def compare(records: dict[str, dict[str, Any]]) -> results.Row:
    """The row: Welch's 95 % interval of the difference of means over seeds, and the ratio of means."""
    ours, theirs = ([r["eval_return"] for r in records.values() if r["algo"] == algo] for algo in ("ours", "sb3"))
    measured, holds = f"{len(ours)} of 5 runs of ours, {len(theirs)} of 5 of Stable-Baselines3's", None
    if min(len(ours), len(theirs)) >= 2:
        low, high = welch_interval(ours, theirs)
        a, b = statistics.fmean(ours), statistics.fmean(theirs)
        measured = f"{a:.0f} against {b:.0f} ({a / b:.2f}); 95 % interval of the difference {low:.0f} to {high:.0f}"
        if min(len(ours), len(theirs)) >= 5:
            holds = low <= 0 <= high and a >= 0.85 * b
    return results.Row(
        id="ppo-parity",
        claim="PPO learns HalfCheetah-v5 in one million steps as Stable-Baselines3's PPO does, same settings",
        target="the interval of the difference covers 0 and our mean is at least 0.85 of theirs",
        measured=measured,
        holds=holds,
        seeds=tuple(sorted({r["seed"] for r in records.values()})),
        command="python launch/bench.py ppo-parity --write",
        wall_s=sum(r["wall_s"] for r in records.values()),
        cpu_s=sum(r["cpu_s"] for r in records.values()),
        commit=results.commit(),
    )


def welch_interval(a: list[float], b: list[float], level: float = 0.95) -> tuple[float, float]:
    """Confidence interval of mean(a) - mean(b), unequal variances (Welch 1947, doi:10.1093/biomet/34.1-2.28)."""
    from scipy.stats import ttest_ind

    interval = ttest_ind(a, b, equal_var=False).confidence_interval(level)
    return float(interval.low), float(interval.high)


class _SB3Actor:
    """A live Stable-Baselines3 model on our observations."""

    def __init__(self, model: Any):
        self.model = model

    def act(self, obs: Obs, *, deterministic: bool = False, generator: torch.Generator | None = None) -> ActionSample:
        action, _ = self.model.predict(obs[STATE].numpy(), deterministic=deterministic)
        return ActionSample(torch.from_numpy(action))

    def reset(self, rows: torch.Tensor | None = None) -> None:
        pass
