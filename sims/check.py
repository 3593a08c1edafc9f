# SPDX-License-Identifier: Apache-2.0
"""`robo_rl.types.VecEnv` in executable form. Every simulator passes `check_vec_env` in a test.

Promises about bits (equal actions from equal states give equal results) are asked only of simulators that can give
their state: the others (a physics engine with hidden caches, a server) keep all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from robo_rl.errors import ContractError, RoboRLError
from robo_rl.seeding import first_training_episode
from robo_rl.types import (
    ACHIEVED_GOAL,
    ENVIRONMENT_STATE,
    GOAL,
    IMAGES,
    STATE,
    TASK_ID,
    Continuous,
    Discrete,
    Obs,
    Step,
    VecEnv,
)

if TYPE_CHECKING:
    from torch import Tensor

KEYS = (STATE, ENVIRONMENT_STATE, GOAL, ACHIEVED_GOAL, TASK_ID)
SHORT = 8  # steps where a few are enough


def check_vec_env(env: VecEnv | Callable[[], VecEnv], steps: int | None = None) -> None:
    """Try every promise of the contract with random actions; episodes that were running are lost.

    Args:
        env: an environment, or a function that makes one; what is made here is closed here, and its saved state is also
            continued by a second one.
        steps: for how long to wait for episodes to end; one step more than `spec.max_episode_steps` where None. If
            nothing ends in that time, what is promised about ends is not checked.

    Raises:
        ContractError: a promise is broken; the message says which, with what was expected and what came.
    """
    if not callable(env):
        _Check(env, steps).run()
        return
    first = env()
    try:
        check = _Check(first, steps)
        check.run()
        if check.exact:
            second = env()
            try:
                check.continues_in(second)
            finally:
                second.close()
    finally:
        first.close()


class _Check:
    """The promises, one method each, in the order of the contract."""

    def __init__(self, env: VecEnv, steps: int | None):
        self.env = env
        self.check_spec()
        self.spec, self.n = env.spec, env.spec.num_envs
        self.steps = steps or self.spec.max_episode_steps + 1
        self.info_keys: set[str] | None = None
        self.counts: dict[str, int] = {}
        env.reset(seed=0)
        self.exact = env.state_dict() is not None

    def run(self) -> None:
        autoreset = self.env.autoreset
        try:
            self.initial_states()
            self.training_sequence()
            self.partial_reset()
            ends = self.autoreset_on()
            self.autoreset_off(ends)
            if self.exact:
                self.state()
            self.pictures()
        finally:
            self.env.autoreset = autoreset

    # --- the promises --------------------------------------------------------------------------------------------

    def check_spec(self) -> None:
        spec = self.env.spec
        for name, value in (("num_envs", spec.num_envs), ("max_episode_steps", spec.max_episode_steps)):
            if not isinstance(value, int) or value < 1:
                _fail(spec.name, f"`spec.{name}` is a positive int", "1 or more", value)
        if not spec.control_hz > 0:
            _fail(spec.name, "`spec.control_hz` is positive", "Hz", spec.control_hz)
        if not spec.tasks:
            _fail(spec.name, "`spec.tasks` names at least one task", "an instruction, which may be empty", spec.tasks)
        for key, array in spec.obs.items():
            if key not in KEYS and not (key.startswith(IMAGES) and len(key) > len(IMAGES)):
                _fail(spec.name, "observation keys are those of robo_rl.types", (*KEYS, IMAGES + "<camera>"), key)
            if array.names and array.shape != (len(array.names),):
                _fail(spec.name, f"`{key}` has one name per number", array.shape, len(array.names))
            if key.startswith(IMAGES) and (array.dtype != "uint8" or len(array.shape) != 3 or array.shape[2] != 3):
                _fail(spec.name, f"`{key}` is an image", "(height, width, 3) uint8", (array.shape, array.dtype))
        match spec.action:
            case Continuous(low, high):
                if len(low) != len(high) or not all(a < b for a, b in zip(low, high, strict=True)):
                    _fail(spec.name, "`spec.action.low` lies below `high`", "low < high for each number", (low, high))
            case Discrete(n):
                if n < 1:
                    _fail(spec.name, "`spec.action.n` is positive", "1 or more", n)
            case other:
                _fail(spec.name, "`spec.action` is Continuous or Discrete", "one of them", type(other).__name__)

    def initial_states(self) -> None:
        """The initial state is a pure function of (task_id, episode): not of the row, nor of what came before."""
        import torch

        tasks = len(self.spec.tasks)
        pairs = torch.tensor([[row % tasks, 3 * row + 1] for row in range(self.n)])
        first = self.reset(init=pairs)
        if TASK_ID in first and not torch.equal(first[TASK_ID], pairs[:, 0].to(first[TASK_ID].device)):
            self.fail("`task_id` of a reset row is that of `init`", pairs[:, 0].tolist(), first[TASK_ID].tolist())
        self.walk(SHORT)
        self.same(
            "the initial state depends on (task_id, episode) alone, not on the past", first, self.reset(init=pairs)
        )
        mirrored = self.reset(init=pairs.flip(0))
        turned = {key: value.flip(0) for key, value in mirrored.items()}
        self.same("the initial state depends on (task_id, episode) alone, not on the row", first, turned)

    def training_sequence(self) -> None:
        """Seeds reproduce, and training episodes are numbered consecutively from `first_training_episode(seed)`."""
        seed = 3
        self.env.autoreset = True
        start = self.reset(seed=seed)
        walked = self.walk(SHORT)
        self.same("reset(seed=) reproduces the initial states", start, self.reset(seed=seed))
        if self.exact:
            self.same_steps("reset(seed=) reproduces the steps", walked, self.walk(SHORT))
            self.reset(seed=seed)
        if len(self.spec.tasks) > 1 and TASK_ID not in self.spec.obs:
            return  # nobody can tell which task a training episode has
        again = self.reset(rows=self.rows([0]))
        first = first_training_episode(seed)
        rows = [*range(self.n), 0]
        seen = [{k: v[row] for k, v in obs.items()} for obs, row in zip([start] * self.n + [again], rows, strict=True)]
        for number, (row, obs) in enumerate(zip(rows, seen, strict=True)):
            task = int(obs[TASK_ID]) if TASK_ID in obs else 0
            named = self.reset(rows=self.rows([row]), init=self.pairs([(task, first + number)]))
            self.same(
                f"training episodes of seed {seed} are numbered on from {first}, in the order of the rows ({number})",
                {k: v[row] for k, v in named.items()},
                obs,
            )

    def partial_reset(self) -> None:
        """reset(rows=) returns all rows and touches only those."""
        self.env.autoreset = True
        self.reset(seed=0)
        before = self.walk(SHORT)[-1].obs
        row = self.n - 1
        after = self.reset(rows=self.rows([row]))
        self.same("reset(rows=) leaves other rows alone", _rows(before, slice(row)), _rows(after, slice(row)))
        named = self.reset(init=self.pairs([(0, 5)]), rows=self.rows([0]))
        self.same("reset(rows=) leaves other rows alone", _rows(after, slice(1, None)), _rows(named, slice(1, None)))
        whole = self.reset(init=self.pairs([(0, 5)] * self.n))
        self.same("reset(rows=, init=) gives that row that state", _rows(whole, slice(1)), _rows(named, slice(1)))

    def autoreset_on(self) -> dict[int, Obs]:
        """An ended row starts anew in the same step, and `final_obs` is its true next observation."""
        self.env.autoreset = True
        self.reset(init=self.pairs([(0, row) for row in range(self.n)]))
        ends: dict[int, Obs] = {}
        for t in range(self.steps):
            step = self.step(t)
            ended = step.terminated | step.truncated
            self.same(
                "`final_obs` is `obs` where no episode ended", _rows(step.obs, ~ended), _rows(step.final_obs, ~ended)
            )
            for row in ended.nonzero()[:, 0].tolist():
                old, new = _rows(step.final_obs, row), _rows(step.obs, row)
                if bool(step.valid[row]) and all(bool((old[key] == new[key]).all()) for key in old):
                    self.fail(
                        "`final_obs` is the last observation of an ended row, `obs` the first of the next episode",
                        "two observations",
                        f"the same in row {row} at step {t}",
                    )
                if row not in ends:
                    ends[row] = old if bool(step.valid[row]) else {}
            if len(ends) == self.n:
                return ends
        if self.steps > self.spec.max_episode_steps:
            missing = sorted(set(range(self.n)) - ends.keys())
            self.fail(
                "an episode ends at `spec.max_episode_steps`", self.spec.max_episode_steps, f"rows {missing} run on"
            )
        return ends

    def autoreset_off(self, ends: dict[int, Obs]) -> None:
        """Without autoreset ended rows are invalid until they are reset, and show what `final_obs` showed with it."""
        self.env.autoreset = False
        self.reset(init=self.pairs([(0, row) for row in range(self.n)]))
        waiting: set[int] = set()
        for t in range(self.steps):
            step = self.step(t)
            for row in waiting:
                if bool(step.valid[row]):
                    self.fail(
                        "with autoreset off an ended row is invalid until it is reset",
                        False,
                        f"True in row {row}, step {t}",
                    )
            for row in (step.terminated | step.truncated).nonzero()[:, 0].tolist():
                if row not in waiting and self.exact and ends.get(row):
                    self.same("`final_obs` is the true next observation", _rows(step.obs, row), ends[row])
                waiting.add(row)
            if len(waiting) == self.n and t > SHORT:
                break
        if waiting:
            row = min(waiting)
            self.reset(rows=self.rows([row]))
            step = self.step(0)
            if not bool(step.valid[row]) and not bool(step.terminated[row] | step.truncated[row]):
                self.fail("a row is valid again after its reset", True, f"False in row {row}")
            others = [bool(step.valid[other]) for other in waiting - {row}]
            if any(others):
                self.fail(
                    "with autoreset off an ended row is invalid until it is reset", False, "True after another's reset"
                )
        self.env.autoreset = True
        self.reset()

    def state(self) -> None:
        """What `state_dict` gave continues bit for bit, and is a copy."""
        self.reset(seed=1)
        self.saved_obs = self.walk(SHORT)[-1].obs
        saved = self.env.state_dict()
        assert saved is not None
        kept = {key: value.clone() for key, value in saved.items()}
        walked = self.walk(2 * SHORT)
        for key, value in kept.items():
            if not _equal(value, saved[key]):
                self.fail("`state_dict` is a copy", "the same values after more steps", f"`{key}` changed")
        self.saved, self.continuation = kept, walked
        self.continues_in(self.env)

    def continues_in(self, env: VecEnv) -> None:
        mine, self.env = self.env, env
        self.counts = {}
        try:
            env.autoreset = True
            obs = self.observed(env.load_state_dict(self.saved))
            self.same("`load_state_dict` returns the observation to act on next", self.saved_obs, obs)
            again = self.walk(2 * SHORT)
            self.same_steps("`load_state_dict` continues bit for bit", self.continuation, again)
        finally:
            self.env = mine

    def pictures(self) -> None:
        """`render(rows)` where it is offered; where it is not, one of this project's errors says so."""
        try:
            picture = self.env.render(self.rows([0]))
        except RoboRLError:
            return
        good = isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim == 4
        if not good or picture.shape[0] != 1 or picture.shape[3] != 3:
            got = (type(picture).__name__, getattr(picture, "shape", None), getattr(picture, "dtype", None))
            self.fail("`render(rows)` returns pictures", "(rows, height, width, 3) uint8 array", got)

    # --- doing, and looking at what comes back -------------------------------------------------------------------

    def reset(self, **arguments: Any) -> Obs:
        return self.observed(self.env.reset(**arguments))

    def walk(self, steps: int) -> list[Step]:
        return [self.step(t) for t in range(steps)]

    def step(self, t: int) -> Step:
        """Step with the `t`-th random action and check all that holds for any step. Returns copies."""
        step = self.env.step(self.action(t))
        if not isinstance(step, Step):
            self.fail("`step` returns a Step", "robo_rl.types.Step", type(step).__name__)
        obs, final_obs = self.observed(step.obs), self.observed(step.final_obs, "final_obs")
        self.array("reward", step.reward, (self.n,), "float32")
        for field in ("terminated", "truncated", "valid"):
            self.array(field, getattr(step, field), (self.n,), "bool")
        if bool((step.terminated & step.truncated).any()):
            self.fail("`terminated` wins where both ends are reported", "`truncated` False there", "both True")
        if "success" not in step.info:
            self.fail("`info` has `success`", "(N,) bool", sorted(step.info))
        self.array("info[success]", step.info["success"], (self.n,), "bool")
        for key, value in step.info.items():
            self.array(f"info[{key}]", value, None, None)
        if self.info_keys is not None and step.info.keys() != self.info_keys:
            self.fail("`info` has the same keys at every step", sorted(self.info_keys), sorted(step.info))
        self.info_keys = set(step.info)
        for name, count in self.env.counters.items():
            if type(count) is not int or count < self.counts.get(name, 0):
                self.fail(f"`counters[{name}]` is an int that never falls", self.counts.get(name, 0), count)
        self.counts = dict(self.env.counters)
        return Step(
            obs,
            final_obs,
            step.reward.clone(),
            step.terminated.clone(),
            step.truncated.clone(),
            step.valid.clone(),
            {key: value.clone() for key, value in step.info.items()},
        )

    def observed(self, obs: Obs, name: str = "obs") -> Obs:
        """A copy of `obs`, after checking it against the spec."""
        if not isinstance(obs, dict) or obs.keys() != self.spec.obs.keys():
            got = sorted(obs) if isinstance(obs, dict) else type(obs).__name__
            self.fail(f"`{name}` has the keys of the spec", sorted(self.spec.obs), got)
        for key, array in self.spec.obs.items():
            self.array(f"{name}[{key}]", obs[key], (self.n, *array.shape), array.dtype)
        if TASK_ID in obs and not bool(((obs[TASK_ID] >= 0) & (obs[TASK_ID] < len(self.spec.tasks))).all()):
            self.fail("`task_id` indexes `spec.tasks`", f"0 to {len(self.spec.tasks) - 1}", obs[TASK_ID].tolist())
        return {key: value.clone() for key, value in obs.items()}

    def array(self, name: str, value: Any, shape: tuple[int, ...] | None, dtype: str | None) -> None:
        import torch

        if not isinstance(value, torch.Tensor):
            self.fail(f"`{name}` is a tensor", "torch.Tensor", type(value).__name__)
        if value.device.type != torch.device(self.spec.device).type:
            self.fail(f"`{name}` is on `spec.device`", self.spec.device, str(value.device))
        if shape is not None and tuple(value.shape) != shape:
            self.fail(f"`{name}` has its shape", shape, tuple(value.shape))
        if tuple(value.shape[:1]) != (self.n,):
            self.fail(f"`{name}` has a row for each environment", self.n, tuple(value.shape))
        if dtype is not None and value.dtype != getattr(torch, dtype):
            self.fail(f"`{name}` has its dtype", dtype, str(value.dtype))
        if value.is_floating_point() and not bool(value.isfinite().all()):
            rows = (~value.isfinite()).reshape(self.n, -1).any(1).nonzero()[:, 0].tolist()
            self.fail(f"`{name}` is finite", "no NaN or infinity", f"some in rows {rows}")

    def action(self, t: int) -> Tensor:
        import torch

        generator = torch.Generator().manual_seed(t)
        match self.spec.action:
            case Discrete(n):
                return torch.randint(n, (self.n,), generator=generator).to(self.spec.device)
            case Continuous(low, high):
                lows, highs = (torch.tensor(x).clamp(-1e3, 1e3) for x in (low, high))
                unit = torch.rand(self.n, len(low), generator=generator)
                return (lows + unit * (highs - lows)).to(self.spec.device)

    def rows(self, rows: list[int]) -> Tensor:
        import torch

        return torch.tensor(rows, dtype=torch.int64, device=self.spec.device)

    def pairs(self, pairs: list[tuple[int, int]]) -> Tensor:
        import torch

        return torch.tensor(pairs, dtype=torch.int64, device=self.spec.device)

    def same(self, promise: str, expected: Obs, got: Obs) -> None:
        for key, value in expected.items():
            if not _equal(value, got[key]):
                gap = (value.double() - got[key].double()).abs().max()
                self.fail(promise, f"equal `{key}`", f"a difference of up to {float(gap):g}")

    def same_steps(self, promise: str, expected: list[Step], got: list[Step]) -> None:
        for t, (a, b) in enumerate(zip(expected, got, strict=True)):
            for field in fields(Step):
                x, y = getattr(a, field.name), getattr(b, field.name)
                as_dict = isinstance(x, dict)
                self.same(f"{promise} (step {t})", x if as_dict else {field.name: x}, y if as_dict else {field.name: y})

    def fail(self, promise: str, expected: object, got: object) -> NoReturn:
        _fail(self.spec.name, promise, expected, got)


def _fail(name: str, promise: str, expected: object, got: object) -> NoReturn:
    raise ContractError(f"{name} breaks the VecEnv contract: {promise}. Expected {expected}, got {got}.")


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


def _rows(obs: Obs, rows: Any) -> Obs:
    return {key: value[rows] for key, value in obs.items()}
