# SPDX-License-Identifier: Apache-2.0
"""Where metrics go: a JSON line each (always), TensorBoard where installed, and the console. Needs no torch itself."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from robo_rl.tracking.panel import Console
from robo_rl.tracking.run_dir import RunDir


class Tracker:
    """`log(step, metrics)`; the x axis is environment steps."""

    def __init__(self, run: RunDir, total_steps: int, live: bool | None = None):
        """`live`: a panel (True), plain lines (False), or a panel where there is a terminal (None)."""
        self._jsonl = (run.path / "metrics.jsonl").open("a")
        self._tensorboard = _tensorboard(run)
        self._console = Console(run.path.name, total_steps, live)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record scalars at `step`; the line is on disk when this returns."""
        self._jsonl.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
        self._jsonl.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        self._console.show(step, metrics)

    def close(self) -> None:
        self._console.close()
        self._jsonl.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _tensorboard(run: RunDir) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the light installation has neither; the JSON lines are complete
        return None
    return SummaryWriter(str(run.path / "tb"))
