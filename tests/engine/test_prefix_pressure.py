"""Stories of prefixes under pressure: cancelled, preempted, evicted, flushed. Exact plans and counts, no model."""

from itertools import pairwise

import pytest

from engine.outputs import FailReason, RequestDone
from engine.prefix_cache import PrefixHit
from tests.engine.driver import EOS
from tests.engine.prefix_driver import PrefixDriver
from tests.engine.test_prefix_scheduling import A, B, answer, cached, own_token, rows

# -- ends at any time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "known"), [(1, 0), (2, 8), (3, 20)])
def test_cancelled_between_chunks_only_what_is_committed_is_known(steps: int, known: int) -> None:
    driver = PrefixDriver(budget=10, depth=2, token=own_token)
    request = driver.ask("a", A[:60], max_tokens=2)
    for _ in range(steps):
        driver.step()
    driver.life.fail(request, FailReason.CANCELLED, "", driver.now)
    driver.check()
    assert driver.known(A[:60]) == known
    driver.run()
    assert driver.known(A[:60]) == known
    assert driver.manager.num_free + driver.cache.num_blocks == 64


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_between_chunks_it_goes_on_from_what_is_committed(depth: int) -> None:
    driver = PrefixDriver(num_blocks=12, budget=4, depth=depth, token=own_token, max_num_seqs=2)
    driver.ask("a", A[:12], max_tokens=24)
    while len(driver.plans) < 4:
        driver.step()
    request = driver.ask("b", B[:28], max_tokens=3)
    while not request.preemptions:
        driver.step()
        assert driver.life.live
    committed = driver.known(B[:28])
    assert request.outputs[0].token_ids == []
    assert committed >= 8
    driver.run()
    starts = [row.start for plan in driver.plans for row in plan.chunks if row.output.request is request]
    assert starts.count(0) == 1, f"it began anew, with {committed} tokens known"
    assert cached(driver, "b") == 0, "what it computed itself does not count"


def test_a_preempted_request_recomputes_little() -> None:
    driver = PrefixDriver(num_blocks=10, token=own_token)
    driver.ask("old", A[:15], max_tokens=12)
    driver.ask("young", B[:15], max_tokens=12)
    driver.run()
    assert driver.done()["young"].usage.preemptions >= 1
    (first, *resumed) = [
        row for plan in driver.plans for row in plan.chunks if row.output.request.id == "young"
    ]
    assert (first.start, first.count) == (0, 15)
    assert all(row.start >= 12 for row in resumed)


def test_what_a_resumed_request_generates_is_known_even_if_its_last_prefill_token_was_no_chunk() -> None:
    """One token short of the budget: the last known token is computed as a decode row."""
    driver = PrefixDriver(num_blocks=12, budget=17, token=own_token)
    request = driver.ask("a", A[:9], max_tokens=30, cache_root=b"a")
    driver.step()
    while len(answer(request)) < 9:
        driver.step()
    driver.cache.flush()
    driver.scheduler._preempt(request.outputs[0])
    driver.cache.flush()
    assert rows(driver.step()) == [("a", 0, 17, 0)]
    assert driver.known(A[:9] + answer(request), b"a") == 16, "known anew"
    assert rows(driver.step()) == [("a", 17, 1, 1)]
    driver.run()
    assert driver.known(A[:9] + answer(request), b"a") == 36


def test_a_row_in_flight_does_not_count_for_the_blocks_of_who_has_resumed() -> None:
    driver = PrefixDriver(budget=10, depth=2, token=own_token)
    request = driver.ask("a", A[:40], max_tokens=2)
    for _ in range(2):
        driver.step()
    driver.scheduler._preempt(request.outputs[0])
    driver.cache.flush()
    assert rows(driver.step()) == [("a", 0, 10, 0)]
    assert driver.known(A[:40]) == 0
    driver.step()
    assert driver.known(A[:40]) == 8
    driver.run()


# -- pressure -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first() -> None:
    driver = PrefixDriver(num_blocks=12, token=own_token)
    for name, tokens in (("a", A[:12]), ("b", B[:12]), ("c", A[50:62])):
        driver.finish(name, tokens)
    driver.finish("d", A[:12])
    assert cached(driver, "d") == 11
    driver.finish("e", B[50:66])
    assert [driver.known(tokens) for tokens in (A[:12], B[:12], A[50:62], B[50:66])] == [12, 0, 12, 16]


def test_a_decoding_output_takes_what_is_only_cached_before_anybody_is_preempted() -> None:
    driver = PrefixDriver(num_blocks=12, token=own_token)
    for name, tokens in (("a", A[:12]), ("b", B[:12])):
        driver.finish(name, tokens)
    for name, start in (("c", 20), ("d", 50)):
        driver.ask(name, A[start : start + 10], max_tokens=12)
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    assert driver.known(A[:12]) + driver.known(B[:12]) < 24


def test_a_lookup_that_finds_no_room_is_no_hit_and_leaves_nothing_held() -> None:
    driver = PrefixDriver(num_blocks=8, token=own_token)
    driver.finish("a", A[:8])
    driver.ask("b", B[:14], max_tokens=6)
    driver.step()
    before = driver.cache.stats.hits
    driver.ask("c", A[:8] + B[40:54], max_tokens=2)
    for _ in range(3):
        assert [row[0] for row in rows(driver.step())] == ["b"]
        assert driver.known(A[:8]) == 8, "nothing is evicted for who does not fit all the same"
    assert driver.cache.stats.hits == before
    driver.run()
    assert cached(driver, "c") == 8


def test_what_an_active_request_made_known_is_not_evicted_and_the_rest_not_for_nothing() -> None:
    driver = PrefixDriver(num_blocks=8, token=own_token)
    driver.finish("a", A[:8])
    driver.ask("b", B[:18], max_tokens=3)
    driver.step()
    assert (driver.cache.num_cached_blocks, driver.manager.num_free, driver.cache.num_blocks) == (2, 1, 6)
    assert not driver.cache.evict(3)
    assert driver.known(A[:8]) == 8
    assert driver.cache.evict(2)
    assert driver.known(A[:8]) == 0
    assert driver.known(B[:18]) == 16
    driver.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pool_full_of_held_prefixes_starves_nobody(depth: int) -> None:
    driver = PrefixDriver(num_blocks=16, max_num_seqs=4, depth=depth, token=own_token)
    for i in range(12):
        driver.ask(f"{i}", A[i * 4 : i * 4 + 13] if i % 3 else A[:13], max_tokens=9)
    full = False
    while driver.life.live:
        driver.step()
        full |= driver.manager.num_free + driver.cache.num_cached_blocks == 0
        assert len(driver.plans) < 400
    assert full, "the pool was not tight enough"
    done = driver.done()
    assert len(done) == 12
    assert all(event.error is None and event.usage.completion_tokens == (9,) for event in done.values())


def test_a_source_may_be_evicted_by_who_copies_it() -> None:
    """The pool is so full that the new prompt takes the very block it copies from."""
    driver = PrefixDriver(num_blocks=4, token=own_token)
    driver.finish("a", A[:16])
    driver.ask("b", A[:3] + B[:10], max_tokens=2)
    plan = driver.step()
    assert rows(plan) == [("b", 3, 10, 1)]
    assert plan is not None
    assert plan.copies[0][0] in plan.chunks[0].blocks
    assert driver.known(A[:16]) == 0
    driver.run()


def test_sources_evicted_by_those_behind_are_read_before_they_are_written() -> None:
    driver = PrefixDriver(num_blocks=6, token=own_token)
    driver.finish("a", A[:8])
    driver.finish("b", B[:12])
    driver.ask("c", [*A[:7], 1], max_tokens=1)
    driver.ask("d", B[:7] + [2] * 7, max_tokens=1)
    driver.step()
    driver.run()
    assert [cached(driver, name) for name in "cd"] == [7, 7]


# -- flush ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_flush_forgets_all_and_running_requests_go_on(depth: int) -> None:
    driver = PrefixDriver(depth=depth, token=own_token)
    driver.finish("a", A[:16])
    request = driver.ask("b", A[:8] + B[:5], max_tokens=9)
    for _ in range(3):
        driver.step()
    assert driver.cache.flush() == 2, "of five known blocks two are held by b, which made a third known"
    driver.check()
    assert driver.known(A[:16]) == 0
    assert (driver.cache.num_blocks, driver.cache.num_nodes) == (0, 0)
    driver.ask("c", A[:16], max_tokens=1)
    driver.run()
    assert cached(driver, "c") == 0
    assert driver.known(A[:8] + B[:5] + answer(request)) == 8, "by c: nothing more becomes known of b"
    driver.finish("d", A[:8] + B[:5])
    assert driver.known(A[:8] + B[:5]) == 12


def test_what_was_held_at_a_flush_is_freed_at_its_end() -> None:
    driver = PrefixDriver(token=own_token)
    driver.finish("a", A[:16])
    request = driver.ask("b", A[:16] + B[:4], max_tokens=9, n=2)
    driver.step()
    assert driver.cache.flush() == 0
    driver.life.fail(request, FailReason.CANCELLED, "", driver.now)
    driver.check()
    assert driver.manager.num_free == driver.manager.num_blocks


@pytest.mark.parametrize("n", [1, 2])
def test_after_a_flush_no_block_counts_as_cached_that_somebody_has(n: int) -> None:
    """The first output ends long before the second one, or before a request that shared its prompt."""
    ends = {("a", 0): 20, ("c", 0): 30}
    driver = PrefixDriver(
        num_blocks=14, token=lambda request_id, output, at: EOS if ends.get((request_id, output)) == at else 7
    )
    driver.finish("first", A[:16])
    driver.ask("a", A[:16], max_tokens=14, n=n)
    driver.ask("c", A[:16], max_tokens=16)
    driver.step()
    driver.cache.flush()
    while len(driver.plans) < 8:
        driver.step()
    driver.ask("b", B[:36], max_tokens=2)
    driver.run()
    assert all(event.error is None for event in driver.events if isinstance(event, RequestDone))


def test_who_was_seated_before_a_flush_makes_nothing_known_after_it() -> None:
    driver = PrefixDriver(depth=2, token=own_token)
    driver.ask("a", A[:16], max_tokens=3, n=2)
    driver.step()
    driver.cache.flush()
    driver.run()
    assert driver.known(A[:16]) == 0
    driver.ask("b", A[:16], max_tokens=3)
    driver.run()
    assert driver.known(A[:16]) == 16


def test_a_flush_between_the_chunks_of_a_prompt_that_has_forked() -> None:
    """The parent held what its first chunk made known, the fork, made before that was committed, did not."""
    driver = PrefixDriver(16, 2, 5, 9, 2, own_token)
    driver.ask("a", A[:13], max_tokens=4, n=2)
    driver.step()
    driver.step()
    driver.cache.flush()
    driver.run()
    assert driver.cache.num_blocks == 0


def test_a_request_that_does_not_fit_is_looked_up_once_until_something_changes() -> None:
    driver = PrefixDriver(8, 2, 3, 32, 1, own_token)
    driver.ask("a", A[:10], max_tokens=6)
    driver.step()
    driver.ask("b", B[:10], max_tokens=4)
    looked_up: list[bytes] = []
    take = driver.cache.take

    def noted(root: bytes, tokens: bytes) -> PrefixHit | None:
        looked_up.append(tokens)
        return take(root, tokens)

    driver.cache.take = noted  # type: ignore[method-assign]
    free = [driver.manager.num_free]
    while "a" not in driver.done():
        driver.step()
        free.append(driver.manager.num_free)
    changes = sum(a != b for a, b in pairwise(free))
    assert len(looked_up) <= changes + 2
    driver.run()
    assert set(driver.done()) == {"a", "b"}
