# SPDX-License-Identifier: Apache-2.0
"""Results pages: `docs/results/NAME.md` is generated from the rows in `NAME.json` and the runs in `records/NAME/`.

A record is what one run left (one command, one small JSON file, committed); a row is one claim with its target and
what was measured. A row that does not hold stays, with its cause in `note`.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from robo_rl.errors import ConfigError

RESULTS = Path("docs/results")


@dataclass(frozen=True)
class Row:
    """One claim. `holds` None means not measured yet."""

    id: str
    claim: str
    target: str
    measured: str
    holds: bool | None
    counts: str = ""
    """Integer counts behind a rate, for example `198/200 + 197/200 + 200/200`."""
    seeds: tuple[int, ...] = ()
    command: str = ""
    wall_s: float = 0.0
    """Wall time of all runs of the row."""
    cpu_s: float = 0.0
    """CPU time of all runs of the row, summed over all processes."""
    commit: str = ""
    note: str = ""


def save_record(page: str, run: str, record: dict[str, Any], root: Path = RESULTS) -> Path:
    """Write what one run measured; returns the file's path."""
    path = root / "records" / page / f"{run}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, json.dumps(record, indent=1) + "\n")
    return path


def load_records(page: str, root: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Every record of a page by run name, in order of name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((root / "records" / page).glob("*.json"))}


def load_rows(page: str, root: Path = RESULTS) -> list[Row]:
    """The rows of a page; none where it does not exist yet.

    Raises:
        ConfigError: a row has an unknown field or lacks one.
    """
    path = root / f"{page}.json"
    if not path.exists():
        return []
    known = {f.name for f in fields(Row)}
    rows = []
    for entry in json.loads(path.read_text()):
        if unknown := set(entry) - known:
            raise ConfigError(f"{path}: row `{entry.get('id')}` has unknown fields {sorted(unknown)}.")
        try:
            rows.append(Row(**(entry | {"seeds": tuple(entry.get("seeds", ()))})))
        except TypeError as error:
            raise ConfigError(f"{path}: row `{entry.get('id')}` is incomplete: {error}.") from error
    return rows


def update_page(page: str, rows: list[Row], root: Path = RESULTS) -> Path:
    """Replace the rows of the same ids, keep the others, write JSON and Markdown; returns the Markdown's path."""
    new = {row.id: row for row in rows}
    merged = [new.pop(row.id, row) for row in load_rows(page, root)] + list(new.values())
    root.mkdir(parents=True, exist_ok=True)
    _write(root / f"{page}.json", json.dumps([asdict(row) for row in merged], indent=1) + "\n")
    path = root / f"{page}.md"
    _write(path, markdown(page, merged, load_records(page, root)))
    return path


def markdown(page: str, rows: list[Row], records: dict[str, dict[str, Any]]) -> str:
    """The page's text."""
    words = {True: "yes", False: "**no**", None: "not measured"}
    lines = [
        f"# {page.replace('_', ' ').capitalize()}",
        "",
        f"Generated from `{page}.json`" + (f" and `records/{page}/`" if records else "") + "; do not edit. "
        f"Full cost: {sum(r.cpu_s for r in rows) / 60:.0f} CPU-minutes, {sum(r.wall_s for r in rows) / 60:.0f} minutes "
        "of wall time. With `--quick` each command is one seed at the smallest sizes.",
        "",
        "| claim | target | measured | holds | counts | seeds | wall s | CPU s |",
        "|-|-|-|-|-|-|-|-|",
    ]
    for r in rows:
        seeds = " ".join(map(str, r.seeds))
        cells = (r.claim, r.target, r.measured, words[r.holds], r.counts, seeds, f"{r.wall_s:.0f}", f"{r.cpu_s:.0f}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines.append("")
    for r in rows:
        lines.append(f"* `{r.id}`: `{r.command}`" + (f" at {r.commit}" if r.commit else "") + ".")
        if r.note:
            lines.append(f"  {r.note}")
    if records:
        lines += ["", "## Runs", "", "| run | " + " | ".join(_columns(records)) + " |"]
        lines.append("|-" * (1 + len(_columns(records))) + "|")
        for run, record in records.items():
            lines.append("| " + " | ".join([run, *(_cell(record.get(c)) for c in _columns(records))]) + " |")
    return "\n".join(lines) + "\n"


def commit() -> str:
    """The short hash of the commit that runs, with `+` where the tree has changes; empty outside a clone.

    Changed results pages do not count: a bench writes them itself, between one run and the next.
    """

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno", "--", ".", f":!{RESULTS}") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return ""


def _columns(records: dict[str, dict[str, Any]]) -> list[str]:
    """The scalar fields that any record has, in the order of first appearance; commands would make the table wide."""
    scalar = (key for record in records.values() for key, v in record.items() if not isinstance(v, list | dict))
    return [key for key in dict.fromkeys(scalar) if key != "command"]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _write(path: Path, text: str) -> None:
    """Beside and renamed: an interrupted run leaves the old file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)
