"""The scheduler: which outputs compute how many tokens in the next step. Pure Python, no torch.

One token budget per step. Outputs one token behind (decoding) go first, then chunks of longer ones, then outputs are
admitted from the waiting queue, whole prompts' blocks reserved. When a decoding output finds no block, the worst
output not yet in the plan is preempted: it gives its blocks back and recomputes later.
"""

from bisect import insort

from engine.block_manager import BlockManager, PagedKVCache
from engine.plan import PlanRow, Sample, StepPlan
from engine.request import Output, Request, State
from engine.waiting import TenantCounters, WaitingQueue


def _running_order(output: Output) -> tuple[int, int, int]:
    """Highest priority first, then by arrival."""
    return -output.request.priority, output.request.number, output.index


class Scheduler:
    """Owns the queues, the seats (device slots) and every output's cache."""

    def __init__(self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.manager = manager
        self.counters = TenantCounters()
        self.waiting = WaitingQueue(self.counters)
        self.running: list[Output] = []
        self.num_preemptions = 0
        self.num_steps = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a new request; its first output stands for all of them until the prompt is computed."""
        self.counters.enter(request.tenant)
        for output in request.outputs[1:]:
            output.state = State.FORKED
        self.waiting.push(request.outputs[0])

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now.

        Advances ``num_computed_tokens`` and adds one pending token per sample; `Scheduler` users fill it by commit.
        """
        plan = StepPlan(self.num_steps)
        budget = self._schedule_running(plan, self._max_num_batched_tokens)
        if not plan.preempted:
            self._admit(plan, budget)
        if not plan.rows:
            return None
        plan.rows.sort(key=lambda row: not row.is_decode)
        self.num_steps += 1
        return plan

    def finish(self, output: Output) -> None:
        """Take an ended output out, from whatever state: blocks and slot are free at once.

        Rows still in flight for it write into blocks that later steps overwrite in stream order, and commit drops them.
        """
        if output.state is State.RUNNING:
            self.running.remove(output)
        output.state = State.FINISHED
        self._vacate(output)
        if output.request.finished:
            self.counters.leave(output.request.tenant)

    def check(self, live: list[Request]) -> None:
        """Assert every invariant; to be called between steps."""
        outputs = [output for request in live for output in request.outputs]
        self.manager.check([output.cache.blocks for output in outputs if output.cache is not None])
        running = [output for output in outputs if output.state is State.RUNNING]
        assert sorted(self.running, key=id) == sorted(running, key=id), "the running list differs from the states"
        held = [output.slot for output in outputs if output.slot >= 0]
        assert sorted(held + self._free_slots) == list(range(self._max_num_seqs)), "slots are lost or doubled"
        for output in outputs:
            assert 0 <= output.num_computed_tokens <= output.num_tokens
            assert (output.cache is not None) == (output.state is State.RUNNING), "only running outputs hold blocks"

    # -- running ------------------------------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        due = [output for output in self.running if output.wants_step]
        behind_by_one = [output for output in due if output.num_tokens - output.num_computed_tokens == 1]
        further_behind = [output for output in due if output.num_tokens - output.num_computed_tokens > 1]
        waiting_for_plan = {id(output): output for output in self.running}
        for output in behind_by_one + further_behind:
            count = min(output.num_tokens - output.num_computed_tokens, budget)
            if count == 0:
                break
            if output.state is State.RUNNING and self._make_room(output, count, plan, waiting_for_plan):
                del waiting_for_plan[id(output)]
                self._add_row(plan, output, count)
                budget -= count
        return budget

    def _make_room(self, output: Output, count: int, plan: StepPlan, candidates: dict[int, Output]) -> bool:
        """Blocks for ``count`` more tokens, preempting the worst candidates; False when it is the worst itself."""
        assert output.cache is not None
        start = output.num_computed_tokens
        while output.cache.blocks_missing(start + count, start) > self.manager.num_free:
            victim = max(candidates.values(), key=self._badness)
            del candidates[id(victim)]
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is output:
                return False
        plan.copies.extend(output.cache.prepare_write(start + count, start))
        return True

    def _badness(self, output: Output) -> tuple[int, int, int, int]:
        request = output.request
        return -request.priority, self.counters[request.tenant], request.number, output.index

    def _preempt(self, output: Output) -> None:
        """Back to the queue. The epoch stays: a row in flight still fills its pending token."""
        self.running.remove(output)
        self._vacate(output)
        output.num_computed_tokens = 0
        output.state = State.WAITING
        output.request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(output)

    def _vacate(self, output: Output) -> None:
        """Blocks and slot back; with an output that still had the prompt to compute, its seated forks' slots too."""
        if output.cache is not None:
            output.cache.release()
            output.cache = None
        leaving = [output, *(o for o in output.request.outputs if o.state is State.FORKED)]
        for leaver in leaving:
            if leaver.slot >= 0:
                self._free_slots.append(leaver.slot)
                leaver.slot = -1

    # -- admission ----------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and (output := self.waiting.peek()) is not None:
            if output.num_pending or not self._fits(output):
                return
            self.waiting.pop()
            self._seat(output, plan)
            count = min(output.num_tokens, budget)
            self._add_row(plan, output, count)
            budget -= count

    def _fits(self, output: Output) -> bool:
        """A seat for it and its forks, and blocks for all its known tokens, one more, and what its forks copy.

        Beyond that a few blocks stay free for the outputs already running, so that admission is not undone at once.
        """
        request = output.request
        forks = _forked(request)
        if 1 + len(forks) > len(self._free_slots):
            return False
        written = len(request.prompt) + max(request.max_tokens - 1, 0)
        blocks = self.manager.blocks_for(min(output.num_tokens + 1, written))
        own = blocks - len(request.prompt) // self.manager.block_size
        spare = min(len(self.running), self.manager.num_blocks // 16)
        return blocks + len(forks) * own + spare <= self.manager.num_free

    def _seat(self, output: Output, plan: StepPlan) -> None:
        request = output.request
        for seated in (output, *_forked(request)):
            seated.slot = self._free_slots.pop()
            plan.admitted.append(seated)
        if output.index == 0 and request.preemptions == 0:
            self.counters.charge(request.tenant, prompt_tokens=len(request.prompt) - request.cached_prompt_tokens)
        output.cache = PagedKVCache(self.manager)
        output.cache.prepare_write(output.num_tokens, 0)
        output.state = State.RUNNING
        insort(self.running, output, key=_running_order)

    # -- rows ---------------------------------------------------------------------------------------------------

    def _add_row(self, plan: StepPlan, output: Output, count: int) -> None:
        assert output.cache is not None
        request, start = output.request, output.num_computed_tokens
        end = start + count
        complete = end == output.num_tokens
        from_device = complete and count == 1 and start >= len(request.prompt)
        prompt_logprobs = self._prompt_logprobs(request, end)
        output.num_computed_tokens = end
        plan.rows.append(
            PlanRow(
                output=output,
                epoch=output.epoch,
                slot=output.slot,
                start=start,
                count=count,
                blocks=output.cache.physical_blocks[: self.manager.blocks_for(end)],
                from_device=from_device,
                samples=self._samples(output, end) if complete and request.max_tokens else (),
                prompt_logprobs=prompt_logprobs,
                completes_request=complete and not request.max_tokens,
            )
        )

    def _samples(self, output: Output, position: int) -> tuple[Sample, ...]:
        """The tokens this row's last logits give: the output's own, and the first one of each seated fork."""
        drawn = [output]
        for fork in _forked(output.request):
            self._fork(output, fork)
            drawn.append(fork)
        samples = []
        for one in drawn:
            suppress = one.num_output_tokens < one.request.params.min_tokens
            samples.append(Sample(one, one.epoch, one.slot, position, suppress))
            one.num_pending += 1
        self.counters.charge(output.request.tenant, output_tokens=len(drawn))
        return tuple(samples)

    def _fork(self, parent: Output, fork: Output) -> None:
        assert parent.cache is not None
        fork.cache = parent.cache.fork()
        fork.num_computed_tokens = parent.num_computed_tokens
        fork.state = State.RUNNING
        insort(self.running, fork, key=_running_order)

    @staticmethod
    def _prompt_logprobs(request: Request, end: int) -> tuple[int, int] | None:
        """Positions whose logprobs the row that computes up to ``end`` gives for the first time."""
        if request.params.prompt_logprobs is None:
            return None
        first, upto = request.prompt_logprobs_sent, min(end + 1, len(request.prompt))
        if upto <= first:
            return None
        request.prompt_logprobs_sent = upto
        return first, upto - first


def _forked(request: Request) -> list[Output]:
    return [output for output in request.outputs if output.state is State.FORKED]
