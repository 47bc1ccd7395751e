"""Where the nodes of a run meet: one TCPStore of torch, in which each node keeps what it has to say.

Node 0 hosts the store. A runner loads no torch, so a child process of each node talks to the store for it,
and ends with it. What lies in the store is JSON, and is read as data only. Nothing here waits for long: where
the store does not answer, an alarm ends the child, also while it is within torch's code.
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
"""For the own child to answer; while it has not found the store it does not."""
FIND_SECONDS = 2.0
"""For one attempt to find the store."""
LEAVE_SECONDS = 3.0
"""For the child to end by itself, saying so in the store."""

Facts = dict[str, Any]
"""What a node says, as a whole; of one that will say no more, "over" says why."""


class Rendezvous:
    """This node's side of the store."""

    def __init__(self, place: Place) -> None:
        """Host the store, as node 0, or begin to look for it. Raises PlaceError."""
        self.says: Facts = {}
        """What this node says from the next look() on."""
        self.heard: dict[int, Facts] = {}
        """What the nodes said at the last look(), by the number of their arrival; node 0's is 0, which sees
        all.
        """
        self.arrival: int | None = None
        """This node's number; None until it has found the store."""
        self.lost: str | None = None
        """Why nothing more can be heard."""
        self._silence_seconds, self._waiting = patience("silence"), False
        listener = [_listen(place)] if place.node == 0 else []
        self._pipe, far = Pipe()
        files = [far.fileno(), *(each.fileno() for each in listener)]
        arguments = [place.host, str(place.port), str(self._silence_seconds), *map(str, files)]
        self._process = subprocess.Popen(
            [*python(__name__), *arguments],
            env={**os.environ, **own_variables()},
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the runner's to heed
        )
        for each in (far, *listener):
            each.close()

    def close(self) -> None:
        """Leave, with what was said last."""
        self._pipe.close()  # at which the child ends
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def look(self) -> None:
        """Say what this node says, and hear what the others do."""
        try:
            if not self._waiting:
                self._pipe.send(self.says)
            self._waiting = not self._pipe.poll(ANSWER_SECONDS)
            if not self._waiting:
                self.arrival, self.heard = self._pipe.recv()
        except (EOFError, OSError):
            silent = self._process.wait() == -signal.SIGALRM
            self.lost = f"silent for {self._silence_seconds:g} s" if silent else "its store was closed"


def _listen(place: Place) -> socket.socket:
    """Where the other nodes find the store. Raises PlaceError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        socket.create_server(
            (str(address[0]), 0), family=family
        ).close()  # only where it is this machine's address
        # On all of them: many hosts know their own name as a loopback address, where nobody else could come.
        return socket.create_server(("", place.port), family=family)
    except UnicodeError:
        reason = "is no name of a host"
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "the port is in use; end what listens there, or choose another port",
            errno.EADDRNOTAVAIL: "is no address of this machine, and --node-rank 0 is to be there",
        }.get(error.errno or 0, error.strerror or str(error))
    raise PlaceError(f"--rdzv {place.endpoint}: {reason}")


def own_address(other: str) -> str | None:
    """That of this machine's interface which leads to another host; None where none does."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:  # sends nothing
            way.connect(address)
            return way.getsockname()[0]
    except (OSError, UnicodeError):
        return None


def interface(address: str | None) -> str | None:
    """The network interface of this machine that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [each.address.partition("%")[0] for each in addresses]:
            return name
    return None


# --- the child process
# -----------------------------------------------------------------------------------------------


def _serve(host: str, port: int, silence_seconds: float, pipe: Connection, listener: int | None) -> None:
    """Keep what the runner says in the store, and tell it what the nodes say, until it ends."""
    from datetime import timedelta

    from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SLURM sends them to all processes of a job
        signal.signal(each, signal.SIG_IGN)
    says, asked, store = pipe.recv(), True, None
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
        except DistError:  # it is not there yet
            if pipe.poll():  # a runner that waits for an answer says nothing more: it has ended
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
                except (ValueError, KeyError, TypeError, RecursionError):  # of a stranger
                    continue
                heard[node] = facts
                beat, since = beats.get(node, (None, 0.0))
                if beat != now:
                    beats[node] = now, time.monotonic()
                elif time.monotonic() > since + silence_seconds:
                    facts.setdefault("over", f"silent for {silence_seconds:g} s")
        if asked:
            pipe.send((arrival, heard))
        if asked := pipe.poll(BEAT_SECONDS):
            try:
                says = pipe.recv()
            except (EOFError, OSError):
                return store.set(
                    f"said/{arrival}", json.dumps({**says, "beat": 0, "over": "its bench run ended"})
                )


if __name__ == "__main__":
    host, port, silence, *files = sys.argv[1:]
    with contextlib.suppress(EOFError, OSError):
        listener = int(files[1]) if len(files) > 1 else None
        _serve(host, int(port), float(silence), Connection(int(files[0])), listener)
    os._exit(0)  # without torch's own end, which could wait
