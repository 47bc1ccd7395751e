"""Read the documents of one corpus file, and explain what is wrong with it. Imports no torch.

gpt2.data.corpora.sources passes read_text, read_json_lines and read_parquet to `datasets`. Each yields
documents with "text", None where it is null, and "where": the file, with the line or row.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

from gpt2.errors import limit_met
from gpt2.files.cache import DataError
from gpt2.text import of_other_kind, pieces

FILE_KINDS = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"}
PIECE_CHARS = 1 << 20
"""Characters of a text file read at once."""
ROWS = 1024
"""Rows of a Parquet file read at once."""
USUAL_COLUMNS = ("text", "content")
SAMPLED_LINES = 256
"""Lines of JSON that are examined to find the columns of text."""
ONE_EACH = (
    "a document is one object on one line (jq -c . OLD > NEW.jsonl for objects, jq -c '.[]' for an array)"
)
BLANK = b" \t\r\n\0"
"""Characters of a line without a document; NULs end a file that was allocated beforehand."""


class NoColumn(DataError):
    """The requested column does not exist."""


def read_text(files: Sequence[str], piece_chars: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield each file as one document, in pieces that can be tokenised independently. Raises DataError."""
    for file in files:
        try:
            for number, text in enumerate(pieces(Path(file), piece_chars or PIECE_CHARS)):
                yield {"text": text, "begins": number == 0, "where": file}
        except OSError as error:
            raise explain(file, error) from None


def read_json_lines(files: Sequence[str], column: str) -> Iterator[dict[str, Any]]:
    """Yield each line's `column` as one document; of a duplicate key, the last value counts.

    null is an empty document, and so is a line without the column, unless it has text in another one. Raises
    DataError.
    """
    for file in files:
        for where, record in _records(file):
            if column not in record and any(isinstance(value, str) for value in record.values()):
                raise DataError(f"{where}: no column {column!r}, but {', '.join(record)}")
            text = record.get(column)
            if text is not None and not isinstance(text, str):
                raise DataError(f"{where}: {column!r} is no text but {type(text).__name__}")
            yield {"text": text, "where": where}


def read_parquet(
    files: Sequence[str], column: str, begun: str = "", skip: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield each row's `column` as one document. Raises DataError.

    The first `skip` rows of the file `begun` will not be used: where they form whole row groups, empty
    records stand for them and nothing is read. All reading is done in this thread, because the threads of
    pyarrow's scanner, which `datasets` uses for Parquet, abort a process that exits early.
    """
    for file in files:
        try:
            yield from _rows(file, column, skip if file == begun else 0)
        except Exception as error:  # pyarrow, fsspec and network libraries raise many types
            raise explain(file, error) from None


def _rows(file: str, column: str, skip: int) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with open_file(file) as opened:
        parquet = pyarrow.parquet.ParquetFile(opened)
        if column not in parquet.schema_arrow.names:
            raise DataError(f"{file}: no column {column!r}, but {', '.join(parquet.schema_arrow.names)}")
        if parquet.schema_arrow.names.count(column) > 1:
            raise DataError(f"{file}: two columns are called {column!r}; rename one")
        if not _is_text(kind := parquet.schema_arrow.field(column).type) and not pyarrow.types.is_null(kind):
            raise DataError(f"{file}: column {column!r} is no text but {kind}")
        before = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if rows <= skip:
                yield from repeat({}, rows)
            else:
                parts = parquet.iter_batches(ROWS, row_groups=[group], columns=[column], use_threads=False)
                # Of a group `a` that holds a column `b`, a.b is taken too.
                texts = chain.from_iterable(part.column(column).to_pylist() for part in parts)
                for number, text in enumerate(texts, before + 1):
                    yield {"text": text, "where": f"{file}, row {number}"}
            skip, before = max(0, skip - rows), before + rows


def _records(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON object of a file with its line, skipping lines of BLANK only. Raises DataError."""
    number, first = 0, True
    try:
        with open_file(file) as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip(BLANK):
                    where = f"{file}, line {number}"
                    yield where, _record(line, where, first)
                    first = False
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        if number == 0 and "Not a gzipped file" in str(error):
            raise DataError(f"{file} is not compressed by gzip; name it without .gz") from None
        raise DataError(f"{file}, after line {number}: damaged gzip data ({error}); get it anew") from None
    except Exception as error:
        raise explain(file, error) from None


def _record(line: bytes, where: str, first: bool) -> dict[str, Any]:
    """Parse one line as a JSON object. Raises DataError.

    first: no line before held an object, so that the whole file may have another format.
    """
    try:
        text = line.decode().rstrip()
    except UnicodeDecodeError as error:
        other = of_other_kind(line) if first else ""
        raise DataError(f"{where}: no UTF-8 ({error.reason} at byte {error.start + 1}){other}") from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        if first and error.pos >= len(text):  # the value continues on the next line
            what = "an array" if text.lstrip().startswith("[") else "an object"
            raise DataError(f"{where}: the beginning of {what} over several lines; {ONE_EACH}") from None
        what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise DataError(f"{where}: no JSON ({what})") from None
    except (ValueError, RecursionError) as error:  # thousands of digits, or of nested brackets
        raise DataError(f"{where}: no JSON that can be read ({error})") from None
    if not isinstance(record, dict):
        what = "an array" if isinstance(record, list) else type(record).__name__
        raise DataError(f"{where}: no JSON object but {what}; {ONE_EACH}")
    return record


def open_file(file: str) -> Any:
    """Open a file on disk, at a URL or on the hub for reading bytes, decompressing .gz."""
    if "://" not in file:
        return gzip.open(file, "rb") if file.lower().endswith(".gz") else open(file, "rb")
    from datasets.utils.file_utils import xopen  # retries when the network fails

    opened = xopen(file, "rb")
    return gzip.GzipFile(fileobj=opened) if file.lower().endswith(".gz") else opened


def text_column_of(name: str, kind: str, files: Sequence[str], asked: str | None) -> str:
    """Return the column of text: the one asked for if it exists, else the usual one, else the only one.

    Parquet columns have types. In JSON, the first SAMPLED_LINES lines decide: a column with a string in any
    of them is text; one with only nulls may be, and is taken by its name or where no other column is text.
    Raises DataError where the column does not exist or cannot be inferred.
    """
    if kind == "text":
        return "text"
    file = files[0]
    sought = asked or USUAL_COLUMNS[0]
    columns, texts, empty = _parquet_columns(file) if kind == "parquet" else _json_columns(files, sought)
    if asked is not None and kind == "json" and asked not in columns and not texts:
        return asked  # no line so far has text, but later ones may
    if asked is not None and asked not in columns:
        raise NoColumn(f"corpus {name!r}: {file} has no column {asked!r}, but {', '.join(columns)}")
    if asked is not None and asked not in (*texts, *empty):
        wrong = f"column {asked!r} of {file} is no text"
        raise DataError(f"corpus {name!r}: {wrong}; those of text: {', '.join(texts)}")
    named = [column for group in (texts, empty) for column in USUAL_COLUMNS if column in group]
    if asked is None and not named and (other := [column for column in USUAL_COLUMNS if column in columns]):
        raise DataError(
            f"corpus {name!r}: column {other[0]!r} of {file} is no text, as it should be by its name; write "
            "it as strings, or say with --text-column which column is meant"
        )
    usual = [asked] if asked else named or texts or empty
    if len(usual) != 1 and not set(usual) & set(USUAL_COLUMNS):
        many = f"columns of text {', '.join(texts)}; say which" if texts else "no column of text"
        raise DataError(f"corpus {name!r}: {file} has {many}{' with --text-column' if texts else ''}")
    return usual[0]


def _parquet_columns(file: str) -> tuple[list[str], list[str], list[str]]:
    import pyarrow.parquet

    try:
        with open_file(file) as opened:
            schema = pyarrow.parquet.read_schema(opened)
    except Exception as error:
        raise explain(file, error) from None
    return schema.names, [field.name for field in schema if _is_text(field.type)], []


def _is_text(kind: Any) -> bool:
    """Return whether an Arrow type is a string, plain or dictionary-encoded."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _json_columns(files: Sequence[str], sought: str) -> tuple[list[str], list[str], list[str]]:
    """Return all columns, those with text, and those with only nulls, up to the first text in `sought`."""
    kinds: dict[str, set[type]] = {}
    sampled = 0
    for file in files:
        for _, record in islice(_records(file), SAMPLED_LINES - sampled):
            sampled += 1
            for column, value in record.items():
                kinds.setdefault(column, set()).add(type(value))
            if str in kinds.get(sought, ()):
                break
        if sampled == SAMPLED_LINES or any(str in each for each in kinds.values()):
            break
    if not sampled:
        raise DataError(f"{files[0]} holds no document")
    texts = [column for column, each in kinds.items() if str in each]
    return list(kinds), texts, [column for column, each in kinds.items() if each == {type(None)}]


def parquet_rows(files: Sequence[str]) -> int:
    """Return the number of rows in local Parquet files. Raises DataError where one is damaged."""
    import pyarrow.parquet

    rows = 0
    for file in files:
        try:
            rows += pyarrow.parquet.read_metadata(file).num_rows
        except Exception as error:
            raise explain(file, error) from None
    return rows


def explain(file: str, error: Exception) -> DataError:
    """Turn an exception of pyarrow, fsspec or the network while reading `file` into a one-line DataError."""
    if isinstance(error, DataError):
        return error
    if limit := limit_met(error):
        return DataError(f"{file} cannot be read: {limit}")
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    remote = "://" in file
    if isinstance(error, PermissionError):
        return DataError(f"{file} cannot be read (permission denied)")
    if isinstance(error, FileNotFoundError):
        gone = "is not there, or its server does not answer" if remote else "does not exist"
        return DataError(f"{file} {gone}")
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"{file} holds text that is no UTF-8 ({error.reason})")
    if remote and not type(error).__module__.startswith("pyarrow"):
        return DataError(
            f"{file} cannot be read any further, after all tries ({type(error).__name__}: {said}); nothing "
            "is lost: once the network is back, go on from the last checkpoint or whole shard"
        )
    why = "it is damaged or cut off, so get it anew, or not of the kind that its name says"
    return DataError(f"{file} cannot be read ({said}); {why}")
