# SPDX-License-Identifier: Apache-2.0
"""Evaluation: every initial state exactly once, whatever the number of environments; counts and intervals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robo_rl.app import evaluate as app
from robo_rl.errors import ConfigError, ContractError
from robo_rl.loops.evaluate import concatenate, evaluate, initial_states, wilson
from robo_rl.seeding import TRAIN_EPISODES, TUNING_EPISODES
from robo_rl.types import ActionSample, ArraySpec, Continuous, EnvSpec, Step, SuccessSpec


class CountingEnv:
    """Episode e lasts 1 + e % 7 steps with reward e each; what happens in it is arithmetic on its number."""

    def __init__(self, num_envs: int, at: str = "once", endless: bool = False):
        self.spec = EnvSpec(
            "counting",
            num_envs,
            {"observation.state": ArraySpec((2,))},
            Continuous((-1.0,), (1.0,)),
            control_hz=10,
            max_episode_steps=7,
            success=SuccessSpec("number", 0.0, "", 1, at),
        )
        self.autoreset, self.counters, self.endless = True, {}, endless
        self.started: Counter[int] = Counter()
        self.episode = torch.zeros(num_envs, dtype=torch.int64)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64)
        self.waiting = torch.zeros(num_envs, dtype=torch.bool)

    @staticmethod
    def length(episode):
        return 1 + episode % 7

    @staticmethod
    def broken(episode):
        return episode % 11 == 5

    def reset(self, seed=None, rows=None, init=None):
        self.episode[rows], self.elapsed[rows], self.waiting[rows] = init[:, 1], 0, False
        self.started.update(init[:, 1].tolist())
        return self.obs()

    def obs(self):
        return {"observation.state": torch.stack([self.episode, self.elapsed], 1).float()}

    def step(self, action):
        assert not self.autoreset
        assert torch.equal(action[:, 0], self.episode.float()), "the action of another row"
        self.elapsed += 1
        over = self.elapsed >= self.length(self.episode)
        ended = over & ~self.waiting & (not self.endless)
        valid = ~self.waiting & ~(self.broken(self.episode) & over)
        # Even episodes succeed at their first step, those divisible by 4 also at their last. A waiting row lies.
        last = over & (self.episode % 4 == 0)
        success = ((self.elapsed == 1) & (self.episode % 2 == 0)) | last | self.waiting
        reward = torch.where(self.waiting, 1e9, self.episode.float())
        self.waiting |= ended
        obs = self.obs()
        no = torch.zeros_like(ended)
        return Step(obs, obs, reward, ended, no, valid, {"success": success})


class Echo:
    """Answers with the episode's number, and remembers which rows were reset."""

    def __init__(self):
        self.resets: list[int] = []

    def act(self, obs, *, deterministic=False, generator=None):
        return ActionSample(obs["observation.state"][:, :1])

    def reset(self, rows=None):
        self.resets += [] if rows is None else rows.tolist()


def run(episodes: int, num_envs: int, at: str = "once"):
    env, actor = CountingEnv(num_envs, at), Echo()
    return env, actor, evaluate(env, actor, initial_states(episodes))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20))
def test_each_state_once_and_in_order(episodes, num_envs):
    env, actor, result = run(episodes, num_envs)
    idle = max(0, num_envs - episodes)  # rows beyond the list idle on the first state
    assert env.started == Counter(range(episodes)) + Counter({0: idle})
    assert len(actor.resets) == max(0, episodes - num_envs)
    number = torch.arange(episodes)
    length, broken = env.length(number), env.broken(number)
    assert torch.equal(result.init[:, 1], number)
    assert torch.equal(result.lengths, length)
    assert torch.equal(result.valid, ~broken)
    rewarded = torch.where(broken, length - 1, length)  # the broken step pays nothing
    assert torch.equal(result.returns, (number * rewarded).float())
    assert torch.equal(result.success_once, (number % 2 == 0) & ~broken)
    at_end = (number % 4 == 0) | ((number % 2 == 0) & (length == 1))
    assert torch.equal(result.success_end, at_end & ~broken)
    assert env.autoreset, "left as it was found"


def test_the_task_says_which_success_counts():
    for at, expected in (("once", 28 // 2 - 1), ("end", 28 // 4 + 1 - 1)):  # episode 16 is broken; 14 is one step long
        env, _, result = run(28, 4, at)
        assert result.metrics(env.spec)["eval/success_rate"] == pytest.approx(expected / 28)
        interval = wilson(expected, 28)
        assert result.counts(env.spec) == {"episodes": 28, "invalid": 3, "successes": expected, "interval": interval}


def test_seeds_are_pooled_by_episodes():
    (env, _, few), (_, _, many) = run(4, 2), run(28, 2)
    pooled = concatenate([few, many])
    assert pooled.counts(env.spec)["successes"] == 2 + 13
    assert pooled.counts(env.spec)["episodes"] == 32
    assert pooled.metrics(env.spec)["eval/mean_ep_length"] == pytest.approx((1 + 2 + 3 + 4 + 4 * 28) / 32)


def test_an_endless_episode_is_refused():
    with pytest.raises(ContractError, match=r"`counting` did not end within 14 steps"):
        evaluate(CountingEnv(2, endless=True), Echo(), initial_states(2))


@pytest.mark.parametrize("init", [initial_states(0), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2)])
def test_a_list_that_is_none_is_refused(init):
    env = CountingEnv(2)
    with pytest.raises(ConfigError, match=r"at least one initial state.*got shape"):
        evaluate(env, Echo(), init)
    assert env.autoreset and not env.started


def test_states_are_apart_from_tuning_and_training():
    results, tuning = initial_states(300, num_tasks=3), initial_states(300, num_tasks=3, tuning=True)
    assert results[:5].tolist() == [[0, 0], [1, 1], [2, 2], [0, 3], [1, 4]]
    assert int(results[:, 1].max()) < TUNING_EPISODES <= int(tuning[:, 1].min())
    assert int(tuning[:, 1].max()) < TRAIN_EPISODES


def test_wilson_interval():
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (score, no continuity correction).
    for successes, episodes, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(successes, episodes) == pytest.approx((low, high), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(200, 200)
    assert (low, high) == (pytest.approx(0.98115, abs=1e-5), 1.0)


@given(st.integers(1, 1000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_rate_and_mirrors(counts):
    successes, episodes = counts
    low, high = wilson(successes, episodes)
    assert 0 <= low <= successes / episodes + 1e-12
    assert successes / episodes - 1e-12 <= high <= 1
    mirrored = wilson(episodes - successes, episodes)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-9)


def test_an_environment_without_success_reports_none():
    env = CountingEnv(2)
    env.spec = replace(env.spec, success=None)
    result = evaluate(env, Echo(), initial_states(4))
    assert set(result.metrics(env.spec)) == {"eval/mean_reward", "eval/std_reward", "eval/mean_ep_length"}
    assert result.counts(env.spec) == {"episodes": 4, "invalid": 0}


class Blinking(CountingEnv):
    """In episodes 5 and 6 one step is invalid, and the row goes on as if nothing had happened."""

    def step(self, action):
        step = super().step(action)
        bad = ((self.episode == 5) & (self.elapsed == 2)) | ((self.episode == 6) & (self.elapsed == 1))
        return replace(step, valid=step.valid & ~bad)

    def render(self, rows):
        return np.zeros((len(rows), 16, 16, 3), np.uint8)


def test_a_tile_of_the_video_stops_where_its_episode_does(tmp_path, monkeypatch):
    pytest.importorskip("av")
    captions = []

    class Recorder(app.VideoWriter):
        def add(self, frame, captions_now=None):
            captions.append(captions_now)
            super().add(frame, captions_now)

    monkeypatch.setattr(app, "VideoWriter", Recorder)
    env, init = Blinking(7), initial_states(7)
    app.record_video(env, Echo(), init, tmp_path / "v.mp4")
    shown = [value for value, _ in captions[-1]]
    assert shown == evaluate(env, Echo(), init).returns.tolist()
    assert shown[5:] == [5.0, 0.0], "nothing of what followed the invalid step"
    assert [success for _, success in captions[0]] == [True, False, True, False, True, False, False]
