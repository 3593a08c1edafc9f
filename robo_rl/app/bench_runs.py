# SPDX-License-Identifier: Apache-2.0
"""Results pages that are made of training runs: every task of `configs/train/` that a page names, several seeds each.

Each run is one command (`--tasks lift --seeds 1`) and leaves one record; a run whose record exists is not repeated, and
one that was cut is resumed. The policy evaluated is the last one, over 200 initial states that neither training nor
tuning ever saw.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robo_rl.app import results
from robo_rl.app.train_sim import TrainSimConfig, load_run_config, train_sim
from robo_rl.config import load
from robo_rl.errors import unknown_name
from robo_rl.loops.evaluate import wilson


@dataclass(frozen=True)
class Goal:
    """What a task is to reach with every seed within CPU minutes (two cores: twice the wall minutes).

    `success` in per cent; or `gain`, percentage points above the clone that the run started from; neither: reported.
    """

    cpu_minutes: float
    success: int | None = None
    gain: int | None = None

    @property
    def target(self) -> str:
        if self.gain is not None:
            return f"at least {self.gain} points above the clone with every seed"
        return "reported" if self.success is None else f"at least {self.success} % with every seed"


PAGES: dict[str, dict[str, Goal]] = {
    "main_job": {
        "reach": Goal(2, 95),
        "lift": Goal(10, 95),
        "push": Goal(16, 90),
        "pick_place": Goal(30, 80),
        "stack": Goal(60),
        "maniskill_pushcube": Goal(30, 90),
        "maniskill_pickcube": Goal(60),
    },
    "pirl": {
        "pirl_reach": Goal(4, 95),
        "pirl_reach_noise": Goal(4, 95),
        "pirl_lift": Goal(12, 95),
        "pirl_lift_noise": Goal(12, 95),
        "pirl_push": Goal(30, gain=30),
        "pirl_pick_place": Goal(30, gain=30),
    },
}


def runs(page: str, tasks: tuple[str, ...], seeds: tuple[int, ...], quick: bool, write: bool) -> list[results.Row]:
    """Make the runs that are missing, then the rows of all tasks that have any."""
    goals = PAGES[page]
    for task in tasks:
        if task not in goals:
            raise unknown_name(f"task of the page {page}", task, goals)
    records = {} if quick else results.load_records(page)
    for task in tasks:
        for seed in seeds[:1] if quick else seeds:
            name = f"{task}_seed{seed}"
            if name not in records:
                records[name] = run(page, task, seed, quick)
                if write and not quick:
                    results.save_record(page, name, records[name])
            print(f"{name}: {records[name]['successes']} of {records[name]['episodes']}", flush=True)
    return [row(page, task, records) for task in goals if any(r["task"] == task for r in records.values())]


def run(page: str, task: str, seed: int, quick: bool) -> dict[str, Any]:
    """Train once, or finish a run that was cut; what the record holds."""
    run_dir = Path("runs") / page / f"{task}_seed{seed}{'_quick' if quick else ''}"
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
    record: dict[str, Any] = {"task": task, "seed": seed, "commit": results.commit()}
    clone = run_dir / "clone" / "result.json"
    if clone.exists():
        start = json.loads(clone.read_text())
        record |= {"clone_successes": start["successes"], "clone_episodes": start["episodes"]}
    for key in ("successes", "episodes", "invalid", "env_steps", "train_cpu_s", "train_wall_s", "cpu_s", "wall_s"):
        record[key] = result[key]
    record["steps_per_cpu_s"] = result["env_steps"] / result["train_cpu_s"]
    record["dropped"] = sum(result["counters"].values())
    record["machine"] = result["versions"]["platform"]
    return record


def row(page: str, task: str, records: dict[str, dict[str, Any]]) -> results.Row:
    """One task's claim over its seeds; every seed must reach the goal by itself within its CPU time."""
    goal = PAGES[page][task]
    mine = [r for r in records.values() if r["task"] == task]
    successes, episodes = sum(r["successes"] for r in mine), sum(r["episodes"] for r in mine)
    low, high = wilson(successes, episodes)
    rates = [r["successes"] / r["episodes"] for r in mine]
    # The final evaluation is not training: the limit of a run is on the time until its last checkpoint.
    longest = max(r["train_cpu_s"] for r in mine) / 60
    steps = sum(r["steps_per_cpu_s"] for r in mine) / len(mine)
    measured = f"{successes / episodes:.1%} [{low:.1%}, {high:.1%}], worst seed {min(rates):.1%}, "
    claim = f"`{task}` from state, from zero"
    if page == "pirl":
        starts = [r["clone_successes"] / r["clone_episodes"] for r in mine]
        gains = [100 * (after - before) for before, after in zip(starts, rates, strict=True)]
        measured += f"from clones at {', '.join(f'{x:.1%}' for x in starts)}, smallest gain {min(gains):.1f} points, "
        claim = f"`{task}`: a clone improved from success alone, cloning included"
        reached = min(gains) >= goal.gain if goal.gain is not None else 100 * min(rates) >= (goal.success or 0)
    else:
        reached = 100 * min(rates) >= (goal.success or 0)
    holds = None
    if len(mine) >= 3 and (goal.success is not None or goal.gain is not None):
        holds = reached and longest <= goal.cpu_minutes + 0.1
    return results.Row(
        id=task,
        claim=f"{claim}, within {goal.cpu_minutes:g} CPU-minutes",
        target=goal.target,
        measured=f"{measured}longest run {longest:.1f} CPU-minutes, {steps:,.0f} steps per CPU-second",
        holds=holds,
        counts=" + ".join(f"{r['successes']}/{r['episodes']}" for r in mine),
        seeds=tuple(r["seed"] for r in mine),
        command=f"python launch/bench.py {page.replace('_', '-')} --tasks {task} --write",
        wall_s=sum(r["wall_s"] for r in mine),
        cpu_s=sum(r["cpu_s"] for r in mine),
        commit=", ".join(dict.fromkeys(r["commit"] for r in mine)),
    )
