"""Corpora for tests: documents, files of them, and a server that can break off."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet


def documents(count: int, seed: int = 0, words: int = 30) -> list[str]:
    """Texts of up to 2 `words` words, some empty, some with what tokenisers stumble over."""
    rng = np.random.default_rng(seed)
    odd = ["<|endoftext|>", "naïve", "漢字", "😀", "\n\n", "\r\n", "  two", "don't", "x" * 40, "\u00a0"]
    texts = []
    for number in range(count):
        drawn = rng.integers(0, 3000, rng.integers(0, 2 * words))
        texts.append(
            f"{number} " * bool(len(drawn)) + " ".join(odd[w] if w < 10 else f"word{w}" for w in drawn)
        )
    return texts


def parquet(path: Path, texts: Sequence[str], rows: int = 50, column: str = "text") -> Path:
    """The texts in row groups of `rows` rows, with a column before them."""
    table = pyarrow.table({"id": list(range(len(texts))), column: pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def json_lines(path: Path, texts: Sequence[str]) -> Path:
    """A line of JSON each; compressed where the name ends in .gz."""
    content = "".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def text(path: Path, texts: Sequence[str]) -> Path:
    """The texts as one, a line each."""
    path.write_text("\n".join(texts), encoding="utf-8", newline="")
    return path


WRITERS: dict[str, Callable[[Path, Sequence[str]], Path]] = {
    "parquet": parquet,
    "jsonl": json_lines,
    "txt": text,
}


def folder(place: Path, texts: Sequence[str], files: int, kind: str = "parquet") -> Path:
    """The texts spread evenly over files of one kind."""
    place.mkdir(exist_ok=True)
    ends = [len(texts) * number // files for number in range(files + 1)]
    for number, (first, end) in enumerate(pairwise(ends)):
        WRITERS[kind](place / f"train-{number:05d}.{kind}", texts[first:end])
    return place


class Server:
    """Serves a folder over HTTP, ranges included, on a port of its own."""

    def __init__(self, place: Path) -> None:
        self.most: int | None = None
        """Bytes until it breaks off."""
        self.most_files: int | None = None
        """Files until it refuses to give another."""
        self.given: set[str] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = place / self.path.lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                if (
                    body
                    and server.most_files is not None
                    and len({*server.given, self.path}) > server.most_files
                ):
                    self.close_connection = True
                    return
                server.given |= {self.path} if body else set()
                content = path.read_bytes()
                asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                first = int(asked[1]) if asked else 0
                last = min(int(asked[2]) if asked and asked[2] else len(content) - 1, len(content) - 1)
                if asked and first >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206 if asked else 200)
                self.send_header("Accept-Ranges", "bytes")
                if asked:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.send_header("Content-Length", str(last + 1 - first))
                self.end_headers()
                if body:
                    self.send(content[first : last + 1])

            def send(self, content: bytes) -> None:
                if server.most is not None:
                    if len(content) > server.most:
                        self.wfile.write(content[: server.most])
                        server.most = 0
                        self.close_connection = True
                        return
                    server.most -= len(content)
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """No longer answer."""
        self._server.shutdown()
        self._server.server_close()
