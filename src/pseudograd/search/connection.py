"""The connection to a Ray cluster, which is found or started, or fails within seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

from pseudograd.extras import needed_for
from pseudograd.words import last_line

_PATIENCE = 5.0  # seconds to wait for an answer

# The HTTP/2 connection preface with empty settings (RFC 9113, section 3.4). A gRPC server answers
# with a settings frame, whose fourth byte is its type. Ray has no check of an address that returns
# within seconds (as of 2.60), so we probe it ourselves.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4


@contextlib.contextmanager
def connection(address: str | None = None) -> Iterator[Any]:
    """Connect to a cluster inside the block; a `RayRunner` there needs no address.

    At the end, a cluster started here is shut down; an existing connection stays open.
    """
    ray = _imported_ray()
    connected_here = _connect(ray, address)
    try:
        yield ray
    finally:
        if connected_here:
            ray.shutdown()


def _imported_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before the import
    with needed_for("a cluster"):
        import ray
    return ray


def _connect(ray: Any, address: str | None) -> bool:
    """Connect this process to the cluster; return False if it already was."""
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise ValueError(
                f"address is {address!r}, but this process is connected to the Ray cluster at "
                f"{here}: leave the address out, or call ray.shutdown() first"
            )
        return False
    found = _find(ray, address)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if found is None:
        with _search_path_for_children():
            ray.init(address="local", **quiet)
        return True
    try:
        # Pass the address as given: Ray's authentication depends on it.
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        reason = last_line(error.__cause__ or error).partition(". ")[0]
        raise ConnectionError(
            f"the Ray cluster at {found} cannot be joined ({reason}): this machine must be one of "
            "its nodes, with the same versions of Ray and Python and the same token"
        ) from error
    return True


@contextlib.contextmanager
def _search_path_for_children() -> Iterator[None]:
    """Make child processes use this process's module search path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _find(ray: Any, address: str | None) -> str | None:
    """Return the cluster's address, resolved as Ray does, or None to start one."""
    given = (os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address) or "auto"
    if "://" in given:
        raise ValueError(
            f"address {given!r} is for Ray Client, which cannot stream outcomes: run on a machine "
            "of the cluster with the address 'auto', or use `ray job submit`"
        )
    if given not in ("auto", "local") and not re.fullmatch(r".+:\d+", given):
        raise ValueError(f"address must be 'host:port', 'auto' or 'local', not {given!r}")
    try:
        found: str | None = ray._private.services.canonicalize_bootstrap_address(address)
    except ConnectionError:
        raise ConnectionError(
            "no Ray cluster runs on this machine: start one with `ray start --head`, "
            "or leave the address out"
        ) from None
    if found is None:
        return None
    try:
        _knock(found)
    except OSError as problem:
        if address is None and given == "auto":
            return None  # the address of a crashed cluster
        name = found if given == "auto" else given
        raise ConnectionError(
            f"no Ray cluster answers at {name} ({last_line(problem)}): check the address"
        ) from problem
    return found


def _knock(address: str) -> None:
    """Raise OSError unless a gRPC server answers; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(_HELLO)
        if connection.recv(9)[3:4] != bytes((_SETTINGS,)):
            raise ConnectionError("the server there is not Ray, whose default port is 6379")
