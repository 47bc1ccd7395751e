"""Read YAML as ladders and runs are written in it, in files and in values of --set. Imports no torch.

It is YAML 1.1 (on, off, yes and no are true and false; << merges mappings), with these differences: 1e-3 is a
number as 1.0e-3 is, a date is text, and anything but plain data is refused: a duplicate key, a number that is
not finite or not decimal (010 would be 8, and 1:30 would be 90), a value that contains itself, a tag such as
!!set.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from gpt2.config.validation import ConfigError

MOST_BYTES = 2**20
"""Largest size of a file; a ladder of a hundred rungs has a fiftieth of it."""
MOST_VALUES = 100_000
"""Largest number of values in a file, with every alias expanded."""
DEEPEST = 100
"""Largest depth of nested values."""

TAG = "tag:yaml.org,2002:"
PLAIN_DATA = {f"{TAG}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}
MERGE = f"{TAG}merge"
NOT_RESOLVED = {f"{TAG}timestamp", f"{TAG}value"}
"""Tags that YAML 1.1 gives to some plain text, and this reader does not."""
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$")
"""A float without a decimal point or without the exponent's sign, which YAML 1.1 reads as text."""
DECIMAL = {
    f"{TAG}int": re.compile(r"[-+]?(?:0|[1-9][\d_]*)"),
    f"{TAG}float": re.compile(r"[^:]+"),
}
"""Numbers that are what they seem; YAML 1.1 has others to the bases 2, 8, 16 and 60."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return PyYAML's implicit resolvers with these changes: tags and patterns by first character."""
    found = {
        first: [(tag, pattern) for tag, pattern in each if tag not in NOT_RESOLVED]
        for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+.0123456789":
        found.setdefault(first, []).append((f"{TAG}float", NUMBER))
    return found


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values, self._depth = 0, 0
        self._sizes: dict[str, int] = {}
        """Number of values below each anchor, once that is complete."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node as PyYAML does, within limits; an alias counts as many values as it stands for."""
        event: Any = self.peek_event()
        before, self._depth = self._values, self._depth + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self._sizes:
                raise _wrong(f"*{event.anchor} stands within what it names", event)
            self._values += self._sizes.get(event.anchor, 0)
        elif event.anchor in self.anchors:
            twice = f"anchor &{event.anchor} is given twice"
            raise _wrong(f"{twice}; every anchor needs a name of its own", event)
        self._values += 1
        if self._depth > DEEPEST:
            raise _wrong("is nested too deeply", event)
        if self._values > MOST_VALUES:
            raise _wrong(f"holds more than {MOST_VALUES:,} values, its aliases written out", event)
        node = super().compose_node(parent, index)
        if node is not None and node.tag not in PLAIN_DATA:
            raise _wrong(f"tag {node.tag.replace(TAG, '!!')} has no meaning here; leave it out", event)
        if not isinstance(event, yaml.AliasEvent) and event.anchor is not None:
            self._sizes[event.anchor] = self._values - before
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate keys, while merged keys (<<) are still separate from the mapping's own."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()  # a quoted "<<" is plain text
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong("a key is a word, not a list or a mapping", key)
            if (key.tag, key.value) in seen:
                several = "; merge several by <<: [*a, *b]" if key.tag == MERGE else ""
                raise _wrong(f"key {key.value!r} is given twice{several}", key)
            seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge the mappings named by <<: own keys win, then the first of a list.

        PyYAML's releases differ in this.
        """
        own = [pair for pair in node.value if pair[0].tag != MERGE]
        merges = [value for key, value in node.value if key.tag == MERGE]
        known, merged = {key.value for key, _ in own}, []
        for merge in merges:
            for each in merge.value if isinstance(merge, yaml.SequenceNode) else [merge]:
                if not isinstance(each, yaml.MappingNode):
                    raise _wrong("<< merges a mapping, or a list of them", each)
                self.flatten_mapping(each)
                merged += [pair for pair in each.value if pair[0].value not in known]
                known |= {key.value for key, _ in each.value}
        node.value = merged + own

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct as PyYAML does; an error about text that does not fit its tag has the position."""
        try:
            found = super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError, TypeError):
            raise _wrong(f"{_text(node)} is no {node.tag.replace(TAG, '')}", node) from None
        if node.tag in DECIMAL and not DECIMAL[node.tag].fullmatch(node.value):
            read = f"YAML reads {_text(node)} as {found}"
            raise _wrong(f"{read}; write a decimal number, or put a text in quotes", node)
        if isinstance(found, float) and not math.isfinite(found):
            raise _wrong(f"{_text(node)} is no finite number", node)
        return found


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which the reader would take for a number."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (the library's own name and type)
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *each]
        for first, each in _resolvers().items()
    }


def _wrong(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _text(node: yaml.Node) -> str:
    """Return a node's text, shortened to 40 characters."""
    text = str(node.value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def read(path: Path) -> Any:
    """Return a file's content; None where it is empty. Raises OSError, and ConfigError with file and line."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path}: is a pipe or a device; write it into a file, which is read several times")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path}: is larger than {MOST_BYTES // 2**20} MiB; is it the file that is meant?")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: is not UTF-8 text") from None
    try:
        return _load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_explain(error, text)}") from None


def mapping(path: Path, keys: str) -> dict[str, Any]:
    """Return a file's content, which must be a mapping with string keys. Raises as read() does.

    keys: description of the expected keys, for error messages.
    """
    content = read(path)
    if content is None:
        raise ConfigError(f"{path}: is empty; {keys}")
    if not isinstance(content, dict):
        what = "a list" if isinstance(content, list) else "one value"
        raise ConfigError(f"{path}: line 1: is {what}; {keys}")
    if odd := next((key for key in content if not isinstance(key, str)), None):
        raise ConfigError(f"{path}: unknown key {odd!r}; {keys}")
    return content


def value(text: str, where: str) -> Any:
    """Parse the value of an option, by the same rules as files. Raises ConfigError."""
    try:
        return _load(text)
    except yaml.YAMLError as error:
        problem = _explain(error, text).removeprefix("line 1: ")
        raise ConfigError(f"{where}: {text!r} is no YAML value ({problem})") from None


def dump(content: Any) -> str:
    """Serialise `content` so that read() gives it back."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=119)


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _explain(error: yaml.YAMLError, text: str) -> str:
    """Return a YAML error as its line and problem."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        said = ", ".join(part for part in (error.context, error.problem) if part)
        said += "; indent with spaces" if r"'\t'" in said else ""
        return f"line {error.problem_mark.line + 1}: {said}"
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"line {line}: character #x{error.character:04x} has no place in YAML"
    return " ".join(str(error).split())
