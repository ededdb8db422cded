"""Ask a Dask scheduler for itself before work is given to it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distributed.comm import connect, resolve_address
from distributed.security import Security

from kansoku.errors import PlatformError

__all__ = ["check_scheduler"]

_PATIENCE_S = 5.0
"""Dask's own 30 s is for clusters that are starting; a person who mistyped waits for them too."""


def check_scheduler(address: str, *, patience_s: float = _PATIENCE_S) -> None:
    """Return if a scheduler answers within ``patience_s``; else raise PlatformError.

    A client must not try first: one whose address accepts and says nothing never ends.
    """
    try:
        resolve_address(address)
        # In a thread: a notebook's own loop may be running in this one.
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(asyncio.run, _identity(address, patience_s)).result()
    except TimeoutError:
        raise _no_scheduler(address, f"no answer in {patience_s:g} s") from None
    # What is no scheduler's answer may be read as the size of a message beyond all memory.
    except (OSError, ValueError, MemoryError) as error:
        raise _no_scheduler(address, str(error)) from None
    kind = told.get("type") if isinstance(told, dict) else None
    if kind != "Scheduler":
        raise _no_scheduler(address, f"a {kind} answers" if kind else "something else answers")


async def _identity(address: str, patience_s: float) -> Any:
    async with asyncio.timeout(patience_s):
        arguments = Security().get_connection_args("client")
        comm = await connect(address, timeout=patience_s, **arguments)
        try:
            await comm.write({"op": "identity", "reply": True})
            return await comm.read()
        finally:
            comm.abort()


def _no_scheduler(address: str, why: str) -> PlatformError:
    return PlatformError(
        f"no Dask scheduler answers: {why}",
        where=address,
        remedy="start one with `dask scheduler`; its address is tcp://HOST:8786",
    )
