from __future__ import annotations

import torch
from headfold.libraries.torch_internals import LiveTensors


def test_what_an_operation_makes_counts_until_it_is_freed():
    kept = torch.ones(1000)
    with LiveTensors() as live:
        first = kept + 1
        view = first.view(10, 100)
        del first, view
        second = [kept * 2, kept * 3]
        del second
    assert live.peak == 2 * 4000


def test_tensors_within_nested_results_count_and_meta_tensors_do_not():
    with LiveTensors() as live:
        torch.ones(1000, device="meta") + 1
        torch.ones(40).split([20, 20])  # views of one storage
        torch.sort(torch.ones(1000))  # values and indices
    assert live.peak == 4000 + 4000 + 8000
