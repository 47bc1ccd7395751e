"""Pictures as parts of one page: in its colours, with its font and rules, and of few bytes.

What matplotlib writes beside each mark, a page says once: styles become classes, the marks of a line are drawn by the
line, and names that nothing refers to go.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from bench.report.plots.style import THEMES

INK = "fill: var(--ink)"
"""Of the whole picture; parts say only what is otherwise."""
WORDS = ("text", "tspan", "title")
"""Elements whose text is shown."""
REFERENCE = re.compile(r"^(?:url\()?#([^)]+)\)?$")
PATH = re.compile(r"\s*M\s*-?[\d.]")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
FEWEST = 3
"""Marks of a line from which on the line draws them."""
Point = tuple[float, float]


class Inliner:
    """The pictures of one page, which share their styles."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}
        self._pictures = 0

    @property
    def rules(self) -> str:
        """The style sheet that the pictures so far need."""
        return "\n".join(f".{name} {{ {style} }}" for style, name in self._classes.items())

    def inlined(self, svg: str) -> str:
        """A whole SVG document as an element of the page; its names are in nobody else's way."""
        self._pictures += 1
        root = _plain(svg)
        _say_once(root)
        _unclip(root)
        _unwrap(root)
        _draw_marks(root)
        referred = {name for each in root.iter() for name in _referred(each)}
        short = {name: f"p{self._pictures}-{n}" for n, name in enumerate(sorted(referred))}
        marks = {id(each) for defs in root.iter("defs") for each in defs.iter()}
        for parent in root.iter():
            for child in list(parent):
                unused = child.tag in ("clipPath", "path") and id(child) in marks and child.get("id") not in short
                if unused and parent.tag == "defs":
                    parent.remove(child)
        for parent in list(root.iter()):
            parent[:] = [child for child in parent if child.tag != "defs" or len(child)]
        for element in root.iter():
            element.attrib = self._attributes(element, short, digits=2 if id(element) in marks else 1)
        root.attrib = {"viewBox": root.attrib["viewBox"], "style": INK}
        return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")

    def _attributes(self, element: Element, short: dict[str, str], digits: int) -> dict[str, str]:
        kept: dict[str, str] = {}
        for name, value in element.attrib.items():
            if found := REFERENCE.match(value):
                kept[name] = value.replace(found[1], short[found[1]])
            elif name == "id":
                kept |= {"id": short[value]} if value in short else {}
            elif name == "style":
                kept |= {"class": self._class(value)} if _style(value) else {}
            elif name == "marker":
                kept["style"] = f"marker:url(#{short[value]})"
            elif not (name == "transform" and value.startswith("rotate(-0 ")):
                kept[name] = _rounded(value, digits)
        return kept

    def _class(self, style: str) -> str:
        return self._classes.setdefault(_style(style), f"s{len(self._classes)}")


def _plain(svg: str) -> Element:
    """The document without namespaces, which are a page's own, and without what is shown nowhere."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        parent.tag = _local(parent.tag)
        parent.attrib = {_local(name): value for name, value in parent.attrib.items()}
        parent[:] = [child for child in parent if _local(child.tag) not in ("metadata", "style")]
        parent.text = parent.text if parent.tag in WORDS else None
        parent.tail = parent.tail if parent.tag == "tspan" else None
    return root


def _local(name: object) -> str:
    return str(name).rpartition("}")[2]


def _referred(element: Element) -> list[str]:
    named = [element.attrib["marker"]] if "marker" in element.attrib else []
    return named + [found[1] for value in element.attrib.values() if (found := REFERENCE.match(value))]


def _style(style: str) -> str:
    """In the page's colours, without what all parts have."""
    for part in ("paper", "ink", "faint"):
        style = re.sub(re.escape(THEMES["light"][part]), f"var(--{part})", style, flags=re.IGNORECASE)
    said = [each.strip() for each in style.split(";")]
    return "; ".join(each for each in said if each and each != INK and not each.startswith("font-family"))


def _rounded(value: str, digits: int) -> str:
    """Coordinates: a tenth of a point is enough, but of a mark, which is small itself, a hundredth."""

    def rounded(found: re.Match[str]) -> str:
        return f"{float(found[0]):.{digits}f}".rstrip("0").rstrip(".")

    value = re.sub(r"-?\d+\.\d+", rounded, value)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", value).strip() if PATH.match(value) else value


def _say_once(root: Element) -> None:
    """A mark that is drawn many times in one style has that style itself."""
    uses: dict[str, list[Element]] = {}
    for element in root.iter("use"):
        uses.setdefault(element.attrib["href"][1:], []).append(element)
    for mark in root.iter():
        drawn = uses.get(mark.attrib.get("id", ""), [])
        if len({use.attrib.get("style") for use in drawn}) == 1 and "style" in drawn[0].attrib:
            mark.attrib["style"] = _merged(drawn[0].attrib["style"], mark.attrib.get("style", ""))
            for use in drawn:
                del use.attrib["style"]


def _merged(inherited: str, own: str) -> str:
    said = [each.partition(":") for style in (inherited, own) for each in style.split(";") if each.strip()]
    return "; ".join(f"{name}: {value}" for name, value in {n.strip(): v.strip() for n, _, v in said}.items())


def _points(element: Element) -> list[Point]:
    """Where a path or marks go."""
    if element.tag == "use":
        return [(float(element.attrib["x"]), float(element.attrib["y"]))]
    numbers = [float(each) for each in NUMBER.findall(element.attrib.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True)) + [at for child in element for at in _points(child)]


def _unclip(root: Element) -> None:
    """What lies within the frame that would cut it off needs no frame."""
    frames = {
        clip.attrib["id"]: [float(clip[0].attrib[side]) for side in ("x", "y", "width", "height")]
        for clip in root.iter("clipPath")
    }
    for element in root.iter():
        found = REFERENCE.match(element.attrib.get("clip-path", ""))
        if found:
            left, top, width, height = frames[found[1]]
            if all(-1 <= x - left <= width + 1 and -1 <= y - top <= height + 1 for x, y in _points(element)):
                del element.attrib["clip-path"]


def _unwrap(element: Element) -> None:
    """Groups that hold nothing together give way to what they hold, and paths of a single point go."""
    children: list[Element] = []
    for child in list(element):
        _unwrap(child)
        bare = child.tag == "g" and not child.attrib.keys() - {"id"} and child.find("title") is None
        if not (child.tag == "path" and element.tag != "defs" and len(_points(child)) < 2):
            children += list(child) if bare else [child]
    element[:] = children


def _draw_marks(root: Element) -> None:
    """Marks that follow each other become those of one path: of the line through them, where there is one."""
    paths = {path.attrib["id"]: (defs, path) for defs in root.iter("defs") for path in defs.iter("path")}
    for parent in list(root.iter()):
        if parent.tag == "defs":
            continue
        children: list[Element] = []
        run: list[Element] = []
        for child in [*parent, None]:
            if child is not None and child.tag == "use" and (not run or run[0].get("href") == child.get("href")):
                run.append(child)
                continue
            children += _run(children, run, paths) if len(run) >= FEWEST else run
            run = [child] if child is not None and child.tag == "use" else []
            children += [child] if child is not None and not run else []
        parent[:] = children + run


def _run(before: list[Element], run: list[Element], paths: dict[str, tuple[Element, Element]]) -> list[Element]:
    """The path that draws the marks of a run: one of its own, or none where the line before it does."""
    name = run[0].attrib["href"][1:]
    defs, mark = paths[name]
    if defs.find(f"marker[@id='{name}m']") is None:
        frame = Element("marker", {"id": f"{name}m", "overflow": "visible", "markerUnits": "userSpaceOnUse"})
        frame.append(mark)
        defs[:] = [frame if each is mark else each for each in defs]
    at = [point for use in run for point in _points(use)]
    line = next((each for each in reversed(before) if each.tag == "path"), None)
    if line is not None and "C" not in line.attrib["d"] and "marker" not in line.attrib:
        through = _points(line)
        if len(through) == len(at) and all(
            abs(x - u) + abs(y - v) < 0.1 for (x, y), (u, v) in zip(at, through, strict=True)
        ):
            line.attrib["marker"] = f"{name}m"
            return []
    drawn = "M" + "L".join(f"{x} {y}" for x, y in at)
    return [Element("path", {"d": drawn, "style": "fill: none", "marker": f"{name}m"})]
