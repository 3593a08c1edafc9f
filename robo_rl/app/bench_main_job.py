# SPDX-License-Identifier: Apache-2.0
"""The main job, measured: every tabletop and ManiSkill task of `configs/train/` from zero, three seeds.

Each run is one command (`--tasks lift --seeds 1`) and leaves one record; a run whose record exists is not repeated, and
one that was cut is resumed. The policy evaluated is the last one, over 200 initial states that neither training nor
tuning ever saw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robo_rl.app import results
from robo_rl.app.train_sim import TrainSimConfig, load_run_config, train_sim
from robo_rl.config import load
from robo_rl.errors import unknown_name
from robo_rl.loops.evaluate import wilson

PAGE = "main_job"
RUNS = Path("runs") / PAGE


@dataclass(frozen=True)
class Goal:
    """Success in per cent to reach within CPU minutes (two cores: twice the wall minutes); None: reported only."""

    success: int | None
    cpu_minutes: float


GOALS = {
    "reach": Goal(95, 2),
    "lift": Goal(95, 10),
    "push": Goal(90, 16),
    "pick_place": Goal(80, 30),
    "stack": Goal(None, 60),
    "maniskill_pushcube": Goal(90, 30),
    "maniskill_pickcube": Goal(None, 60),
}


def main_job(tasks: tuple[str, ...], seeds: tuple[int, ...], quick: bool, write: bool) -> list[results.Row]:
    """Make the runs that are missing, then the rows of all tasks that have any."""
    for task in tasks:
        if task not in GOALS:
            raise unknown_name("task of the main job", task, GOALS)
    records = {} if quick else results.load_records(PAGE)
    for task in tasks:
        for seed in seeds[:1] if quick else seeds:
            name = f"{task}_seed{seed}"
            if name not in records:
                records[name] = run(task, seed, quick)
                if write and not quick:
                    results.save_record(PAGE, name, records[name])
            print(f"{name}: {records[name]['successes']} of {records[name]['episodes']}", flush=True)
    return [row(task, records) for task in GOALS if any(r["task"] == task for r in records.values())]


def run(task: str, seed: int, quick: bool) -> dict[str, Any]:
    """Train once, or finish a run that was cut; what the record holds."""
    run_dir = RUNS / f"{task}_seed{seed}{'_quick' if quick else ''}"
    resume = (run_dir / "checkpoints" / "last").exists()
    if resume:
        config = load_run_config(run_dir)
    else:
        config = replace(load(TrainSimConfig, Path("configs/train") / f"{task}.yaml"), seed=seed)
        if quick:
            config = replace(config, total_env_steps=20_000)
    result = train_sim(config, run_dir, resume=resume, live=False)
    if result["interrupted"]:
        raise KeyboardInterrupt
    record = {"task": task, "seed": seed, "commit": results.commit()}
    for key in ("successes", "episodes", "invalid", "env_steps", "train_cpu_s", "train_wall_s", "cpu_s", "wall_s"):
        record[key] = result[key]
    record["steps_per_cpu_s"] = result["env_steps"] / result["train_cpu_s"]
    record["dropped"] = sum(result["counters"].values())
    record["machine"] = result["versions"]["platform"]
    return record


def row(task: str, records: dict[str, dict[str, Any]]) -> results.Row:
    """One task's claim over its seeds; every seed must reach the goal by itself within its CPU time."""
    goal = GOALS[task]
    mine = [r for r in records.values() if r["task"] == task]
    successes, episodes = sum(r["successes"] for r in mine), sum(r["episodes"] for r in mine)
    low, high = wilson(successes, episodes)
    worst = min(r["successes"] / r["episodes"] for r in mine)
    longest = max(r["train_cpu_s"] for r in mine) / 60
    holds = None
    if goal.success is not None and len(mine) >= 3:
        # The final evaluation is not training: the limit of a run is on the time until its last checkpoint.
        holds = 100 * worst >= goal.success and longest <= goal.cpu_minutes + 0.1
    steps = sum(r["steps_per_cpu_s"] for r in mine) / len(mine)
    return results.Row(
        id=task,
        claim=f"`{task}` from state, from zero, within {goal.cpu_minutes:g} CPU-minutes",
        target="reported" if goal.success is None else f"at least {goal.success} % with every seed",
        measured=f"{successes / episodes:.1%} [{low:.1%}, {high:.1%}], worst seed {worst:.1%}, longest run "
        f"{longest:.1f} CPU-minutes, {steps:,.0f} steps per CPU-second",
        holds=holds,
        counts=" + ".join(f"{r['successes']}/{r['episodes']}" for r in mine),
        seeds=tuple(r["seed"] for r in mine),
        command=f"python launch/bench.py main-job --tasks {task} --write",
        wall_s=sum(r["wall_s"] for r in mine),
        cpu_s=sum(r["cpu_s"] for r in mine),
        commit=", ".join(dict.fromkeys(r["commit"] for r in mine)),
    )
