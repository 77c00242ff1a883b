"""Stories of requests that share prefixes: exact plans and counts, no model. Every read of KV is checked on the way."""

import pytest

from engine.outputs import FailReason, Started
from engine.plan import StepPlan
from engine.request import Request
from tests.engine.driver import EOS
from tests.engine.prefix_driver import PrefixDriver

A = list(range(100, 200))
B = list(range(200, 300))


def own_token(request_id: str, output: int, position: int) -> int:
    """Different for every request and output, and never EOS."""
    return 1000 + 100 * ord(request_id[0]) + 10 * output + position


def rows(plan: StepPlan | None) -> list[tuple[str, int, int, int]]:
    """(request, start, count, samples) of every row."""
    assert plan is not None
    return [(row.output.request.id, row.start, row.count, len(row.samples)) for row in plan.rows]


def answer(request: Request, index: int = 0) -> list[int]:
    return request.outputs[index].token_ids


def cached(driver: PrefixDriver, request_id: str) -> int:
    """As the request was told, twice the same."""
    (started,) = (e for e in driver.events if isinstance(e, Started) and e.request_id == request_id)
    done = driver.done()[request_id]
    assert started.cached_prompt_tokens == done.usage.cached_prompt_tokens
    return started.cached_prompt_tokens


# -- what is found --------------------------------------------------------------------------------------------------


def test_a_prompt_computes_only_what_is_not_known() -> None:
    driver = PrefixDriver(token=own_token)
    driver.finish("a", A[:18])
    driver.ask("b", [*A[:10], *B[:5]], max_tokens=2)
    plan = driver.step()
    assert rows(plan) == [("b", 10, 5, 1)]
    assert plan is not None
    assert plan.copies == [(2, plan.chunks[0].blocks[2])], "the third block is equal in two tokens"
    assert plan.chunks[0].blocks[:2] == [0, 1]
    driver.run()
    assert cached(driver, "a") == 0
    assert cached(driver, "b") == 10
    assert driver.life.prompt_tokens_computed == 18 + 5
    stats = driver.cache.stats
    assert (stats.lookups, stats.hits, stats.looked_up_tokens, stats.hit_tokens, stats.copies) == (2, 1, 33, 10, 1)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [*range(1, 10), 15, 16, 17, 31, 32, 33])
def test_the_same_prompt_again_computes_one_token_and_no_less(block_size: int, length: int) -> None:
    driver = PrefixDriver(block_size=block_size, token=own_token)
    driver.finish("a", A[:length])
    driver.ask("b", A[:length], max_tokens=1)
    known = min(length // block_size * block_size, length - 1)
    whole, partial = divmod(known, block_size)
    if length <= block_size:
        known = partial = 0
    plan = driver.step()
    assert rows(plan) == [("b", known, length - known, 1)]
    assert plan is not None
    assert len(plan.copies) == (partial > 0)
    assert plan.chunks[0].blocks[:whole] == list(range(whole)) or not known
    driver.run()
    assert cached(driver, "b") == known
    assert driver.life.prompt_tokens_computed == 2 * length - known


def test_a_144_token_prompt_then_one_that_differs_at_token_126() -> None:
    driver = PrefixDriver(block_size=16, budget=256, partial_tokens=4, token=own_token)
    first, second = list(range(1000, 1144)), [*range(1000, 1126), *range(18)]
    driver.finish("a", first)
    driver.ask("b", second, max_tokens=1)
    plan = driver.step()
    assert rows(plan) == [("b", 126, 18, 1)]
    assert plan is not None
    assert plan.copies == [(7, plan.chunks[0].blocks[7])]
    driver.run()
    assert cached(driver, "b") == 126
    assert (driver.known(first), driver.known(second)) == (144, 144)


def test_too_few_equal_tokens_of_a_block_are_computed() -> None:
    driver = PrefixDriver(block_size=16, partial_tokens=4, token=own_token)
    driver.finish("a", A[:32])
    for name, at in (("b", 19), ("c", 20)):
        driver.ask(name, [*A[:at], *B[:3]], max_tokens=1)
    plan = driver.step()
    assert rows(plan) == [("b", 16, 6, 1), ("c", 20, 3, 1)]
    assert plan is not None
    assert [source for source, _ in plan.copies] == [1]


def test_two_cached_requests_part_within_a_block_and_each_copies_it() -> None:
    driver = PrefixDriver(token=own_token)
    driver.finish("a", A[:16])
    driver.ask("b", [*A[:14], *B[:6]])
    driver.ask("c", [*A[:15], *B[50:55]])
    plan = driver.step()
    assert rows(plan) == [("b", 14, 6, 1), ("c", 15, 5, 1)]
    assert plan is not None
    assert [source for source, _ in plan.copies] == [3, 3]
    assert len({destination for _, destination in plan.copies}) == 2
    driver.run()
    assert driver.known([*A[:14], *B[:6]]) == 20
    assert driver.known([*A[:15], *B[50:55]]) == 20


def test_the_answer_is_part_of_what_the_next_turn_finds() -> None:
    driver = PrefixDriver(token=own_token)
    history = A[:10]
    for turn in range(4):
        request = driver.finish(f"{turn}", history, max_tokens=7)
        history = history + answer(request)
        # The last token was sampled, but never fed back.
        assert driver.known(history) == (len(history) - 1) // 4 * 4
        history = history + B[turn : turn + 3]
    assert [cached(driver, f"{turn}") for turn in range(4)] == [0, 16, 24, 36]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_known_as_its_chunks_are_committed(depth: int) -> None:
    driver = PrefixDriver(budget=10, depth=depth, token=own_token)
    driver.ask("a", A[:30], max_tokens=2)
    seen = []
    for _ in range(4):
        driver.step()
        seen.append(driver.known(A[:30]))
    assert seen == ([8, 20, 28, 28] if depth == 1 else [0, 8, 20, 28])


def test_three_requests_with_one_prompt_admitted_before_the_first_ends() -> None:
    driver = PrefixDriver(token=own_token)
    requests = [driver.ask(name, A[:13], max_tokens) for name, max_tokens in (("a", 6), ("b", 1), ("c", 3))]
    assert len(rows(driver.step())) == 3
    assert driver.known(A[:13]) == 12
    tree = {block for node in driver.cache._tree.nodes() for block in node.blocks}
    assert len(tree) == 3, "one of the three copies"
    for request in requests[:1] + requests[2:]:
        assert request.outputs[0].prefix is not None
    driver.run()
    assert [cached(driver, name) for name in "abc"] == [0, 0, 0]
    for request in requests:
        whole = (13 + len(answer(request)) - 1) // 4 * 4
        assert driver.known(A[:13] + answer(request)) == whole
    assert driver.cache.num_blocks == 3 + 1, "of all they wrote, twelve tokens and one block of the longest answer"


def test_a_request_admitted_later_shares_with_one_that_runs() -> None:
    driver = PrefixDriver(token=own_token)
    driver.ask("a", A[:13], max_tokens=20)
    driver.step()
    driver.ask("b", A[:12] + B[:4], max_tokens=20)
    assert rows(driver.step()) == [("a", 13, 1, 1), ("b", 12, 4, 1)]
    driver.life.fail(driver.life.live["a"], FailReason.CANCELLED, "", driver.now)
    driver.step()
    driver.run()
    assert driver.done()["b"].usage.completion_tokens == (20,)


# -- what is not looked up, and what is not known -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"prompt_logprobs": 0}, {"prompt_logprobs": 2, "n": 2}])
def test_who_wants_the_prompts_logits_looks_nothing_up_but_makes_it_known(options: dict[str, int]) -> None:
    driver = PrefixDriver(token=own_token)
    driver.finish("a", A[:8])
    options = {"max_tokens": 3} | options
    driver.ask("b", A[:16], **options)
    assert rows(driver.step()) == [("b", 0, 16, options.get("n", 1) if options["max_tokens"] else 0)]
    driver.run()
    assert cached(driver, "b") == 0
    assert driver.known(A[:16]) == 16
    driver.finish("c", A[:18])
    assert cached(driver, "c") == 16


def test_bypassing_neither_reads_nor_inserts() -> None:
    driver = PrefixDriver(token=own_token)
    driver.finish("a", A[:16])
    before = driver.cache.num_blocks
    driver.finish("b", A[:20], max_tokens=9, cache_root=None)
    assert cached(driver, "b") == 0
    assert driver.cache.num_blocks == before
    assert driver.known(A[:20]) == 16
    assert driver.cache.stats.lookups == 1


def test_salts_never_share() -> None:
    driver = PrefixDriver(token=own_token)
    for name, root in (("a", b"one"), ("b", b"two"), ("c", b""), ("d", b"one")):
        driver.finish(name, A[:16], cache_root=root)
    assert [cached(driver, name) for name in "abcd"] == [0, 0, 0, 15]
    assert driver.cache.num_blocks == 12


def test_a_stop_string_cuts_what_is_known() -> None:
    driver = PrefixDriver(depth=2, token=own_token)
    request = driver.ask("a", A[:6], max_tokens=50)
    while len(answer(request)) < 14:
        driver.step()
    whole = A[:6] + answer(request)
    driver.life.finish_output(request.outputs[0], 7, driver.now)
    driver.run()
    assert driver.known(whole) == 12
    driver.finish("b", whole)
    assert cached(driver, "b") == 12


def test_tokens_that_no_longer_count_are_not_kept_however_much_of_them_is_computed() -> None:
    """A stop string found late in a request that was preempted and is being computed again, by chunks."""
    driver = PrefixDriver(num_blocks=10, budget=12, token=own_token)
    driver.ask("a", A[:9], 30)
    request = driver.ask("b", B[:9], 30)
    output = request.outputs[0]
    while not (request.preemptions and output.cache is not None):
        driver.step()
    assert output.num_kept_tokens == output.num_written_tokens < output.num_prefill_tokens
    output.token_ids = output.token_ids[:1]
    assert output.num_kept_tokens == 10
    driver.life.finish_output(output, 1, driver.now)
    driver.run()


def test_nan_logits_make_nothing_known() -> None:
    driver = PrefixDriver(token=own_token)
    driver.nan = {("a", 0, 12)}
    driver.finish("a", A[:12])
    assert driver.done()["a"].error is FailReason.NAN_LOGITS
    assert driver.cache.num_blocks == 0
    assert driver.manager.num_free == driver.manager.num_blocks


def test_nan_logits_after_some_chunks_or_tokens_take_back_what_was_known_by_then() -> None:
    for position, prompt in ((30, A[:30]), (25, A[:20])):
        driver = PrefixDriver(budget=8, depth=2, token=own_token)
        driver.nan = {("a", 0, position)}
        request = driver.ask("a", prompt, max_tokens=20)
        for _ in range(4):
            driver.step()
        assert driver.known(prompt) > 0
        driver.run()
        assert driver.done()["a"].error is FailReason.NAN_LOGITS
        assert (driver.cache.num_blocks, driver.manager.num_free) == (0, 64)
        assert request.outputs[0].prefix is None


def test_nan_logits_leave_alone_what_others_hold_or_went_on_from() -> None:
    driver = PrefixDriver(token=own_token)
    driver.finish("a", A[:8] + B[:8])
    driver.ask("b", A[:12], max_tokens=20)
    driver.step()
    driver.nan = {("c", 1, 26)}
    driver.ask("c", A[:24], max_tokens=20, n=2)
    driver.step()
    assert driver.known(A[:24]) == 24
    while "c" in driver.life.live:
        driver.step()
    assert driver.known(A[:24]) == 12
    assert driver.known(A[:8] + B[:8]) == 16
    driver.run()


# -- forks ----------------------------------------------------------------------------------------------------------


def test_forks_share_the_hit_and_copy_the_block_they_part_in() -> None:
    driver = PrefixDriver(depth=2, token=own_token)
    driver.finish("a", A[:16])
    request = driver.ask("b", A[:14] + B[:4], max_tokens=6, n=3)
    plan = driver.step()
    assert rows(plan) == [("b", 14, 4, 3)]
    assert plan is not None
    assert len(plan.copies) == 1
    assert all(output.prefix is not None for output in request.outputs), "before anything is committed"
    plan = driver.step()
    assert plan is not None
    assert len(plan.copies) == 2
    assert [row.blocks[:4] for row in plan.rows] == [plan.rows[0].blocks[:4]] * 3
    driver.run()
    assert cached(driver, "b") == 14
    for index in range(3):
        assert driver.known(A[:14] + B[:4] + answer(request, index)) == 20
    assert driver.cache.num_blocks == 4 + 1 + 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [64, 10])
def test_a_prompt_stays_held_while_only_a_fork_of_it_lives(depth: int, budget: int) -> None:
    """The first output ends at once. What it made known must not count as room for others."""
    driver = PrefixDriver(
        num_blocks=10,
        budget=budget,
        depth=depth,
        token=lambda request_id, output, position: EOS if (request_id, output) == ("a", 0) else 7,
    )
    driver.ask("a", A[:16], max_tokens=8, n=2)
    for _ in range(2):
        driver.step()
    driver.ask("b", B[:22], max_tokens=2)
    driver.run()
    assert driver.done()["a"].usage.completion_tokens == (1, 8)
    assert driver.done()["b"].usage.completion_tokens == (2,)


def test_preempted_forks_resume_from_the_prompt_that_is_known() -> None:
    driver = PrefixDriver(num_blocks=12, token=own_token)
    driver.ask("a", A[:16], max_tokens=16, n=3)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    resumed = [row for plan in driver.plans[1:] for row in plan.chunks]
    assert resumed
    assert all(row.start >= 16 for row in resumed)
    assert driver.done()["a"].usage.completion_tokens == (16, 16, 16)
