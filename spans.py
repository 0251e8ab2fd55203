"""Span corruption, the objective that T5 was pretrained with (Raffel et al. 2020, arXiv 1910.10683, §3.1.4).

Some spans of a text are cut out. The source is the text with a sentinel in the place of each, the target the sentinels,
each with the tokens that stood there. The sentence of the paper's figure 2 as T5's code has it, which leaves out the
figure's last sentinel::

    text     Thank you for inviting me to your party last week
    source   Thank you <X> me to your party <Y> week </s>
    target   <X> for inviting <Y> last </s>
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedError, UsageError
from .pairs import Pair

NOISE_DENSITY, MEAN_SPAN = 0.15, 3.0
_SENTINEL = re.compile("\u2581?<extra_id_([0-9]+)>")  # mt5's vocabulary has a word mark in front


@dataclass(frozen=True)
class SpanCorruption:
    """Makes a pair of any stretch of token ids.

    Attributes:
        sentinels: ids of the sentinels, in the order of their use.
        eos: id that closes source and target.
        noise_density: share of the tokens that are cut out.
        mean_span: tokens of a span on average.
    """

    sentinels: tuple[int, ...]
    eos: int
    noise_density: float = NOISE_DENSITY
    mean_span: float = MEAN_SPAN

    @classmethod
    def of(cls, tokenizer: Any, noise_density: float = NOISE_DENSITY, mean_span: float = MEAN_SPAN) -> SpanCorruption:
        """With the tokenizer's own sentinels, ``<extra_id_0>`` first.

        Raises:
            UnsupportedError: it has none, or no EOS.
        """
        numbered = {
            int(found[1]): place
            for token, place in tokenizer.get_vocab().items()
            if (found := _SENTINEL.fullmatch(token)) is not None
        }
        if not numbered or tokenizer.eos_token_id is None:
            raise UnsupportedError(
                "The tokenizer has no sentinels <extra_id_0>, <extra_id_1>, … and EOS, which span corruption needs; "
                "this model was not pretrained with it.",
                "Train and evaluate on pairs: name two columns with --source-column and --target-column.",
            )
        return cls(tuple(numbered[key] for key in sorted(numbered)), tokenizer.eos_token_id, noise_density, mean_span)

    def lengths(self, tokens: int) -> tuple[int, int]:
        """Tokens of source and target, EOS included, that ``tokens`` tokens of text become."""
        noise, spans = self._noise(tokens)
        return tokens - noise + spans + 1, noise + spans + 1

    def tokens_for(self, sequence_length: int) -> int:
        """The most tokens of text whose source fits into ``sequence_length`` tokens: 568 for 512, as T5 has it.

        Raises:
            UsageError: ``sequence_length`` is too small for a span, or needs more sentinels than there are.
        """
        tokens = max(2, sequence_length // 2)
        while self.lengths(tokens + 1)[0] <= sequence_length:
            tokens += 1
        if self.lengths(tokens)[0] > sequence_length:
            raise UsageError(
                f"A block of {sequence_length} tokens is too small for span corruption.",
                "Give --sequence-length 8 or more.",
            )
        self.require(tokens)
        return tokens

    def require(self, tokens: int) -> None:
        """Refuse texts of a length of which no pair can be made.

        Raises:
            UsageError: ``tokens`` are too few for a span, or need more sentinels than there are.
        """
        if tokens < 2:
            raise UsageError(f"{tokens} tokens are too few to cut a span out.", "Give --sequence-length 8 or more.")
        spans = self._noise(tokens)[1]
        if spans > len(self.sentinels):
            raise UsageError(
                f"{tokens} tokens have {spans} spans cut out, and the tokenizer has {len(self.sentinels)} sentinels.",
                "Give a smaller --sequence-length, or longer spans (--mean-span).",
            )

    def __call__(self, ids: list[int], draw: random.Random) -> Pair:
        """Cut spans out of these tokens.

        As many tokens and spans as :meth:`lengths` counts, whatever is drawn. Text and spans take turns, text first;
        how long each is, is drawn from all ways of dividing the tokens with equal chance.

        Raises:
            UsageError: see :meth:`require`.
        """
        self.require(len(ids))
        noise, spans = self._noise(len(ids))
        kept_runs = _divide(len(ids) - noise, spans, draw)
        noise_runs = _divide(noise, spans, draw)
        source: list[int] = []
        target: list[int] = []
        place = 0
        for sentinel, kept, cut in zip(self.sentinels[:spans], kept_runs, noise_runs, strict=True):
            source += [*ids[place : place + kept], sentinel]
            place += kept
            target += [sentinel, *ids[place : place + cut]]
            place += cut
        return Pair([*source, self.eos], [*target, self.eos])

    def _noise(self, tokens: int) -> tuple[int, int]:
        """Tokens that are cut out, one at least and one less than all at most, and spans that they form."""
        noise = min(max(round(tokens * self.noise_density), 1), tokens - 1)
        spans = max(round(noise / self.mean_span), 1)
        return noise, min(spans, noise, tokens - noise)


def _divide(tokens: int, parts: int, draw: random.Random) -> list[int]:
    """Lengths of ``parts`` non-empty parts of ``tokens`` tokens."""
    borders = sorted(draw.sample(range(1, tokens), parts - 1))
    return [end - begin for begin, end in zip([0, *borders], [*borders, tokens], strict=True)]
