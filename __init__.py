"""headfold: turn a pretrained multi-head-attention checkpoint into a grouped-query one, and show what it cost."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("headfold")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"
