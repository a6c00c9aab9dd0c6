"""Many calls and streams of the RPC at once: nothing lost, joined or reordered, no queue grows."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import AsyncGenerator

import pytest
from rpc_pairs import Sleeper, add, add_async, bounded, connected, count, echo, pair, read_all, serving, until

from mpexec.errors import WrongStateError
from mpexec.mp_engine import rpc_server
from mpexec.mp_engine.frames import MAX_CREDIT
from mpexec.mp_engine.sockets import SocketFolder

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that was never awaited


async def test_calls_in_flight_get_their_own_answers(folder: SocketFolder) -> None:
    async def turns(number: int, turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return number

    async with pair(folder, turns) as (server, client):
        dice = random.Random(3)
        works = [client.call("turns", number, dice.randrange(20)) for number in range(1000)]
        assert await bounded(asyncio.gather(*works)) == list(range(1000))
        assert client.late == 0
        assert server.open_calls == 0


# F046
async def test_replies_of_all_sizes_arrive_whole_while_the_client_reads_slowly(folder: SocketFolder) -> None:
    sizes = (10, 70_000, 5_000_000)
    dice = random.Random(5)
    blobs = [dice.randbytes(sizes[number % 3]) for number in range(3 * 4)]
    checksums = [zlib.crc32(blob) for blob in blobs]

    def blob(number: int) -> tuple[int, int, bytes]:
        return number, checksums[number % 12], blobs[number % 12]

    async with pair(folder, blob) as (_, client):
        numbers = iter(range(2000))

        async def read() -> None:
            for number in numbers:
                got, checksum, data = await client.call("blob", number)
                assert got == number
                assert checksum == checksums[number % 12]
                assert data == blobs[number % 12] if number % 9 else zlib.crc32(data) == checksum
                if number % 100 == 0:
                    time.sleep(0.01)  # noqa: ASYNC251  # this loop reads nothing meanwhile

        await bounded(asyncio.gather(*(read() for _ in range(6))), 60)
        assert client.late == 0


@pytest.mark.parametrize("credit", [1, 2, 64])
@pytest.mark.parametrize("slow", ["reader", "producer", "neither"])
async def test_a_stream_loses_joins_and_reorders_nothing(folder: SocketFolder, credit: int, slow: str) -> None:
    produced = 0

    async def produce(to: int) -> AsyncGenerator[int, None]:
        nonlocal produced
        for number in range(to):
            produced = number + 1
            yield number
            if slow == "producer" and number % 3 == 0:
                await asyncio.sleep(0.0001)

    async with pair(folder, produce) as (_, client):
        taken = ahead = 0
        async for number in client.stream("produce", 500, credit=credit):
            assert number == taken
            taken += 1
            if slow == "reader":
                for _ in range(3):
                    await asyncio.sleep(0)
            ahead = max(ahead, produced - taken)
        assert taken == 500
        assert ahead <= credit


async def test_nobody_produces_ahead_of_the_credit_however_long_the_reader_waits(folder: SocketFolder) -> None:
    produced: dict[int, int] = {}

    async def produce(credit: int) -> AsyncGenerator[bytes, None]:
        while True:
            produced[credit] = produced.get(credit, 0) + 1
            yield bytes(10_000)

    async with pair(folder, produce, add_async) as (_, client):
        streams = {credit: client.stream("produce", credit, credit=credit) for credit in (1, 2, 64)}
        for stream in streams.values():
            await bounded(anext(stream))
        for _ in range(300):  # each is a round trip in which the generators could go on
            await bounded(client.call("add_async", 1))
        for credit, stream in streams.items():
            assert produced[credit] <= credit + 1
            await stream.aclose()


async def test_a_hundred_thousand_small_items_arrive(folder: SocketFolder) -> None:
    async with pair(folder, count) as (_, client):
        expected = 0
        async for number in client.stream("count", 100_000):
            assert number == expected
            expected += 1
        assert expected == 100_000
        assert client.late == 0


async def test_a_stream_with_boundless_credit_leaves_turns_to_the_others(folder: SocketFolder) -> None:
    async with pair(folder, count, add) as (_, client):
        stream = client.stream("count", 1_000_000, credit=MAX_CREDIT)
        assert await bounded(anext(stream)) == 0
        assert await bounded(client.call("add", 1)) == 2
        assert len(client._calls[1].items) < 500_000
        await stream.aclose()


async def test_a_client_has_so_many_calls_in_flight_at_most(
    folder: SocketFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "_MAX_CALLS", 3)
    sleeper = Sleeper()
    async with pair(folder, sleeper.sleep) as (server, client):
        works = [asyncio.ensure_future(client.call("sleep")) for _ in range(4)]
        with pytest.raises(WrongStateError, match="3 calls in flight"):
            await bounded(works.pop())
        async with connected(server) as other:
            works.append(asyncio.ensure_future(other.call("sleep")))
            await until(lambda: sleeper.begun == 4)
            for work in works:
                work.cancel()
            await asyncio.wait(works)


async def test_two_clients_do_not_hear_of_each_other(folder: SocketFolder) -> None:
    sleeper = Sleeper()
    async with serving(folder, sleeper.sleep, count, echo) as server, connected(server) as one:
        async with connected(server) as two:
            reading = asyncio.ensure_future(read_all(one.stream("count", 2000, credit=2)))
            values = await bounded(
                asyncio.gather(*(c.call("echo", (i, c is one)) for i in range(50) for c in (one, two)))
            )
            assert values == [[i, mine] for i in range(50) for mine in (True, False)]
            sleeping = asyncio.ensure_future(two.call("sleep"))
            await until(lambda: sleeper.begun == 1)
            sleeping.cancel()
            await asyncio.gather(sleeping, return_exceptions=True)
        assert await bounded(reading) == 2000
