"""How all plots look: sizes, colours that the colour-blind can tell apart, on light and on dark paper."""

from __future__ import annotations

import hashlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.format import number, plain
from bench.stats import Estimate
from gpt2.files.atomic import atomic_text, atomic_write

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, without yellow and black, which vanish on one of the papers."""
FASTER, SLOWER, NEITHER = "#009E73", "#D55E00", "#8A8F98"

THEMES: dict[str, dict[str, str]] = {
    "light": {"paper": "#FFFFFF", "ink": "#1F2328", "faint": "#D0D7DE"},
    "dark": {"paper": "#0D1117", "ink": "#E6EDF3", "faint": "#30363D"},
}


@contextmanager
def theme(name: str) -> Iterator[None]:
    """Context in which figures are drawn and saved."""
    paper, ink, faint = (THEMES[name][part] for part in ("paper", "ink", "faint"))
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    inks = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "axes.titlecolor",
        "xtick.color",
        "ytick.color",
    )
    settings: dict[Any, Any] = {
        **dict.fromkeys(papers, paper),
        **dict.fromkeys(inks, ink),
        "grid.color": faint,
        "grid.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "font.size": 9,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
        "svg.hashsalt": "gpt2-bench",  # the same figure gives the same file
        "text.parse_math": False,  # a dollar sign in a name begins no formula
        "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
    }
    with rc_context(settings):
        yield


def draw_on_both_papers(out: Path, pictures: Callable[[], Iterable[tuple[str, Figure | None]]]) -> list[Path]:
    """Draw pictures into out/plots, on light and on dark paper; returns the files. Raises OSError.

    pictures: makes them, each with its name; None is one that has nothing to show.
    """
    folder = out / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for paper in THEMES:
        suffix = "" if paper == "light" else f"-{paper}"
        with theme(paper):
            for name, figure in pictures():
                if figure:
                    files += save(figure, folder / f"{name}{suffix}")
    return files


TIP = "tip:"
TIPS = re.compile(rf'<g id="{TIP}([^"]*)">')


def tooltip(artists: Iterable[Artist], text: str) -> None:
    """Set the text that an SVG shows when the mouse rests on these parts."""
    for artist in artists:
        artist.set_gid(TIP + plain(text))


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG and SVG, without the time of drawing. Raises OSError."""
    _purge(figure)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    with atomic_write(files[0]) as file:
        _write(figure, file, dpi=150, metadata={"Software": None})
    atomic_text(files[1], svg(figure))
    return files


def _write(figure: Figure, to: IO[Any], **how: Any) -> None:
    """Save without a warning for letters that no font here has: tables and the SVG have them as text."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        figure.savefig(to, **how)


def _purge(figure: Figure) -> None:
    """Remove control characters, which XML does not allow, from all words."""
    for words in figure.findobj(Text):
        assert isinstance(words, Text)
        words.set_text(_printable(words.get_text()))


def _printable(text: str) -> str:
    """The text without control characters, line by line."""
    return "\n".join(plain(line) for line in text.split("\n"))


def svg(figure: Figure) -> str:
    """The figure as an SVG document."""
    _purge(figure)
    text = io.StringIO()
    _write(figure, text, format="svg", metadata={"Date": None, "Creator": None})
    return _same_clips(TIPS.sub(r"<g><title>\1</title>", text.getvalue()))


CLIP = re.compile(r"(?<=[\"#])p[0-9a-f]{10}\b")
"""Name that matplotlib gives to a clipping rectangle: a hash of its corners, down to their last bit."""


def _same_clips(text: str) -> str:
    """Name clipping rectangles by picture and order: the layout's last bits differ between runs."""
    # No two pictures of a page may share a name.
    own = hashlib.sha256(CLIP.sub("", text).encode()).hexdigest()[:10]
    names: dict[str, str] = {}
    return CLIP.sub(lambda match: names.setdefault(match[0], f"p{own}-{len(names)}"), text)


def draw_interval(axes: Axes, y: float, estimate: Estimate) -> None:
    """Draw an interval as a horizontal line, where there is one."""
    if estimate.low is not None and estimate.high is not None:
        reach = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
        axes.errorbar(estimate.value, y, xerr=reach, color=axes.xaxis.label.get_color(), capsize=3, lw=1.2)


def text_beside(axes: Axes, x: float, y: float, text: str) -> None:
    """Write words right of a mark, clear of an interval's cap and of the lines that they would cross."""
    paper = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1}
    axes.annotate(
        text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, bbox=paper
    )


def text_instead(axes: Axes, y: float, text: str) -> None:
    """Write words in place of a rung's mark."""
    axes.annotate(text, (0.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=NEITHER)


def plain_log(axis: Axis) -> None:
    """Write few plain numbers on a log axis whose ends are set."""
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < FAR * low else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


FAR = 200
"""Ratio of a log axis' ends from which only powers of ten have room."""
PLAIN = "{x:,.9g}"
"""Format of an axis' numbers: millions without a power of ten, and as many digits as its steps need."""
LETTER = 0.068
"""Inches per character of the words beside marks."""


def fit_axis(axes: Axes, ends: Sequence[tuple[float, str]]) -> None:
    """Set an axis from 0 to the end of the words right of marks.

    ends: places of marks, and the words beside them.
    """
    axes.set_xlim(0, _end_of_words(axes, 0.0, ends))


def fit_log_axis(axes: Axes, low: float, ends: Sequence[tuple[float, str]], part: float = 1.0) -> None:
    """Set a log axis from left of `low` to the end of the words right of marks.

    ends: as of fit_axis(). part: share of the figure's width that the axes with labels take.
    """
    left = math.log(low / 1.2)
    right = _end_of_words(axes, left, [(math.log(at), words) for at, words in ends], part)
    axes.set_xscale("log")
    axes.set_xlim(math.exp(left), math.exp(right))


def _end_of_words(axes: Axes, left: float, ends: Sequence[tuple[float, str]], part: float = 1.0) -> float:
    """Where an axis that begins at `left` must end."""
    labels = [line for label in axes.get_yticklabels() for line in label.get_text().split("\n")]
    assert isinstance(axes.figure, Figure)
    inches = part * axes.figure.get_figwidth() - LETTER * 9 / 8 * max(map(len, labels), default=0) - 0.5
    right = left
    for at, words in ends:
        share = min(0.7, (LETTER * len(words) + 0.2) / inches)
        right = max(right, (at - share * left) / (1 - share))
    return right


MARKERS = ("o", "s", "^", "D", "v", "P")


def colour_and_marker(place: int) -> dict[str, Any]:
    """Colour and marker of one of many lines: where colours begin anew, markers change."""
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place // len(COLOURS) % len(MARKERS)]}


def label_rows(axes: Axes, names: Sequence[str], most: int = 32) -> list[float]:
    """Label the rows of a picture from top to bottom; returns their positions."""
    at = [float(n) for n in range(len(names))]
    labels = [wrapped(name, most) for name in names]
    if len(set(labels)) < len(labels):  # what they differ in was too long to be shown
        labels = [f"{n}: {label}" for n, label in enumerate(labels, start=1)]
    axes.set_yticks(at, labels)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    return at


LINES = 4
"""Most lines of a rung's name."""


def wrapped(name: str, most: int = 32) -> str:
    """A name for an axis, broken between words into lines of `most` letters, or else shortened."""
    if len(_printable(name).replace("\n", "")) > LINES * most:
        return shortened(name, most)
    wrap = textwrap.TextWrapper(most, break_on_hyphens=False, break_long_words=False).wrap
    return "\n".join(shortened(part, most) for line in name.split("\n") for part in wrap(line))


def total_height(rungs: Sequence[str], least: float) -> float:
    """Inches for rungs beneath one another, each `least` or more."""
    return len(rungs) * max([least, *(0.1 + 0.155 * len(wrapped(rung).split("\n")) for rung in rungs)])


def legend_label(name: str, most: int = 28) -> str:
    """A name for a legend, which leaves out labels that begin with an underscore."""
    return f"{' ' if name.startswith('_') else ''}{shortened(name, most)}"


def shortened(name: str, most: int = 28) -> str:
    """A name for an axis, with both ends, by which names differ."""
    name = _printable(name)
    if len(name) > most:
        head = most // 2
        name = f"{name[:head].rstrip()}…{name[head + 1 - most :].lstrip()}"
    return name
