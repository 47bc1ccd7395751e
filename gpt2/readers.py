"""What one file of a corpus holds, read document by document, and what is wrong with it. Imports no torch.

gpt2.corpora hands read_text, read_json_lines and read_parquet to `datasets`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from gpt2.shards import DataError
from gpt2.text import pieces

FILE_KINDS = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"}
PIECE_CHARS = 1 << 20
"""Of a text file read at once."""
ROWS = 1024
"""Of a Parquet file read at once."""
USUAL_COLUMNS = ("text", "content")


def read_text(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each file as one document, in pieces that can be tokenised one by one."""
    for file in files:
        for number, text in enumerate(pieces(Path(file), PIECE_CHARS)):
            yield {"text": text, "begins": number == 0}


def read_json_lines(files: Sequence[str], column: str) -> Iterator[dict[str, Any]]:
    """Each line's `column` as one document."""
    for file in files:
        for number, record in _records(file):
            if column not in record:
                raise DataError(f"{file}, line {number}: no column {column!r}, but {', '.join(record) or 'none'}")
            text = record[column]
            if text is not None and not isinstance(text, str):
                raise DataError(f"{file}, line {number}: {column!r} is no text but {type(text).__name__}")
            yield {column: text}


def read_parquet(files: Sequence[str], column: str, begun: str = "", skip: int = 0) -> Iterator[dict[str, Any]]:
    """Each row's `column` as one document.

    Of the file `begun` the first `skip` rows will not be used: where these are whole row groups, empty records
    stand for them and nothing is read. All is read in this thread: those of pyarrow's scanner, which `datasets`
    has for Parquet, abort a process that ends early.
    """
    for file in files:
        try:
            yield from _rows(file, column, skip if file == begun else 0)
        except Exception as error:  # whatever pyarrow, fsspec and the network's libraries raise
            raise explain(file, error) from None


def _rows(file: str, column: str, skip: int) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with open_file(file) as opened:
        parquet = pyarrow.parquet.ParquetFile(opened)
        if column not in parquet.schema_arrow.names:
            raise DataError(f"{file}: no column {column!r}, but {', '.join(parquet.schema_arrow.names)}")
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if rows <= skip:
                yield from repeat({}, rows)
            else:
                for part in parquet.iter_batches(ROWS, row_groups=[group], columns=[column], use_threads=False):
                    for text in part.column(0).to_pylist():
                        yield {column: text}
            skip = max(0, skip - rows)


def _records(file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with open_file(file) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise DataError(f"{file}, line {number}: no JSON object; each line is one document")
                    yield number, record
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, line {number}: no UTF-8 ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{file}, line {number}: no JSON ({error.msg} at column {error.colno})") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file}, after line {number}: damaged gzip data ({error})") from None
    except Exception as error:
        raise explain(file, error) from None


def open_file(file: str) -> Any:
    """A file on the disk, at a URL or on the hub, for reading bytes; what is compressed is decompressed."""
    if "://" not in file:
        return gzip.open(file, "rb") if file.endswith(".gz") else open(file, "rb")
    from datasets.utils.file_utils import xopen  # tries again where the network fails

    opened = xopen(file, "rb")
    return gzip.GzipFile(fileobj=opened) if file.endswith(".gz") else opened


def text_column_of(name: str, kind: str, file: str, asked: str | None) -> str:
    """The column of text: the one asked for if it is there, else the usual one, else the only one.

    Raises DataError where it is not there or cannot be told.
    """
    if kind == "text":
        return "text"
    columns, texts = _parquet_columns(file) if kind == "parquet" else _json_columns(file)
    if asked is not None and asked not in columns:
        raise DataError(f"corpus {name!r}: {file} has no column {asked!r}, but {', '.join(columns)}")
    if asked is not None and asked not in texts:
        raise DataError(f"corpus {name!r}: column {asked!r} of {file} is no text; those of text: {', '.join(texts)}")
    usual = [asked] if asked else [column for column in USUAL_COLUMNS if column in texts] or texts
    if len(usual) != 1 and not set(usual) & set(USUAL_COLUMNS):
        many = f"columns of text {', '.join(texts)}; say which" if texts else "no column of text"
        raise DataError(f"corpus {name!r}: {file} has {many}{' with --text-column' if texts else ''}")
    return usual[0]


def _parquet_columns(file: str) -> tuple[list[str], list[str]]:
    import pyarrow.parquet

    try:
        with open_file(file) as opened:
            schema = pyarrow.parquet.read_schema(opened)
    except Exception as error:
        raise explain(file, error) from None
    kinds = pyarrow.types
    texts = [field.name for field in schema if kinds.is_string(field.type) or kinds.is_large_string(field.type)]
    return schema.names, texts


def _json_columns(file: str) -> tuple[list[str], list[str]]:
    _, record = next(_records(file), (0, None))
    if record is None:
        raise DataError(f"{file} holds no document")
    return list(record), [column for column, value in record.items() if isinstance(value, str)]


def parquet_rows(files: Sequence[str]) -> int:
    """Number of documents of these files on the disk. Raises DataError where one is damaged."""
    import pyarrow.parquet

    rows = 0
    for file in files:
        try:
            rows += pyarrow.parquet.read_metadata(file).num_rows
        except Exception as error:
            raise explain(file, error) from None
    return rows


def explain(file: str, error: Exception) -> DataError:
    """One line for what pyarrow, fsspec or the network raised while the file was read."""
    if isinstance(error, DataError):
        return error
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    remote = "://" in file
    if isinstance(error, FileNotFoundError):
        return DataError(f"{file} is not there, or its server does not answer" if remote else f"{file} does not exist")
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"{file} holds text that is no UTF-8 ({error.reason})")
    if remote and not type(error).__module__.startswith("pyarrow"):
        return DataError(
            f"{file} cannot be read any further, after all tries ({type(error).__name__}: {said}); nothing is lost: "
            "once the network is back, go on from the last checkpoint or whole shard"
        )
    return DataError(f"{file} cannot be read ({said}); it is damaged, cut off, or not of the kind that its name says")
