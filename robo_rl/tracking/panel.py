# SPDX-License-Identifier: Apache-2.0
"""The console: one live panel on a terminal, one aligned line per update elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

ROWS = (  # label, metric, format
    ("success", "rollout/success_rate", "{:.1%}"),
    ("return", "rollout/ep_rew_mean", "{:.2f}"),
    ("episode length", "rollout/ep_len_mean", "{:.1f}"),
    ("last evaluation", "eval/success_rate", "{:.1%}"),
    ("KL", "train/kl", "{:.4f}"),
    ("approximate KL", "train/approx_kl", "{:.4f}"),
    ("policy loss", "train/policy_gradient_loss", "{:.4f}"),
    ("value loss", "train/value_loss", "{:.4f}"),
    ("learning rate", "train/learning_rate", "{:.1e}"),
    ("explained variance", "train/explained_variance", "{:.2f}"),
    ("dropped (broken physics)", "env/non_finite", "{:.0f}"),
)
PLAIN_EVERY = 5.0  # s between plain lines
LIVE_EVERY = 1.0  # s between redraws; one costs 4.5 ms of a core


class Console:
    """Shows the newest metrics; remembers those that do not come with every update."""

    def __init__(self, title: str, total_steps: int, live: bool | None):
        self._title, self._total = title, total_steps
        self._metrics: dict[str, float] = {}
        self._start = self._printed = time.perf_counter()
        # Time, step and share done of the first update: speed is measured from there, without building and warming up.
        self._first: tuple[float, int, float] | None = None
        self._live: Live | None = None
        if live or (live is None and sys.stdout.isatty()):
            # Redrawn by `show`: rich's own thread would draw also where nothing is new.
            live_panel = Live(auto_refresh=False)
            live_panel.start()
            self._live = live_panel

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics
        now = time.perf_counter()
        done = self._metrics.get("time/progress", step / self._total)
        if self._first is None:
            self._first = (now, step, done)
        if now - self._printed < (PLAIN_EVERY if self._live is None else LIVE_EVERY) and done < 1:
            return
        self._printed = now
        if self._live is not None:
            self._live.update(self._panel(step, done, now), refresh=True)
        else:
            print(self._line(step, done, now), flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _panel(self, step: int, done: float, now: float) -> Panel:
        table = Table.grid(padding=(0, 2))
        table.add_row(
            "steps", f"{step:,} of {self._total:,}", ProgressBar(total=1.0, completed=min(done, 1.0), width=30)
        )
        speed, left = self._speed_and_left(step, done, now)
        cpu = self._metrics.get("time/cpu_s", 0.0)
        table.add_row("throughput", f"{speed:,.0f} steps/s", f"{step / cpu:,.0f} per CPU-second" if cpu else "")
        table.add_row("time left", _clock(left), f"spent {_clock(now - self._start)}")
        for label, name, form in ROWS:
            if name in self._metrics and (name != "env/non_finite" or self._metrics[name]):
                table.add_row(label, form.format(self._metrics[name]), "")
        return Panel(table, title=self._title, expand=False)

    def _line(self, step: int, done: float, now: float) -> str:
        speed, left = self._speed_and_left(step, done, now)
        parts = [f"{min(done, 1):4.0%}", f"{step:>12,} steps", f"{speed:>8,.0f}/s", f"left {_clock(left):>7}"]
        for label, name, form in ROWS[:5]:
            if name in self._metrics:
                parts.append(f"{label} {form.format(self._metrics[name])}")
        return "  ".join(parts)

    def _speed_and_left(self, step: int, done: float, now: float) -> tuple[float, float]:
        """Steps per second of this process, and seconds to go at this pace."""
        assert self._first is not None
        began, first_step, first_done = self._first
        elapsed, gained = now - began, done - first_done
        if elapsed <= 0 or gained <= 0:
            return self._metrics.get("time/fps", 0.0), float("inf")
        return (step - first_step) / elapsed, max(0.0, (1 - done) * elapsed / gained)


def _clock(seconds: float) -> str:
    if seconds > 100 * 3600:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
