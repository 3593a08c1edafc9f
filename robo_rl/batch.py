# SPDX-License-Identifier: Apache-2.0
"""What on-policy data looks like: a preallocated `Rollout` of T steps by N environments, and its minibatches.

Axes: T num_steps, N num_envs, B a minibatch out of the flattened T * N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Generator, Tensor

from robo_rl.errors import ContractError
from robo_rl.types import ActionSample, EnvSpec, Obs, Step


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of N environments, (T, N, ...) each; flat batches of it are (B, ...). With chunks, a step is a chunk.

    Attributes:
        obs: what was acted on.
        sample: the action with its log-prob, value and trace at collection time.
        reward: float32, what the algorithm learns from (amended by reward models before advantages are computed);
            (T, N, H) with chunks, a column per action.
        terminated, truncated: bool ends of the step.
        valid: bool, False where nobody may learn from the row; (T, N, H) with chunks, True for executed actions.
        next_value: float32, the critic's value of the true next observation; ignored where terminated. 0 without a
            critic, where `sample.value` is None.
        ids: int64, `global_step * num_envs + row`, unique in a run; late answers are written to their own row by it.
        advantage, value_target: float32, None until `functional.advantages` has filled them.
        extras: further fields (teacher actions, reward terms) with one bool mask `has_<name>` each where they may be
            missing.
    """

    obs: Obs
    sample: ActionSample
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    next_value: Tensor
    ids: Tensor
    advantage: Tensor | None = None
    value_target: Tensor | None = None
    extras: dict[str, Tensor] | None = None

    @staticmethod
    def allocate(num_steps: int, spec: EnvSpec, obs: Obs, sample: ActionSample) -> Rollout:
        """An empty rollout shaped after one observation and one sample (N, ...) of the run it is for."""

        def like(x: Tensor) -> Tensor:
            return torch.zeros((num_steps, *x.shape), dtype=x.dtype, device=x.device)

        if sample.log_prob is None:
            raise ContractError("An on-policy rollout needs a policy that gives a log_prob with each action.")
        flags = torch.zeros(spec.num_envs, dtype=torch.bool, device=sample.log_prob.device)
        return Rollout(
            obs={k: like(v) for k, v in obs.items()},
            sample=ActionSample(
                action=like(sample.action),
                log_prob=like(sample.log_prob),
                value=None if sample.value is None else like(sample.value),
                trace={k: like(v) for k, v in sample.trace.items()},
            ),
            reward=like(sample.log_prob),
            terminated=like(flags),
            truncated=like(flags),
            valid=like(sample.log_prob.bool()),
            next_value=like(flags.float() if sample.value is None else sample.value),
            ids=like(flags.long()),
        )

    @property
    def num_steps(self) -> int:
        return self.reward.shape[0]

    @property
    def usable(self) -> Tensor:
        """(T, N) or (B,) bool, the rows to learn from: a chunk whose first action is invalid is invalid as a whole."""
        return self.valid if self.valid.ndim == self.terminated.ndim else self.valid[..., 0]

    def write(self, t: int, obs: Obs, sample: ActionSample) -> None:
        """Store what was acted on at step t and the sample; copies, since environments reuse their buffers."""
        for key, stored in self.obs.items():
            stored[t].copy_(obs[key])
        stored = self.sample
        stored.action[t].copy_(sample.action)
        assert stored.log_prob is not None and sample.log_prob is not None  # allocate() refused samples without
        stored.log_prob[t].copy_(sample.log_prob)
        if stored.value is not None and sample.value is not None:
            stored.value[t].copy_(sample.value)
        for key, trace in stored.trace.items():
            trace[t].copy_(sample.trace[key])

    def amend(self, ids: Tensor, values: Mapping[str, Tensor]) -> int:
        """Write late answers, (M, ...) per field, to the rows with these ids; returns how many had expired.

        A field is `reward` or a key of `extras`; an extra's mask `has_<name>` is set where it exists.
        """
        first = int(self.ids[0, 0])
        flat = ids - first
        known = (flat >= 0) & (flat < self.ids.numel())
        where = flat[known]
        for name, value in values.items():
            target = self.reward if name == "reward" else (self.extras or {})[name]
            target.flatten(0, 1)[where] = value[known].to(target.dtype)
            if self.extras and f"has_{name}" in self.extras:
                self.extras[f"has_{name}"].flatten(0, 1)[where] = True
        return int((~known).sum())

    def flatten(self) -> Rollout:
        """The same data as one batch (T * N, ...); views, no copies."""
        return _map(self, lambda x: x.flatten(0, 1))

    def __getitem__(self, index: Tensor | slice) -> Rollout:
        """Rows `index` of the first axis of every field."""
        return _map(self, lambda x: x[index])


def per_row(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """What a step, or a chunk of actions, gave each row: reward (N,), 0 where invalid, the number of actions executed
    (N,) int64, at least 1, and whether the row is valid (N,)."""
    reward, valid = torch.where(step.valid, step.reward, 0.0), step.valid
    if valid.ndim == 1:
        return reward, torch.ones_like(valid, dtype=torch.int64), valid
    return reward.sum(1), valid.sum(1).clamp_min(1), valid[:, 0]


def _map(rollout: Rollout, fn: Callable[[Any], Any]) -> Rollout:
    """The rollout with `fn` of every tensor (or of what stands in a tensor's place)."""

    def apply(x):
        if x is None:
            return None
        if isinstance(x, dict):
            return {k: fn(v) for k, v in x.items()}
        if isinstance(x, ActionSample):
            return ActionSample(*[apply(getattr(x, name)) for name in SAMPLE_FIELDS])
        return fn(x)

    return Rollout(*[apply(getattr(rollout, name)) for name in FIELDS])


FIELDS = tuple(f.name for f in fields(Rollout))
SAMPLE_FIELDS = tuple(f.name for f in fields(ActionSample))


def minibatches(batch: Rollout, size: int, generator: Generator) -> Iterator[Rollout]:
    """One pass over a flat batch in random order, `size` rows at a time; the last one may be smaller."""
    total = batch.reward.shape[0]
    # One gather a pass and views of it cost less than a gather per minibatch where minibatches are small.
    shuffled = batch[torch.randperm(total, generator=generator).to(batch.reward.device)]
    parts = _map(shuffled, lambda x: x.split(size))
    for i in range(-(-total // size)):
        yield _map(parts, lambda split: split[i])  # noqa: B023  # used before i moves on
