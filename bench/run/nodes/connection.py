"""A connection between two nodes: JSON objects, one to a line, and word of when the other side is lost.

What is received is data only: it is read as JSON, and nothing of it is ever executed or unpickled. That a silent host
is lost is found out by the kernel's keep-alive probes, which go on while this process is busy. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import select
import socket
import time
from typing import Any

import psutil

from bench.run.nodes.topology import Place, PlaceError

SEND_SECONDS = 5.0
"""A message is short; one that takes longer is not being read."""
LONGEST_LINE = 2**20
RETRY_SECONDS = 0.5


class Link:
    """One side of a connection."""

    def __init__(self, connection: socket.socket, silence_seconds: float) -> None:
        self.lost: str | None = None
        """Why nothing more can come; None while all is well."""
        self._socket = connection
        self._rest = b""
        connection.settimeout(SEND_SECONDS)
        _probe_often(connection, silence_seconds)
        self._silence = f"silent for {silence_seconds:g} s"
        self.own_host = self.other_host = ""
        """Addresses; this side's is that of the interface which leads to the other."""
        try:
            self.own_host, self.other_host = connection.getsockname()[0], connection.getpeername()[0]
        except OSError as error:  # gone already
            self._lose(error)

    def send(self, what: str, **facts: Any) -> None:
        """Send one object; where the other side is lost, `lost` says so."""
        try:
            self._socket.sendall(json.dumps({"what": what, **facts}).encode() + b"\n")
        except OSError as error:
            self._lose(error)

    def receive(self, wait_seconds: float = 0.0) -> list[dict[str, Any]]:
        """The objects that have come, after waiting for something to come up to so long."""
        if self._socket.fileno() < 0:
            return []
        try:
            while len(self._rest) <= LONGEST_LINE and select.select([self._socket], [], [], wait_seconds)[0]:
                wait_seconds = 0.0
                part = self._socket.recv(2**16)
                if not part:
                    self.lost = self.lost or "its connection was closed"
                    break
                self._rest += part
        except OSError as error:
            self._lose(error)
        *lines, self._rest = self._rest.split(b"\n")
        messages: list[dict[str, Any]] = []
        with contextlib.suppress(ValueError, RecursionError):
            messages = [message for message in map(json.loads, lines) if isinstance(message, dict)]
        if len(messages) < len(lines) or len(self._rest) > LONGEST_LINE:
            self.lost = self.lost or "it sent what is no message"
        return messages

    def close(self) -> None:
        """Say no more."""
        self._socket.close()

    def _lose(self, error: OSError) -> None:
        quiet = isinstance(error, TimeoutError)
        self.lost = self.lost or (self._silence if quiet else (error.strerror or str(error)).lower())


def _probe_often(connection: socket.socket, silence_seconds: float) -> None:
    """Have the kernel report a host that has gone quiet within about `silence_seconds`, whether we send or not."""
    each = max(1, round(silence_seconds / 6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 2 * each,
        "TCP_KEEPALIVE": 2 * each,  # what macOS calls the same
        "TCP_KEEPINTVL": each,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": round(silence_seconds * 1000),  # for what was sent and never acknowledged; Linux only
    }
    for name, value in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(place: Place) -> socket.socket:
    """Where the other nodes find node 0; its accept() does not wait. Raises PlaceError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        # Many hosts know their own name as a loopback address, where nobody else could come.
        inward = _is_loopback(str(address[0])) and not (_is_loopback(place.host) or place.host == "localhost")
        server = socket.create_server(("" if inward else str(address[0]), place.port), family=family)
        server.setblocking(False)
        return server
    except socket.gaierror as error:
        reason = f"{error.strerror or error}; give a name or an address of node 0"
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "the port is in use; end what listens there, or choose another port",
            errno.EADDRNOTAVAIL: "is no address of this machine, and --node-rank 0 is to be there",
        }.get(error.errno or 0, error.strerror or str(error))
    raise PlaceError(f"--rdzv {place.endpoint}: {reason}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connect(place: Place, silence_seconds: float) -> Link | None:
    """Try once to reach node 0; None, after a moment, where it is not there yet."""
    try:
        connection = socket.create_connection((place.host, place.port), timeout=SEND_SECONDS)
        if connection.getsockname() != connection.getpeername():  # a port of this machine may connect to itself
            return Link(connection, silence_seconds)
        connection.close()
    except OSError:
        pass
    time.sleep(RETRY_SECONDS)
    return None


def interface(host: str) -> str | None:
    """The network interface of this machine that has the address `host`."""
    for name, addresses in psutil.net_if_addrs().items():
        if host in [address.address.partition("%")[0] for address in addresses]:
            return name
    return None
