# SPDX-License-Identifier: Apache-2.0
"""Write episodes of an actor to a folder. Thin over `robo_rl.app`; `--help` explains."""

import sys

from robo_rl.app.cli import collect

if __name__ == "__main__":
    sys.exit(collect())
