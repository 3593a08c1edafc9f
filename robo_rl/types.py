# SPDX-License-Identifier: Apache-2.0
"""The contracts that simulators, policies, algorithms and robots share. Imports nothing internal and no torch.

Axis words, used everywhere:
    N  num_envs       environments stepped together        H  chunk          actions predicted at once
    T  num_steps      steps of a rollout                   A  action_dim     numbers in one action
    B  batch          any flattened batch                  K  denoise_steps  steps from noise to action
    image             (height, width, 3) uint8, RGB

An observation is a flat dict. Its keys are LeRobot's: `observation.state`, `observation.environment_state`
(privileged: critics and experts; an actor only where its configuration lists it),
`observation.images.<camera>`, `observation.goal`, `observation.achieved_goal`, and `task_id` (N,) int64, which
indexes `EnvSpec.tasks`, the instruction texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor

STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
IMAGES = "observation.images."  # + camera name
GOAL = "observation.goal"
ACHIEVED_GOAL = "observation.achieved_goal"
TASK_ID = "task_id"

Obs: TypeAlias = "dict[str, Tensor]"
Metrics: TypeAlias = dict[str, float]


# --- what an environment is ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArraySpec:
    """One observation entry without its batch axis. `dtype` is numpy's name for it."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Continuous:
    """A box of real actions; bounds per dimension, in `units` (empty where dimensionless)."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    kind: Literal["continuous"] = "continuous"

    @property
    def dim(self) -> int:
        return len(self.low)


@dataclass(frozen=True)
class Discrete:
    """One of `n` actions, an int64 scalar per environment."""

    n: int
    names: tuple[str, ...] = ()
    kind: Literal["discrete"] = "discrete"


@dataclass(frozen=True)
class SuccessSpec:
    """What success means, once per task: `quantity` on the right side of `threshold` for `hold_steps` steps.

    `info["success"]` is True at a step where the condition has held for the last `hold_steps` steps. `at` says which
    figure is the task's success rate: `once` (at any step of the episode) or `end` (at its last step).
    """

    quantity: str
    threshold: float
    unit: str
    hold_steps: int
    at: Literal["once", "end"]


@dataclass(frozen=True)
class EnvSpec:
    """Everything a policy, a checkpoint or a robot must know about an environment.

    `tasks` is the instruction text by `task_id`. `convention` holds what two sides must agree on beyond shapes:
    `action` (for example `joint_delta`), `gripper` (which sign opens), `image` (orientation) and so on.
    """

    name: str
    num_envs: int
    obs: Mapping[str, ArraySpec]
    action: Continuous | Discrete
    control_hz: float
    max_episode_steps: int
    tasks: tuple[str, ...] = ("",)
    success: SuccessSpec | None = None
    convention: Mapping[str, str] = field(default_factory=dict)
    simulator: str = ""  # name and version, for example "mujoco 3.3.7"
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of N environments returns. CPU tensors may be views that the next `step` overwrites.

    Attributes:
        obs: what to act on next; already the new episode's first observation where one ended and autoreset is on.
        final_obs: the true next observation of every row, before any reset; may be the same storage as `obs`.
        reward: (N,) float32; (N, H) from an environment that runs chunks of actions.
        terminated: (N,) bool, the task ended: no value beyond. Wins where both ends are reported.
        truncated: (N,) bool, the episode was cut (time limit): bootstrap from `final_obs`.
        valid: (N,) bool, False for a row that nobody may learn from (NaN, respawned worker, an ended row); (N, H) with
            chunks, False also for the actions that were not executed because the episode had ended.
        info: dense (N, ...) tensors; always `success` (N,) bool.
    """

    obs: Obs
    final_obs: Obs
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    info: dict[str, Tensor]


class VecEnv(Protocol):
    """N environments stepped together; `sims.check.check_vec_env` is this contract in executable form.

    `autoreset`: True resets an ended row within the step that ended it; False leaves it to `reset(rows=...)`, and
    until then its steps are meaningless and `valid` False. May be set at any time between steps.
    `counters`: dropped or repaired things by name (for example `non_finite`), counted since construction.
    """

    spec: EnvSpec
    autoreset: bool
    counters: dict[str, int]

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """Start new episodes and return the observation of all N rows.

        Args:
            seed: restarts the sequence of training episodes; only without `rows`. The sequence of a seed starts at
                episode `(seed + 1) * 2**32`; numbers below 2**32 are kept for evaluation.
            rows: (M,) int64, the rows to reset; all where None.
            init: (M, 2) int64, `(task_id, episode)` of each row: the initial state is a pure function of it.
                Drawn from the training sequence where None.
        """
        ...

    def step(self, action: Tensor) -> Step:
        """Advance every row by one control step. `action` is (N, A) float32, or (N,) int64 where discrete."""
        ...

    def render(self, rows: Tensor | None = None) -> np.ndarray:
        """Pictures of the rows, (M, height, width, 3) uint8."""
        ...

    def state_dict(self) -> dict[str, Tensor] | None:
        """Everything needed to continue bit-identically, or None where the simulator cannot give it."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> Obs:
        """Continue from `state_dict`; returns the observation to act on next."""
        ...

    def close(self) -> None: ...


# --- what acts and what learns -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActionSample:
    """Actions and what is needed to judge them again later.

    Attributes:
        action: (B, A) or (B, H, A) float32, or (B,) int64: what the environment gets.
        log_prob: (B,) float32, or (B, H) with one column per action of a chunk; None from an actor without a density.
        value: (B,) float32, or None from an actor without a critic.
        trace: fixed-shape tensors that `Policy.evaluate` needs beside the action (pre-squash action, denoising
            chain, tokens with their mask).
    """

    action: Tensor
    log_prob: Tensor | None = None
    value: Tensor | None = None
    trace: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy's present opinion of stored actions; gradients flow.

    `entropy` and `value` are (B,), `log_prob` as in the sample; no value from a policy without a critic. `mean` and
    `std`, where the density is a diagonal Gaussian, are those of the variable whose density `log_prob` is, and make an
    exact KL possible.
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor | None
    mean: Tensor | None = None
    std: Tensor | None = None


@runtime_checkable
class Actor(Protocol):
    """Anything that chooses actions: a policy, a scripted expert, an ONNX file, a socket."""

    def act(self, obs: Obs, *, deterministic: bool = False, generator: Generator | None = None) -> ActionSample: ...

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget what was remembered about these rows' episodes (all rows where None)."""
        ...


@runtime_checkable
class Policy(Actor, Protocol):
    """An actor that ratio-based algorithms can train. In practice a `torch.nn.Module`."""

    def evaluate(self, obs: Obs, sample: ActionSample) -> Evaluation: ...

    def value(self, obs: Obs) -> Tensor:
        """The critic's (B,) value of `obs`."""
        ...

    def update_statistics(self, obs: Obs) -> None:
        """Add fresh training observations (B, ...) to the input normaliser. Never called in evaluation."""
        ...


@runtime_checkable
class Imitator(Protocol):
    """A policy with a cloning loss."""

    def imitation_loss(self, batch: Any, generator: Generator | None = None) -> tuple[Tensor, Metrics]: ...
