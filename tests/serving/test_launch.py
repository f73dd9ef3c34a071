"""What a user is told of a rank that ended; which replica a client is passed on to."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from autotp.errors import RankError
from autotp.serving import rank
from autotp.serving.rank import Options


@pytest.mark.parametrize(
    "message",
    ["StateError: no", {"message": "StateError: no", "extraInfo": {"timestamp": "1"}}],
    ids=["text", "record"],
)
def test_the_reason_is_the_ranks_own(message, tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": message}))

    def elastic_launch(config: Any, entrypoint: Any) -> Any:
        def start(options: Options) -> None:
            raise ChildFailedError("run", {1: ProcessFailure(1, 7, 1, str(file))})

        return start

    monkeypatch.setattr(rank, "elastic_launch", elastic_launch)
    options = Options([Path("x")], 2, 1, None, "127.0.0.1", 0, "", (), 16, 4, None)
    with pytest.raises(RankError, match="rank 1 of 2 ended with code 1. StateError: no"):
        rank.serve(options)


async def passed_on(folder: Path) -> dict[str, Any]:
    """What clients hear of three replicas, of which the last is not there, and what is under way before and after."""
    front, listening = rank.Front([folder / name for name in "abc"]), socket.create_server(("127.0.0.1", 0))
    task, found = asyncio.create_task(front.serve(listening)), dict[str, Any]()
    going = asyncio.Event()

    async def client(text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(text)
        return reader, writer

    def replica(name: str) -> Any:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if (text := await reader.read(99)) == b"wait":
                going.set()
                assert not await reader.read(99)  # until the client has gone
                going.clear()
            writer.write(text + name.encode())
            writer.close()

        return asyncio.start_unix_server(answer, folder / name)

    servers = [await replica(name) for name in "ab"]
    waiting = await client(b"wait")
    await going.wait()
    found["under way"] = list(front.open.values())
    beside = await client(b"1")
    found["beside it"] = await beside[0].read()
    other = await client(b"wait")
    while sum(front.open.values()) < 2:
        await asyncio.sleep(0.01)
    refused = await client(b"x" * 300_000)
    found["of none"] = await refused[0].read()
    for _, writer in (waiting, beside, other, refused):
        writer.close()
    while any(front.open.values()):
        await asyncio.sleep(0.01)
    found["gone"] = going.is_set()
    task.cancel()
    for server in servers:
        server.close()
    return found


def test_a_client_is_passed_on_to_the_replica_with_the_fewest(tmp_path):
    found = asyncio.run(passed_on(tmp_path))
    assert found["under way"] == [1, 0, 0] and found["beside it"] == b"1b" and not found["gone"]
    assert found["of none"].startswith(b"HTTP/1.1 503 ") and json.loads(found["of none"].partition(b"\r\n\r\n")[2])
