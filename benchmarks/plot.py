"""Draws the newest table of benchmarks/RESULTS.md as docs/speed.svg, the README's picture of the speed.

    python -m benchmarks.plot [--results FILE] [--output FILE]

Needs matplotlib (the `dev` extra).
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTENDERS = {"FAIR eager": "FAIR, eager", "hiera-optim": "hiera-optim 0.2.1", "ours": "hiera-train"}
"""How the table's columns begin, and their names in the picture."""
COLOURS = {"FAIR, eager": "#b8b8b8", "hiera-optim 0.2.1": "#e0a458", "hiera-train": "#2f6f9f"}


@dataclass(frozen=True)
class Measurement:
    """Milliseconds a step: the median, and the 10th and 90th percentile where they are known."""

    median: float
    low: float
    high: float


Table = dict[str, dict[str, Measurement]]
"""Measurements by row and contender; what was not measured is not there."""


def parse_cell(text: str) -> Measurement | None:
    """`44.65 (44.52 to 44.82)`, `44.65 (44.52–44.82)` or `21.1 (a remark)`; None for a dash."""
    match = re.match(r"([0-9.]+)(?: \(([0-9.]+)(?: to |–)([0-9.]+)\))?", text.strip())
    if match is None:
        return None
    median, low, high = match.groups()
    return Measurement(float(median), float(low or median), float(high or median))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def newest_table(markdown: str) -> Table:
    """The last table that has a column of each contender.

    Raises:
        ValueError: when there is none.
    """
    lines = markdown.splitlines()
    newest: Table | None = None
    for i, line in enumerate(lines):
        columns = {}
        for index, title in enumerate(_cells(line) if line.startswith("|") else []):
            name = next((v for k, v in CONTENDERS.items() if title.startswith(k) and "/" not in title), None)
            if name is not None and name not in columns:
                columns[name] = index
        if len(columns) < len(CONTENDERS):
            continue
        newest = {}
        for row in lines[i + 2 :]:
            if not row.startswith("|"):
                break
            cells = _cells(row)
            found = {name: parse_cell(cells[index]) for name, index in columns.items()}
            newest[cells[0]] = {name: m for name, m in found.items() if m is not None}
    if newest is None:
        raise ValueError(f"no table with the columns {', '.join(CONTENDERS)}")
    return newest


def samples_per_second(row: str, measurement: Measurement) -> float:
    """At the median; the batch is the row's own `B=`.

    Raises:
        ValueError: when the row names no batch.
    """
    match = re.search(r"B=(\d+)", row)
    if match is None:
        raise ValueError(f"no batch size in the row {row!r}")
    return int(match[1]) * 1e3 / measurement.median


def draw(table: Table, output: Path) -> None:
    """Speed of each contender as a multiple of hiera-optim's, one group of bars a row that hiera-optim has."""
    import matplotlib as mpl

    mpl.use("svg")
    # the same picture from the same numbers, byte for byte
    mpl.rcParams.update({"svg.hashsalt": "hiera-train", "font.family": "DejaVu Sans", "font.size": 10})
    from matplotlib import pyplot as plt

    base = CONTENDERS["hiera-optim"]
    rows = {row: results for row, results in table.items() if base in results}
    height = 0.26
    figure, axes = plt.subplots(figsize=(8, 0.95 * len(rows) + 0.9))
    for group, (row, results) in enumerate(rows.items()):
        unit = results[base].median
        for place, (name, m) in enumerate(results.items()):
            middle, low, high = unit / m.median, unit / m.high, unit / m.low
            y = group + (place - (len(results) - 1) / 2) * (height + 0.03)
            axes.barh(y, middle, height, color=COLOURS[name], label=name, xerr=[[middle - low], [high - middle]])
            text = f"{samples_per_second(row, m):,.0f} samples/s"
            axes.annotate(text, (high, y), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel(f"speed, {base} = 1")
    axes.set_xlim(right=axes.get_xlim()[1] * 1.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [name for name in CONTENDERS.values() if name in handles]
    place_above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(names), "frameon": False}
    axes.legend([handles[name] for name in names], names, **place_above)
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws the newest table of RESULTS.md.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "speed.svg")
    arguments = parser.parse_args()
    try:
        draw(newest_table(arguments.results.read_text(encoding="utf-8")), arguments.output)
    except (OSError, ValueError) as error:
        print(f"{arguments.results}: {error}", file=sys.stderr)
        return 1
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
