# SPDX-License-Identifier: Apache-2.0
"""The on-policy loop: collect T steps of N environments, update, repeat.

    loop = OnPolicy(env, policy, algorithm, num_steps, generator)
    for metrics in loop: ...          # one rollout and one update each; runs until the caller stops

Axes: T num_steps, N num_envs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Generator, Tensor

from robo_rl.batch import Rollout, per_row
from robo_rl.errors import ContractError
from robo_rl.types import Metrics, Obs, Policy, Step, VecEnv


class OnPolicyAlgorithm(Protocol):
    def update(self, rollout: Rollout, generator: Generator, progress: float = 0.0) -> Metrics: ...


class OnPolicy:
    """An endless iterator of metrics. `env_steps` counts steps of single environments; `progress` (0 to 1) is set by
    the caller for schedules that need the end in sight."""

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        algorithm: OnPolicyAlgorithm,
        num_steps: int,
        generator: Generator,
        seed: int = 0,
    ):
        self.env, self.policy, self.algorithm = env, policy, algorithm
        self.num_steps, self.generator = num_steps, generator
        self.env_steps = 0
        self.progress = 0.0
        self._executed = 0
        env.autoreset = True
        self.obs = env.reset(seed=seed)
        policy.update_statistics(self.obs)  # the first rollout is normalised by the first observations
        num_envs = env.spec.num_envs
        device = next(iter(self.obs.values())).device
        self.episode_return = torch.zeros(num_envs, device=device)
        self.episode_length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.episode_success = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.recent: deque[tuple[float, int, bool, bool]] = deque(maxlen=max(100, num_envs))
        self._rollout: Rollout | None = None

    def __iter__(self) -> Iterator[Metrics]:
        return self

    def __next__(self) -> Metrics:
        start, before = time.perf_counter(), self.env_steps
        rollout = self.collect()
        collected = time.perf_counter()
        steps = self.env_steps - before
        metrics = self.algorithm.update(rollout, self.generator, self.progress)
        self.policy.update_statistics({k: v.flatten(0, 1) for k, v in rollout.obs.items()})
        end = time.perf_counter()
        return (
            metrics
            | self._episode_metrics()
            | {
                "time/fps": steps / (end - start),
                "time/collect_share": (collected - start) / (end - start),
            }
        )

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Act for T steps; the returned rollout is overwritten by the next call."""
        env, policy, rollout = self.env, self.policy, self._rollout
        num_envs = env.spec.num_envs
        ended_at: list[tuple[int, Tensor, Obs]] = []
        for t in range(self.num_steps):
            sample = policy.act(self.obs, generator=self.generator)
            if rollout is None:
                rollout = self._rollout = Rollout.allocate(self.num_steps, env.spec, self.obs, sample)
            rollout.write(t, self.obs, sample)
            step = env.step(sample.action)
            rollout.reward[t].copy_(step.reward)
            rollout.terminated[t].copy_(step.terminated)
            rollout.truncated[t].copy_(step.truncated)
            rollout.valid[t].copy_(step.valid)
            rows = self._count_episodes(step)
            if len(rows):
                ended_at.append((t, rows, {k: v[rows] for k, v in step.final_obs.items()}))
                policy.reset(rows)
            self.obs = step.obs
        assert rollout is not None
        if rollout.sample.value is None:
            raise ContractError("The policy gives no value, and PPO learns from values: give it a critic, or use GRPO.")
        rollout.ids.copy_(torch.arange(self.num_steps * num_envs).view(self.num_steps, num_envs))
        rollout.ids.add_(self.env_steps)
        # The next observation of a row is the next one acted on, unless its episode ended: then it is final_obs.
        rollout.next_value[:-1].copy_(rollout.sample.value[1:])
        rollout.next_value[-1].copy_(policy.value(self.obs))
        if ended_at:
            final_obs = {k: torch.cat([obs[k] for _, _, obs in ended_at]) for k in self.obs}
            steps = torch.cat([torch.full_like(rows, t) for t, rows, _ in ended_at])
            rollout.next_value[steps, torch.cat([rows for _, rows, _ in ended_at])] = policy.value(final_obs)
        self.env_steps += self._executed
        self._executed = 0
        return rollout

    def _count_episodes(self, step: Step) -> Tensor:
        """Running return, length and success of every row; returns the rows (M,) whose episode ended."""
        reward, executed, valid = per_row(step)
        success = step.info["success"]
        self.episode_return += reward
        self.episode_length += executed
        self._executed += int(executed.sum())
        self.episode_success |= step.info.get("success_once", success) & valid
        rows = (step.terminated | step.truncated).nonzero().squeeze(-1)
        if len(rows):
            for row in rows[valid[rows]].tolist():
                self.recent.append(
                    (
                        float(self.episode_return[row]),
                        int(self.episode_length[row]),
                        bool(self.episode_success[row]),
                        bool(success[row]),
                    )
                )
            self.episode_return[rows] = 0
            self.episode_length[rows] = 0
            self.episode_success[rows] = False
        return rows

    def _episode_metrics(self) -> Metrics:
        """Means over the last episodes; no success where the environment defines none."""
        if not self.recent:
            return {}
        returns, lengths, once, at_end = (sum(column) / len(self.recent) for column in zip(*self.recent, strict=True))
        metrics = {"rollout/ep_rew_mean": returns, "rollout/ep_len_mean": lengths}
        success = self.env.spec.success
        if success is not None:
            metrics["rollout/success_rate"] = at_end if success.at == "end" else once
        return metrics

    def state_dict(self) -> dict[str, Tensor]:
        """Everything beside policy and algorithm that the next iteration depends on, flat."""
        state = {
            "env_steps": torch.tensor(self.env_steps),
            "generator": self.generator.get_state(),
            "episode_return": self.episode_return,
            "episode_length": self.episode_length,
            "episode_success": self.episode_success,
            "recent": torch.tensor(list(self.recent), dtype=torch.float64).reshape(-1, 4),
        }
        env_state = self.env.state_dict()
        if env_state is not None:
            state |= {f"env/{k}": v for k, v in env_state.items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict`. Where the simulator has no state, its episodes start anew and are counted in
        `env.counters["restarted"]`."""
        self.env_steps = int(state["env_steps"])
        self.generator.set_state(state["generator"].cpu())
        if self.episode_return.shape != state["episode_return"].shape:
            raise ContractError(
                f"The checkpoint was written with num_envs = {len(state['episode_return'])}, the environment has "
                f"{len(self.episode_return)}. Resume with the same env.num_envs."
            )
        self.recent.clear()
        self.recent.extend((float(r), int(n), bool(o), bool(e)) for r, n, o, e in state["recent"].tolist())
        env_state = {k.removeprefix("env/"): v for k, v in state.items() if k.startswith("env/")}
        if env_state:
            self.obs = self.env.load_state_dict(env_state)
            self.episode_return.copy_(state["episode_return"])
            self.episode_length.copy_(state["episode_length"])
            self.episode_success.copy_(state["episode_success"])
        else:
            self.env.counters["restarted"] = self.env.counters.get("restarted", 0) + self.env.spec.num_envs
