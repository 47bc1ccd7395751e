"""A stand-in for the Hugging Face hub: as much of its HTTP interface as streaming a dataset asks for."""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = r"([^/]+/[^/]+)"


class Hub:
    """Serves each folder OWNER/NAME of `place` as a dataset's repository, the same at each of its commits."""

    def __init__(self, place: Path) -> None:
        hub_place = place
        self.commits = commits = [COMMIT]
        """The newest last; any that is appended is as if somebody had pushed."""

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            place = hub_place

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path, _, query = urllib.parse.unquote(self.path).partition("?")
                if (
                    found := re.fullmatch(rf"/api/datasets/{REPOSITORY}(/revision/([^/]+))?", path)
                ) and self.has(found):
                    commit = found[3] if found[3] in commits else commits[-1]
                    about = {"id": found[1], "sha": commit, "private": False, "gated": False, "downloads": 0}
                    self.as_json(
                        {**about, "siblings": [{"rfilename": file} for file in self.files(found[1])]}
                    )
                elif (
                    found := re.fullmatch(rf"/api/datasets/{REPOSITORY}/tree/[^/]+/?(.*)", path)
                ) and self.has(found):
                    self.as_json(self.tree(found[1], found[2], "recursive=true" in query.lower()))
                elif found := re.fullmatch(rf"/datasets/{REPOSITORY}/resolve/([^/]+)/(.*)", path):
                    self.file(self.place / found[1] / found[3], found[2])
                else:
                    self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

            def has(self, found: re.Match[str]) -> bool:
                return (self.place / found[1]).is_dir()

            def files(self, repository: str) -> list[str]:
                top = self.place / repository
                return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())

            def tree(self, repository: str, folder: str, recursive: bool) -> list[dict[str, Any]]:
                top = self.place / repository
                found = (top / folder).rglob("*") if recursive else (top / folder).glob("*")
                entries = []
                for path in sorted(found):
                    kind = (
                        {"type": "file", "size": path.stat().st_size}
                        if path.is_file()
                        else {"type": "directory"}
                    )
                    entries.append({**kind, "path": str(path.relative_to(top)), "oid": "0" * 40})
                return entries

            def file(self, path: Path, revision: str) -> None:
                commit = revision if revision in commits else commits[-1]
                if not path.is_file() or revision not in ("main", *commits):
                    self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                    return
                content = path.read_bytes()
                about = {"X-Repo-Commit": commit, "ETag": '"' + "0" * 40 + '"', "Accept-Ranges": "bytes"}
                if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                    part = content[int(asked[1]) : int(asked[2] or len(content)) + 1]
                    last = int(asked[1]) + len(part) - 1
                    self.answer(
                        206, part, {**about, "Content-Range": f"bytes {asked[1]}-{last}/{len(content)}"}
                    )
                else:
                    self.answer(200, content, about)

            def as_json(self, value: Any) -> None:
                self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

            def answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(code)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """No longer answer."""
        self._server.shutdown()
        self._server.server_close()
