"""Watch a run: its metrics, their trackers, spikes of the loss, and held-out text."""
