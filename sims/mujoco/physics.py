# SPDX-License-Identifier: Apache-2.0
"""N MuJoCo worlds stepped natively by MuJoCo's own thread pool (`mujoco.rollout`). numpy in, numpy out.

What `mujoco.rollout` does that a loop over `mj_step` does not: every call starts with a zero solver warm start
(the state it takes and gives has none), so one call per control step equals an `mj_step` loop that zeroes
`qacc_warmstart` before each control step, bit for bit and for any number of threads. `sensordata` belongs to the
state before the last integration, one physics step earlier than `state`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import mujoco
import numpy as np
from mujoco import rollout

FULL = mujoco.mjtState.mjSTATE_FULLPHYSICS


class BatchPhysics:
    """Steps a batch of states. Rows may have different models if their sizes agree (other shapes, colours, masses).

    A state row is `[time, qpos, qvel, act, ...]` (mjSTATE_FULLPHYSICS), float64.
    """

    def __init__(self, model: mujoco.MjModel, num_envs: int, substeps: int, num_threads: int | None = None):
        """`num_threads` None takes every core that gets 8 environments or more: below that, waking a thread costs more
        than it does."""
        threads = min(num_threads, num_envs) if num_threads else max(1, min(os.cpu_count() or 1, num_envs // 8))
        self.model = model
        self.num_envs = num_envs
        self.substeps = substeps
        self.nstate = mujoco.mj_stateSize(model, FULL)
        self.qpos = slice(1, 1 + model.nq)
        self.qvel = slice(1 + model.nq, 1 + model.nq + model.nv)
        # Rollout(nthread=1) would start a pool of one thread; 0 runs in the caller.
        self._pool = rollout.Rollout(nthread=threads if threads > 1 else 0)
        self._data = [mujoco.MjData(model) for _ in range(threads)]
        # The default chunk leaves threads idle on small batches; two chunks a thread measured best there.
        self._chunk = None if num_envs >= 64 else max(1, num_envs // (2 * threads))
        self._buffers: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def advance(
        self,
        state: np.ndarray,
        ctrl: np.ndarray,
        models: Sequence[mujoco.MjModel] | None = None,
        substeps: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hold `ctrl` (M, nu) for `substeps` physics steps from `state` (M, nstate), both float64 and contiguous.

        Returns:
            `state` (M, substeps, nstate) and `sensordata` (M, substeps, nsensordata) after each physics step; they
            are overwritten by the next call with as many rows and steps. Where MuJoCo gives up on a row (bad
            acceleration) it repeats the row's last state and raises nothing: callers check for non-finite values.
        """
        rows, steps = state.shape[0], substeps or self.substeps
        buffers = self._buffers.get((rows, steps))
        if buffers is None:
            if len(self._buffers) > 64:  # resets come in every batch size; keep the memory bounded
                self._buffers.clear()
            buffers = (
                np.empty((rows, steps, self.nstate)),
                np.empty((rows, steps, self.model.nsensordata)),
                np.empty((rows, steps, self.model.nu)),
            )
            self._buffers[rows, steps] = buffers
        out_state, out_sensors, tiled = buffers
        tiled[:] = ctrl[:, None]
        self._pool.rollout(
            list(models) if models is not None else [self.model] * rows,
            self._data,
            state,
            tiled,
            skip_checks=True,
            nstep=steps,
            state=out_state,
            sensordata=out_sensors,
            chunk_size=self._chunk if rows == self.num_envs else None,
        )
        return out_state, out_sensors

    def close(self) -> None:
        self._pool.close()
