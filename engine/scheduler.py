"""The scheduler: which outputs compute how many tokens in the next step. Pure Python, no torch.

One token budget per step. Outputs one token behind (decoding) go first, then chunks of longer ones, then outputs are
admitted from the waiting queue, whole prompts' blocks reserved. Beside decoding outputs, which wait for the whole
step, chunks may have a smaller budget of their own. When a decoding output finds no block, the worst
output not yet in the plan is preempted: it gives its blocks back and recomputes later.

What runs for every output in every step is short and makes nothing but the row; whatever is rare pays for itself.
"""

from bisect import insort

from engine.block_manager import BlockManager, NoFreeBlocks, PagedKVCache
from engine.output_prefixes import OutputPrefixes
from engine.plan import PlanRow, Sample, StepPlan
from engine.prefix_cache import PrefixHit
from engine.request import Output, Request, State
from engine.tenants import OUTPUT_TOKEN_WEIGHT, TenantCounters
from engine.waiting import WaitingQueue


def _running_order(output: Output) -> tuple[int, int, int]:
    """Highest priority first, then by arrival."""
    return -output.request.priority, output.request.number, output.index


def _badness(output: Output) -> tuple[int, int, int, int]:
    """The highest is preempted first: lowest priority, then whose tenant used most, then who came last."""
    request = output.request
    return -request.priority, request.account.counter, request.number, output.index


class Scheduler:
    """Owns the queues, the seats (device slots) and every output's cache.

    ``max_chunk_tokens_beside_decode``: tokens of all chunks of a step in which an output decodes; None = no bound of
    their own.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefixes: OutputPrefixes | None = None,
    ) -> None:
        self.manager = manager
        self.prefixes = prefixes
        self.waiting = WaitingQueue()
        self.running: list[Output] = []
        self.num_preemptions = 0
        self.num_steps = 0
        self.max_chunk_tokens_beside_decode: int | None = None
        self._tenants = TenantCounters()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._refused: tuple[int, ...] = ()

    def add(self, request: Request) -> None:
        """Queue a new request; its first output stands for all of them until the prompt is computed."""
        request.account = self._tenants.enter(request.tenant)
        for output in request.outputs[1:]:
            output.state = State.FORKED
        self.waiting.push(request.outputs[0])

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now.

        Advances ``num_computed_tokens`` and adds one pending token per sample, which commit fills.
        """
        plan = StepPlan(self.num_steps)
        budget = self._schedule_running(plan, self._max_num_batched_tokens)
        if not plan.preempted:
            self._admit(plan, budget)
        if not plan.decode and not plan.chunks:
            return None
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
            self._tenants.leave(output.request.tenant)

    def committed_chunks(self, plan: StepPlan) -> None:
        """The plan's chunks are written. Rows of outputs that have ended or given those blocks back do not count."""
        for row in plan.chunks:
            cache = row.output.cache
            if cache is not None and cache.physical_blocks is row.blocks:
                row.output.num_written_tokens = row.start + row.count

    def share_chunks(self, plan: StepPlan) -> None:
        """Let others use what the plan's chunks wrote, where they still run.

        Forks made in the plan have the same blocks, so they must hold what becomes known of them.
        """
        if self.prefixes is not None:
            for row in plan.chunks:
                self.prefixes.written(row.output)
                for sample in row.samples:
                    self.prefixes.written(sample.output)

    def check(self, live: list[Request]) -> None:
        """Assert every invariant; to be called between steps."""
        outputs = [output for request in live for output in request.outputs]
        holders = [output.cache.blocks for output in outputs if output.cache is not None]
        if self.prefixes is not None:
            prefixes = [output.prefix for output in outputs if output.prefix is not None]
            holders.append(self.prefixes.cache.check(prefixes))
        self.manager.check(holders)
        running = [output for output in outputs if output.state is State.RUNNING]
        assert sorted(self.running, key=id) == sorted(running, key=id), "the running list differs from the states"
        held = [output.slot for output in outputs if output.slot >= 0]
        assert sorted(held + self._free_slots) == list(range(self._max_num_seqs)), "slots are lost or doubled"
        for output in outputs:
            assert 0 <= output.num_computed_tokens <= output.num_tokens
            assert output.state is State.FINISHED or output.num_pending >= 0, "more tokens are known than were sampled"
            assert (output.cache is not None) == (output.state is State.RUNNING), "only running outputs hold blocks"

    # -- running ------------------------------------------------------------------------------------------------

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        """Rows for outputs one token behind, then for those further behind. Returns what is left of the budget."""
        further_behind = []
        for output in self.running.copy():  # preemption takes outputs out of the list, forks put some in
            start, request, cache = output.num_computed_tokens, output.request, output.cache
            if cache is None or start >= request.num_computable:
                continue  # preempted just now, or its last token is already being sampled
            if output.num_tokens - start > 1:
                further_behind.append(output)
            elif budget == 0:
                return 0
            elif start < cache.writable_until or self._make_room(output, 1, plan):
                budget -= 1
                if start >= len(request.prompt):
                    plan.decode.append(_decode_row(output, request, cache, start))
                else:
                    self._add_chunk(plan, output, 1)
        if plan.decode and self.max_chunk_tokens_beside_decode is not None:
            budget = min(budget, self.max_chunk_tokens_beside_decode)
        for output in further_behind:
            count = min(output.num_tokens - output.num_computed_tokens, budget)
            if count == 0:
                return 0
            if output.state is State.RUNNING and self._make_room(output, count, plan):
                self._add_chunk(plan, output, count)
                budget -= count
        return budget

    def _make_room(self, output: Output, count: int, plan: StepPlan) -> bool:
        """Blocks for ``count`` more tokens, preempting the worst outputs; False when it is the worst itself."""
        cache, start = output.cache, output.num_computed_tokens
        assert cache is not None
        if start + count <= cache.writable_until:
            return True
        while True:
            try:
                plan.copies += cache.prepare_write(start + count, start)
                return True
            except NoFreeBlocks:
                if self._evict_for(cache.blocks_missing(start + count, start)):
                    continue
                victim = max(self._not_in(plan), key=_badness)
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is output:
                return False

    def _not_in(self, plan: StepPlan) -> list[Output]:
        """Running outputs that the plan neither computes nor samples."""
        planned = {id(row.output) for row in plan.rows}
        planned.update(id(sample.output) for row in plan.rows for sample in row.samples)
        return [output for output in self.running if id(output) not in planned]

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
            if self.prefixes is not None:
                self.prefixes.leave(output)
            else:
                output.cache.release()
            output.cache = None
        leaving = [output, *(o for o in output.request.outputs if o.state is State.FORKED)]
        for leaver in leaving:
            if leaver.slot >= 0:
                self._free_slots.append(leaver.slot)
                leaver.slot = -1

    # -- admission ----------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and self._free_slots and (output := self.waiting.peek()) is not None:
            if output.num_pending:
                return
            if self._refused == self._room(output):
                return  # nothing has changed since it did not fit: it is not looked up again in every step
            hit = self.prefixes.take(output) if self.prefixes is not None else None
            if not self._fits(output, hit):
                if self.prefixes is not None:
                    self.prefixes.give_back(hit)
                self._refused = self._room(output)
                return
            self.waiting.pop()
            self._seat(output, plan, hit)
            count = min(output.num_tokens - output.num_computed_tokens, budget)
            self._add_chunk(plan, output, count)
            budget -= count

    def _room(self, output: Output) -> tuple[int, ...]:
        """All that decides whether ``output`` fits. Equal numbers: the answer is the same."""
        cache = self.prefixes.cache if self.prefixes is not None else None
        known = (cache.num_cached_blocks, cache.num_changes) if cache is not None else ()
        request = output.request
        room = (self.manager.num_free, len(self._free_slots), len(self.running))
        return (request.number, output.index, output.num_tokens, *room, *known)

    def _fits(self, output: Output, hit: PrefixHit | None) -> bool:
        """A seat for it and its forks, and blocks for all its known tokens, one more, and what its forks copy.

        Beyond that a few blocks stay free for the outputs already running, so that admission is not undone at once.
        """
        request = output.request
        forks = _forked(request)
        if 1 + len(forks) > len(self._free_slots):
            return False
        blocks = self.manager.blocks_for(min(output.num_tokens + 1, request.num_computable))
        own = blocks - len(request.prompt) // self.manager.block_size
        spare = min(len(self.running), self.manager.num_blocks // 16)
        known = len(hit.blocks) if hit is not None else 0
        cached = self.prefixes.cache.num_cached_blocks if self.prefixes is not None else 0
        return blocks - known + len(forks) * own + spare <= self.manager.num_free + cached

    def _evict_for(self, count: int) -> bool:
        """Have ``count`` blocks free, of those that are only cached if need be. False when there are too few."""
        missing = count - self.manager.num_free
        if missing <= 0:
            return True
        return self.prefixes is not None and self.prefixes.cache.evict(missing)

    def _seat(self, output: Output, plan: StepPlan, hit: PrefixHit | None) -> None:
        request = output.request
        for seated in (output, *_forked(request)):
            seated.slot = self._free_slots.pop()
            plan.admitted.append(seated)
        self._give_blocks(output, plan, hit)
        if output.index == 0 and request.preemptions == 0:
            request.cached_prompt_tokens = min(output.num_computed_tokens, len(request.prompt))
            request.account.counter += len(request.prompt) - request.cached_prompt_tokens
            if self.prefixes is not None:
                self.prefixes.count(output, hit, request.cached_prompt_tokens)
        output.state = State.RUNNING
        insort(self.running, output, key=_running_order)

    def _give_blocks(self, output: Output, plan: StepPlan, hit: PrefixHit | None) -> None:
        """Blocks for all its known tokens: known ones, and of a partly equal one a copy."""
        start, source = 0, None
        if self.prefixes is not None:
            output.seated_at_flush = self.prefixes.cache.num_flushes
        if hit is not None:
            output.prefix, output.num_known_blocks = hit.held, len(hit.blocks)
            start = len(hit.blocks) * self.manager.block_size
            # Looked up before anything is evicted. The copy runs before the step writes anything, so its source may
            # even be one of the blocks that are taken now.
            source = self.manager.physical(hit.partial[0]) if hit.partial is not None else None
        cache = output.cache = PagedKVCache(self.manager, hit.blocks if hit is not None else ())
        self._evict_for(cache.blocks_missing(output.num_tokens, start))
        cache.prepare_write(output.num_tokens, start)
        if hit is not None and hit.partial is not None and source is not None:
            plan.copies.append((source, cache.physical_blocks[len(hit.blocks)]))
            start += hit.partial[1]
        output.num_computed_tokens = output.num_written_tokens = start
        output.num_prefill_tokens = output.num_tokens

    # -- rows ---------------------------------------------------------------------------------------------------

    def _add_chunk(self, plan: StepPlan, output: Output, count: int) -> None:
        """The next ``count`` tokens of an output whose last known token is not alone missing, or is no sampled one."""
        cache, request, start = output.cache, output.request, output.num_computed_tokens
        assert cache is not None
        end = output.num_computed_tokens = start + count
        complete = end == output.num_tokens
        plan.chunks.append(
            PlanRow(
                output=output,
                epoch=output.epoch,
                slot=output.slot,
                start=start,
                count=count,
                blocks=cache.physical_blocks,
                blocks_version=cache.version,
                from_device=False,
                prompt_logprobs=self._prompt_logprobs(request, end),
                samples=self._first_samples(output, end) if complete and request.max_tokens else (),
                completes_request=complete and not request.max_tokens,
            )
        )

    def _first_samples(self, output: Output, position: int) -> tuple[Sample, ...]:
        """The tokens the last logits of a prompt give: the output's own, and the first one of each seated fork."""
        forks = _forked(output.request)
        for fork in forks:
            self._fork(output, fork)
        return tuple(_sample(drawn, drawn.request, position) for drawn in (output, *forks))

    def _fork(self, parent: Output, fork: Output) -> None:
        assert parent.cache is not None
        fork.cache = parent.cache.fork()
        fork.num_computed_tokens = parent.num_computed_tokens
        if self.prefixes is not None:
            self.prefixes.fork(parent, fork)
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


def _decode_row(output: Output, request: Request, cache: PagedKVCache, start: int) -> PlanRow:
    """The row of an output whose last sampled token is all that is missing."""
    end = output.num_computed_tokens = start + 1
    samples = (_sample(output, request, end),)
    return PlanRow(output, output.epoch, output.slot, start, 1, cache.physical_blocks, cache.version, True, samples)


def _sample(output: Output, request: Request, position: int) -> Sample:
    output.num_tokens += 1
    request.account.counter += OUTPUT_TOKEN_WEIGHT
    return Sample(output, output.epoch, output.slot, position, position < request.stops_from)


def _forked(request: Request) -> list[Output]:
    return [output for output in request.outputs if output.state is State.FORKED]
