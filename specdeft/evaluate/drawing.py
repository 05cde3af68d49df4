"""Lines over a logarithmic axis as an SVG file, the same each time. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from specdeft.errors import SpecdeftError

Series = dict[str, list[tuple[float, float]]]  # points of each line, by its name

# middle tones, as in the drawings of trees: legible on white and on dark
COLOURS = ("#d9661f", "#2f81c7", "#3f9b5f", "#b0569c", "#a08420", "#6e7781", "#c04a4a", "#4a9a9a", "#7a6fc0")
MARKS = "os^Dv<>pX"
TEXT = "#7d8590"
NO_MATPLOTLIB = "plots need matplotlib: pip install 'specdeft[plots]'. Tables and results are written without it"


def draw_lines(
    series: Series, x: str, y: str, title: str, path: Path, dashed: Collection[str] = (), bold: Collection[str] = ()
) -> None:
    """Write one picture; `x` and `y` name the axes. Raises SpecdeftError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise SpecdeftError(NO_MATPLOTLIB) from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "svg.hashsalt": "specdeft", "svg.fonttype": "none", "font.size": 9, "text.color": TEXT, "axes.labelcolor": TEXT,
        "axes.edgecolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "axes.titlesize": 9, "legend.frameon": False,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(7.2, 4.4))
        for index, (name, points) in enumerate(series.items()):
            at, height = zip(*points, strict=True)
            if name in dashed:
                axes.plot(at, height, color=TEXT, linestyle="--", linewidth=1, label=name)
            else:
                shade, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
                width = 2.4 if name in bold else 1
                axes.plot(at, height, color=shade, marker=mark, markersize=4, linewidth=width, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({at for points in series.values() for at, _ in points})
        axes.set_xticks(ticks, [f"{at:.0f}" for at in ticks])
        axes.minorticks_off()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_title(title)
        axes.grid(alpha=0.25)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
