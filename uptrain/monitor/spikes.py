"""Stop a run whose loss rises and does not come back."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ...errors import TrainingError

_ADVICE = (
    "The saves are from before: continue from them with a lower --learning-rate or --max-grad-norm and --resume "
    "always, or look at the text of these steps. --spike 0 continues regardless."
)


class SpikeDetector:
    """Compares each loss with the median of the last ones that were not spikes.

    Args:
        factor: a loss above this many times the median is a spike if it is also a nat above it: a small divergence may
            well triple while the learning rate rises. 0 detects nothing.
        losses: of the steps before, if a run continues.

    Attributes:
        losses: in nats, the last ones that were not spikes. The next one is compared with them.
        spikes: number of spikes in a row, up to the last loss.
    """

    WINDOW, MIN_LOSSES, MAX_SPIKES = 50, 20, 3
    """Losses to compare with, the fewest that are enough, and the number of spikes in a row that stops a run."""
    RISE_NATS = 1.0

    def __init__(self, factor: float, losses: Sequence[float] = ()) -> None:
        self._factor = factor
        self.losses = list(losses)
        self.spikes = 0

    @property
    def calm(self) -> bool:
        """False if the last loss was a spike. Weights of such a moment are not worth a save."""
        return not self.spikes

    def check(self, step: int, loss: float) -> None:
        """Compare the loss of a step.

        Raises:
            TrainingError: it is the third spike in a row.
        """
        # a median, since losses of single steps are noisy
        usual = median(self.losses) if self._factor and len(self.losses) >= self.MIN_LOSSES else None
        if usual is None or loss <= max(self._factor * usual, usual + self.RISE_NATS):
            # a new list, since the old one may be part of a save
            self.losses = [*self.losses, loss][-self.WINDOW :]
            self.spikes = 0
            return
        self.spikes += 1
        if self.spikes == self.MAX_SPIKES:
            raise TrainingError(
                f"At step {step} the loss is {loss:.3f}, and it has been over {self._factor:g} times the usual "
                f"{usual:.3f} for {self.MAX_SPIKES} steps.",
                _ADVICE,
            )

    def refuse_end(self, step: int) -> None:
        """Check that the run does not end in a spike.

        Raises:
            TrainingError: the last loss was one.
        """
        if not self.calm:
            raise TrainingError(f"The run ends at step {step} in a spike of the loss.", _ADVICE)
