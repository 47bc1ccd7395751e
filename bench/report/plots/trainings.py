"""Pictures of long runs: losses by step and by time, speed, and HellaSwag on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.plots.style import COLOURS, NEITHER, draw_on_both_papers, legend_label
from bench.report.several_runs.trainings import SMOOTHED, LongRun, loss_of, reference_lines, same_validation

SIZE = (8.0, 4.5)


def losses(runs: Sequence[LongRun], *, by_time: bool) -> Figure | None:
    """Training losses smoothed, validation losses as points; by time it is that of all legs."""
    if not any(run.of("step") for run in runs):
        return None
    note = "" if same_validation(runs) else "; validation is on unlike corpora"
    title = f"Loss: lines the mean of {SMOOTHED} training steps, points validation{note}"
    longest = max(run.seconds for run in runs)
    unit, name = (3600, "hours") if longest > 5400 else (60, "minutes")
    figure, axes = _axes(title, name if by_time else "steps", "nats per token")
    for run, (colour, line) in zip(runs, _styles(runs), strict=True):
        for kind in ("step", "val"):
            events = run.of(kind)
            seconds = [event.values.get("elapsed_seconds") or math.nan for event in events]
            x = [each / unit for each in seconds] if by_time else [event.step for event in events]
            values = pd.Series([loss_of(event) for event in events], dtype=float)
            if kind == "step":
                smooth = values.rolling(SMOOTHED, min_periods=1).mean()
                axes.plot(x, smooth, line, color=colour, label=legend_label(run.name))
            else:
                axes.plot(x, values, "o", ms=4, color=colour)
    axes.legend()
    return figure


def speed(runs: Sequence[LongRun]) -> Figure | None:
    """Tokens per second of each step; compilation and disturbances show."""
    if not any(run.of("step") for run in runs):
        return None
    figure, axes = _axes("Tokens per second over the run, each step", "steps", "tokens per second")
    for run, (colour, line) in zip(runs, _styles(runs), strict=True):
        x = [event.step for event in run.of("step")]
        tps = pd.Series([event.values["tps"] for event in run.of("step")], dtype=float)
        smooth = tps.rolling(SMOOTHED, min_periods=1).median()
        axes.plot(x, tps, ".", ms=3, alpha=0.5, color=colour)
        axes.plot(x, smooth, line, color=colour, label=legend_label(run.name))
    speeds = [run.tps for run in runs if run.tps]
    if speeds and max(speeds) > 10 * min(speeds):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def hellaswag(runs: Sequence[LongRun], style: str) -> Figure | None:
    """acc_norm by step, beside published scores of OpenAI's weights of the same sizes."""
    scored = [run for run in runs if any(event.values["style"] == style for event in run.of("hellaswag"))]
    if not scored:
        return None
    figure, axes = _axes(f"HellaSwag, {style} style, on the way", "steps", "acc_norm")
    for run, (colour, line) in zip(scored, _styles(scored), strict=True):
        scores = [event for event in run.of("hellaswag") if event.values["style"] == style]
        shares = [event.values["acc_norm"] for event in scores]
        axes.plot(
            [event.step for event in scores], shares, f"o{line}", color=colour, label=legend_label(run.name)
        )
    for model, low, high in reference_lines(scored, style):
        for share in {low, high}:
            axes.axhline(share, ls="--", lw=1, color=NEITHER)
        shares = f"{low:.4f}" if low == high else f"{low:.4f} to {high:.4f}"
        axes.annotate(
            f"{model}, OpenAI's weights: {shares} (published)",
            (0.01, high),
            va="bottom",
            size=8,
            xycoords=("axes fraction", "data"),
        )
    axes.legend(loc="lower right")
    return figure


def draw(runs: Sequence[LongRun], out: Path) -> list[Path]:
    """Draw all pictures into out/plots, on light and dark paper; returns the files. Raises OSError."""

    def pictures() -> Iterator[tuple[str, Figure | None]]:
        yield "trainings-loss-by-step", losses(runs, by_time=False)
        yield "trainings-loss-by-time", losses(runs, by_time=True)
        yield "trainings-speed", speed(runs)
        yield "trainings-hellaswag-completion", hellaswag(runs, "completion")
        yield "trainings-hellaswag-harness", hellaswag(runs, "harness")

    return draw_on_both_papers(out, pictures)


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE)
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    return figure, axes


def _styles(runs: Sequence[LongRun]) -> list[tuple[str, str]]:
    """A colour and a line for each run; lines change once the colours are used up."""
    lines = ("-", "--", "-.", ":")
    return [
        (COLOURS[place % len(COLOURS)], lines[place // len(COLOURS) % len(lines)])
        for place in range(len(runs))
    ]
