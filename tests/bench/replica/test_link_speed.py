"""How fast a link is."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.replica import link_speed
from worker.parallel.communicator import LINK_CHUNK_BYTES
from worker.parallel.rank_store import open_store


def test_a_links_speed_is_a_line_through_its_times() -> None:
    speed = link_speed.fit({1000: 1.1e-3, 500_000: 0.5, 1_001_000: 1.001e-3 + 0.1e-3 + 1.0})
    assert speed.bytes_per_s == pytest.approx(1e6, rel=1e-3) and speed.latency_s == pytest.approx(1e-4, rel=0.02)


def test_two_ranks_time_what_passes_between_them() -> None:
    store, meeting = open_store()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(link_speed.one_end, rank, meeting, "cpu") for rank in (0, 1)]
        found = [end.result(60) for end in ends]
    del store
    assert found[0].keys() == found[1].keys() == set(link_speed.SIZES)
    assert all(0 < seconds < 10 for seconds in found[0].values())


def test_sockets_of_one_machine_have_the_chunks_of_several() -> None:
    assert {link_speed.SOCKETS[f"NCCL_P2P_{way}_CHUNKSIZE"] for way in ("NVL", "PCI")} == {str(LINK_CHUNK_BYTES)}
