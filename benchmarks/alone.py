"""Contestants in processes of their own: one that runs on a GPU finds no memory that another has left."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, final

import torch

from benchmarks.harness import now, settle


@final
class Alone:
    """The contestant ``prepare(*args)``, made and called in a process that it has to itself, as a training loop has.

    What is called and given must be found by its name there. A call returns when the device has done it.
    """

    def __init__(self, prepare: Callable[..., Callable[[], Any]], *args: Any, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        given = (there, prepare, args, device, torch.get_float32_matmul_precision())
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        there.close()

    def __call__(self) -> None:
        try:
            self._connection.send("go")
            self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join()
            raise RuntimeError(
                f"a contestant's process has ended with code {self._process.exitcode}: what it wrote tells why"
            ) from error

    def __enter__(self) -> Alone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.join()


def _serve(
    connection: Connection,
    prepare: Callable[..., Callable[[], Any]],
    args: tuple[Any, ...],
    device: torch.device,
    precision: str,
) -> None:
    """A call for every message, until nobody is there any more."""
    settle()
    torch.set_float32_matmul_precision(precision)
    contestant = prepare(*args)
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        contestant()
        now(device)  # waits for it
        connection.send("done")
