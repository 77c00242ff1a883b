"""The driver with a prefix cache, and a pretend device that knows what every place of the KV pool holds.

What stands at a position is a number made of all tokens up to it, as real KV is. So every read can be checked: a row
that attends to anything but its own sequence's KV fails, and so does a tree that names a block of other content.
"""

from collections.abc import Callable, Iterator
from typing import Any

from engine.lifecycle import Lifecycle, StepResult
from engine.output_prefixes import OutputPrefixes
from engine.plan import PlanRow, StepPlan
from engine.prefix_cache import PrefixCache
from engine.radix_tree import Node, token_bytes
from engine.request import Output, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.engine.driver import EOS, Driver

ROOT = b"root"
POISON = -1


class PretendDevice:
    """The KV pool in numbers: as launched steps leave it, and as committed ones do."""

    def __init__(self, num_blocks: int, block_size: int, token: Callable[[str, int, int], int]) -> None:
        self._block_size = block_size
        self._token = token
        self._pool = [[POISON] * block_size for _ in range(num_blocks)]
        self._committed = [[POISON] * block_size for _ in range(num_blocks)]
        self._writes: dict[int, list[tuple[int, int, int]]] = {}
        self._sums: dict[tuple[str, int], list[int]] = {}

    def launch(self, plan: StepPlan, free: list[int], known: set[int]) -> None:
        """Copies, then each row's writes and reads. ``free`` blocks lose what they hold, ``known`` ones keep it."""
        _copy(self._pool, plan.copies)
        for block in free:
            self._pool[block] = [POISON] * self._block_size
        writes = self._writes[plan.number] = []
        for row in plan.rows:
            sums = self._sums_of(row.output, row.start + row.count)
            for position in range(row.start, row.start + row.count):
                index, offset = divmod(position, self._block_size)
                assert row.blocks[index] not in known, f"{row.output.request.id} writes into a known block"
                writes.append((row.blocks[index], offset, sums[position]))
        assert len({write[:2] for write in writes}) == len(writes), "two rows write the same place"
        _write(self._pool, writes)
        for row in plan.rows:
            self._check_read(row)

    def commit(self, plan: StepPlan) -> None:
        _copy(self._committed, plan.copies)
        _write(self._committed, self._writes.pop(plan.number))

    def check_known(self, nodes: Iterator[Node], physical: Callable[[int], int]) -> None:
        """Every block of the tree holds, by committed steps, the KV of the tokens that lead to it."""
        for node in nodes:
            tokens = _path(node)
            sums = _running_sums(tokens, [])[-len(node.blocks) * self._block_size :]
            held = [number for block in node.blocks for number in self._committed[physical(block)]]
            assert held == sums, "a block in the tree holds other KV than its tokens say, or is not committed"

    def _check_read(self, row: PlanRow) -> None:
        end = row.start + row.count
        read = [number for block in row.blocks for number in self._pool[block]][:end]
        assert read == self._sums_of(row.output, end), f"{row.output.request.id} reads KV that is not its own"

    def _sums_of(self, output: Output, stop: int) -> list[int]:
        request = output.request
        sums = self._sums.setdefault((request.id, output.index), [])
        sequence = [
            request.prompt[at] if at < len(request.prompt) else self._token(request.id, output.index, at)
            for at in range(len(sums), stop)
        ]
        return _running_sums(sequence, sums)[:stop]


def _running_sums(tokens: list[int], sums: list[int]) -> list[int]:
    """``sums``, which stand for the tokens before, made longer by one number for each token."""
    for token in tokens:
        sums.append(hash((sums[-1] if sums else 0, token)))
    return sums


def _path(node: Node) -> list[int]:
    keys: list[bytes] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        keys.append(at.key)
        at = at.parent
    return list(memoryview(b"".join(reversed(keys))).cast("i"))


def _copy(pool: list[list[int]], copies: list[tuple[int, int]]) -> None:
    assert all(block >= 0 for copy in copies for block in copy)
    content = [list(pool[source]) for source, _ in copies]
    for (_, destination), numbers in zip(copies, content, strict=True):
        pool[destination] = numbers


def _write(pool: list[list[int]], writes: list[tuple[int, int, int]]) -> None:
    for block, offset, number in writes:
        pool[block][offset] = number


class _Lifecycle(Lifecycle):
    """Tells the driver about every launch."""

    on_launch: Callable[[StepPlan], None]

    def launched(self, plan: StepPlan, now: float) -> None:
        super().launched(plan, now)
        self.on_launch(plan)


class PrefixDriver(Driver):
    """Requests have prompts of their own, and share what they have in common. ``nan``: what gives NaN logits."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 64,
        depth: int = 1,
        token: Callable[[str, int, int], int] | None = None,
        partial_tokens: int = 1,
    ) -> None:
        super().__init__(num_blocks, block_size, max_num_seqs, budget, depth, token)
        self.block_size = block_size
        self.cache = PrefixCache(self.manager, partial_tokens)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs, budget, prefixes=OutputPrefixes(self.cache, self.block_size)
        )
        self.life = life = _Lifecycle(self.scheduler, (EOS,))
        life.on_launch = self._launch
        self.device = PretendDevice(num_blocks, block_size, self._token)
        self.nan: set[tuple[str, int, int]] = set()

    def ask(self, request_id: str, prompt: list[int], max_tokens: int = 8, **options: Any) -> Request:
        """Add a request. ``options``: those of `SamplingParams` and of `Request`."""
        root = options.pop("cache_root", ROOT)
        params = {name: options.pop(name) for name in list(options) if hasattr(SamplingParams, name)}
        self._number += 1
        request = Request(
            request_id,
            prompt,
            SamplingParams(**params),
            1,
            max_tokens,
            self._number,
            self.now,
            cache_root=root,
            **options,
        )
        self.life.add(request)
        return request

    def finish(self, request_id: str, prompt: list[int], max_tokens: int = 1, **options: Any) -> Request:
        """Add a request and run everything to its end."""
        request = self.ask(request_id, prompt, max_tokens, **options)
        self.run()
        return request

    def check(self) -> None:
        super().check()
        tree = self.cache._tree
        self.device.check_known(tree.nodes(), self.manager.physical)
        if not self.life.live:
            assert self.cache.num_cached_blocks == self.cache.num_blocks
            assert self.manager.num_free + self.cache.num_blocks == self.manager.num_blocks

    def known(self, tokens: list[int], root: bytes = ROOT) -> int:
        """How many of ``tokens`` are known by whole blocks. Holds nothing."""
        match = self.cache._tree.match(root, token_bytes(tokens))
        return len(match.blocks) * self.block_size if match is not None else 0

    def _launch(self, plan: StepPlan) -> None:
        known = {self.manager.physical(block) for node in self.cache._tree.nodes() for block in node.blocks}
        self.device.launch(plan, list(self.manager._free_physical), known)

    def _result(self, plan: StepPlan) -> StepResult:
        self.device.commit(plan)
        result = super()._result(plan)
        is_nan = [(s.output.request.id, s.output.index, s.position) in self.nan for s in plan.samples]
        return StepResult(result.tokens, is_nan, result.logprobs, result.prompt_logprobs)
