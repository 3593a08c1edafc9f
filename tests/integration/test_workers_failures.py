# SPDX-License-Identifier: Apache-2.0
"""Worker processes: the contract, every way to fail, and nothing left behind. Real processes, a toy simulator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # spawned workers get this path too
from toy_simulator import ToyConfig, make

from robo_rl.errors import ConfigError, ContractError
from robo_rl.loops.evaluate import evaluate, initial_states
from robo_rl.seeding import first_training_episode
from robo_rl.types import ActionSample
from sims.workers import WorkerLimits, WorkerVecEnv

STATE, IMAGE = "observation.state", "observation.images.front"
DEFAULT = ToyConfig()
QUICK = WorkerLimits(start_s=60, reset_s=5, step_s=1.0)


@pytest.fixture
def build():
    made: list[WorkerVecEnv] = []

    def build(config: ToyConfig = DEFAULT, num_envs: int = 3, **options) -> WorkerVecEnv:
        made.append(WorkerVecEnv(make, config, num_envs, **({"limits": QUICK} | options)))
        return made[-1]

    yield build
    for env in made:
        env.close()


def actions(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def test_autoreset_gives_the_true_next_obs_and_the_new_episode(build) -> None:
    env = build(num_workers=2)
    first = env.reset()[STATE].clone()
    names = [(e % 2, e) for e in range(first_training_episode(0), first_training_episode(0) + 6)]
    for _ in range(4):
        assert not env.step(actions(0.1, 0.2, 0.3)).truncated.any()
    step = env.step(actions(0.1, 0.2, 0.3))
    assert step.truncated.all() and step.valid.all() and not step.terminated.any()
    assert torch.allclose(step.final_obs[STATE][:, 0], first[:, 0] + torch.tensor([0.5, 1.0, 1.5]), atol=1e-6)
    assert step.final_obs[STATE][:, 1].tolist() == [5, 5, 5] and step.obs[STATE][:, 1].tolist() == [0, 0, 0]
    assert torch.allclose(step.reward, step.final_obs[STATE][:, 0])
    assert torch.allclose(step.info["distance"], 3.0 - step.reward)
    assert torch.equal(step.final_obs[IMAGE][2, 0, 0], torch.full((3,), int(step.reward[2] * 10), dtype=torch.uint8))
    second = step.obs[STATE].clone()
    assert step.obs["task_id"].tolist() == [task for task, _ in names[3:]]
    assert torch.equal(env.reset(init=torch.tensor(names[3:]))[STATE], second)  # numbered on in row order
    assert torch.equal(env.reset(seed=0)[STATE], first)


def test_ended_rows_wait_without_autoreset(build) -> None:
    env = build(ToyConfig(max_episode_steps=2))
    env.autoreset = False
    env.reset()
    env.step(actions(0, 0, 0))
    assert env.step(actions(0, 0, 0)).truncated.all()
    step = env.step(actions(0, 0, 0))
    assert not step.valid.any() and not step.truncated.any() and not step.reward.any()
    env.reset(rows=torch.tensor([1]), init=torch.tensor([[1, 7]]))
    assert env.step(actions(0, 0, 0)).valid.tolist() == [False, True, False]


def test_success_terminates_and_wins_over_the_time_limit(build) -> None:
    env = build(ToyConfig(max_episode_steps=4), num_envs=1)
    env.reset(init=torch.tensor([[0, 0]]))
    for _ in range(3):
        step = env.step(actions(1.0))
        if step.info["success"].item():
            break
    else:
        step = env.step(actions(1.0))
    assert step.terminated.item() and not step.truncated.item() and step.info["success"].item()


@pytest.mark.parametrize("failure", ["raise", "exit", "hang"])
def test_a_failed_worker_is_replaced_and_its_episode_dropped(build, failure: str, caplog) -> None:
    env = build(ToyConfig(fail_at=0.5, failure=failure))
    env.reset()
    env.step(actions(0, 0, 0))
    step = env.step(actions(0, 1, 0))  # row 1 passes 0.5
    assert step.valid.tolist() == [True, False, True] and step.truncated.tolist() == [False, True, False]
    assert env.counters == {"respawned": 1, "dropped": 1, "non_finite": 0}
    assert step.obs[STATE][:, 1].tolist() == [2, 0, 2], "the replaced row starts anew, the others go on"
    assert env.step(actions(0, 0, 0)).valid.all()
    assert "worker 1 (row 1, call step)" in caplog.text
    assert {"raise": "the toy broke", "exit": "exit code 7", "hang": "limit 1 s"}[failure] in caplog.text


def test_failing_on_and_on_is_refused_with_the_cause(build) -> None:
    env = build(ToyConfig(fail_at=0.5), num_envs=2)
    env.reset()
    with pytest.raises(ContractError, match=r"(?s)row 0, call step.*the toy broke.*Failure 3"):
        [env.step(actions(1, 0)) for _ in range(3)]


def test_a_hung_worker_can_stop_the_run_and_is_named(build) -> None:
    limits = WorkerLimits(start_s=60, reset_s=5, step_s=0.5, on_failure="raise")
    env = build(ToyConfig(fail_at=0.5, failure="hang"), num_envs=4, num_workers=2, limits=limits)
    env.reset()
    with pytest.raises(ContractError, match=r"worker 1 \(row 3, call step\).*no answer for 0\.\d s \(limit 0\.5 s\)"):
        env.step(actions(0, 0, 0, 1))


def test_a_killed_worker_costs_the_episodes_of_its_rows(build) -> None:
    env = build(num_envs=4, num_workers=2)
    env.reset()
    env.step(actions(0, 0, 0, 0))
    os.kill(env._workers[0].process.pid, signal.SIGKILL)
    step = env.step(actions(0, 0, 0, 0))
    assert step.valid.tolist() == [False, False, True, True]
    assert env.counters["respawned"] == 1 and env.counters["dropped"] == 2
    assert env.step(actions(0, 0, 0, 0)).valid.all()


def test_non_finite_rows_are_dropped_and_counted(build) -> None:
    env = build(ToyConfig(fail_at=0.5, failure="nan"), num_envs=2)
    env.reset()
    step = env.step(actions(0, 1))
    assert step.valid.tolist() == [True, False]
    assert env.counters == {"respawned": 0, "dropped": 1, "non_finite": 1}
    assert all(torch.isfinite(x).all() for x in (step.reward, step.obs[STATE], step.final_obs[STATE]))


FIRST = first_training_episode(0)


def test_a_reset_that_is_not_finite_takes_the_next_training_episode(build) -> None:
    env = build(ToyConfig(max_episode_steps=2, broken_episodes=(FIRST + 1, FIRST + 2, FIRST + 4)), num_envs=2)
    plain = build(ToyConfig(max_episode_steps=2), num_envs=2)

    def expected(*episodes: int) -> torch.Tensor:
        return plain.reset(init=torch.tensor([[e % 2, FIRST + e] for e in episodes]))[STATE]

    assert torch.equal(env.reset()[STATE], expected(0, 3)), "1 and 2 are dropped"
    assert env.counters == {"respawned": 0, "dropped": 2, "non_finite": 2}
    assert env.step(actions(0, 0)).valid.all()
    step = env.step(actions(0, 0))
    assert step.truncated.all() and step.valid.all()
    assert torch.equal(step.obs[STATE], expected(6, 5)), "the row of 4 asked again, after the other one had 5"
    assert torch.equal(step.final_obs[STATE][:, 1], torch.tensor([2.0, 2.0])), "the ended episodes are untouched"
    assert env.counters == {"respawned": 0, "dropped": 3, "non_finite": 3}


def test_resets_that_are_never_finite_are_refused_with_the_worker(build) -> None:
    env = build(ToyConfig(broken_episodes=tuple(range(FIRST + 1, FIRST + 99))), num_envs=2)
    pids = [w.process.pid for w in env._workers]
    with pytest.raises(
        ContractError, match=rf"(?s)worker 1 \(row 1, call reset\).*3 episodes.*{FIRST + 3}.*not finite"
    ):
        env.reset()
    assert all(map(gone, pids))


def test_a_named_episode_that_begins_not_finite_is_dropped_at_its_first_step(build) -> None:
    env = build(ToyConfig(broken_episodes=(7,)), num_envs=3)
    env.autoreset = False
    obs = env.reset(init=torch.tensor([[0, 6], [1, 7], [0, 8]]))  # no other episode can stand in for one that is named
    assert obs[STATE].isfinite().all() and not obs[STATE][1].any()
    assert env.counters == {"respawned": 0, "dropped": 1, "non_finite": 1}
    step = env.step(actions(0, 0, 0))
    assert step.valid.tolist() == [True, False, True] and step.truncated.tolist() == [False, True, False]
    assert env.counters["dropped"] == 1, "counted once"
    assert env.step(actions(0, 0, 0)).truncated.tolist() == [False, False, False]
    env.reset(rows=torch.tensor([1]), init=torch.tensor([[1, 9]]))
    assert env.step(actions(0, 0, 0)).valid.all()


def test_evaluation_counts_an_episode_that_begins_not_finite_as_invalid(build) -> None:
    class Still:
        def act(self, obs, *, deterministic=False, generator=None):
            return ActionSample(torch.zeros(2, 1))

        def reset(self, rows=None): ...

    env = build(ToyConfig(broken_episodes=(1, 4)), num_envs=2)
    result = evaluate(env, Still(), initial_states(6, num_tasks=2))
    assert result.valid.tolist() == [True, False, True, True, False, True]
    assert result.returns.isfinite().all()


def test_bad_input_is_refused(build) -> None:
    with pytest.raises(ConfigError, match="refused as asked"):
        build(ToyConfig(refuse=True))
    with pytest.raises(ConfigError, match="5 workers, 3 envs"):
        build(num_workers=5)
    env = build()
    env.reset()
    with pytest.raises(ContractError, match=r"expected action \(3, 1\), got \(3, 2\)"):
        env.step(torch.zeros(3, 2))
    with pytest.raises(ContractError, match="task_id must be 0 to 1"):
        env.reset(init=torch.tensor([[2, 0]] * 3))
    assert env.render().shape == (3, 8, 8, 3)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_close_leaves_no_process_and_no_shared_memory(build) -> None:
    env = build()
    state = env.reset()[STATE]
    pids, memory = [w.process.pid for w in env._workers], Path("/dev/shm") / env._block.name
    assert memory.exists()
    env.close()
    assert all(map(gone, pids)) and not memory.exists()
    assert state.sum().isfinite(), "what the caller still holds stays readable"


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_workers_and_memory_go_when_the_parent_is_killed() -> None:
    script = (
        f"import sys, os, signal; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from toy_simulator import ToyConfig, make\nfrom sims.workers import WorkerVecEnv\n"
        "if __name__ == '__main__':\n"
        "    env = WorkerVecEnv(make, ToyConfig(), 2)\n"
        "    print(env._block.name, *[w.process.pid for w in env._workers], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    name, *pids = done.stdout.split()
    assert done.returncode == -signal.SIGKILL and len(pids) == 2
    assert wait_for(lambda: all(gone(int(pid)) for pid in pids))
    assert wait_for(lambda: not (Path("/dev/shm") / name).exists())
