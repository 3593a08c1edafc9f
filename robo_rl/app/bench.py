# SPDX-License-Identifier: Apache-2.0
"""Benchmarks by name: `sim` (stepping), `ppo` and `flow` (training speed), `ppo-parity` (learning against
Stable-Baselines3), `main-job` (every task from zero) and `pirl` (every clone improved).

Speed is environment steps per CPU-second, summed over this process and its children, so that neither a second core
nor other people's work on the machine decides it. Contenders are measured in turns, in short windows of one run, and
a ratio is the median over the turns: two figures from different sittings differ by up to 40 % for the same code.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import tyro

import sims
from policies.gaussian import GaussianConfig
from robo_rl.algorithms.ppo import PPOConfig
from robo_rl.app import results
from robo_rl.app.cpu import cpu_seconds
from robo_rl.app.train_sim import TrainSimConfig, make_run
from robo_rl.errors import ConfigError, RoboRLError, missing_extra
from robo_rl.types import ENVIRONMENT_STATE, STATE, Continuous
from sims.mujoco.gym_tasks import MujocoConfig
from sims.mujoco.tabletop import TabletopConfig

CHEETAH = "HalfCheetah-v5"
NUM_ENVS = 256
PEER_ENVS = 8
SB3_ROLLOUT = 2048

# Stable-Baselines3's defaults, 8 environments of 256 steps; its vf_coef 0.5 weighs the squared error, ours half of it.
SB3_LIKE = PPOConfig(
    num_steps=256,
    epochs=10,
    minibatch_size=64,
    learning_rate=3e-4,
    schedule="constant",
    target_kl=None,
    kl_stop=None,
    gamma=0.99,
    value_coef=1.0,
    max_grad_norm=0.5,
    normalize_advantage="minibatch",
    scale_reward=False,
)
SB3_LIKE_POLICY = GaussianConfig(
    hidden=(64, 64), activation="tanh", normalize_obs=False, log_std_init=0.0, log_std_min=-20.0, log_std_max=2.0
)


@dataclass(frozen=True)
class BenchConfig:
    rows: tyro.conf.Positional[tuple[Literal["sim", "ppo", "flow", "ppo-parity", "main-job", "pirl"], ...]]
    """What to measure."""
    repeats: int = 7
    """Turns of each contender; a ratio is the median over them."""
    seconds: float = 4.0
    """Wall time of one contender's window in a turn [s]; PPO takes whole rollouts."""
    algo: Literal["ours", "sb3", "both"] = "both"
    """ppo-parity: whose runs to make."""
    tasks: tuple[str, ...] = ()
    """main-job, pirl: names of `configs/train/`; empty: only put the page together from the runs that there are."""
    seeds: tuple[int, ...] = ()
    """One run each; empty: five for ppo-parity, three for main-job and pirl."""
    quick: bool = False
    """Two short turns, and one parity run of 20,000 steps; shows that everything runs, measures little."""
    write: bool = False
    """Update docs/results with the rows (and keep the parity runs' records)."""


@dataclass(frozen=True)
class Contender:
    """`advance` does one small piece of work and returns its environment steps."""

    name: str
    advance: Callable[[], int]
    close: Callable[[], None] = lambda: None


@dataclass
class Rates:
    """Environment steps per second of CPU and of wall time, one entry per turn."""

    per_cpu_s: list[float] = field(default_factory=list)
    per_wall_s: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.per_cpu_s)


def main(arguments: Sequence[str]) -> int:
    """`bench sim ppo [--quick]` from the command line; the rows as JSON are the last line printed."""
    try:
        rows = bench(tyro.cli(BenchConfig, args=arguments, prog="robo-rl bench", description=__doc__))
    except RoboRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(row) for row in rows]))
    return 0


def bench(config: BenchConfig) -> list[results.Row]:
    """Measure the rows, print them as they come, and return them."""
    if not config.rows:
        raise ConfigError("bench needs at least one of: sim, ppo, flow, ppo-parity, main-job, pirl.")
    torch.set_num_threads(1)  # the cheapest per CPU-second on networks of this size, for us and for the peers
    rows: list[results.Row] = []
    for name in dict.fromkeys(config.rows):
        start, cpu = time.perf_counter(), cpu_seconds()
        if name == "ppo-parity":
            from robo_rl.app.bench_parity import ppo_parity

            new, page = ppo_parity(config), "ppo_parity"
        elif name in ("main-job", "pirl"):
            from robo_rl.app.bench_runs import runs

            page = name.replace("-", "_")
            new = runs(page, config.tasks, config.seeds or (0, 1, 2), config.quick, config.write)
        else:
            new, page = _speed(name)(config), "speed"
            new = [replace(r, command=f"python launch/bench.py {name} --write", commit=results.commit()) for r in new]
            # Measured together; the first row carries the cost of all.
            new[0] = replace(new[0], wall_s=time.perf_counter() - start, cpu_s=cpu_seconds() - cpu)
        for row in new:
            holds = {True: "holds", False: "DOES NOT HOLD", None: ""}[row.holds]
            print(f"{row.id}: {row.measured} (target: {row.target}) {holds}", flush=True)
        if config.write and not config.quick:
            print(f"Wrote {results.update_page(page, new)}.")
        rows += new
    return rows


def _speed(name: str) -> Callable[[BenchConfig], list[results.Row]]:
    if name == "flow":
        from robo_rl.app.bench_flow import flow

        return flow
    return {"sim": sim, "ppo": ppo}[name]


def sim(config: BenchConfig) -> list[results.Row]:
    """Stepping: HalfCheetah against MuJoCo's own cost and Gymnasium's processes; the tabletop; its two cameras."""
    contenders = [
        _env_contender("ours", MujocoConfig(task=CHEETAH, num_envs=NUM_ENVS)),
        _mj_step_contender(),
        _async_contender(PEER_ENVS),
        _async_contender(2),
    ]
    rates = interleave(contenders, config)
    best_async = max((f"AsyncVectorEnv({n})" for n in (PEER_ENVS, 2)), key=lambda n: rates[n].median)
    tabletop = interleave([_env_contender("lift", TabletopConfig(task="lift", num_envs=NUM_ENVS))], config)["lift"]
    cameras = interleave([_camera_contender()], config)["cameras"]
    wall = statistics.median(cameras.per_wall_s)
    return [
        ratio_row("sim-mj_step", "HalfCheetah-v5 batched stepping against mj_step(nstep=5)", rates, "mj_step", 0.8),
        ratio_row("sim-async", "the same against Gymnasium's AsyncVectorEnv", rates, best_async, 4.0),
        results.Row(
            id="sim-lift",
            claim="tabletop lift, random actions, 256 environments",
            target="reported",
            measured=f"{tabletop.median:,.0f} steps/CPU-s, {statistics.median(tabletop.per_wall_s):,.0f} steps/s",
            holds=None,
        ),
        results.Row(
            id="sim-cameras",
            claim="tabletop lift with two 84 x 84 cameras",
            target="1,000 observations/s on two cores",
            measured=f"{wall:,.0f} observations/s, {cameras.median:,.0f} per CPU-s",
            holds=wall >= 1000,
        ),
    ]


def ppo(config: BenchConfig) -> list[results.Row]:
    """Training, learning included: HalfCheetah at minibatch 64, the tabletop at minibatch 2,048."""
    from torch import nn

    # Rollouts of 2,048 steps for all, so equal update counts; from as many environments as suits each.
    many = replace(SB3_LIKE, num_steps=SB3_ROLLOUT // 64)
    cheetah = interleave(
        [
            _ppo_contender(MujocoConfig(task=CHEETAH, num_envs=64), SB3_LIKE_POLICY, many),
            _sb3_contender(CHEETAH, SB3_LIKE, "dummy", 8),
            _sb3_contender(CHEETAH, SB3_LIKE, "dummy", 64),
            _sb3_contender(CHEETAH, SB3_LIKE, "subproc", 8),
        ],
        config,
    )
    learner, network = PPOConfig(), GaussianConfig(obs_keys=(STATE, ENVIRONMENT_STATE))
    tabletop = interleave(
        [
            _ppo_contender(TabletopConfig(task="lift", num_envs=NUM_ENVS), network, learner),
            *(
                _sb3_contender(
                    "sims.gymnasium_export:robo_rl/Lift-v0",
                    learner,
                    mode,
                    PEER_ENVS,
                    rollout=learner.num_steps * NUM_ENVS,
                    policy_kwargs={
                        "net_arch": {"pi": list(network.hidden), "vf": list(network.hidden)},
                        "activation_fn": nn.ELU,
                    },
                )
                for mode in ("dummy", "subproc")
            ),
        ],
        config,
    )

    def best(rates: dict[str, Rates]) -> str:
        return max((name for name in rates if name != "ours"), key=lambda name: rates[name].median)

    return [
        ratio_row(
            "ppo-cheetah",
            "PPO on HalfCheetah-v5, rollouts of 2,048 steps (ours from 64 environments), 10 epochs, minibatch 64, "
            "against Stable-Baselines3 from 8 or 64",
            cheetah,
            best(cheetah),
            2.0,
        ),
        ratio_row(
            "ppo-lift",
            f"PPO on lift, 8,192 steps, {learner.epochs} epochs, minibatch 2,048, against Stable-Baselines3",
            tabletop,
            best(tabletop),
            3.0,
            note="Ours normalises observations and rewards within this figure; Stable-Baselines3 does not.",
        ),
    ]


# --- measuring -----------------------------------------------------------------------------------------------


def interleave(contenders: list[Contender], config: BenchConfig) -> dict[str, Rates]:
    """Rates of every contender, measured in turns."""
    rates = {c.name: Rates() for c in contenders}
    repeats, seconds = (2, 0.5) if config.quick else (config.repeats, config.seconds)
    try:
        for c in contenders:
            c.advance()  # first calls allocate, compile and start threads
        for _ in range(repeats):
            for c in contenders:
                cpu, start = cpu_seconds(), time.perf_counter()
                steps = c.advance()  # at least one, however slow the machine
                while time.perf_counter() - start < seconds:
                    steps += c.advance()
                rates[c.name].per_wall_s.append(steps / (time.perf_counter() - start))
                rates[c.name].per_cpu_s.append(steps / (cpu_seconds() - cpu))
    finally:
        for c in contenders:
            c.close()
    return rates


def ratio_row(
    id: str, claim: str, rates: dict[str, Rates], peer: str, target: float, ours: str = "ours", note: str = ""
) -> results.Row:
    """Ours over the peer, turn by turn: median, with the lowest and highest turn."""
    ratios = [a / b for a, b in zip(rates[ours].per_cpu_s, rates[peer].per_cpu_s, strict=True)]
    median = statistics.median(ratios)
    others = ", ".join(f"{name} {r.median:,.0f}" for name, r in rates.items())
    return results.Row(
        id=id,
        claim=claim,
        target=f"at least {target:g} times {peer}",
        measured=f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); steps/CPU-s: {others}",
        holds=median >= target,
        note=note,
    )


# --- contenders ----------------------------------------------------------------------------------------------


def _env_contender(name: str, env_config: MujocoConfig | TabletopConfig) -> Contender:
    env = sims.make(env_config, seed=0)
    env.reset(seed=0)
    assert isinstance(env.spec.action, Continuous)
    actions = torch.rand(16, env.spec.num_envs, env.spec.action.dim) * 2 - 1

    def advance() -> int:
        for action in actions:
            env.step(action)
        return len(actions) * env.spec.num_envs

    return Contender(name, advance, env.close)


def _camera_contender() -> Contender:
    return _env_contender("cameras", TabletopConfig(task="lift", num_envs=16, cameras=("front", "wrist")))


def _mj_step_contender() -> Contender:
    """What MuJoCo itself costs: one environment, no observations or rewards, episodes of 1,000 steps."""
    import gymnasium
    import mujoco

    env = gymnasium.make(CHEETAH)
    model = env.unwrapped.model  # type: ignore[attr-defined]
    data = mujoco.MjData(model)
    actions = np.random.default_rng(0).uniform(-1, 1, (1000, model.nu))

    def advance() -> int:
        mujoco.mj_resetData(model, data)
        for action in actions:
            data.ctrl[:] = action
            mujoco.mj_step(model, data, nstep=5)
        return len(actions)

    return Contender("mj_step", advance, env.close)


def _async_contender(num_envs: int) -> Contender:
    import gymnasium

    envs = gymnasium.make_vec(CHEETAH, num_envs=num_envs, vectorization_mode="async")
    envs.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (64, num_envs, 6)).astype(np.float32)

    def advance() -> int:
        for action in actions:
            envs.step(action)
        return len(actions) * num_envs

    return Contender(f"AsyncVectorEnv({num_envs})", advance, envs.close)


def _ppo_contender(env_config: Any, policy_config: GaussianConfig, ppo_config: PPOConfig) -> Contender:
    loop = make_run(TrainSimConfig(env_config, policy_config, ppo_config)).loop

    def advance() -> int:
        before = loop.env_steps
        next(loop)
        return loop.env_steps - before

    return Contender("ours", advance, loop.env.close)


def sb3_ppo(
    env_id: str,
    ppo_config: PPOConfig,
    vec_env: Literal["dummy", "subproc"],
    seed: int,
    num_envs: int = PEER_ENVS,
    rollout: int = SB3_ROLLOUT,
    policy_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Stable-Baselines3's PPO with the settings of `ppo_config`, `rollout` steps from all environments together between
    two updates; everything else its default."""
    try:
        from stable_baselines3 import PPO as SB3PPO
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
    except ImportError as error:
        raise missing_extra("stable-baselines3", "sb3") from error

    cls = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[vec_env]
    envs = make_vec_env(env_id, n_envs=num_envs, seed=seed, vec_env_cls=cls, wrapper_class=_flat)
    return SB3PPO(
        "MlpPolicy",
        envs,
        learning_rate=ppo_config.learning_rate,
        n_steps=rollout // num_envs,
        batch_size=ppo_config.minibatch_size,
        n_epochs=ppo_config.epochs,
        gamma=ppo_config.gamma,
        gae_lambda=ppo_config.gae_lambda,
        clip_range=ppo_config.clip,
        ent_coef=ppo_config.entropy_coef,
        vf_coef=ppo_config.value_coef / 2,
        max_grad_norm=ppo_config.max_grad_norm,
        policy_kwargs=policy_kwargs,
        seed=seed,
        device="cpu",
    )


def _flat(env: Any) -> Any:
    """Our Dict observation as the vector that an MLP sees (a name with a dot cannot be a module's in torch); other
    environments as they are."""
    import gymnasium

    space = env.observation_space
    if not isinstance(space, gymnasium.spaces.Dict):
        return env
    dim = sum(space[key].shape[0] for key in (STATE, ENVIRONMENT_STATE))  # type: ignore[index]
    flat = gymnasium.spaces.Box(-np.inf, np.inf, (dim,), np.float32)
    return gymnasium.wrappers.TransformObservation(
        env, lambda obs: np.concatenate([obs[STATE], obs[ENVIRONMENT_STATE]]), flat
    )


def _sb3_contender(
    env_id: str,
    ppo_config: PPOConfig,
    vec_env: Literal["dummy", "subproc"],
    num_envs: int,
    rollout: int = SB3_ROLLOUT,
    policy_kwargs: dict[str, Any] | None = None,
) -> Contender:
    model = sb3_ppo(env_id, ppo_config, vec_env, 0, num_envs, rollout, policy_kwargs)
    steps = model.n_steps * model.n_envs

    def advance() -> int:
        model.learn(steps, reset_num_timesteps=False)
        return steps

    return Contender(f"SB3 {vec_env}({num_envs})", advance, model.get_env().close)
