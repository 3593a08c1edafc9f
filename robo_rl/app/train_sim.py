# SPDX-License-Identifier: Apache-2.0
"""Train in simulation: configuration in, run directory out.

`train_sim` is the whole job in reading order: build, restore if resuming, then one iteration after another with
evaluation and checkpoints when due, and a last evaluation of the last policy.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import policies
import sims
from policies import PolicyConfig
from robo_rl import checkpoint
from robo_rl.algorithms.bc import BCConfig
from robo_rl.algorithms.grpo import GRPO, GRPOConfig
from robo_rl.algorithms.ppo import PPO, PPOConfig
from robo_rl.app.cpu import cpu_seconds
from robo_rl.app.evaluate import EvaluationConfig, chunked_for, evaluation_env, run_evaluation
from robo_rl.app.train_offline import DemonstrationsConfig, TrainOfflineConfig, train_offline
from robo_rl.config import dump, load, to_dict
from robo_rl.errors import ConfigError, ContractError, NonFiniteError
from robo_rl.loops.evaluate import EvaluationResult
from robo_rl.loops.groups import GroupLoop
from robo_rl.loops.on_policy import OnPolicy
from robo_rl.tracking.run_dir import RunDir, versions
from robo_rl.tracking.tracker import Tracker
from robo_rl.types import EnvSpec, Metrics, VecEnv
from sims import SimConfig


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0
    """Environment steps between checkpoints; 0: only at the end (and on Ctrl-C)."""
    keep: int = 3
    """How many of the newest to keep."""


@dataclass(frozen=True)
class CloneConfig:
    """How a run starts from a cloned policy; see `TrainOfflineConfig`."""

    algorithm: BCConfig = field(default_factory=BCConfig)
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)


@dataclass(frozen=True)
class TrainSimConfig:
    env: SimConfig
    policy: PolicyConfig
    algorithm: PPOConfig | GRPOConfig = field(default_factory=PPOConfig)
    clone: CloneConfig | None = None
    """Clone the policy from demonstrations first, in this environment, and start from that."""
    start_from: str | None = None
    """A run or checkpoint directory whose policy this run starts from."""
    total_env_steps: int = 1_000_000
    """Steps of single environments, all together."""
    max_cpu_minutes: float | None = None
    """Stop after this much CPU time over all processes, whichever limit comes first; None: no limit."""
    seed: int = 0
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    torch_threads: int = 1
    """More than one fights with the physics threads while collecting."""
    device: str = "cpu"
    """Where the policy lives."""


@dataclass
class Run:
    """What a run is made of, and how it is saved and restored."""

    config: TrainSimConfig
    spec: EnvSpec
    policy: Any  # a torch.nn.Module that is a Policy
    algorithm: PPO | GRPO
    loop: OnPolicy | GroupLoop
    cpu_before: float = 0.0  # spent by the runs that this one resumes [s]
    wall_before: float = 0.0
    saved_at: int = -1  # env_steps of the newest checkpoint
    evaluation_env: VecEnv | None = None  # built at the first evaluation and kept: worker processes start slowly

    def save(self, root: Path, cpu_s: float, wall_s: float) -> None:
        """Write a checkpoint, unless this very state is on disk already."""
        if self.saved_at == self.loop.env_steps:
            return
        loop = self.loop.state_dict()
        parts = {
            "policy": self.policy.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "rng": {"generator": loop.pop("generator")},
            "env": loop,
        }
        policy = to_dict(self.config.policy)
        spec = {"env": checkpoint.env_spec_dict(self.spec), "policy": policy, "versions": versions()}
        state = {"cpu_s": cpu_s, "wall_s": wall_s}
        checkpoint.save(root, self.loop.env_steps, parts, state, spec, self.config.checkpoint.keep)
        self.saved_at = self.loop.env_steps

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        self.policy.load_state_dict(saved.parts["policy"])
        self.algorithm.load_state_dict(saved.parts["algorithm"])
        self.loop.load_state_dict({**saved.parts["env"], **saved.parts["rng"]})
        self.cpu_before, self.wall_before = saved.state["cpu_s"], saved.state["wall_s"]
        self.saved_at = self.loop.env_steps

    def evaluate(self, video: Path | None = None) -> EvaluationResult:
        """The present policy over the configured initial states, in environments of its own."""
        evaluation = self.config.evaluation
        if self.evaluation_env is None:
            env = evaluation_env(self.config.env, evaluation, self.config.seed)
            self.evaluation_env = chunked_for(env, self.policy)
        return run_evaluation(self.evaluation_env, self.policy, evaluation, video)

    def close(self) -> None:
        self.loop.env.close()
        if self.evaluation_env is not None:
            self.evaluation_env.close()


def make_run(config: TrainSimConfig) -> Run:
    """Simulator, policy, algorithm and loop of a configuration, freshly initialised from its seed."""
    torch.set_num_threads(config.torch_threads)
    torch.manual_seed(config.seed)
    env = sims.make(config.env, config.seed)
    policy = policies.make(config.policy, env.spec).to(config.device)
    env = chunked_for(env, policy)
    generator = torch.Generator().manual_seed(config.seed)
    match config.algorithm:
        case PPOConfig() as settings:
            algorithm = PPO(policy, settings, env.spec.num_envs)
            loop = OnPolicy(env, policy, algorithm, settings.num_steps, generator, config.seed)
        case GRPOConfig() as settings:
            algorithm = GRPO(policy, settings)
            size, resamples = settings.group_size, settings.max_resamples
            loop = GroupLoop(env, policy, algorithm, size, resamples, generator, config.seed)
    if config.evaluation.video:
        env.render(torch.arange(1))  # a missing OpenGL is to be found now, not after training
    return Run(config, env.spec, policy, algorithm, loop)


def train_sim(config: TrainSimConfig, run_dir: Path, resume: bool = False, live: bool | None = None) -> dict[str, Any]:
    """Train, evaluate, and write the run directory.

    Args:
        run_dir: made if missing; refused if it holds another run, unless `resume` continues it.
        live: a live panel (True), plain lines (False), or a panel where there is a terminal (None).

    Returns:
        What `result.json` holds. `wall_s` and `cpu_s` are of everything, `train_wall_s` and `train_cpu_s` end where the
        last evaluation begins. `interrupted` is True after Ctrl-C: the run was saved, not evaluated, and can go on.

    Raises:
        NonFiniteError: a loss or gradient is not finite; the minibatch is in `non_finite_batch.safetensors`.
    """
    start, cpu_start = time.perf_counter(), cpu_seconds()
    directory = RunDir.create(run_dir, dump(config), resume=resume)
    start_from = None if resume else _start(config, run_dir, live)
    run = make_run(config)
    if resume:
        run.restore(checkpoint.load(run_dir))
    elif start_from is not None:
        load_weights(run.policy, checkpoint.load(start_from), run.spec)
    loop, env = run.loop, run.loop.env

    def spent() -> tuple[float, float]:
        cpu = run.cpu_before + cpu_seconds() - cpu_start
        return cpu, run.wall_before + time.perf_counter() - start

    metrics: Metrics = {}
    checkpoints = run_dir / "checkpoints"
    with _stop_on_sigint() as stop:
        # Inside: importing TensorBoard takes seconds, and a Ctrl-C then is to end the run like any other.
        tracker = Tracker(directory, config.total_env_steps, live, start_step=loop.env_steps)
        try:
            next_save = _next_due(loop.env_steps, config.checkpoint.every)
            next_evaluation = _next_due(loop.env_steps, config.evaluation.every)
            loop.progress = _progress(config, loop.env_steps, spent()[0])
            while loop.progress < 1 and not stop.requested:
                metrics = next(loop)
                cpu_s, wall_s = spent()
                loop.progress = _progress(config, loop.env_steps, cpu_s)
                if loop.env_steps >= next_evaluation and loop.progress < 1:
                    next_evaluation = _next_due(loop.env_steps, config.evaluation.every)
                    metrics |= run.evaluate().metrics(run.spec)
                metrics |= {f"env/{k}": float(v) for k, v in env.counters.items()}
                metrics |= {"time/cpu_s": cpu_s, "time/wall_s": wall_s, "time/progress": loop.progress}
                tracker.log(loop.env_steps, metrics)  # before saving: what a checkpoint holds is in the log
                if loop.env_steps >= next_save:
                    next_save = _next_due(loop.env_steps, config.checkpoint.every)
                    run.save(checkpoints, cpu_s, wall_s)
            train_cpu_s, train_wall_s = spent()
            run.save(checkpoints, train_cpu_s, train_wall_s)
            result: dict[str, Any] = {"interrupted": stop.requested, "metrics": metrics, "env_steps": loop.env_steps}
            if not stop.requested:
                video = run_dir / "video" / f"step_{loop.env_steps:012d}.mp4" if config.evaluation.video else None
                final = run.evaluate(video)
                evaluated = final.metrics(run.spec)
                tracker.log(loop.env_steps, evaluated)
                result |= {"metrics": metrics | evaluated, **final.counts(run.spec)}
            cpu_s, wall_s = spent()
        except NonFiniteError as error:
            path = run_dir / "non_finite_batch.safetensors"
            save_file(error.tensors, path)
            raise NonFiniteError(f"{error} The minibatch is in `{path}`.", error.tensors) from error
        finally:
            run.close()
            tracker.close()
    result |= {
        "train_wall_s": train_wall_s,
        "train_cpu_s": train_cpu_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "seed": config.seed,
        "counters": dict(env.counters),
    }
    return directory.write_result(result)


def _start(config: TrainSimConfig, run_dir: Path, live: bool | None) -> Path | None:
    """Where the policy's first weights lie; clones it into the run directory if that is asked for."""
    if config.clone is None:
        return None if config.start_from is None else Path(config.start_from)
    if config.start_from is not None:
        raise ConfigError("Give `clone` or `start_from`, not both: each says where the policy's weights come from.")
    offline = TrainOfflineConfig(
        config.env,
        config.policy,
        config.clone.algorithm,
        config.clone.demonstrations,
        config.seed,
        replace(config.evaluation, video=False),
        config.torch_threads,
        config.device,
    )
    train_offline(offline, run_dir / "clone", live)
    return run_dir / "clone"


def load_weights(policy: Any, saved: checkpoint.Checkpoint, spec: EnvSpec) -> None:
    """Give a fresh policy the weights of a checkpoint. What only training needs (critic, noise head) may be missing
    there and stays fresh.

    Raises:
        ContractError: the checkpoint is for another environment or another network.
    """
    checkpoint.check_fits(saved.env_spec, spec, tuple(policy.config.obs_keys))
    mine, theirs = policy.state_dict(), saved.parts["policy"]
    for name, value in theirs.items():
        if name in mine and mine[name].shape != value.shape:
            raise ContractError(
                f"`{name}` has shape {tuple(value.shape)} in `{saved.path}` and {tuple(mine[name].shape)} in this "
                "policy. Use the `policy` section that the checkpoint was trained with."
            )
    missing = [n for n in mine.keys() - theirs.keys() if not n.startswith(("critic", "noise_head"))]
    unknown = [n for n in theirs.keys() - mine.keys() if not n.startswith(("critic", "noise_head"))]
    if missing or unknown:
        raise ContractError(
            f"`{saved.path}` is of another kind of policy: it lacks {sorted(missing)[:3]} and has "
            f"{sorted(unknown)[:3]} besides. Use the `policy` section that it was trained with."
        )
    policy.load_state_dict({k: v for k, v in theirs.items() if k in mine}, strict=False)


def dry_run(config: TrainSimConfig) -> str:
    """Build everything, act once, and describe it: shapes, parameter counts, limits."""
    run = make_run(config)
    try:
        sample = run.policy.act(run.loop.obs)
        lines = [f"environment  {run.spec.name}, {run.spec.num_envs} at {run.spec.control_hz} Hz, {run.spec.simulator}"]
        lines += [f"  {k}  {tuple(v.shape)} {v.dtype}" for k, v in run.loop.obs.items()]
        lines += [f"action       {tuple(sample.action.shape)} {run.spec.action}"]
        lines += [f"tasks        {'; '.join(run.spec.tasks)}", f"success      {run.spec.success}"]
        count = sum(p.numel() for p in run.policy.parameters())
        lines += [f"policy       {config.policy.kind}, {count:,} parameters on {config.device}"]
        per_update = run.loop.num_steps * getattr(run.loop.env, "chunk", 1) * run.spec.num_envs
        updates = -(-config.total_env_steps // per_update)
        lines += [f"algorithm    {config.algorithm.kind}, {updates:,} updates of {per_update:,} steps"]
    finally:
        run.close()
    return "\n".join(lines)


def load_run_config(run_dir: Path) -> TrainSimConfig:
    """The configuration of a run directory."""
    path = Path(run_dir) / "config.yaml"
    if not path.exists():
        raise ConfigError(f"`{run_dir}` is not a run directory: it has no config.yaml.")
    return load(TrainSimConfig, path)


def _progress(config: TrainSimConfig, env_steps: int, cpu_s: float) -> float:
    """Share of the training done, by the limit that is nearer."""
    by_cpu = cpu_s / (60 * config.max_cpu_minutes) if config.max_cpu_minutes else 0.0
    return max(env_steps / config.total_env_steps, by_cpu)


def _next_due(env_steps: int, every: int) -> float:
    return (env_steps // every + 1) * every if every else float("inf")


@dataclass
class _Stop:
    requested: bool = False


@contextmanager
def _stop_on_sigint() -> Iterator[_Stop]:
    """The first Ctrl-C asks to stop after the present iteration; a second one kills."""
    stop = _Stop()

    def handle(signum, frame):
        stop.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread, as in some notebooks: Ctrl-C is theirs
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
