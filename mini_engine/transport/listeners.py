"""Listeners: the two stream sockets that EngineCore connects to, bound and listening before anything else exists.

Promises  Both are plain descriptors with an address that is already good to connect to: connections made before any ZMQ socket adopts them
          wait in the backlog. So the process that binds, the one that launches engines and the one that serves may be three processes.
Layout    input: ZMQ ROUTER, requests go down; output: ZMQ PULL, outputs come up. A local pair is two Unix sockets in a directory that
          only this user may enter (there is no other authentication); a remote pair is two TCP ports.
Owner     whoever calls close(): the client, once it was given the listeners.

Stands at forms 4 and 8 of a request.    vLLM: utils/network_utils.py; v1/utils.py hands the descriptors on; WIRE §1.1, §11
"""

import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from mini_engine.exceptions import VLLMValidationError


@dataclass(slots=True)
class Listeners:
    """Descriptors (-1 once closed) and the addresses that INIT tells the engines."""

    input_fd: int
    output_fd: int
    input_address: str
    output_address: str
    local: bool  #: the engines are our own children, over Unix sockets. False: nothing but the connection tells of their end
    directory: Path | None = None  #: holds the Unix sockets; removed by close()

    def open_socket(self, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        """A ZMQ socket, ROUTER or PULL, with the right options; it accepts nobody before adopt()."""
        sock = context.socket(kind)
        sock.linger = 0
        sock.set_hwm(0)  # unlimited: nothing between the two processes pushes back (WIRE T16)
        if kind == zmq.ROUTER:
            sock.router_mandatory = True  # a send to an engine that is gone raises instead of vanishing
        if not self.local:  # a remote peer that vanishes without closing is noticed after ten silent seconds
            sock.heartbeat_ivl, sock.heartbeat_timeout = 2_000, 10_000
        return sock

    def adopt(self, sock: zmq.Socket[bytes]) -> None:
        """Let `sock` accept on the matching descriptor. It gets a duplicate, closed with the socket.

        Engines may have connected long ago, and ZMQ accepts them at once: whoever wants to see it watches the socket before.
        """
        fd, address = (self.input_fd, self.input_address) if sock.type == zmq.ROUTER else (self.output_fd, self.output_address)
        sock.setsockopt(zmq.USE_FD, os.dup(fd))
        sock.bind(address)

    def hand_over(self) -> None:
        """Close our descriptors: a child has inherited them. The addresses stay good until close()."""
        for fd in (self.input_fd, self.output_fd):
            if fd >= 0:
                os.close(fd)
        self.input_fd = self.output_fd = -1

    def close(self) -> None:
        self.hand_over()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def bind_listeners(*, local: bool = True, host: str | None = None) -> Listeners:
    """Two Unix sockets, or with local=False two free TCP ports on `host` (default 127.0.0.1), which remote engines have to reach.

    Raises VLLMValidationError: a TMPDIR too long for a socket's name, a host that is not ours.
    """
    directory = Path(tempfile.mkdtemp(prefix="mini_engine-")) if local else None  # mode 0700
    names: list[Any] = [(host or "127.0.0.1", 0)] * 2 if directory is None else [str(directory / "in"), str(directory / "out")]
    try:
        servers = [socket.create_server(name, family=socket.AF_UNIX if local else socket.AF_INET) for name in names]
    except OSError as e:
        if directory is not None:
            shutil.rmtree(directory)
        reason = "set TMPDIR to a shorter path" if local else e.strerror
        raise VLLMValidationError(f"cannot listen at {names[0]}: {reason}") from e
    input_address, output_address = map(_address, servers)
    return Listeners(servers[0].detach(), servers[1].detach(), input_address, output_address, local, directory)


def inherit_listeners(input_fd: int, output_fd: int) -> Listeners:
    """A pair that another process has bound and keeps the engines of. Raises OSError when a descriptor is no listening socket."""
    addresses = []
    for fd in (input_fd, output_fd):
        os.set_inheritable(fd, False)
        with socket.socket(fileno=os.dup(fd)) as sock:
            addresses.append(_address(sock))
    return Listeners(input_fd, output_fd, addresses[0], addresses[1], False)


def _address(sock: socket.socket) -> str:
    name = sock.getsockname()
    return f"ipc://{name}" if sock.family == socket.AF_UNIX else "tcp://{}:{}".format(*name)
