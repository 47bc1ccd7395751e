"""Two hosts on one Linux machine, as network namespaces that only a cable joins; needs root and iproute2.

By hand, `bench run` on both of them with the same arguments, node 0's output on stdout:
    python tests/support/two_hosts.py ladders/ddp-cpu.yaml --repeats 1
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400


class TwoHostsError(Exception):
    """Namespaces cannot be made here; the message says why."""


class TwoHosts:
    """Hosts 0 and 1; a context manager that takes them away again."""

    def __init__(self) -> None:
        self.names = [f"bench-{os.getpid()}-{host}" for host in (0, 1)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def __enter__(self) -> TwoHosts:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            near, far = self.names
            _ip("-n", near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", far)
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError) as error:
            self._remove()
            raise TwoHostsError(getattr(error, "stderr", None) or str(error)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def cut(self) -> None:
        """Take the cable out, at host 1."""
        _ip("-n", self.names[1], "link", "set", "cable", "down")

    def mend(self) -> None:
        """Put it back."""
        _ip("-n", self.names[1], "link", "set", "cable", "up")

    def start(self, host: int, arguments: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """`bench run` on one of the hosts, which is the node of that number."""
        where = ["--nnodes", "2", "--node-rank", str(host), "--rdzv", f"{self.addresses[0]}:{PORT}"]
        command = [sys.executable, "-m", "bench.cli", "run", *arguments, *where]
        enter = ["ip", "netns", "exec", self.names[host]]
        return subprocess.Popen([*enter, *command], cwd=ROOT, text=True, **options)  # type: ignore[call-overload]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


if __name__ == "__main__":
    with TwoHosts() as hosts:
        follower = hosts.start(1, sys.argv[1:])
        leader = hosts.start(0, sys.argv[1:])
        try:
            code = leader.wait()
        except KeyboardInterrupt:  # which both have had from the terminal
            code = leader.wait()
        follower.wait()
    raise SystemExit(code)
