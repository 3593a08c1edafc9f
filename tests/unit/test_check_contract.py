# SPDX-License-Identifier: Apache-2.0
"""`check_vec_env` passes an honest environment and names every promise that a broken one breaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from robo_rl.errors import ConfigError, ContractError
from robo_rl.seeding import first_training_episode, uniforms
from robo_rl.types import IMAGES, STATE, TASK_ID, ArraySpec, Continuous, Discrete, EnvSpec, Step
from sims.check import check_vec_env

HORIZON = 12


class Line:
    """A point on a line that ends beyond 2.5 (terminated) or after 12 steps, honest but for one `fault`."""

    def __init__(self, fault: str = "", num_envs: int = 3, seed: int = 0):
        self.fault, self.n = fault, num_envs
        self.spec = EnvSpec(
            name="line",
            num_envs=num_envs,
            obs={STATE: ArraySpec((2,), names=("x", "t")), TASK_ID: ArraySpec((), "int64")},
            action=Continuous((-1.0,), (1.0,)),
            control_hz=10.0,
            max_episode_steps=HORIZON,
            tasks=("left", "right"),
        )
        match fault:
            case "spec key":
                self.spec = replace(self.spec, obs={**self.spec.obs, "state": ArraySpec((2,))})
            case "spec names":
                self.spec = replace(self.spec, obs={**self.spec.obs, STATE: ArraySpec((2,), names=("x",))})
            case "spec image":
                self.spec = replace(self.spec, obs={**self.spec.obs, IMAGES + "front": ArraySpec((3, 8, 8), "uint8")})
            case "spec bounds":
                self.spec = replace(self.spec, action=Continuous((1.0,), (-1.0,)))
            case "discrete":
                self.spec = replace(self.spec, action=Discrete(3))
        self.autoreset = True
        self.counters = {"non_finite": 0}
        self.x, self.t = torch.zeros(num_envs), torch.zeros(num_envs)
        self.task, self.ended = torch.zeros(num_envs, dtype=torch.int64), torch.zeros(num_envs, dtype=torch.bool)
        self.next_episode, self.calls = first_training_episode(seed), 0
        self.reset()

    def place(self, rows, task, episode):
        draw = torch.from_numpy(uniforms(task.numpy(), episode.numpy(), 1)[:, 0]).float()
        self.x[rows], self.t[rows], self.task[rows], self.ended[rows] = draw, 0.0, task, False
        match self.fault:
            case "start depends on the past":
                self.x[rows] += self.calls
            case "start depends on the row":
                self.x[rows] += rows.float()

    def draw(self, rows):
        episode = self.next_episode + torch.arange(len(rows))
        if self.fault == "episodes in reverse":
            episode = episode.flip(0)
        self.next_episode += 0 if self.fault == "episode repeats" else len(rows)
        self.place(rows, episode % 2, episode)

    def observe(self):
        return {STATE: torch.stack([self.x, self.t], 1), TASK_ID: self.task.clone()}

    def reset(self, seed=None, rows=None, init=None):
        self.calls += 1
        if seed is not None and self.fault != "seed ignored":
            self.next_episode = first_training_episode(seed)
        which = torch.arange(self.n) if rows is None or self.fault == "rows ignored" else rows
        if init is None or len(init) != len(which):
            self.draw(which)
        else:
            self.place(which, init[:, 0], init[:, 1])
        if self.fault == "init task ignored":
            self.task[which] = 0
        if self.fault == "others move" and rows is not None:
            self.x[torch.arange(self.n) != rows[0]] += 0.5
        obs = self.observe()
        if self.fault == "returns reset rows only" and rows is not None:
            obs = {key: value[rows] for key, value in obs.items()}
        return obs

    def step(self, action):
        move = action.float() if self.spec.action.kind == "discrete" else action[:, 0]
        waiting = self.ended.clone()
        self.x += move * ~waiting
        self.t += ~waiting
        if self.fault == "unrepeatable":
            self.x += torch.rand(self.n)
        terminated = (self.x > 2.5) & ~waiting
        truncated = (self.t >= HORIZON) & ~waiting & ~terminated
        if self.fault == "endless":
            terminated, truncated = torch.zeros(2, self.n, dtype=torch.bool)
        if self.fault == "both ends":
            truncated, terminated = truncated | terminated, terminated | truncated
        valid, final_obs = ~waiting, self.observe()
        obs, ended = final_obs, terminated | truncated
        if ended.any() and self.autoreset and self.fault != "no autoreset":
            self.draw(ended.nonzero()[:, 0])
            obs = self.observe()
        elif not (self.autoreset or self.fault == "valid after the end"):
            self.ended |= ended
        match self.fault:
            case "final_obs is the new episode":
                final_obs = obs
            case "final_obs wrong":
                final_obs = {**final_obs, STATE: final_obs[STATE] + ended[:, None]} if self.autoreset else final_obs
            case "final_obs elsewhere":
                final_obs = {**final_obs, STATE: final_obs[STATE] + 1.0}
            case "obs shape":
                obs = {**obs, STATE: obs[STATE][:, :1]}
            case "obs dtype":
                obs = {**obs, STATE: obs[STATE].double()}
            case "obs key":
                obs = {STATE: obs[STATE]}
            case "obs numpy":
                obs = {**obs, STATE: obs[STATE].numpy()}
            case "task out of range":
                obs = {**obs, TASK_ID: obs[TASK_ID] + 2}
            case "nan":
                obs = {**obs, STATE: obs[STATE] * float("nan")}
            case "never valid":
                valid = torch.zeros(self.n, dtype=torch.bool)
            case "counter falls":
                self.counters["non_finite"] -= 1
            case "counter is a tensor":
                self.counters["non_finite"] = torch.tensor(0)
        reward = self.x.double() if self.fault == "reward dtype" else self.x.clone()
        info = {"success": terminated.clone(), "distance": 3 - self.x}
        match self.fault:
            case "no success":
                del info["success"]
            case "success is sparse":
                info["success"] = terminated[terminated]
            case "info comes and goes":
                if not ended.any():
                    del info["distance"]
            case "info object":
                info["distance"] = [None] * self.n
            case "flag dtype":
                terminated = terminated.float()
        return Step(obs, final_obs, reward, terminated, truncated, valid, info)

    def state_dict(self):
        if self.fault == "no state":
            return None
        saved = {"x": self.x.clone(), "t": self.t.clone(), "task": self.task.clone(), "ended": self.ended.clone()}
        saved["next_episode"] = torch.tensor(self.next_episode)
        if self.fault == "state is a view":
            saved["t"] = self.t
        if self.fault == "state forgets":
            del saved["next_episode"]
        return saved

    def load_state_dict(self, state):
        self.x, self.t, self.task, self.ended = (state[k].clone() for k in ("x", "t", "task", "ended"))
        if "next_episode" in state:
            self.next_episode = int(state["next_episode"])
        obs = self.observe()
        return {**obs, STATE: obs[STATE] + 1} if self.fault == "load returns another" else obs

    def render(self, rows=None):
        if self.fault == "no render":
            raise ConfigError("made without pictures")
        shape = (3, 4, 6) if self.fault == "picture shape" else (1, 4, 6, 3)
        return np.zeros(shape, np.float32 if self.fault == "picture dtype" else np.uint8)

    def close(self):
        self.closed = True


@pytest.mark.parametrize("variant", ["", "discrete", "no state", "no render"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_honest_environment_passes(variant, num_envs):
    check_vec_env(lambda: Line(variant, num_envs))
    env = Line(variant, num_envs)
    env.autoreset = False
    check_vec_env(env)
    assert not env.autoreset, "left as it was"


def test_what_it_makes_it_closes():
    made = []
    check_vec_env(lambda: made.append(Line()) or made[-1])
    assert len(made) == 2 and all(env.closed for env in made)


FAULTS = {
    "spec key": "keys are those of robo_rl.types",
    "spec names": "one name per number",
    "spec image": "is an image",
    "spec bounds": "lies below",
    "start depends on the past": "not on the past",
    "start depends on the row": "not on the row",
    "init task ignored": "is that of `init`",
    "episodes in reverse": "numbered on from",
    "episode repeats": "numbered on from",
    "seed ignored": r"reset\(seed=\) reproduces the initial states",
    "rows ignored": "leaves other rows alone|numbered on from",
    "others move": "leaves other rows alone",
    "returns reset rows only": "`obs.* has its shape. Expected \\(3, 2\\), got \\(1, 2\\)",
    "unrepeatable": "reproduces the steps",
    "endless": "ends at `spec.max_episode_steps`",
    "both ends": "`terminated` wins",
    "no autoreset": "two observations",
    "valid after the end": "invalid until it is reset",
    "final_obs is the new episode": "two observations",
    "final_obs wrong": "is the true next observation",
    "final_obs elsewhere": "where no episode ended",
    "obs shape": "has its shape. Expected \\(3, 2\\), got \\(3, 1\\)",
    "obs dtype": "has its dtype. Expected float32, got torch.float64",
    "obs key": "has the keys of the spec",
    "obs numpy": "is a tensor",
    "task out of range": "indexes `spec.tasks`",
    "nan": "is finite",
    "never valid": "valid again after its reset",
    "counter falls": "never falls",
    "counter is a tensor": "never falls",
    "reward dtype": "`reward` has its dtype",
    "no success": "`info` has `success`",
    "success is sparse": r"`info\[success\]` has its shape",
    "info comes and goes": "same keys at every step",
    "info object": r"`info\[distance\]` is a tensor",
    "flag dtype": "`terminated` has its dtype",
    "state is a view": "is a copy",
    "state forgets": "continues bit for bit",
    "load returns another": "returns the observation to act on next",
    "picture shape": "returns pictures",
    "picture dtype": "returns pictures",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_promise_is_named(fault):
    with pytest.raises(ContractError, match=FAULTS[fault]):
        check_vec_env(lambda: Line(fault))


def test_ends_are_not_awaited_beyond_steps():
    check_vec_env(Line("endless"), steps=HORIZON - 2)
