# SPDX-License-Identifier: Apache-2.0
"""One worker process with its simulators: what runs inside it, the memory it shares, and the handle on it.

All arrays (observations, pictures, actions, results) live in one block of shared memory that both sides index by row;
the pipe carries one byte per command and one per answer. Pipes and not semaphores: they cost
some 30 microseconds more per worker and step (8 workers, busy machine: 300 against 67), and in return the death of
either side is an event instead of a deadlock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import shared_memory
from typing import Any, Protocol

import numpy as np

from robo_rl.errors import ConfigError
from robo_rl.types import Continuous, EnvSpec

CALLS = ("nothing", "step", "reset")
STEP, RESET, RENDER, CLOSE = b"s", b"r", b"p", b"c"
DONE, FAILED = b"d", b"f"


class Simulator(Protocol):
    """One environment in a worker process. numpy in, numpy out.

    Attributes:
        spec: its description, with `num_envs` 1; `spec.obs` names every array that `reset` and `step` return.
        info_names: the scalars that `step` reports beside `success`.
    """

    spec: EnvSpec
    info_names: tuple[str, ...]

    def reset(self, task_id: int, episode: int) -> Mapping[str, np.ndarray]:
        """Start the episode named by `(task_id, episode)`, of which the initial state is a pure function."""
        ...

    def step(self, action: np.ndarray) -> tuple[Mapping[str, np.ndarray], float, bool, bool, Mapping[str, float]]:
        """One control step: obs, reward, terminated, truncated, info with `success` and every name promised."""
        ...

    def render(self) -> np.ndarray:
        """A picture, (height, width, 3) uint8."""
        ...

    def close(self) -> None: ...


# --- memory both sides see -----------------------------------------------------------------------------------------


class _Memory(shared_memory.SharedMemory):
    def __del__(self) -> None:
        with contextlib.suppress(BufferError):  # tensors still look into it; the mapping goes with the last of them
            self.close()


class Block:
    """Named arrays in one block of shared memory. The side that made it (`name` None) removes it on `close`."""

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], str]], name: str | None = None):
        sizes = {k: int(np.prod(shape)) * np.dtype(dtype).itemsize for k, (shape, dtype) in fields.items()}
        total = sum(-(-size // 64) * 64 for size in sizes.values())  # whole cache lines each
        self._memory = _Memory(name=name, create=name is None, size=total)
        self._owner = name is None
        self.fields, self.name = dict(fields), self._memory.name
        self.arrays: dict[str, np.ndarray] = {}
        offset = 0
        for key, (shape, dtype) in fields.items():
            self.arrays[key] = np.ndarray(shape, dtype, buffer=self._memory.buf, offset=offset)
            offset += -(-sizes[key] // 64) * 64

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    def close(self) -> None:
        """Give the name back; the memory itself goes with the last view of it."""
        if self._owner:
            self._owner = False
            self._memory.unlink()


def layout(spec: EnvSpec, info_names: tuple[str, ...], num_workers: int) -> dict[str, tuple[tuple[int, ...], str]]:
    n = spec.num_envs
    fields: dict[str, tuple[tuple[int, ...], str]] = {
        "call": ((num_workers, 3), "float64"),  # row, index into CALLS, time.monotonic() at its start
        "init": ((n, 2), "int64"),
        "todo": ((n,), "bool"),  # the rows that the present command is for
        "action": ((n, spec.action.dim), "float32") if isinstance(spec.action, Continuous) else ((n,), "int64"),
        "reward": ((n,), "float32"),
        "terminated": ((n,), "bool"),
        "truncated": ((n,), "bool"),
        "info/success": ((n,), "bool"),
    }
    fields |= {f"info/{name}": ((n,), "float32") for name in info_names}
    for key, array in spec.obs.items():
        fields |= {f"{copy}/{key}": ((n, *array.shape), array.dtype) for copy in ("obs", "final_obs")}
    return fields


# --- the worker's side ---------------------------------------------------------------------------------------------


def _run_worker(factory: Callable[[Any], Simulator], config: Any, index: int, rows: range, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent, which closes its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        simulators = {row: factory(config) for row in rows}
        first = simulators[rows[0]]
        pipe.send(("ready", first.spec, first.info_names))
    except ConfigError as error:
        pipe.send(("config", str(error), ()))
        return
    except BaseException:  # SystemExit too: some simulators call exit() where an asset is missing
        pipe.send(("error", traceback.format_exc(), ()))
        return
    try:
        name, fields = pipe.recv()
        _serve(simulators, Block(fields, name), index, pipe)
    except (EOFError, BrokenPipeError):  # the parent is gone
        pass
    except BaseException:
        pipe.send_bytes(FAILED + traceback.format_exc().encode())
    finally:
        for simulator in simulators.values():
            simulator.close()


def _serve(simulators: dict[int, Simulator], block: Block, index: int, pipe: Any) -> None:
    obs = {k.split("/", 1)[1]: v for k, v in block.arrays.items() if k.startswith("obs/")}
    final_obs = {k: block[f"final_obs/{k}"] for k in obs}
    info = {k.split("/", 1)[1]: v for k, v in block.arrays.items() if k.startswith("info/")}
    reward, terminated, truncated = block["reward"], block["terminated"], block["truncated"]
    action, init, todo, call = block["action"], block["init"], block["todo"], block["call"]
    while (command := pipe.recv_bytes()) != CLOSE:
        if command[:1] == RENDER:
            pipe.send_bytes(_picture(simulators[int(command[1:])]))
            continue
        for row, simulator in simulators.items():
            if not todo[row]:
                continue
            if command == STEP:
                call[index] = row, CALLS.index("step"), time.monotonic()
                now, reward[row], terminated[row], truncated[row], scalars = simulator.step(action[row].copy())
                for key, value in info.items():
                    value[row] = scalars[key]
                for key, value in final_obs.items():
                    value[row] = now[key]
            else:
                call[index] = row, CALLS.index("reset"), time.monotonic()
                now = simulator.reset(int(init[row, 0]), int(init[row, 1]))
            for key, value in obs.items():
                value[row] = now[key]
        call[index] = -1, 0, time.monotonic()
        pipe.send_bytes(DONE)


def _picture(simulator: Simulator) -> bytes:
    """The answer to RENDER. A failing renderer says so and harms no episode."""
    try:
        picture = np.ascontiguousarray(simulator.render(), np.uint8)
        return DONE + struct.pack("<2I", *picture.shape[:2]) + picture.tobytes()
    except Exception:
        return FAILED + traceback.format_exc().encode()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # also out of a call that never returns


# --- the parent's side ---------------------------------------------------------------------------------------------


class Worker:
    """A process, its pipe, and how often it failed since one of its episodes last ended."""

    def __init__(self, factory: Callable[[Any], Simulator], config: Any, index: int, rows: range):
        self.rows, self.index, self.failures = rows, index, 0
        self._args = factory, config, index, rows
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_run_worker, args=(*self._args, theirs), name=f"simulator-{self.index}", daemon=True
        )
        # One simulator, one thread: N workers with a thread pool each would fight over the cores.
        threads = {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        os.environ.update(dict.fromkeys(threads, "1"))
        try:
            self.process.start()
        finally:
            for key, value in threads.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
        theirs.close()  # so that the worker's death closes the pipe

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()

    def answer(self) -> str:
        """Read the answer to a command; what went wrong, or nothing."""
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.process.join(5)
            return f"it died with exit code {self.process.exitcode}"
        return "" if message == DONE else message[len(FAILED) :].decode()
