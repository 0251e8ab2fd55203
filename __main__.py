"""Run ``python -m headfold``, as ``accelerate launch -m headfold`` does."""

from .cli import main

main()
