from __future__ import annotations

import pytest
import torch
from headfold.libraries.torch_internals import LiveTensors, offset_in_file


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


@pytest.mark.parametrize("new_format", [True, False])
def test_the_place_of_a_storage_in_its_file_is_known(new_format, tmp_path):
    file = tmp_path / "x.bin"
    tensors = {"a": torch.arange(3.0), "b": torch.arange(5.0)}
    torch.save(tensors, file, _use_new_zipfile_serialization=new_format)
    loaded = torch.load(file, map_location="meta", weights_only=True)
    if not new_format:
        assert offset_in_file(loaded["a"]) is None
        return
    for name, tensor in tensors.items():
        begin = offset_in_file(loaded[name])
        assert file.read_bytes()[begin : begin + tensor.nbytes] == tensor.numpy().tobytes()
