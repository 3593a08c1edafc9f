# SPDX-License-Identifier: Apache-2.0
"""Where metrics go: a JSON line each (always), TensorBoard where installed, and the console. Needs no torch itself."""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robo_rl.errors import ContractError
from robo_rl.files import write_whole
from robo_rl.tracking.panel import Console
from robo_rl.tracking.run_dir import RunDir, to_json


class Tracker:
    """`log(step, metrics)`; the x axis is environment steps."""

    def __init__(self, run: RunDir, total_steps: int, live: bool | None = None, start_step: int = 0):
        """
        Args:
            live: a panel (True), plain lines (False), or a panel where there is a terminal (None).
            start_step: where a resumed run continues. What was logged beyond it, by a process that died after its
                last checkpoint, is dropped: it will be logged again.
        """
        path = run.path / "metrics.jsonl"
        _truncate(path, start_step)
        self._tensorboard = _tensorboard(run, start_step)
        self._jsonl = path.open("a")
        self._console = Console(run.path.name, total_steps, live)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record scalars at `step`; the line is in the file when this returns.

        Raises:
            ContractError: the disk is full.
        """
        try:
            self._jsonl.write(json.dumps(to_json({"step": step, "time": time.time(), **metrics})) + "\n")
            self._jsonl.flush()
            if self._tensorboard is not None:
                for name, value in metrics.items():
                    self._tensorboard.add_scalar(name, value, step)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ContractError(
                f"The disk is full: the metrics of step {step} could not be written to `{self._jsonl.name}`. "
                "Free some space and resume from the last checkpoint."
            ) from error
        self._console.show(step, metrics)

    def close(self) -> None:
        self._console.close()
        with contextlib.suppress(OSError):  # a full disk has been reported by log()
            self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _truncate(path: Path, start_step: int) -> None:
    """Keep only whole lines up to `start_step`."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            step = json.loads(line)["step"]
        except json.JSONDecodeError:  # the process died while writing it
            continue
        if step <= start_step:
            kept.append(line + "\n")  # the last one may have lost its newline
    write_whole(path, "".join(kept))


def _tensorboard(run: RunDir, start_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the light installation has neither; the JSON lines are complete
        return None
    return SummaryWriter(str(run.path / "tb"), purge_step=start_step + 1)
