"""Stories of the scheduler: exact plans, no model, no torch."""

import pytest

from engine.outputs import FailReason, FinishReason, OutputFinished, PromptLogprobs, RequestDone, Started, TokenOutput
from engine.plan import PlanRow, StepPlan
from engine.sampling_params import SamplingParams
from engine.waiting import SWEEP_EVERY
from tests.engine.driver import EOS, Driver, random_token


def rows(plan: StepPlan | None) -> list[tuple[str, int, int, int]]:
    """(request, start, count, samples) of every row."""
    assert plan is not None
    return [(row.output.request.id, row.start, row.count, len(row.samples)) for row in plan.rows]


def only_row(plan: StepPlan | None) -> PlanRow:
    assert plan is not None
    (row,) = plan.rows
    return row


def test_a_request_is_prefilled_then_decoded_to_max_tokens() -> None:
    driver = Driver()
    driver.add("a", prompt_len=6, max_tokens=3)
    assert rows(driver.step()) == [("a", 0, 6, 1)]
    assert rows(driver.step()) == [("a", 6, 1, 1)]
    assert rows(driver.step()) == [("a", 7, 1, 1)]
    assert driver.step() is None
    assert driver.done()["a"].usage.completion_tokens == (3,)
    assert driver.manager.num_free == driver.manager.num_blocks


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_ones() -> None:
    driver = Driver(budget=10)
    driver.add("short", prompt_len=4)
    driver.step()
    driver.add("long", prompt_len=21)
    assert rows(driver.step()) == [("short", 4, 1, 1), ("long", 0, 9, 0)]
    assert rows(driver.step()) == [("short", 5, 1, 1), ("long", 9, 9, 0)]
    assert rows(driver.step()) == [("short", 6, 1, 1), ("long", 18, 3, 1)]
    assert rows(driver.step()) == [("short", 7, 1, 1), ("long", 21, 1, 1)]


def test_chunks_beside_decoding_outputs_have_a_budget_of_their_own() -> None:
    driver = Driver(budget=32, block_size=4)
    driver.scheduler.max_chunk_tokens_beside_decode = 4
    driver.add("first", prompt_len=20, max_tokens=4)
    assert rows(driver.step()) == [("first", 0, 20, 1)], "nobody waits for this step"
    driver.add("long", prompt_len=11, max_tokens=2)
    driver.add("next", prompt_len=3, max_tokens=1)
    assert rows(driver.step()) == [("first", 20, 1, 1), ("long", 0, 4, 0)]
    assert rows(driver.step()) == [("first", 21, 1, 1), ("long", 4, 4, 0)]
    assert rows(driver.step()) == [("first", 22, 1, 1), ("long", 8, 3, 1), ("next", 0, 1, 0)]
    driver.scheduler.max_chunk_tokens_beside_decode = None
    assert rows(driver.step()) == [("long", 11, 1, 1), ("next", 1, 2, 1)]


def test_when_nothing_decodes_any_more_a_chunk_takes_the_whole_budget() -> None:
    driver = Driver(budget=16)
    driver.scheduler.max_chunk_tokens_beside_decode = 4
    driver.add("short", prompt_len=4, max_tokens=2)
    driver.step()
    driver.add("long", prompt_len=30, max_tokens=1)
    assert rows(driver.step()) == [("short", 4, 1, 1), ("long", 0, 4, 0)]
    assert rows(driver.step()) == [("long", 4, 16, 0)]
    assert rows(driver.step()) == [("long", 20, 10, 1)]


def test_the_next_request_starts_in_what_is_left_of_the_budget() -> None:
    driver = Driver(budget=10)
    driver.add("a", prompt_len=7)
    driver.add("b", prompt_len=7)
    assert rows(driver.step()) == [("a", 0, 7, 1), ("b", 0, 3, 0)]
    assert rows(driver.step()) == [("a", 7, 1, 1), ("b", 3, 4, 1)]


def test_seats_bound_the_batch_and_are_taken_in_order_of_arrival() -> None:
    driver = Driver(max_num_seqs=2)
    for name in "abc":
        driver.add(name, prompt_len=2, max_tokens=2)
    assert [row[0] for row in rows(driver.step())] == ["a", "b"]
    driver.step()
    assert [row[0] for row in rows(driver.step())] == ["c"]


def test_higher_priority_goes_first_whenever_it_came() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add("first", prompt_len=2, max_tokens=1)
    driver.add("low", prompt_len=2, max_tokens=1, priority=-5)
    driver.add("high", prompt_len=2, max_tokens=1, priority=3)
    order = [rows(driver.step())[0][0] for _ in range(3)]
    assert order == ["high", "first", "low"]


def test_depth_two_schedules_ahead_of_the_tokens_and_drops_what_an_eos_overtook() -> None:
    driver = Driver(depth=2, token=lambda request_id, output, position: EOS if position == 5 else 7)
    driver.add("a", prompt_len=4, max_tokens=50)
    plans = [driver.step() for _ in range(3)]
    assert [rows(plan) for plan in plans] == [[("a", 0, 4, 1)], [("a", 4, 1, 1)], [("a", 5, 1, 1)]]
    assert plans[1] is not None
    assert plans[1].rows[0].from_device
    driver.run()
    assert driver.done()["a"].usage.completion_tokens == (2,)
    assert driver.life.tokens_discarded == 1


def test_depth_two_wastes_nothing_when_max_tokens_ends_it() -> None:
    driver = Driver(depth=2)
    driver.add("a", prompt_len=4, max_tokens=5)
    driver.run()
    assert driver.life.tokens_discarded == 0
    assert sum(plan.num_tokens for plan in driver.plans) == 4 + 4


def test_the_worst_running_request_is_preempted_and_its_tokens_are_not_repeated() -> None:
    driver = Driver(num_blocks=4, block_size=4)
    driver.add("old", prompt_len=7, max_tokens=8)
    driver.add("young", prompt_len=7, max_tokens=8)
    driver.run()
    assert driver.scheduler.num_preemptions >= 1
    done = driver.done()
    assert done["old"].usage.preemptions == 0
    assert done["young"].usage.preemptions >= 1
    for name in ("old", "young"):
        tokens = [e for e in driver.events if isinstance(e, TokenOutput) and e.request_id == name]
        assert len(tokens) == 8
    assert sum(isinstance(event, Started) for event in driver.events) == 2


def test_preemption_spares_higher_priority() -> None:
    driver = Driver(num_blocks=4, block_size=4)
    driver.add("low", prompt_len=7, max_tokens=8, priority=0)
    driver.add("high", prompt_len=7, max_tokens=8, priority=1)
    driver.run()
    assert driver.done()["high"].usage.preemptions == 0
    assert driver.done()["low"].usage.preemptions >= 1


def test_a_preempted_output_is_not_rescheduled_before_its_pending_token_is_known() -> None:
    driver = Driver(num_blocks=4, block_size=4, depth=2)
    driver.add("old", prompt_len=7, max_tokens=8)
    driver.add("young", prompt_len=7, max_tokens=8)
    for _ in range(200):
        if driver.step() is None and not driver.life.live:
            break
        for plan in driver.plans[-1:]:
            for row in plan.rows:
                known = len(row.output.request.prompt) + len(row.output.token_ids)
                assert row.from_device or row.start + row.count <= known, "a chunk would need an unknown token"
    assert set(driver.done()) == {"old", "young"}


def test_outputs_fork_after_the_prompt_and_copy_only_the_partial_block() -> None:
    driver = Driver(block_size=4)
    driver.add("a", prompt_len=6, max_tokens=3, n=3)
    first = driver.step()
    assert rows(first) == [("a", 0, 6, 3)]
    assert first is not None
    assert len({sample.slot for sample in first.rows[0].samples}) == 3
    second = driver.step()
    assert second is not None
    assert len(second.rows) == 3
    assert len(second.copies) == 2
    assert len({row.blocks[0] for row in second.rows}) == 1
    assert len({row.blocks[1] for row in second.rows}) == 3
    driver.run()
    assert driver.done()["a"].usage.completion_tokens == (3, 3, 3)


def test_rows_share_the_block_list_and_its_version_tells_when_it_changed() -> None:
    driver = Driver(block_size=4)
    driver.add("a", prompt_len=6, max_tokens=8)
    seen = [only_row(driver.step()) for _ in range(6)]
    assert len({id(row.blocks) for row in seen}) == 1
    assert seen[-1].blocks == [0, 1, 2]
    # Positions 6 and 7 go into the prompt's second block, 8 needs a third.
    assert [row.blocks_version == seen[0].blocks_version for row in seen] == [True] * 3 + [False] * 3
    assert len({row.blocks_version for row in seen}) == 2


def test_copy_on_write_shows_in_the_version_of_those_who_copied() -> None:
    driver = Driver(block_size=4)
    driver.add("a", prompt_len=6, max_tokens=4, n=3)
    driver.step()
    versions = {id(output): output.cache.version for output in driver.scheduler.running if output.cache}
    plan = driver.step()
    assert plan is not None
    assert [row.blocks_version == versions[id(row.output)] for row in plan.rows] == [False, False, True]


def test_a_resumed_request_never_shows_an_old_version() -> None:
    driver = Driver(num_blocks=4, block_size=4, depth=2)
    driver.add("old", prompt_len=7, max_tokens=8)
    driver.add("young", prompt_len=7, max_tokens=8)
    content: dict[int, list[int]] = {}
    while driver.life.live:
        plan = driver.step()
        for row in plan.rows if plan else []:
            assert content.setdefault(row.blocks_version, list(row.blocks)) == row.blocks
    assert driver.scheduler.num_preemptions >= 1
    assert len(content) > 4


def test_an_output_that_forks_in_this_step_is_not_preempted_in_it() -> None:
    """Its first token is already being sampled, though it is the worst, by its tenant's account."""
    driver = Driver(num_blocks=8, block_size=4, budget=10)
    driver.add("early", prompt_len=4, max_tokens=9, tenant="busy")
    last = driver.add("last", prompt_len=4, max_tokens=9, tenant="frugal")
    for _ in range(4):
        driver.step()
    last.number = 3
    forking = driver.add("forks", prompt_len=9, max_tokens=4, n=2, tenant="busy")
    forking.number = 2
    assert rows(driver.step())[2:] == [("forks", 0, 8, 0)]
    plan = driver.step()
    assert rows(plan) == [("early", 8, 1, 1), ("forks", 8, 1, 2)]
    assert plan is not None
    assert plan.preempted == last.outputs
    driver.run()


def test_stops_are_held_back_until_min_tokens_are_there() -> None:
    driver = Driver()
    driver.add("a", prompt_len=3, max_tokens=4, params=SamplingParams(min_tokens=2, n=2))
    driver.run()
    held_back = [[sample.suppress_stops for row in plan.rows for sample in row.samples] for plan in driver.plans]
    assert held_back == [[True, True], [True, True], [False, False], [False, False]]


def test_a_request_with_n_outputs_waits_for_n_seats() -> None:
    driver = Driver(max_num_seqs=3)
    driver.add("one", prompt_len=2, max_tokens=4)
    driver.add("three", prompt_len=2, max_tokens=2, n=3)
    assert [row[0] for row in rows(driver.step())] == ["one"]
    driver.run()
    assert driver.done()["three"].usage.completion_tokens == (2, 2, 2)


def test_scoring_computes_the_prompt_and_samples_nothing() -> None:
    driver = Driver(budget=8)
    driver.add("a", prompt_len=12, max_tokens=0, params=SamplingParams(prompt_logprobs=0, n=2))
    driver.run()
    assert [rows(plan) for plan in driver.plans] == [[("a", 0, 8, 0)], [("a", 8, 4, 0)]]
    finished = [event for event in driver.events if isinstance(event, OutputFinished)]
    assert [(f.output_index, f.reason, f.token_count) for f in finished] == [
        (0, FinishReason.LENGTH, 0),
        (1, FinishReason.LENGTH, 0),
    ]
    offsets = [(e.token_offset, len(e.entries)) for e in driver.events if isinstance(e, PromptLogprobs)]
    assert offsets == [(0, 9), (9, 3)]


def test_prompt_logprobs_are_not_repeated_after_preemption() -> None:
    driver = Driver(num_blocks=4, block_size=4, budget=8)
    driver.add("old", prompt_len=7, max_tokens=9)
    driver.add("young", prompt_len=7, max_tokens=8, params=SamplingParams(prompt_logprobs=0))
    driver.run()
    assert driver.done()["young"].usage.preemptions >= 1
    positions = [
        e.token_offset + i for e in driver.events if isinstance(e, PromptLogprobs) for i in range(len(e.entries))
    ]
    assert positions == list(range(7))


@pytest.mark.parametrize(
    ("steps", "reason"),
    [(0, FailReason.DEADLINE_QUEUED), (1, FailReason.DEADLINE_PREFILL), (4, FailReason.DEADLINE_DECODE)],
)
def test_a_deadline_fails_the_request_wherever_it_is(steps: int, reason: FailReason) -> None:
    driver = Driver(budget=10, max_num_seqs=10)
    request = driver.add("a", prompt_len=25, max_tokens=50, deadline=steps + 0.5)
    driver.now = 0.6 if steps == 0 else 0
    while driver.life.live:
        driver.step()
    assert driver.done()["a"].error is reason
    assert request.finished
    assert driver.manager.num_free == driver.manager.num_blocks


def test_queue_timeout_counts_only_before_the_first_schedule() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add("runs", prompt_len=2, max_tokens=9, queue_deadline=2.5)
    driver.add("waits", prompt_len=2, max_tokens=9, queue_deadline=2.5)
    driver.run()
    assert driver.done()["runs"].error is None
    assert driver.done()["waits"].error is FailReason.QUEUE_TIMEOUT


def test_a_stop_time_finishes_with_what_there_is() -> None:
    driver = Driver()
    driver.add("a", prompt_len=2, max_tokens=50, n=2, stop_time=5.5)
    driver.run()
    finished = [event for event in driver.events if isinstance(event, OutputFinished)]
    assert [f.reason for f in finished] == [FinishReason.TIME_LIMIT] * 2
    assert driver.done()["a"].error is None
    assert driver.done()["a"].usage.completion_tokens == (5, 5)


def test_an_output_ended_from_outside_counts_only_the_given_tokens() -> None:
    driver = Driver(depth=2)
    request = driver.add("a", prompt_len=2, max_tokens=50)
    for _ in range(6):
        driver.step()
    driver.life.finish_output(request.outputs[0], 3, driver.now)
    driver.run()
    assert driver.done()["a"].usage.completion_tokens == (3,)
    assert not [event for event in driver.events if isinstance(event, OutputFinished)]


def test_tenants_share_and_an_idle_one_earns_no_credit() -> None:
    driver = Driver(max_num_seqs=1)
    for i in range(4):
        driver.add(f"busy{i}", prompt_len=4, max_tokens=2, tenant="busy")
    driver.step()
    for i in range(4):
        driver.add(f"late{i}", prompt_len=4, max_tokens=2, tenant="late")
    driver.run()
    started = [event.request_id[:4] for event in driver.events if isinstance(event, Started)]
    assert started == ["busy", "late", "busy", "late", "busy", "late", "busy", "late"]


def test_a_flooding_tenant_gets_no_more_than_its_share() -> None:
    driver = Driver(max_num_seqs=4, num_blocks=256)
    for i in range(60):
        driver.add(f"flood{i}", prompt_len=4, max_tokens=4, tenant="flood")
    for tenant in ("x", "y"):
        for i in range(10):
            driver.add(f"{tenant}{i}", prompt_len=4, max_tokens=4, tenant=tenant)
    served = {"flood": 0, "x": 0, "y": 0}
    while min(served["x"], served["y"]) < 10:
        driver.step()
        served = {"flood": 0, "x": 0, "y": 0}
        for event in driver.events:
            if isinstance(event, Started):
                served[event.request_id.rstrip("0123456789")] += 1
    assert served["flood"] <= 14
    driver.run()
    assert len(driver.done()) == 80


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_random_loads_end_every_request_once_and_leave_nothing(depth: int, seed: int) -> None:
    """Tokens do not depend on preemption, depth or neighbours: they are a function of the position alone."""
    import random

    rng = random.Random(seed)
    token = random_token(seed)
    driver = Driver(num_blocks=24, block_size=4, max_num_seqs=6, budget=16, depth=depth, token=token)
    wanted: dict[str, tuple[int, int]] = {}
    cancelled: set[str] = set()
    for i in range(40):
        n = rng.choice([1, 1, 1, 2, 4])
        prompt_len, max_tokens = rng.randint(1, 30), rng.randint(0, 12)
        shared = prompt_len // 4
        if shared + n * (-(-(prompt_len + max_tokens) // 4) - shared) > 24:
            continue
        wanted[f"r{i}"] = (prompt_len, max_tokens)
        driver.add(f"r{i}", prompt_len, max_tokens, n, priority=rng.randint(0, 2), tenant=rng.choice("ab"))
        for _ in range(rng.randint(0, 3)):
            driver.step()
        if rng.random() < 0.2 and driver.life.live:
            victim = rng.choice(list(driver.life.live.values()))
            driver.life.fail(victim, FailReason.CANCELLED, "", driver.now)
            cancelled.add(victim.id)
    driver.run()
    done = driver.done()
    assert set(done) == set(wanted)
    assert driver.manager.num_free == 24
    for name, (prompt_len, max_tokens) in wanted.items():
        if name in cancelled:
            assert done[name].error is FailReason.CANCELLED
            continue
        for index, count in enumerate(done[name].usage.completion_tokens):
            tokens = [
                e.token_id
                for e in driver.events
                if isinstance(e, TokenOutput) and (e.request_id, e.output_index) == (name, index)
            ]
            expected: list[int] = []
            while len(expected) < max_tokens and EOS not in expected:
                expected.append(token(name, index, prompt_len + len(expected)))
            assert tokens == expected
            assert count == len(expected)


def test_an_old_deadline_does_not_meet_a_new_request_of_its_id() -> None:
    driver = Driver()
    old = driver.add("a", 4, max_tokens=2, deadline=30.0)
    driver.run()
    assert old.finished
    new = driver.add("a", 4, max_tokens=100)
    while driver.now < 40:
        driver.step()
    assert not new.finished
    assert driver.life.next_deadline() is None
    assert [event.error for event in driver.events if isinstance(event, RequestDone)] == [None]


def test_what_is_in_flight_for_an_old_request_does_not_meet_a_new_one_of_its_id() -> None:
    driver = Driver(depth=2)
    old = driver.add("a", 4, params=SamplingParams(prompt_logprobs=0))
    driver.step()
    driver.life.fail(old, FailReason.CANCELLED, "", driver.now)
    driver.add("a", 4, max_tokens=2)
    driver.run()
    assert not [event for event in driver.events if isinstance(event, PromptLogprobs)]
    assert [event.error for event in driver.events if isinstance(event, RequestDone)] == [FailReason.CANCELLED, None]


def test_cancelled_requests_of_low_priority_do_not_pile_up() -> None:
    """They stand behind others that never let them come up."""
    driver = Driver(max_num_seqs=1)
    driver.add("runs", 4, max_tokens=1000, priority=1)
    driver.step()
    driver.add("waits", 4, priority=1)
    for number in range(3000):
        low = driver.add(str(number), 4, priority=0)
        driver.life.fail(low, FailReason.CANCELLED, "", driver.now)
    heaps = driver.scheduler.waiting._heaps
    assert sum(len(heap) for tenants in heaps.values() for heap in tenants.values()) <= SWEEP_EVERY + 1
    waiting = driver.scheduler.waiting.peek()
    assert waiting is not None
    assert waiting.request.id == "waits"
