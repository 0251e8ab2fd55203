from __future__ import annotations

import logging
import sys

import pytest
import torch
from accelerate import Accelerator, disk_offload
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.other import logger as saving_logger
from headfold.libraries import accelerate_internals as internals
from torch.distributed.launcher.api import LaunchConfig


@pytest.fixture
def accelerator(monkeypatch):
    """An accelerator whose state is put back afterwards, since accelerate shares it within the process."""
    internals.forget_settings_of_earlier_run()
    made = Accelerator(cpu=True)
    before = dict(PartialState._shared_state)
    yield made
    PartialState._shared_state.clear()
    PartialState._shared_state.update(before)
    internals.forget_settings_of_earlier_run()


def test_a_second_run_of_a_process_chooses_its_own_precision(accelerator):
    with pytest.raises(ValueError, match="already been initialized"):  # the control: accelerate remembers
        Accelerator(cpu=True, mixed_precision="bf16")
    internals.forget_settings_of_earlier_run()
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"


@pytest.mark.parametrize("asked", ["true", "false"])
def test_the_wishes_of_a_launch_are_read(asked, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", asked)
    assert internals.launch_asks_for_cpu() == internals.launch_asks_for_fsdp() == (asked == "true")


def test_fsdp_is_turned_on_where_accelerate_would_ignore_it(accelerator, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert not accelerator.is_fsdp2
    plugin = internals.fsdp_plugin(accelerator)
    assert plugin.fsdp_version == 2
    internals.turn_on_fsdp(accelerator, plugin)
    assert accelerator.is_fsdp2
    assert accelerator.distributed_type == DistributedType.FSDP
    assert AcceleratorState().fsdp_plugin is plugin
    assert PartialState().distributed_type == DistributedType.FSDP


@pytest.mark.parametrize("several", [True, False])
def test_the_launcher_takes_the_command(several, tmp_path):
    command = internals.launcher_command(tmp_path / "c.yaml", ["headfold", "uptrain", "-x"], several_on_cpus=several)
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    read = launch_command_parser().parse_args(command[3:])
    assert (read.config_file, read.multi_gpu, read.module) == (str(tmp_path / "c.yaml"), several, True)
    assert (read.training_script, read.training_script_args) == ("headfold", ["uptrain", "-x"])


def test_the_launcher_waits_for_saves_unless_the_user_says_how_long(monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    told = internals.launcher_environment(on_cpus=False, seconds_to_save=77)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", told)
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 77
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    kept = internals.launcher_environment(on_cpus=False, seconds_to_save=77)
    assert kept["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5"


def test_processes_are_told_to_stay_on_cpus(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert "ACCELERATE_USE_CPU" not in internals.launcher_environment(on_cpus=False, seconds_to_save=1)
    assert internals.launcher_environment(on_cpus=True, seconds_to_save=1)["ACCELERATE_USE_CPU"] == "true"


def test_saves_of_tied_weights_are_quiet(accelerator, tmp_path, caplog):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "ab"})
    model["b"].weight = model["a"].weight
    saving_logger.logger.setLevel(logging.NOTSET)
    accelerator.save_model(model, tmp_path / "loud")
    assert "weight" in caplog.text  # the control
    caplog.clear()
    internals.quiet_about_tied_weights()
    accelerator.save_model(model, tmp_path / "quiet")
    assert caplog.text == ""


def test_weights_on_disk_are_in_memory_for_a_while(tmp_path):
    linear = torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(linear)  # a model's own hook is of another kind than that of its parts
    x_NC = torch.randn(4, 3)
    expected, weight = linear(x_NC), linear.weight.detach().clone()
    disk_offload(model, tmp_path)
    assert linear.weight.is_meta
    with internals.weights_in_memory(model) as stored:
        assert torch.equal(linear.weight, weight)
        assert set(stored.values()) == {torch.float32}
        linear.weight.data += 1  # what is done to them counts, since the hook does not read them again
        assert not torch.equal(linear(x_NC), expected)
    assert linear.weight.is_meta
    assert torch.equal(linear(x_NC), expected)
