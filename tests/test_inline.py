"""Pictures as parts of a page: the same picture, of fewer bytes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from bench.report.plots.inline import Inliner
from bench.report.plots.style import svg, theme, tip

NAME = "#1F2328 <b> & M 0.123456 1"


@pytest.fixture(scope="module")
def drawn() -> str:
    with theme("light"):
        figure = Figure(figsize=(3, 2))
        axes = figure.add_subplot()
        axes.plot([1, 2, 3], [1.0, 4.0, 9.0], "o-", label=NAME)
        tip(axes.barh([2.0], [2.5]), "a bar")
        axes.legend()
        return svg(figure)


def marks(text: str) -> list[tuple[float, float]]:
    """Where marks are drawn, each for itself or by the line through them."""
    found = []
    for each in ElementTree.fromstring(text).iter():
        if each.tag.endswith("use"):
            found.append((float(each.attrib["x"]), float(each.attrib["y"])))
        elif "marker:" in each.attrib.get("style", ""):
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", each.attrib["d"])]
            found += list(zip(numbers[::2], numbers[1::2], strict=True))
    return found


def test_every_word_is_kept_letter_by_letter(drawn: str) -> None:
    def words(text: str) -> list[str]:
        return [e.text or "" for e in ElementTree.fromstring(text).iter() if re.search("text$|title$", e.tag)]

    inlined = words(Inliner().inlined(drawn))
    assert NAME in inlined
    assert "a bar" in inlined
    assert sorted(inlined) == sorted(word for word in words(drawn) if "svg" not in word)


def test_every_mark_is_where_it_was_to_a_tenth_of_a_point(drawn: str) -> None:
    before, after = marks(drawn), marks(Inliner().inlined(drawn))
    assert len(before) >= 10
    assert len(after) == len(before)
    for (x, y), (u, v) in zip(before, after, strict=True):
        assert (u, v) == (pytest.approx(x, abs=0.051), pytest.approx(y, abs=0.051))


def test_what_its_frame_cuts_off_is_still_cut_off() -> None:
    with theme("light"):
        figure = Figure()
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1])
        axes.plot([0, 1], [0, 50])
        axes.set_ylim(0, 2)
        text = Inliner().inlined(svg(figure))
    assert text.count("clip-path=") == 1
    assert text.count("<clipPath") == 1


def test_the_marks_of_a_line_are_drawn_by_the_line() -> None:
    with theme("light"):
        figure = Figure()
        figure.add_subplot().plot([1, 2, 3, 4], [1, 4, 9, 16], "o-")
        text = svg(figure)
    (line,) = [e for e in ElementTree.fromstring(Inliner().inlined(text)).iter() if "marker:" in e.get("style", "")]
    assert line.attrib["d"].count("L") == 3
    assert "class" in line.attrib


def test_a_title_stays_with_the_bar_that_it_tells_of(drawn: str) -> None:
    (group,) = [e for e in ElementTree.fromstring(Inliner().inlined(drawn)).iter("g") if e.find("title") is not None]
    assert [child.tag for child in group] == ["title", "path"]


def test_every_class_has_a_rule_and_every_reference_its_target(drawn: str) -> None:
    inliner = Inliner()
    text = "".join(inliner.inlined(drawn) for _ in range(2))
    rules = set(re.findall(r"^\.(\w+) \{", inliner.rules, re.MULTILINE))
    assert rules == set(re.findall(r'class="(\w+)"', text))
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) == set(names)


def test_it_takes_less_than_half_the_bytes(drawn: str) -> None:
    inliner = Inliner()
    assert 2 * len(inliner.inlined(drawn) + inliner.rules) < len(drawn)
