# SPDX-License-Identifier: Apache-2.0
"""The loop of group-relative algorithms: whole episodes, in groups that start from the same state; update; repeat.

    loop = GroupLoop(env, policy, algorithm, group_size, max_resamples, generator)
    for metrics in loop: ...          # one update each; runs until the caller stops

All N rows start together, row r in the state of group r // G, and run to their ends with autoreset off. Nothing of the
environment outlives an iteration, so resuming is exact on every simulator.

Axes: T num_steps, N num_envs, G group_size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Generator, Tensor

from robo_rl.batch import Rollout, per_row
from robo_rl.errors import ConfigError, ContractError
from robo_rl.seeding import first_training_episode
from robo_rl.types import Metrics, Obs, Policy, VecEnv


class GroupAlgorithm(Protocol):
    def kept(self, rollout: Rollout) -> Tensor: ...

    def update(self, rollout: Rollout, generator: Generator, progress: float = 0.0) -> Metrics: ...


class GroupLoop:
    """An endless iterator of metrics. `env_steps` counts steps of single environments; `progress` (0 to 1) is set by
    the caller for schedules that need the end in sight."""

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        algorithm: GroupAlgorithm,
        group_size: int,
        max_resamples: int,
        generator: Generator,
        seed: int = 0,
    ):
        """Raises ConfigError where the rows of `env` do not make whole groups of at least 2."""
        num_envs = env.spec.num_envs
        if group_size < 2 or num_envs % group_size:
            raise ConfigError(
                f"algorithm.group_size = {group_size} must be at least 2 and divide env.num_envs = {num_envs}."
            )
        self.env, self.policy, self.algorithm = env, policy, algorithm
        self.group_size, self.max_resamples, self.generator, self.seed = group_size, max_resamples, generator, seed
        self.num_steps = -(-env.spec.max_episode_steps // getattr(env, "chunk", 1))  # T: chunks, where there are some
        self.env_steps = 0
        self.progress = 0.0
        self.rollouts = 0  # so far; says which initial states are next
        self.skipped = 0  # updates, because no group had anything to teach
        env.autoreset = False
        self.obs = self._start()
        policy.update_statistics(self.obs)  # the first rollout is normalised by the first observations
        self._rollout: Rollout | None = None

    def __iter__(self) -> Iterator[Metrics]:
        return self

    def __next__(self) -> Metrics:
        start, before = time.perf_counter(), self.env_steps
        rollout, outcome = self.collect()
        resamples = 0
        while not bool(self.algorithm.kept(rollout).any()) and resamples < self.max_resamples:
            rollout, outcome = self.collect()
            resamples += 1
        self.skipped += not bool(self.algorithm.kept(rollout).any())
        collected = time.perf_counter()
        metrics = self.algorithm.update(rollout, self.generator, self.progress)
        self.policy.update_statistics({k: v[rollout.usable] for k, v in rollout.obs.items()})
        end = time.perf_counter()
        return (
            metrics
            | outcome
            | {
                "rollout/resamples": float(resamples),
                "rollout/skipped_updates": float(self.skipped),
                "time/fps": (self.env_steps - before) / (end - start),
                "time/collect_share": (collected - start) / (end - start),
            }
        )

    @torch.no_grad()
    def collect(self) -> tuple[Rollout, Metrics]:
        """One episode of each row, from initial states that were never used before.

        Returns:
            the rollout (overwritten by the next call): `valid` is False after an episode's end, and for all of an
            episode in which something broke; `extras["success"]` (T, N), where the task defines success, is the
            outcome of the row's episode, the same at every step. And the means over the episodes.

        Raises:
            ContractError: an episode outlasts the environment's own limit.
        """
        env, policy, rollout = self.env, self.policy, self._rollout
        num_envs, device = env.spec.num_envs, env.spec.device
        self.obs = self._start()
        policy.reset()
        running = torch.ones(num_envs, dtype=torch.bool, device=device)
        intact, success = running.clone(), torch.zeros_like(running)
        returns = torch.zeros(num_envs, device=device)
        lengths = torch.zeros(num_envs, dtype=torch.int64, device=device)
        if rollout is not None:
            rollout.valid.zero_()  # where all episodes end early, the last steps are not written
        for t in range(self.num_steps):
            sample = replace(policy.act(self.obs, generator=self.generator), value=None)  # nobody asks the critic
            if rollout is None:
                rollout = self._rollout = Rollout.allocate(self.num_steps, env.spec, self.obs, sample)
            rollout.write(t, self.obs, sample)
            step = env.step(sample.action)
            reward, executed, ok = per_row(step)
            intact &= ok | ~running
            rollout.reward[t].copy_(step.reward)
            rollout.valid[t].copy_(step.valid & _over(running & ok, step.valid))
            rollout.terminated[t].copy_(step.terminated & running)
            rollout.truncated[t].copy_(step.truncated & running)
            returns += torch.where(running, reward, 0.0)
            lengths += torch.where(running, executed, 0)
            success = torch.where(running, self._succeeded(success, step.info) & ok, success)
            running &= ok & ~(step.terminated | step.truncated)
            self.obs = step.obs
            if not bool(running.any()):
                break
        else:
            raise ContractError(
                f"{int(running.sum())} episodes of `{env.spec.name}` did not end within {env.spec.max_episode_steps} "
                "steps, the max_episode_steps that its spec declares. Correct the spec."
            )
        assert rollout is not None
        rollout.valid.logical_and_(_over(intact, rollout.valid[0]))
        rollout.ids.copy_(torch.arange(rollout.ids.numel()).view_as(rollout.ids) + self.rollouts * rollout.ids.numel())
        self.rollouts += 1
        self.env_steps += int(lengths.sum())
        metrics = {"rollout/ep_rew_mean": returns.mean(), "rollout/ep_len_mean": lengths.float().mean()}
        if env.spec.success is not None:
            success &= intact
            metrics["rollout/success_rate"] = success.float().mean()
            rollout = replace(rollout, extras={"success": success.expand(self.num_steps, num_envs)})
        return rollout, {name: float(value) for name, value in metrics.items()}

    def _start(self) -> Obs:
        """All rows at the initial states that are next in the training sequence, each state in G of them."""
        groups = self.env.spec.num_envs // self.group_size
        episode = first_training_episode(self.seed) + self.rollouts * groups + torch.arange(groups)
        init = torch.stack([episode % len(self.env.spec.tasks), episode], dim=1)
        return self.env.reset(init=init.repeat_interleave(self.group_size, dim=0))

    def _succeeded(self, before: Tensor, info: dict[str, Tensor]) -> Tensor:
        """(N,) bool, success so far: of the step, or of any, as the task counts it."""
        success = self.env.spec.success
        if success is not None and success.at == "end":
            return info["success"]
        return before | info.get("success_once", info["success"])

    def state_dict(self) -> dict[str, Tensor]:
        """Everything beside policy and algorithm that the next iteration depends on, flat."""
        return {
            "env_steps": torch.tensor(self.env_steps),
            "rollouts": torch.tensor(self.rollouts),
            "skipped": torch.tensor(self.skipped),
            "generator": self.generator.get_state(),
            **{f"counters/{name}": torch.tensor(count) for name, count in self.env.counters.items()},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        self.env_steps, self.rollouts, self.skipped = (int(state[k]) for k in ("env_steps", "rollouts", "skipped"))
        self.generator.set_state(state["generator"].cpu())
        counters = {k.removeprefix("counters/"): int(v) for k, v in state.items() if k.startswith("counters/")}
        self.env.counters.update(counters)


def _over(rows: Tensor, like: Tensor) -> Tensor:
    """(N,) as (N, 1) where `like` is (N, H)."""
    return rows if like.ndim == 1 else rows[:, None]
