"""The Redis index on a real server: sharing, faults, hostile values."""

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from daric_rag.engine.keys import Segment, SegmentKey, Tier, root_key, segment_chain
from daric_rag.engine.scheduling.index import KVIndex, new_index, redis_link, redis_writer
from daric_rag.engine.scheduling.index.redis import RedisIndex
from daric_rag.engine.scheduling.index.redis_link import redact
from daric_rag.errors import CacheUnavailableError, MissingExtraError
from tests.engine_support import wait_until
from tests.redis_server import RedisServer, free_port

pytestmark = pytest.mark.integration

ROOT = root_key({"model": "m"})


def chunk(name: int, length: int = 3, root: SegmentKey = ROOT) -> tuple[Segment, ...]:
    return segment_chain(root, [name] * (256 * length - 7))


def keys(chain: tuple[Segment, ...]) -> list[SegmentKey]:
    return [segment.key for segment in chain]


def announce(index: KVIndex, chain: tuple[Segment, ...], tier: Tier = Tier.HOST) -> None:
    index.insert(keys(chain), tier)


def demote(index: KVIndex, chain: tuple[Segment, ...]) -> None:
    index.insert(keys(chain), Tier.DISK)
    index.remove(keys(chain), Tier.HOST)


def copies(raw: "redis.Redis", chain: tuple[Segment, ...]) -> list[set[bytes]]:
    """What the server has of each segment: `h` for a copy in host memory, `d` for one on disk."""
    return [{member[:1] for member in raw.smembers(name(key))} for key in keys(chain)]


def name(key: SegmentKey) -> str:
    return f"daric:2:s:{key.hex()}"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long time limits: on a busy machine a healthy server may be silent for longer than a request would wait."""
    monkeypatch.setattr(redis_link, "LOOKUP_TIMEOUT_S", 30.0)
    monkeypatch.setattr(redis_link, "BACKGROUND_TIMEOUT_S", 30.0)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server that is empty; a test that kills its server starts one of its own."""
    redis.Redis(port=shared_server.port).flushall()
    return shared_server


@pytest.fixture
def raw(server: RedisServer) -> Iterator["redis.Redis"]:
    with redis.Redis(port=server.port) as client:
        yield client


@pytest.fixture
def make_index(server: RedisServer) -> Iterator[Callable[..., RedisIndex]]:
    made = []

    def make(url: str | None = None, **options: str) -> RedisIndex:
        made.append(RedisIndex(url or server.url, **options))
        return made[-1]

    yield make
    for index in made:
        index.close()


MakeIndex = Callable[..., RedisIndex]


def test_what_was_inserted_is_found_and_what_was_removed_is_not(make_index: MakeIndex) -> None:
    index = make_index()
    chains = [chunk(number, length) for number, length in enumerate((1, 2, 4))]
    for chain in chains:
        announce(index, chain)
    prompt = [*map(keys, chains), keys(chunk(99)), []]
    # At once, from the updates in waiting, and again from the server.
    assert index.lookup(prompt) == [1, 2, 4, 0, 0]
    index.flush()
    assert index.lookup(prompt) == [1, 2, 4, 0, 0]
    index.remove([chains[2][1].key])
    assert index.lookup(prompt) == [1, 2, 1, 0, 0]
    index.flush()
    assert index.lookup(prompt) == [1, 2, 1, 0, 0]
    announce(index, chains[2][1:2])
    index.flush()
    assert index.lookup(prompt) == [1, 2, 4, 0, 0]


def test_a_whole_prompt_is_one_round_trip(
    server: RedisServer, make_index: MakeIndex, raw: "redis.Redis"
) -> None:
    index = make_index()
    chains = [chunk(number, 2) for number in range(12)]
    for chain in chains:
        announce(index, chain)
    index.flush()
    commands = []
    with redis.Redis(port=server.port, protocol=2) as marker, raw.monitor() as monitor:
        marker.ping()
        assert index.lookup([*map(keys, chains)]) == [2] * 12
        marker.echo("end of the look-up")
        for command in monitor.listen():
            if "end of the look-up" in command["command"]:
                break
            if command["client_type"] != "lua":
                commands.append(command["command"].split()[0])
    assert commands[commands.index("PING") + 1 :] == ["EVALSHA"]


def test_host_copies_count_for_their_owner_only(make_index: MakeIndex) -> None:
    one, other = make_index(shared_disk_id="disk"), make_index(shared_disk_id="disk")
    elsewhere = make_index(shared_disk_id="another-disk")
    chain = chunk(1)
    announce(one, chain)
    one.flush()
    assert [index.lookup([keys(chain)]) for index in (one, other, elsewhere)] == [[3], [0], [0]]
    announce(other, chain)
    one.remove(keys(chain))
    one.flush()
    other.flush()
    assert [index.lookup([keys(chain)]) for index in (one, other, elsewhere)] == [[0], [3], [0]]


def test_disk_copies_count_for_everybody_with_that_disk(make_index: MakeIndex) -> None:
    one, other = make_index(shared_disk_id="disk"), make_index(shared_disk_id="disk")
    elsewhere, alone = make_index(shared_disk_id="another-disk"), make_index()
    chain = chunk(1)
    announce(one, chain, Tier.DISK)
    one.flush()
    indexes = (one, other, elsewhere, alone)
    assert [index.lookup([keys(chain)]) for index in indexes] == [[3], [3], [0], [0]]
    other.remove([chain[1].key])
    other.flush()
    assert [index.lookup([keys(chain)]) for index in indexes] == [[1], [1], [0], [0]]


def test_tiers_follow_the_copies(make_index: MakeIndex) -> None:
    one, other = make_index(shared_disk_id="disk"), make_index(shared_disk_id="disk")
    chain = chunk(1)
    announce(one, chain)
    demote(one, chain)
    assert one.lookup([keys(chain)]) == [3]
    one.flush()
    assert (one.lookup([keys(chain)]), other.lookup([keys(chain)])) == ([3], [3])
    announce(other, chain)
    other.flush()
    one.remove(keys(chain), Tier.DISK)
    assert one.lookup([keys(chain)]) == [0]
    one.flush()
    assert (one.lookup([keys(chain)]), other.lookup([keys(chain)])) == ([0], [3])


def test_the_server_holds_copies_and_nothing_else(make_index: MakeIndex, raw: "redis.Redis") -> None:
    index = make_index()
    chain = chunk(1)
    announce(index, chain)
    announce(index, chain[:1], Tier.DISK)
    index.flush()
    assert copies(raw, chain) == [{b"h", b"d"}, {b"h"}, {b"h"}]
    assert index.stats().segments == 3
    index.remove(keys(chain), Tier.HOST)
    index.flush()
    assert copies(raw, chain) == [{b"d"}, set(), set()]
    assert index.stats().segments == 1
    assert raw.smembers(f"daric:2:o:{index.owner}") == {chain[0].key.hex().encode()}, "its own disk goes too"


def test_version_changes_with_own_updates_and_with_time(
    make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    index = make_index()
    monkeypatch.setattr(
        "daric_rag.engine.scheduling.index.redis.time", SimpleNamespace(monotonic=lambda: now)
    )
    versions = [index.version]
    for change in (lambda: announce(index, chunk(1)), lambda: index.remove(keys(chunk(1)))):
        change()
        versions.append(index.version)
        index.lookup([keys(chunk(1))])
        assert index.version == versions[-1]
    now += 0.06
    versions.append(index.version)
    assert len(set(versions)) == 4


def test_an_engine_that_closes_takes_its_copies_along(make_index: MakeIndex, raw: "redis.Redis") -> None:
    leaving, staying = make_index(shared_disk_id="disk"), make_index(shared_disk_id="disk")
    announce(leaving, chunk(1))
    announce(leaving, chunk(2), Tier.DISK)
    announce(leaving, chunk(3, 300))
    announce(staying, chunk(4))
    staying.flush()
    leaving.close()
    leaving.close()
    assert staying.lookup([keys(chunk(n)) for n in (1, 2, 4)]) == [0, 3, 3]
    assert copies(raw, (*chunk(2), *chunk(4))) == [{b"d"}] * 3 + [{b"h"}] * 3
    assert len(raw.keys("daric:2:s:*")) == 6
    assert raw.zrange("daric:2:owners", 0, -1) == [staying.owner.encode()]
    assert leaving.lookup([keys(chunk(2))]) == [0]


def test_copies_of_an_engine_that_vanished_are_collected(
    server: RedisServer, make_index: MakeIndex, raw: "redis.Redis"
) -> None:
    program = f"""
import os, sys
from tests.integration.test_redis_index import *
redis_link.BACKGROUND_TIMEOUT_S = 30.0
index = RedisIndex({server.url!r})
announce(index, chunk(1, 450)); announce(index, chunk(2), Tier.DISK); index.flush()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], timeout=300)
    assert len(raw.keys("daric:2:s:*")) == 453
    (owner,) = raw.zrange("daric:2:owners", 0, -1)
    raw.zadd("daric:2:owners", {owner: 1.0})
    staying = make_index()
    announce(staying, chunk(3))
    wait_until(lambda: raw.zrange("daric:2:owners", 0, -1) == [staying.owner.encode()])
    staying.flush()
    assert sorted(raw.keys("daric:2:s:*")) == sorted(name(key).encode() for key in keys(chunk(3)))


def test_an_engine_taken_for_gone_announces_itself_again(
    make_index: MakeIndex, raw: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_writer, "_BEAT_S", 0.05)
    index = make_index()
    announce(index, chunk(1))
    index.flush()
    raw.flushall()
    wait_until(lambda: index.lookup([keys(chunk(1))]) == [3])


def test_namespaces_share_no_hit(make_index: MakeIndex) -> None:
    index = make_index()
    roots = [root_key({"namespace": tenant}) for tenant in "ab"]
    announce(index, chunk(1, 3, roots[0]))
    index.flush()
    assert index.lookup([keys(chunk(1, 3, root)) for root in roots]) == [3, 0]


GIANT = b"9" * (16 << 20)
HOSTILE: dict[str, Callable[["redis.Redis", str], object]] = {
    "string": lambda raw, key: raw.set(key, b"junk"),
    "giant string": lambda raw, key: raw.set(key, GIANT),
    "list": lambda raw, key: raw.rpush(key, "n", "256"),
    "hash": lambda raw, key: raw.hset(key, "n", "256"),
    "sorted set": lambda raw, key: raw.zadd(key, {"n": 256}),
    "stream": lambda raw, key: raw.xadd(key, {"n": "256"}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_entries_are_misses_and_deleted(kind: str, make_index: MakeIndex, raw: "redis.Redis") -> None:
    index = make_index()
    chain = chunk(1)
    announce(index, chain)
    index.flush()
    raw.delete(name(chain[1].key))
    HOSTILE[kind](raw, name(chain[1].key))
    gc.collect()
    assert index.lookup([keys(chain)]) == [1]
    assert not raw.exists(name(chain[1].key))
    announce(index, chain)
    index.flush()
    assert index.lookup([keys(chain)]) == [3]


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_update_trips_over_hostile_entries(kind: str, make_index: MakeIndex, raw: "redis.Redis") -> None:
    index = make_index()
    chains = [chunk(number, 1) for number in range(3)]
    for chain in chains:
        HOSTILE[kind](raw, name(chain[0].key))
    announce(index, chains[1])
    index.remove(keys(chains[2]))
    index.flush()
    assert index.lookup([*map(keys, chains)]) == [0, 1, 0]
    assert raw.keys("daric:2:s:*") == [name(chains[1][0].key).encode()]
    assert index.stats().dropped == index.stats().failures == 0


@pytest.mark.parametrize("target", ["all", "owners", "o:{owner}"])
def test_bookkeeping_of_the_wrong_type_is_replaced(
    target: str, make_index: MakeIndex, raw: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_writer, "_BEAT_S", 0.05)
    index = make_index()
    announce(index, chunk(1))
    index.flush()
    key = f"daric:2:{target}".replace("{owner}", index.owner)
    raw.delete(key)
    raw.set(key, GIANT)
    announce(index, chunk(2))
    index.remove(keys(chunk(1))[2:])
    index.flush()
    assert index.lookup([keys(chunk(1)), keys(chunk(2))]) == [2, 3]
    wait_until(lambda: raw.type(key) != b"string")
    assert index.stats().dropped == index.stats().failures == 0


def test_junk_in_bookkeeping_is_passed_over(make_index: MakeIndex, raw: "redis.Redis") -> None:
    index = make_index()
    chain = chunk(1)
    announce(index, chain)
    index.flush()
    for key in ("all", f"o:{index.owner}", f"s:{chain[1].key.hex()}"):
        raw.sadd(f"daric:2:{key}", GIANT[: 1 << 20], b"\xff\xfe", "g" * 64, "0" * 64)
    raw.zadd("daric:2:owners", {"short": 1.0, "x" * 32: 2.0, GIANT[: 1 << 20]: 3.0})
    make_index()
    wait_until(lambda: raw.zcard("daric:2:owners") == 2)
    assert index.lookup([keys(chain)]) == [3]
    index.remove([chain[0].key])
    index.flush()
    assert index.lookup([keys(chain)]) == [0]
    index.close()
    assert raw.keys("daric:2:o:*") == []
    assert raw.keys("daric:2:s:*") == [name(chain[1].key).encode()], "somebody else's copies"


def test_a_forged_entry_costs_a_repair_only(make_index: MakeIndex, raw: "redis.Redis") -> None:
    index = make_index(shared_disk_id="disk")
    raw.sadd(name(chunk(1)[0].key), "d:disk")
    assert index.lookup([keys(chunk(1))]) == [1]
    index.remove(keys(chunk(1))[:1])
    assert index.lookup([keys(chunk(1))]) == [0]
    index.flush()
    assert not raw.exists(name(chunk(1)[0].key))


def test_an_absent_server_is_named_without_its_password() -> None:
    port = free_port()
    with pytest.raises(CacheUnavailableError) as caught:
        new_index(f"redis://ann:s3cret@127.0.0.1:{port}/1")
    assert f"redis://ann:***@127.0.0.1:{port}/1" in str(caught.value)
    assert "s3cret" not in repr(caught.value) + repr(caught.value.__cause__)


def test_a_password_is_used_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer(password="s3cret") as server:
        index = RedisIndex(server.url)
        announce(index, chunk(1))
        index.flush()
        assert index.lookup([keys(chunk(1))]) == [3]
        for url in (server.url.replace("s3cret", "wr0ng"), f"redis://127.0.0.1:{server.port}"):
            with pytest.raises(CacheUnavailableError) as caught:
                RedisIndex(url)
            assert str(server.port) in str(caught.value) and "wr0ng" not in repr(caught.value)
        server.kill()
        assert index.lookup([keys(chunk(1))]) == [0]
        index.close()
    assert "s3cret" not in repr(index) + caplog.text and str(server.port) in caplog.text


def test_tls_works_with_the_ca_in_the_url(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no"]
    with RedisServer(password="s3cret", options=options):
        index = RedisIndex(f"rediss://:s3cret@127.0.0.1:{port}/0?ssl_ca_certs={cert}")
        announce(index, chunk(1))
        index.flush()
        assert index.lookup([keys(chunk(1))]) == [3]
        index.close()
        with pytest.raises(CacheUnavailableError, match="certificate"):
            RedisIndex(f"rediss://:s3cret@127.0.0.1:{port}/0")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host", "redis://host"),
        ("redis://:pw@host:1/2", "redis://:***@host:1/2"),
        ("redis://ann:p:w@host", "redis://ann:***@host"),
        ("redis://pw@host", "redis://:***@host"),
        ("rediss://ann:pw@[::1]:6379/0?ssl_cert_reqs=none", "rediss://ann:***@[::1]:6379/0"),
        ("redis://host?password=pw", "redis://host"),
        ("redis://host?password=p@w", "redis://host"),
        ("redis://:p/w@host", "redis://***"),
        ("redis://:p?w@host", "redis://***"),
        ("redis://:pw", "redis://***"),
        ("redis://:p@w@host", "redis://***"),
        ("pw", "***"),
    ],
)
def test_shown_urls_never_hold_the_password(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3c/ret@host",
        "redis://:s3cret",
        "redis://:s3cret@host:99999",
        "redis://:s3cret@host?x=1",
        "redis://host?socket_timeout=60",
        "redis://host?ssl_ca_certs=x",
        "redis://",
    ],
)
def test_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="index=") as caught:
        RedisIndex(url)
    assert "s3c" not in repr(caught.value)


def test_a_malformed_disk_id_is_refused(server: RedisServer) -> None:
    with pytest.raises(ValueError, match="shared_disk_id"):
        RedisIndex(server.url, shared_disk_id="a b")


def test_without_the_client_the_extra_is_named() -> None:
    program = """
import sys
sys.modules["redis"] = None
from daric_rag.engine.scheduling.index import new_index
from daric_rag.errors import MissingExtraError
new_index("memory")
try:
    new_index("redis://host")
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert 'pip install "daric-rag[redis]"' in done.stdout
    assert issubclass(MissingExtraError, ImportError)


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":abc\r\n", b"$-7\r\n", b"*1\r\n:1\r\n", b""]
)
def test_a_server_that_is_no_redis_is_refused(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(CacheUnavailableError, match=str(port)):
            RedisIndex(f"redis://127.0.0.1:{port}")
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=10)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_killed_server_costs_one_warning_and_hits_come_back(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server:
        index = RedisIndex(server.url, shared_disk_id="disk")
        stop = threading.Event()
        failures: list[BaseException] = []
        chains = [chunk(number, 2) for number in range(40)]

        def load(share: list[tuple[Segment, ...]]) -> None:
            try:
                while not stop.is_set():
                    for chain in share:
                        assert index.lookup([keys(chain)])[0] in (0, 1, 2)
                        announce(index, chain, Tier.DISK)
                        time.sleep(0.002)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=load, args=(chains[part::4],)) for part in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: index.lookup([keys(chains[0])]) == [2])
        server.kill()
        wait_until(lambda: not index.stats().available)
        assert index.lookup([*map(keys, chains)]) == [0] * 40
        removed = chunk(500, 1)
        announce(index, removed)
        index.remove(keys(removed))
        server.start()
        wait_until(lambda: index.lookup([*map(keys, chains)]) == [2] * 40)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        index.flush()
        assert index.stats().segments == 80
        assert len(warnings_of(caplog)) == 1
        assert f"redis://127.0.0.1:{server.port}" in warnings_of(caplog)[0]
        index.close()


def test_copies_announced_while_the_server_is_away_are_found_later() -> None:
    with RedisServer() as server:
        index = RedisIndex(server.url)
        announce(index, chunk(1))
        index.flush()
        server.kill()
        announce(index, chunk(2))
        demote(index, chunk(1))
        assert index.lookup([keys(chunk(1)), keys(chunk(2))]) == [0, 0]
        server.start()
        wait_until(lambda: index.lookup([keys(chunk(1)), keys(chunk(2))]) == [3, 3])
        index.flush()
        with redis.Redis(port=server.port) as raw:
            assert copies(raw, (*chunk(1), *chunk(2))) == [{b"d"}] * 3 + [{b"h"}] * 3
        index.close()


def test_a_server_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_link, "LOOKUP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(redis_link, "BACKGROUND_TIMEOUT_S", 1.0)
    with RedisServer() as server:
        index = RedisIndex(server.url)
        announce(index, chunk(1))
        index.flush()
        server.pause()
        results = [index.lookup([keys(chunk(1))]) for _ in range(200)]
        assert results == [[0]] * 200
        # Of 200 look-ups one failed; what else failed are the writer's attempts to reconnect meanwhile.
        assert index.stats().failures <= 10
        server.resume()
        wait_until(lambda: index.lookup([keys(chunk(1))]) == [3])
        index.close()


def test_a_dropped_connection_is_replaced_without_a_miss(make_index: MakeIndex, raw: "redis.Redis") -> None:
    index = make_index()
    announce(index, chunk(1))
    index.flush()
    raw.client_kill_filter(_type="normal", skipme=True)
    assert index.lookup([keys(chunk(1))]) == [3]


def test_scripts_are_sent_again_after_the_server_forgot_them(
    make_index: MakeIndex, raw: "redis.Redis"
) -> None:
    index = make_index()
    raw.script_flush()
    announce(index, chunk(1))
    index.flush()
    raw.script_flush()
    assert index.lookup([keys(chunk(1))]) == [3]
    assert index.stats().failures == index.stats().dropped == 0


def test_a_full_server_refuses_updates_and_still_answers(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server, redis.Redis(port=server.port) as raw:
        index = RedisIndex(server.url)
        announce(index, chunk(1))
        index.flush()
        raw.config_set("maxmemory", "1")
        for number in range(2, 6):
            announce(index, chunk(number))
        index.flush()
        assert index.lookup([keys(chunk(1)), keys(chunk(2))]) == [3, 0]
        assert index.stats().dropped == 12
        assert index.stats().available
        assert len(warnings_of(caplog)) == 1
        index.close()


def test_a_full_queue_drops_updates_and_makes_good_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_writer, "MAX_QUEUED_KEYS", 10)
    with RedisServer() as server:
        index = RedisIndex(server.url)
        server.kill()
        chains = [chunk(number) for number in range(20)]
        for chain in chains:
            announce(index, chain)
        assert index.stats().dropped == 51
        server.start()
        wait_until(lambda: index.lookup([*map(keys, chains)]) == [3] * 20)
        index.close()


def test_two_engines_under_load_agree_in_the_end(make_index: MakeIndex) -> None:
    indexes = [make_index(shared_disk_id="disk") for _ in range(2)]
    chains = [chunk(number, 2) for number in range(30)]

    def work(index: RedisIndex, kept: int) -> None:
        for _ in range(5):
            for number, chain in enumerate(chains):
                announce(index, chain, Tier.DISK)
                announce(index, chain, Tier.HOST)
                index.lookup([keys(chain)])
                if number % 2 != kept:
                    index.remove(keys(chain), Tier.HOST)
        index.flush()

    threads = [threading.Thread(target=work, args=(index, kept)) for kept, index in enumerate(indexes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in indexes:
        assert index.lookup([*map(keys, chains)]) == [2] * 30
    for index in indexes:
        index.remove([key for chain in chains for key in keys(chain)], Tier.DISK)
        index.flush()
    for kept, index in enumerate(indexes):
        assert index.lookup([*map(keys, chains)]) == [2 * (number % 2 == kept) for number in range(30)]


def test_closing_leaves_no_thread_and_no_connection(server: RedisServer, raw: "redis.Redis") -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        index = RedisIndex(server.url)
        announce(index, chunk(1))
        index.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
