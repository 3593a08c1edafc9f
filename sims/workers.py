# SPDX-License-Identifier: Apache-2.0
"""Slow simulators side by side: worker processes over shared memory, seen from outside as one `VecEnv`.

A simulator implements the small protocol `Simulator` for one environment; `WorkerVecEnv` runs N of them.

    worker   one process, started by `spawn`; owns `rows` of the batch, usually one
    call     what the worker is doing now: its row, `reset` or `step`, and since when, written to shared memory before
             each (the heartbeat). A call over its time limit is named with all three.
    failure  a worker that died, raised or ran over a limit. It is replaced, its rows' partial episodes are dropped
             (`valid` False, `truncated` True) and counted; failing on and on is refused with the last cause.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from robo_rl.errors import ConfigError, ContractError
from robo_rl.seeding import first_training_episode
from robo_rl.types import EnvSpec, Obs, Step
from sims.worker_process import CALLS, CLOSE, FAILED, RENDER, RESET, STEP, Block, Simulator, Worker, layout

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerLimits:
    """When a worker counts as hung, and what becomes of failures."""

    start_s: float = 300.0
    """Seconds to import and build a simulator."""
    reset_s: float = 120.0
    """Seconds for one reset of one environment."""
    step_s: float = 60.0
    """Seconds for one step of one environment."""
    on_failure: Literal["respawn", "raise"] = "respawn"
    """`respawn` replaces a failed worker; `raise` stops at the first failure (debugging)."""
    max_failures: int = 3
    """A worker that fails this often without ending an episode in between is refused, not replaced."""


class WorkerVecEnv:
    """N simulators in worker processes as one `VecEnv` (CPU tensors, views of shared memory).

    Args:
        factory: a module-level function that builds one `Simulator` from `config` inside the worker.
        config: the simulator's configuration, a dataclass of plain values; travels to the worker once.
        num_envs: N.
        num_workers: processes; each gets an equal share of consecutive rows. One per environment where None.
        seed: names the sequence of training episodes; their `task_id` is `episode` modulo the number of tasks.

    A failed worker costs its rows' episodes, not the run: see `WorkerLimits`. `counters`: `respawned` workers,
    `dropped` episodes (by respawns and by `non_finite` observations or rewards). Where an episode's first observation
    is not finite, the next training episode takes its place; one that `init` names has no other, begins with zeros and
    is dropped (`valid` False, `truncated` True) by its first step.

    Raises:
        ConfigError: the simulator refused its configuration.
        ContractError: a simulator could not be built, a worker failed `limits.max_failures` times, or as many training
            episodes in a row began with something that is not finite.
    """

    def __init__(
        self,
        factory: Callable[[Any], Simulator],
        config: Any,
        num_envs: int,
        num_workers: int | None = None,
        seed: int = 0,
        limits: WorkerLimits = WorkerLimits(),
    ):
        import torch

        num_workers = num_envs if num_workers is None else num_workers
        if not 1 <= num_workers <= num_envs:
            raise ConfigError(f"Expected 1 <= num_workers <= num_envs, got {num_workers} workers, {num_envs} envs.")
        self.autoreset = True
        self.counters = {"respawned": 0, "dropped": 0, "non_finite": 0}
        self._limits, self._next_episode = limits, first_training_episode(seed)
        bounds = [num_envs * i // num_workers for i in range(num_workers + 1)]
        self._workers: list[Worker] = []
        self.close = weakref.finalize(self, _shut_down, self._workers, blocks := [])
        try:
            for i in range(num_workers):
                self._workers.append(Worker(factory, config, i, range(bounds[i], bounds[i + 1])))
            described = [self._ready(worker) for worker in self._workers]
            self.spec: EnvSpec = replace(described[0][0], num_envs=num_envs)
            self._block = Block(layout(self.spec, described[0][1], num_workers))
            blocks.append(self._block)
            for worker in self._workers:
                worker.pipe.send((self._block.name, self._block.fields))
        except BaseException:
            self.close()
            raise
        self._owner = np.repeat(np.arange(num_workers), np.diff(bounds))
        self._ended = np.ones(num_envs, bool)
        self._valid = np.zeros(num_envs, bool)
        self._stillborn = np.zeros(num_envs, bool)  # named by `init`, began not finite: the next step drops them
        views = {k: torch.from_numpy(v) for k, v in self._block.arrays.items()}
        self._obs = {k: views[f"obs/{k}"] for k in self.spec.obs}
        self._step = Step(
            obs=self._obs,
            final_obs={k: views[f"final_obs/{k}"] for k in self.spec.obs},
            reward=views["reward"],
            terminated=views["terminated"],
            truncated=views["truncated"],
            valid=torch.from_numpy(self._valid),
            info={k.split("/", 1)[1]: v for k, v in views.items() if k.startswith("info/")},
        )

    def reset(self, seed: int | None = None, rows: Tensor | None = None, init: Tensor | None = None) -> Obs:
        """See `VecEnv.reset`."""
        index = np.arange(self.spec.num_envs) if rows is None else rows.cpu().numpy()
        if seed is not None:
            if rows is not None:
                raise ContractError("reset(seed=...) restarts the training sequence of all rows; leave out `rows`.")
            self._next_episode = first_training_episode(seed)
        if init is None:
            self._draw(index)
        elif tuple(init.shape) != (len(index), 2):
            raise ContractError(f"reset: expected init of shape ({len(index)}, 2), got {tuple(init.shape)}.")
        else:
            names, tasks = init.cpu().numpy(), len(self.spec.tasks)
            if ((names[:, 0] < 0) | (names[:, 0] >= tasks)).any():
                raise ContractError(f"reset: task_id must be 0 to {tasks - 1}, got {names[:, 0].tolist()}.")
            self._block["init"][index] = names
        self._reset(index, drawn=init is None)
        return self._obs

    def step(self, action: Tensor) -> Step:
        """See `VecEnv.step`."""
        block = self._block
        if tuple(action.shape) != block["action"].shape:
            raise ContractError(f"step: expected action {block['action'].shape}, got {tuple(action.shape)}.")
        block["action"][:] = action.detach().cpu().numpy()
        active, stillborn = ~self._ended, self._stillborn & ~self._ended
        lost = self._command(STEP, active & ~stillborn) & ~stillborn
        stepped = active & ~stillborn & ~lost
        dropped = active & (lost | self._non_finite(stepped, ("reward", *self._names("final_obs"))))
        self.counters["dropped"] += int(dropped.sum())
        dropped |= stillborn  # counted when they began
        np.logical_and(active, ~dropped, out=self._valid)
        self._blank(~self._valid)
        block["truncated"][dropped] = True
        block["truncated"][block["terminated"]] = False
        self._ended |= block["terminated"] | block["truncated"]
        for row in np.flatnonzero(self._ended & self._valid):
            self._workers[self._owner[row]].failures = 0
        if self.autoreset and self._ended.any():
            rows = np.flatnonzero(self._ended)
            self._draw(rows)
            self._reset(rows, drawn=True)
        return self._step

    def render(self, rows: Tensor | None = None) -> np.ndarray:
        """See `VecEnv.render`."""
        index = range(self.spec.num_envs) if rows is None else rows.tolist()
        pictures = []
        for row in index:
            pipe = self._workers[self._owner[row]].pipe
            pipe.send_bytes(RENDER + str(row).encode())
            if not pipe.poll(self._limits.step_s):
                self.close()
                raise ContractError(f"{self.spec.name}: render of row {row} ran over {self._limits.step_s:g} s.")
            message = pipe.recv_bytes()
            if message[:1] == FAILED:
                raise ContractError(f"{self.spec.name}: row {row} cannot be rendered:\n{message[1:].decode()}")
            height, width = struct.unpack("<2I", message[1:9])
            pictures.append(np.frombuffer(message, np.uint8, offset=9).reshape(height, width, 3))
        return np.stack(pictures)

    def state_dict(self) -> dict[str, Tensor] | None:
        """None: a simulator behind the protocol cannot be saved; resume restarts its episodes."""
        return None

    def load_state_dict(self, state: dict[str, Tensor]) -> Obs:
        raise ContractError(f"{self.spec.name} cannot continue from a saved state; start new episodes with reset().")

    # --- inside ---

    def _draw(self, rows: np.ndarray) -> None:
        """Name the next training episodes, in row order."""
        episode = self._next_episode + np.arange(len(rows))
        self._block["init"][rows, 0] = episode % len(self.spec.tasks)
        self._block["init"][rows, 1] = episode
        self._next_episode += len(rows)

    def _reset(self, rows: np.ndarray, drawn: bool) -> None:
        """Start the episodes that `init` of the block names. `drawn`: they are training episodes, and the next will do
        as well where one begins not finite."""
        todo = np.zeros(self.spec.num_envs, bool)
        todo[rows] = True
        self._ended[rows] = self._stillborn[rows] = False
        tries = np.zeros(self.spec.num_envs, int)
        while todo.any():
            lost = self._command(RESET, todo)
            # Rows of a replaced worker that were not being reset have lost their episode too.
            self.counters["dropped"] += int((lost & ~todo & ~self._ended).sum())
            self._ended |= lost & ~todo
            bad = self._non_finite(todo & ~lost, self._names("obs"))
            self.counters["dropped"] += int(bad.sum())
            todo &= lost
            if not bad.any():
                continue
            for name in self._names("obs"):
                self._block[name][bad] = 0
            if drawn:
                self._refuse_endless(tries := tries + bad)
                self._draw(np.flatnonzero(bad))
                todo |= bad
            else:
                self._stillborn |= bad

    def _refuse_endless(self, tries: np.ndarray) -> None:
        """Give up where a row has been given as many training episodes that began not finite as a worker may fail."""
        row = int(tries.argmax())
        if tries[row] < self._limits.max_failures:
            return
        task, episode = self._block["init"][row].tolist()
        self.close()
        raise ContractError(
            f"{self.spec.name}: worker {self._owner[row]} (row {row}, call reset) began {tries[row]} episodes one "
            f"after another, the last one (task {task}, episode {episode}), with an observation that is not finite; "
            "giving up."
        )

    def _names(self, copy: str) -> tuple[str, ...]:
        return tuple(f"{copy}/{key}" for key in self.spec.obs)

    def _non_finite(self, rows: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """(N,) bool, which of `rows` have a NaN or infinity in these arrays of the block; counted."""
        bad = np.zeros(self.spec.num_envs, bool)
        for value in map(self._block.__getitem__, names):
            if value.dtype.kind == "f":
                bad |= ~np.isfinite(value).reshape(len(value), -1).all(axis=1)
        bad &= rows
        self.counters["non_finite"] += int(bad.sum())
        return bad

    def _blank(self, rows: np.ndarray) -> None:
        """Zeros where there is nothing to report, so that no stale or half-written value reaches anyone."""
        if rows.any():
            for key, value in self._block.arrays.items():
                if key.split("/")[0] in ("reward", "terminated", "truncated", "info", "obs", "final_obs"):
                    value[rows] = 0

    def _command(self, command: bytes, rows: np.ndarray) -> np.ndarray:
        """Have the workers of `rows` do `command`; replace those that fail. (N,) bool: rows of replaced workers."""
        lost = np.zeros(self.spec.num_envs, bool)
        self._block["todo"][:] = rows
        waiting: dict[Any, Worker] = {}
        failed: list[tuple[Worker, str]] = []
        sent = time.monotonic()
        for index in np.unique(self._owner[rows]):
            worker = self._workers[index]
            try:
                worker.pipe.send_bytes(command)
                waiting[worker.pipe] = worker
            except OSError:
                failed.append((worker, f"it died with exit code {worker.process.exitcode}"))
        limit = self._limits.step_s if command == STEP else self._limits.reset_s
        while waiting:
            oldest = min(max(sent, self._block["call"][worker.index, 2]) for worker in waiting.values())
            for pipe in connection.wait(list(waiting), timeout=max(0.0, oldest + limit - time.monotonic())):
                worker = waiting.pop(pipe)
                if failure := worker.answer():
                    failed.append((worker, failure))
            for pipe, worker in list(waiting.items()):
                seconds = time.monotonic() - max(sent, self._block["call"][worker.index, 2])
                if seconds > limit:
                    failed.append((waiting.pop(pipe), f"no answer for {seconds:.1f} s (limit {limit:g} s)"))
        for worker, cause in failed:
            self._respawn(worker, cause)
            lost[list(worker.rows)] = True
        for worker, _ in failed:
            self._ready(worker)
            worker.pipe.send((self._block.name, self._block.fields))
        return lost

    def _respawn(self, worker: Worker, cause: str) -> None:
        row, call, _ = self._block["call"][worker.index]
        what = f"row {row:.0f}, call {CALLS[int(call)]}" if row >= 0 else f"rows {worker.rows.start} on, between calls"
        worker.failures += 1
        message = f"{self.spec.name}: worker {worker.index} ({what}) failed: {cause}"
        if self._limits.on_failure == "raise" or worker.failures >= self._limits.max_failures:
            worker.kill()  # it may hang, and close() would wait for it
            self.close()
            raise ContractError(f"{message}\nFailure {worker.failures} without an episode ended in between; giving up.")
        log.warning("%s\nReplacing it; %d episode(s) dropped.", message, len(worker.rows))
        self.counters["respawned"] += 1
        worker.kill()
        self._block["call"][worker.index] = -1, 0, 0
        worker.start()

    def _ready(self, worker: Worker) -> tuple[EnvSpec, tuple[str, ...]]:
        """Wait until the worker has built its simulators; returns the spec of one and its info names."""
        try:
            if not worker.pipe.poll(self._limits.start_s):
                raise ContractError(f"Simulator worker {worker.index} did not start in {self._limits.start_s:g} s.")
            kind, spec, info_names = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            raise ContractError(
                f"Simulator worker {worker.index} died while starting (exit code {worker.process.exitcode}). A script "
                'that makes environments needs `if __name__ == "__main__":` around its main part.'
            ) from None
        if kind == "config":
            raise ConfigError(spec)
        if kind == "error":
            raise ContractError(f"Simulator worker {worker.index} could not build its simulator:\n{spec}")
        return spec, info_names


def _shut_down(workers: list[Worker], blocks: list[Block]) -> None:
    for worker in workers:  # ask all before waiting for any
        with contextlib.suppress(OSError, ValueError):
            worker.pipe.send_bytes(CLOSE)
    deadline = time.monotonic() + 5
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.kill()
    for block in blocks:
        block.close()
