"""The TCPStore of torch through which the nodes of a run exchange facts.

Node 0 hosts the store. A runner loads no torch, so a child process of each node talks to the store for it,
and ends with it. The store holds JSON, which is read as data only. Where the store does not answer, an alarm
ends the child, even within torch's code.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

import psutil

from bench.run.nodes.topology import Place, PlaceError, patience
from gpt2.training.reexec import own_variables, python

BEAT_SECONDS = 0.5
ANSWER_SECONDS = 1.0
"""Limit for the child to answer, which it does once it has found the store."""
FIND_SECONDS = 2.0
"""Limit of one attempt to find the store."""
LEAVE_SECONDS = 3.0
"""Limit for the child to end by itself, which it announces in the store."""

Facts = dict[str, Any]
"""What a node says; the key "left" tells why it will say no more."""


class Rendezvous:
    """This node's side of the store."""

    def __init__(self, place: Place) -> None:
        """Host the store, as node 0, or begin to look for it. Raises PlaceError."""
        self.outgoing: Facts = {}
        """What this node says, sent at the next exchange()."""
        self.incoming: dict[int, Facts] = {}
        """What came at the last exchange(), by arrival; node 0 (arrival 0) hears all, the others node 0."""
        self.arrival: int | None = None
        """Number of this node's arrival; None until it has found the store."""
        self.lost: str | None = None
        """Why the store is lost; None while it is not."""
        self._silence_seconds, self._waiting = patience("silence"), False
        listener = [_listen(place)] if place.node == 0 else []
        self._pipe, far = Pipe()
        files = [far.fileno(), *(socket.fileno() for socket in listener)]
        arguments = [place.host, str(place.port), str(self._silence_seconds), *map(str, files)]
        self._process = subprocess.Popen(
            [*python(__name__), *arguments],
            env={**os.environ, **own_variables()},
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the runner
        )
        for handle in (far, *listener):
            handle.close()

    def close(self) -> None:
        """Leave the store; what was said last stays there."""
        self._pipe.close()  # at which the child ends
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def exchange(self) -> None:
        """Send what this node says, and receive what the others say."""
        try:
            if not self._waiting:
                self._pipe.send(self.outgoing)
            self._waiting = not self._pipe.poll(ANSWER_SECONDS)
            if not self._waiting:
                self.arrival, self.incoming = self._pipe.recv()
        except (EOFError, OSError):
            silent = self._process.wait() == -signal.SIGALRM
            self.lost = f"silent for {self._silence_seconds:g} s" if silent else "its store was closed"


def _listen(place: Place) -> socket.socket:
    """Open the socket of the store. Raises PlaceError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        socket.create_server((str(address[0]), 0), family=family).close()  # fails if it is another machine's
        # On all addresses: many hosts resolve their own name to a loopback address.
        return socket.create_server(("", place.port), family=family)
    except UnicodeError:
        reason = "is not the name of a host"
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "the port is in use; end what listens there, or choose another port",
            errno.EADDRNOTAVAIL: "is no address of this machine, which --node-rank 0 makes the host",
        }.get(error.errno or 0, error.strerror or str(error))
    raise PlaceError(f"--rdzv {place.endpoint}: {reason}")


def own_address(other: str) -> str | None:
    """Return the address of this machine's interface towards another host; None if there is none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as route:  # sends nothing
            route.connect(address)
            return route.getsockname()[0]
    except (OSError, UnicodeError):
        return None


def interface(address: str | None) -> str | None:
    """Return this machine's network interface that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [known.address.partition("%")[0] for known in addresses]:
            return name
    return None


# --- the child process


def _serve(host: str, port: int, silence_seconds: float, pipe: Connection, listener: int | None) -> None:
    """Copy what the runner says into the store, and tell it what the nodes say, until it ends."""
    from datetime import timedelta

    from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SLURM sends them to all of a job
        signal.signal(number, signal.SIG_IGN)
    says, waited_for, store = pipe.recv(), True, None
    while store is None:
        signal.setitimer(signal.ITIMER_REAL, FIND_SECONDS + silence_seconds)
        try:
            wait = timedelta(seconds=FIND_SECONDS)
            store = TCPStore(
                host,
                port,
                None,
                listener is not None,
                wait,
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        except DistError:  # the store is not there yet
            if pipe.poll():  # the runner waits for an answer, so this is the end of its pipe
                return
    arrival = store.add("arrivals", 1) if listener is None else 0
    beats: dict[int, tuple[object, float]] = {}
    while True:
        signal.setitimer(signal.ITIMER_REAL, silence_seconds)
        store.set(f"said/{arrival}", json.dumps({**says, "beat": time.monotonic()}))
        heard: dict[int, Facts] = {}
        for node in range(store.add("arrivals", 0) + 1) if listener is not None else [0]:
            if store.check([f"said/{node}"]):
                try:
                    facts = json.loads(store.get(f"said/{node}"))
                    now = facts["beat"]
                except (ValueError, KeyError, TypeError, RecursionError):  # not written by a node
                    continue
                heard[node] = facts
                beat, since = beats.get(node, (None, 0.0))
                if beat != now:
                    beats[node] = now, time.monotonic()
                elif time.monotonic() > since + silence_seconds:
                    facts.setdefault("left", f"silent for {silence_seconds:g} s")
        if waited_for:
            pipe.send((arrival, heard))
        if waited_for := pipe.poll(BEAT_SECONDS):
            try:
                says = pipe.recv()
            except (EOFError, OSError):
                return store.set(
                    f"said/{arrival}", json.dumps({**says, "beat": 0, "left": "its bench run ended"})
                )


if __name__ == "__main__":
    host, port, silence, *files = sys.argv[1:]
    with contextlib.suppress(EOFError, OSError):
        listener = int(files[1]) if len(files) > 1 else None
        _serve(host, int(port), float(silence), Connection(int(files[0])), listener)
    os._exit(0)  # without torch's own end, which could wait
