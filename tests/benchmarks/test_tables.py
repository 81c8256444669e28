"""The benchmark's table: what it says of its measurements, and what the picture reads from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import plot, run
from benchmarks.contenders import Case

RESULTS = Path(run.__file__).with_name("RESULTS.md")


def result(ms: float, samples: int) -> dict[str, object]:
    return {
        "ms": ms, "p10": ms - 1, "p90": ms + 1, "samples_per_second": round(samples / ms * 1e3),
        "device": "NVIDIA H200", "peak_reserved_gib": 7.5, "first_step_s": 3.0,
    }  # fmt: skip


def recorded(*cases: Case) -> str:
    """A table as `make bench` records it: FAIR 80 ms where it is timed, hiera-optim 40 ms, ours 16 ms."""
    times = {"fair": 80.0, "hiera-optim": 40.0, "ours": 16.0}
    rows = []
    for case in cases:
        can = {name: result(ms, case.batch) if run.possible(name, case) else None for name, ms in times.items()}
        rows.append(run.row(case, can))
    return "\n".join(["# Results", "", run.HEADER, *rows, "", "| other | table |", "| --- | --- |", "| a | b |"])


def test_the_picture_reads_what_the_benchmark_writes() -> None:
    table = plot.newest_table(recorded(Case(), Case(dims=1, batch=512)))
    assert table == {
        "base B=128": {
            "FAIR, eager": plot.Measurement(80, 79, 81),
            "hiera-optim 0.2.1": plot.Measurement(40, 39, 41),
            "hiera-train": plot.Measurement(16, 15, 17),
        },
        "base 1-D B=512": {
            "hiera-optim 0.2.1": plot.Measurement(40, 39, 41),
            "hiera-train": plot.Measurement(16, 15, 17),
        },
    }
    assert plot.samples_per_second("base 1-D B=512", plot.Measurement(16, 15, 17)) == 32000


def test_a_row_says_ratio_memory_and_mfu() -> None:
    cells = [
        cell.strip()
        for cell in run.row(Case(), {"ours": result(16.0, 128), "hiera-optim": result(40.0, 128)}).split("|")
    ]
    ratio, rate, memory, mfu = cells[5:9]
    assert (ratio, rate, memory) == ("0.40", "8,000", "7.5 / 7.5")
    assert float(mfu) == pytest.approx(8000 * 61.3e9 / 989e12, abs=0.005)


def test_the_newest_table_counts() -> None:
    old = recorded(Case()).replace("16.0", "19.0")
    assert plot.newest_table(old + "\n\n" + recorded(Case()))["base B=128"]["hiera-train"].median == 16.0
    with pytest.raises(ValueError, match="no table"):
        plot.newest_table("| a | b |\n| --- | --- |\n| 1 | 2 |")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("44.65 (44.52 to 44.82)", (44.65, 44.52, 44.82)),
        ("44.65 (44.52–44.82)", (44.65, 44.52, 44.82)),
        ("21.1 (earlier measurement)", (21.1, 21.1, 21.1)),
        ("–", None),
    ],
)
def test_cells(text: str, want: tuple[float, float, float] | None) -> None:
    assert plot.parse_cell(text) == (None if want is None else plot.Measurement(*want))


def test_the_readmes_picture_is_of_the_recorded_numbers(tmp_path: Path) -> None:
    drawn = tmp_path / "speed.svg"
    plot.draw(plot.newest_table(RESULTS.read_text(encoding="utf-8")), drawn)

    def numbers(path: Path) -> list[str]:
        return re.findall(r"<!-- (.+? samples/s) -->", path.read_text(encoding="utf-8"))

    shown = numbers(Path(run.__file__).parents[1] / "docs" / "speed.svg")
    assert len(shown) > 2
    assert shown == numbers(drawn), "run python -m benchmarks.plot"
