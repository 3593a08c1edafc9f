# SPDX-License-Identifier: Apache-2.0
"""Say what this installation can do. Thin over `robo_rl.app`; `--help` explains."""

import sys

from robo_rl.app.cli import doctor

if __name__ == "__main__":
    sys.exit(doctor())
