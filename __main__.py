"""``python -m headfold``, which ``accelerate launch -m headfold`` needs."""

from .cli import main

main()
