# SPDX-License-Identifier: Apache-2.0
"""CPU time over all processes of a run: the cost that does not depend on who else uses the machine."""

from __future__ import annotations

import resource
import time

import psutil


def cpu_seconds() -> float:
    """CPU time of this process, its living descendants, and its children that ended and were waited for [s]."""
    total = time.process_time()  # of all threads, and finer than the kernel's ticks that psutil reads
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total += ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
