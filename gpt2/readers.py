"""What one file of a corpus holds, read document by document, and what is wrong with it. Imports no torch.

gpt2.corpora hands read_text and read_json_lines to `datasets`; Parquet it reads itself.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt2.shards import DataError
from gpt2.text import pieces

FILE_KINDS = {".txt": "text", ".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"}
PIECE_CHARS = 1 << 20
"""Of a text file read at once."""
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


def _records(file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(file) as lines:
        number = 0
        try:
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
        except (gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{file}, after line {number}: damaged gzip data ({error})") from None


def _open(file: str) -> io.BufferedIOBase:
    from datasets.utils.file_utils import xopen  # reads from the network too, and tries again where it fails

    opened = open(file, "rb") if "://" not in file else xopen(file, "rb")  # noqa: SIM115
    return gzip.GzipFile(fileobj=opened) if file.endswith(".gz") else opened  # type: ignore[return-value]


def text_column_of(name: str, kind: str, file: str, asked: str | None) -> str:
    """The column of text: the one asked for if it is there, else the usual one, else the only one.

    Raises DataError where it is not there or cannot be told.
    """
    if kind == "text":
        return "text"
    try:
        columns, texts = _parquet_columns(file) if kind == "parquet" else _json_columns(file)
    except DataError:
        raise
    except Exception as error:
        raise explain(name, [file], 0, error) from None
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
    from datasets.utils.file_utils import xopen

    with xopen(file, "rb") as opened:
        schema = pyarrow.parquet.read_schema(opened)
    kinds = pyarrow.types
    texts = [field.name for field in schema if kinds.is_string(field.type) or kinds.is_large_string(field.type)]
    return schema.names, texts


def _json_columns(file: str) -> tuple[list[str], list[str]]:
    _, record = next(_records(file), (0, None))
    if record is None:
        raise DataError(f"{file} holds no document")
    return list(record), [column for column, value in record.items() if isinstance(value, str)]


def explain(name: str, files: Sequence[str], reached: int, error: Exception) -> DataError:
    """One line for what `datasets`, pyarrow or the network raised while the file at `reached` was read."""
    file = files[reached]
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, FileNotFoundError):
        gone = "is not there, or its server does not answer" if "://" in file else "does not exist"
        return DataError(f"corpus {name!r}: {file} {gone}")
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"corpus {name!r}: {file} holds text that is no UTF-8 ({error.reason})")
    if missing := re.search(r"No match for FieldRef\.Name\((.*?)\)", said):
        return DataError(f"corpus {name!r}: {file} has no column {missing[1]!r}")
    if "://" in file and not type(error).__module__.startswith("pyarrow"):
        return DataError(
            f"corpus {name!r}: {file} cannot be read any further, after all tries ({type(error).__name__}: {said}); "
            "nothing is lost: once the network is back, go on from the last checkpoint or whole shard"
        )
    damaged = next((each for each in files if "://" not in each and not _is_parquet(each)), file)
    return DataError(f"corpus {name!r}: {damaged} cannot be read as Parquet ({said}); it is damaged or cut off")


def _is_parquet(file: str) -> bool:
    import pyarrow
    import pyarrow.parquet

    try:
        pyarrow.parquet.read_metadata(file)
    except (OSError, pyarrow.ArrowException):
        return False
    return True
