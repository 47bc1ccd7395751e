"""Pictures as parts of one page: in its colours, with its font and rules, and of few bytes.

What matplotlib writes beside each mark, a page says once: styles become classes, and names that nothing refers to go.
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
        root = ElementTree.fromstring(svg)
        for parent in list(root.iter()):
            for child in list(parent):
                if _local(child.tag) in ("metadata", "style"):
                    parent.remove(child)
        for element in root.iter():
            element.tag = _local(element.tag)
            element.attrib = {_local(name): value for name, value in element.attrib.items()}
        _say_once(root)
        referred = {found[1] for each in root.iter() for v in each.attrib.values() if (found := REFERENCE.match(v))}
        short = {name: f"p{self._pictures}-{n}" for n, name in enumerate(sorted(referred))}
        for element in root.iter():
            element.attrib = self._attributes(element, short)
            if element.tag not in WORDS:
                element.text = None
            element.tail = element.tail if element.tag == "tspan" else None
        _unwrap(root)
        root.attrib = {"viewBox": root.attrib["viewBox"], "style": INK}
        return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")

    def _attributes(self, element: Element, short: dict[str, str]) -> dict[str, str]:
        kept: dict[str, str] = {}
        for name, value in element.attrib.items():
            if found := REFERENCE.match(value):
                kept[name] = value.replace(found[1], short[found[1]])
            elif name == "id":
                kept |= {"id": short[value]} if value in short else {}
            elif name == "style":
                kept |= {"class": self._class(value)} if _style(value) else {}
            elif name == "transform" and value.startswith("rotate(-0 "):
                pass
            else:
                kept[name] = _rounded(value)
        return kept

    def _class(self, style: str) -> str:
        return self._classes.setdefault(_style(style), f"s{len(self._classes)}")


def _local(name: object) -> str:
    """Without its namespace, which is a page's own."""
    return str(name).rpartition("}")[2]


def _style(style: str) -> str:
    """In the page's colours, without what all parts have."""
    for part in ("paper", "ink", "faint"):
        style = re.sub(re.escape(THEMES["light"][part]), f"var(--{part})", style, flags=re.IGNORECASE)
    said = [each.strip() for each in style.split(";")]
    return "; ".join(each for each in said if each and each != INK and not each.startswith("font-family"))


def _rounded(value: str) -> str:
    """Coordinates: a hundredth of a point is enough."""
    value = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", value).strip() if re.match(r"M[ -]?\d", value) else value


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


def _unwrap(element: Element) -> None:
    """Groups that neither bear a name nor are told of by a title give way to what they hold."""
    children: list[Element] = []
    for child in list(element):
        _unwrap(child)
        bare = child.tag == "g" and not child.attrib and child.find("title") is None
        children += list(child) if bare else [child]
    element[:] = children
