"""Requests for a server under load: lengths, shared prefixes and arrivals from a seed, as plain data."""

import random
from dataclasses import asdict, dataclass
from typing import Any

FIRST_TOKEN_ID = 3  # below are the tokens that begin and end texts


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: ``512`` fixed, ``256-1024`` uniform, ``exp:512`` exponential of that mean."""

    kind: str
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError."""
        kind, _, mean = text.partition(":")
        low, dash, high = (mean, "", "") if kind == "exp" else text.partition("-")
        parsed = cls("exp" if kind == "exp" else "uniform", int(low), int(high if dash else low))
        if not 1 <= parsed.low <= parsed.high:
            raise ValueError(f"{text!r} is no range of lengths")
        return parsed

    def draw(self, generator: random.Random) -> int:
        """At least 1; an exponential draw is cut at 4 times its mean."""
        if self.kind == "exp":
            return max(1, min(round(generator.expovariate(1 / self.low)), 4 * self.low))
        return generator.randint(self.low, self.high)


@dataclass(frozen=True)
class Planned:
    """One request. ``at``: seconds after the start, None = when a worker is free. ``prefix``: which shared prefix."""

    number: int
    at: float | None
    prompt_tokens: int
    output_tokens: int
    prefix: int | None
    prefix_tokens: int


@dataclass(frozen=True)
class Workload:
    """``prefix_share`` of the requests begin with one of ``prefixes`` prefixes of ``prefix_tokens`` tokens."""

    prompts: Lengths
    outputs: Lengths
    prefix_tokens: int
    prefixes: int
    prefix_share: float
    seed: int

    def plan(self, count: int, rate: float | None, first_wave: int = 0) -> list[Planned]:
        """``count`` requests: a Poisson process of ``rate`` per second, or none of them timed.

        The lengths do not depend on the rate. Outputs of the ``first_wave`` requests are cut at random: what is sent
        together does not end together, so that those that follow arrive one by one, as they would later on.
        """
        lengths, arrivals, now = random.Random(f"{self.seed}-lengths"), random.Random(f"{self.seed}-arrivals"), 0.0
        cuts = random.Random(f"{self.seed}-first-wave")
        planned = []
        for number in range(count):
            shared = lengths.random() < self.prefix_share
            prefix = lengths.randrange(self.prefixes) if shared else None
            prompt, output = self.prompts.draw(lengths), self.outputs.draw(lengths)
            if number < first_wave:
                output = cuts.randint(1, output)
            now += arrivals.expovariate(rate) if rate else 0.0
            at = now if rate else None
            planned.append(Planned(number, at, prompt, output, prefix, self.prefix_tokens if shared else 0))
        return planned


def token_ids(request: dict[str, Any], seed: str, vocab_size: int) -> list[int]:
    """The prompt of a planned request (as a dict): its shared prefix, and tokens of its own after it."""
    prefix = _draw(f"{seed}-prefix-{request['prefix']}", request["prefix_tokens"], vocab_size)
    return prefix + _draw(f"{seed}-prompt-{request['number']}", request["prompt_tokens"], vocab_size)


def split(planned: list[Planned], parts: int) -> list[list[dict[str, Any]]]:
    """The requests dealt out in turn, as dicts."""
    return [[asdict(request) for request in planned[part::parts]] for part in range(parts)]


def _draw(seed: str, count: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_TOKEN_ID, vocab_size), k=count)
