"""Span corruption, the objective that T5 was pretrained with (Raffel et al. 2020, arXiv 1910.10683, §3.1.4).

Some spans of a text are cut out. The source is the text with a sentinel in the place of each span. The target lists the
sentinels, each followed by the tokens that it replaces. This is the sentence of the paper's figure 2 as T5's code makes
it, without the figure's last sentinel::

    text     Thank you for inviting me to your party last week
    source   Thank you <X> me to your party <Y> week </s>
    target   <X> for inviting <Y> last </s>
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from .corpus import refuse_unknown_ids
from .errors import UnsupportedError, UsageError
from .pairs import Pair

NOISE_DENSITY, MEAN_SPAN = 0.15, 3.0
_SENTINEL = re.compile("\u2581?<extra_id_([0-9]+)>")  # mt5's vocabulary has a word mark in front


@dataclass(frozen=True)
class SpanCorruption:
    """Makes a pair of any stretch of token ids.

    Attributes:
        sentinels: ids of the sentinels, in the order of their use.
        eos: id that ends source and target.
        noise_density: share of the tokens that are cut out.
        mean_span: mean number of tokens of a span.
    """

    sentinels: tuple[int, ...]
    eos: int
    noise_density: float = NOISE_DENSITY
    mean_span: float = MEAN_SPAN

    @classmethod
    def of(cls, tokenizer: Any, noise_density: float = NOISE_DENSITY, mean_span: float = MEAN_SPAN) -> SpanCorruption:
        """Use the tokenizer's own sentinels, ``<extra_id_0>`` first.

        Raises:
            UnsupportedError: the tokenizer has none, or no EOS.
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
        """Compute the lengths of source and target, EOS included, that ``tokens`` tokens of text become."""
        noise, spans = self._noise(tokens)
        return tokens - noise + spans + 1, noise + spans + 1

    def tokens_for(self, sequence_length: int) -> int:
        """Find the most tokens of text whose source fits into ``sequence_length`` tokens: 568 for 512, as in T5's code.

        Raises:
            UsageError: ``sequence_length`` is too small for a span, or needs more sentinels than there are.
        """
        # searched, since rounding leaves no formula to invert
        tokens = max(2, sequence_length // 2)
        while self.lengths(tokens + 1)[0] <= sequence_length:
            tokens += 1
        if self.lengths(tokens)[0] > sequence_length:
            raise UsageError(
                f"A sequence of {sequence_length} tokens is too small for span corruption.",
                "Give --sequence-length 8 or more.",
            )
        self.require(tokens)
        return tokens

    def require(self, tokens: int) -> None:
        """Check that a pair can be made of a text of this length.

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

        The number of tokens and of spans is fixed, see :meth:`lengths`; only the places are drawn. Text and spans take
        turns, text first. Their lengths are drawn from all ways of dividing the tokens, each with equal chance.

        Raises:
            UsageError: see :meth:`require`.
        """
        self.require(len(ids))
        noise, spans = self._noise(len(ids))
        text_runs = _divide(len(ids) - noise, spans, draw)
        noise_runs = _divide(noise, spans, draw)
        source: list[int] = []
        target: list[int] = []
        place = 0
        for sentinel, text, cut in zip(self.sentinels[:spans], text_runs, noise_runs, strict=True):
            source += [*ids[place : place + text], sentinel]
            place += text
            target += [sentinel, *ids[place : place + cut]]
            place += cut
        return Pair([*source, self.eos], [*target, self.eos])

    def _noise(self, tokens: int) -> tuple[int, int]:
        """Count the tokens that are cut out, and the spans that they form.

        At least one token is cut out and at least one stays, and every span has text before it.
        """
        noise = min(max(round(tokens * self.noise_density), 1), tokens - 1)
        spans = max(round(noise / self.mean_span), 1)
        return noise, min(spans, noise, tokens - noise)


def plain_ids(tokenizer: Any, text: str, embeddings: int | None = None) -> list[int]:
    """Tokenize a text to cut spans out of, without EOS and the like.

    Args:
        embeddings: rows of the model's embedding; None: any token is taken.

    Raises:
        DataError: the model has no embedding for one of the tokens.
    """
    # verbose=False: no warning that the text is longer than the model's context, since it is cut into blocks
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if embeddings is not None and ids:
        refuse_unknown_ids(max(ids), embeddings)
    return ids


def _divide(tokens: int, parts: int, draw: random.Random) -> list[int]:
    """Divide ``tokens`` tokens into ``parts`` parts, none of them empty, and return their lengths."""
    # distinct borders, so that no part is empty
    borders = sorted(draw.sample(range(1, tokens), parts - 1))
    return [end - begin for begin, end in zip([0, *borders], [*borders, tokens], strict=True)]
