"""What an output has to do with the prefix cache, from admission to its end. Pure Python, no torch."""

from engine.prefix_cache import PrefixCache, PrefixHit
from engine.radix_tree import TOKEN_BYTES, token_bytes
from engine.request import Output


class OutputPrefixes:
    """The rules: who looks up, what is inserted and when. Owns no state but the outputs' own."""

    def __init__(self, cache: PrefixCache, block_size: int) -> None:
        self.cache = cache
        self._block_size = block_size

    def take(self, output: Output) -> PrefixHit | None:
        """What is known of an output that is to be admitted, held for it. Its last token is always computed.

        Nothing for prompts below one block, and where the prompt's own logits are wanted: cached positions have none.
        """
        root = output.request.cache_root
        if root is None or not self._looks_up(output):
            return None
        return self.cache.take(root, _tokens(output)[:-TOKEN_BYTES])

    def _looks_up(self, output: Output) -> bool:
        request = output.request
        wants_logits = request.params.prompt_logprobs is not None or request.max_tokens == 0
        return request.cache_root is not None and output.num_tokens > self._block_size and not wants_logits

    def give_back(self, hit: PrefixHit | None) -> None:
        """Undo `take`: the output was not admitted."""
        if hit is not None:
            self.cache.give_back(hit)

    def count(self, output: Output, hit: PrefixHit | None, hit_tokens: int) -> None:
        """An output was admitted for the first time."""
        stats = self.cache.stats
        if self._looks_up(output):
            stats.lookups += 1
            stats.looked_up_tokens += len(output.request.prompt)
        stats.hits += hit_tokens > 0
        stats.hit_tokens += hit_tokens
        stats.copies += hit is not None and hit.partial is not None

    def written(self, output: Output) -> None:
        """Make known what is written and committed of an output; whole blocks that are not known yet.

        Nothing of outputs seated before a flush, nor of their forks: some hold the same blocks, others do not.
        """
        if output.seated_at_flush != self.cache.num_flushes:
            return
        request, cache = output.request, output.cache
        whole = output.num_kept_tokens // self._block_size
        if cache is None or request.cache_root is None or whole <= output.num_known_blocks:
            return
        tokens = _tokens(output)[: whole * self._block_size * TOKEN_BYTES]
        output.prefix = self.cache.insert(output.prefix, request.cache_root, tokens, cache.blocks[:whole])
        output.num_known_blocks = whole

    def fork(self, parent: Output, fork: Output) -> None:
        """A fork holds what its parent holds."""
        fork.seated_at_flush = parent.seated_at_flush
        if parent.prefix is not None:
            fork.prefix = self.cache.fork(parent.prefix)
            fork.num_known_blocks = parent.num_known_blocks

    def leave(self, output: Output) -> None:
        """The output gives its blocks back: what it wrote stays known, its hold ends.

        One that has lost its root since it was seated gave NaN: what it alone made known is forgotten with it.
        """
        self.written(output)
        if output.cache is not None:
            output.cache.release()
        if output.prefix is not None:
            end = self.cache.release if output.request.cache_root is not None else self.cache.discard
            end(output.prefix)
            output.prefix, output.num_known_blocks = None, 0


def _tokens(output: Output) -> bytes:
    """Prompt and committed tokens."""
    return output.request.prompt_bytes + token_bytes(output.token_ids)
