"""Launch configs, the launcher's command line, and the options of a run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from headfold import recipes
from headfold.errors import HeadfoldError, UsageError
from headfold.uptrain.processes import launch as launching
from headfold.uptrain.processes.launch import Layout, find_launch, read_layout, without_launch
from runs import called

CONFIGS = sorted((Path(recipes.__file__).parent / "accelerate").glob("*.yaml"))
LAYOUTS = {
    "one-gpu": Layout(1, False), "ddp-8": Layout(8, False), "fsdp2-8": Layout(8, True), "fsdp2-2x8": Layout(16, True),
}  # fmt: skip


def test_every_layout_is_shipped():
    assert {file.stem for file in CONFIGS} == set(LAYOUTS)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_launch_configs_are_what_accelerate_reads(file):
    config = load_config_from_file(str(file))
    assert config.num_processes == LAYOUTS[file.stem].processes
    assert config.num_machines == (2 if file.stem == "fsdp2-2x8" else 1)
    assert read_layout(file) == LAYOUTS[file.stem]
    assert find_launch(file.stem) == file.resolve()


def test_the_slurm_script_is_a_script():
    script = CONFIGS[0].with_name("slurm.sh")
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: 1", "not a launch config.*num_processes is None"),
        ("[", "not a launch config.*YAML"),
        ("# Headfold\n\nSome text.", "not a launch config.*no names"),
        ("num_processes: 0\ndistributed_type: FSDP", "num_processes is 0"),
        ("num_processes: .inf\ndistributed_type: FSDP", "num_processes is inf"),
        ("num_processes: 1\ndistributed_type: NO", "distributed_type is False"),  # YAML's NO without quotes
        ("num_processes: 1\ndistributed_type: some", "distributed_type is 'some'"),
        ("num_processes: 2\ndistributed_type: FSDP\nfsdp_config: text", "fsdp_config is 'text'"),
        ("num_processes: 2\ndistributed_type: FSDP", "first"),
        ("num_processes: 2\ndistributed_type: 'NO'", "asks for 2 processes, and distributed_type 'NO' starts one"),
        (
            "num_processes: 2\ndistributed_type: DEEPSPEED",
            "is 'DEEPSPEED', and headfold runs with NO,",
        ),
        ("num_processes: 2\ndistributed_type: MULTI_GPU\nmixed_precision: fp16", "fp16, in which headfold does not"),
    ],
)
def test_invalid_launch_configs_are_refused(content, says, tmp_path):
    file = tmp_path / "launch.yaml"
    file.write_text(content)
    with pytest.raises(UsageError, match=says):
        read_layout(file)
    with pytest.raises(UsageError, match=says):
        find_launch(str(file))


def test_a_bad_launch_config_is_refused_before_anything_starts(tmp_path, monkeypatch):
    from headfold.recipes import run
    from headfold.recipes.command import run as run_command
    from headfold.uptrain.command import uptrain as uptrain_command

    def started(*arguments, **named):
        raise AssertionError("something was started")

    monkeypatch.setattr(launching, "launch", started)
    monkeypatch.setattr(run, "run_recipe", started)
    file = tmp_path / "README.md"
    file.write_text("# Headfold\n")
    with pytest.raises(UsageError, match="not a launch config"):
        called(run_command, "demo", "-o", str(tmp_path / "out"), "--launch", str(file))
    options = ["checkpoint", "-o", str(tmp_path / "out"), "--data", "x", "--launch"]
    with pytest.raises(UsageError, match="not a launch config"):
        called(uptrain_command, *options, str(file))
    with pytest.raises(AssertionError):  # a good one is
        called(uptrain_command, *options, "ddp-8")


SRUN = """#!/bin/bash
echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > timeout
trap 'sleep 0.3; touch saved; exit 1' TERM
touch ready
for _ in $(seq 100); do sleep 0.1; [ -e fail ] && exit 1; done
"""


def test_the_slurm_script_finds_its_launch_config():
    found = re.search(r"python -c '(.+?)'", CONFIGS[0].with_name("slurm.sh").read_text())
    done = subprocess.run([sys.executable, "-c", found[1]], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(CONFIGS[0].with_name("fsdp2-2x8.yaml").resolve())


@pytest.mark.parametrize("stopped", [True, False])
def test_the_slurm_script_requeues_a_stopped_run_but_not_a_failed_one(stopped, tmp_path):
    """Under bash, with an srun whose launcher ends with 1 in both cases, as torchrun's does."""
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/bash\n[ "$1" = requeue ] && echo "$2" > requeued\ntrue\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HEADFOLD_LAUNCH": "x", "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a",
    }  # fmt: skip
    script = CONFIGS[0].with_name("slurm.sh")
    job = subprocess.Popen(["bash", str(script), "x"], cwd=tmp_path, env=environment)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    if stopped:
        job.terminate()
    else:
        (tmp_path / "fail").touch()
    assert job.wait(30) == 1
    assert (tmp_path / "saved").exists() == (tmp_path / "requeued").exists() == stopped
    assert (tmp_path / "timeout").read_text() == os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600") + "\n"


def test_an_unknown_launch_config_names_the_shipped_ones():
    with pytest.raises(UsageError) as problem:
        find_launch("nowhere")
    assert "ddp-8, fsdp2-2x8, fsdp2-8, one-gpu" in problem.value.hint


def test_the_processes_get_the_command_line_without_the_launch():
    assert without_launch(["uptrain", "x", "--launch", "ddp-8", "--steps", "3"]) == ["uptrain", "x", "--steps", "3"]
    assert without_launch(["uptrain", "--launch=ddp-8", "x"]) == ["uptrain", "x"]


FAKE = """
import signal, sys, time, pathlib
here = pathlib.Path(sys.argv[0]).parent
here.joinpath("arguments").write_text(" ".join(sys.argv[1:]))
def stop(*_):
    time.sleep(0.2); here.joinpath("saved").write_text(""); sys.exit(1)
signal.signal(signal.SIGTERM, stop)
here.joinpath("ready").write_text("")
time.sleep(float(here.joinpath("seconds").read_text())); sys.exit(int(here.joinpath("code").read_text()))
"""


@pytest.fixture
def fake_launcher(tmp_path, monkeypatch):
    """Replace accelerate's launcher by a script that waits and writes down its arguments."""
    script = tmp_path / "launcher.py"
    script.write_text(FAKE)
    real = subprocess.Popen
    monkeypatch.setattr(
        launching.subprocess, "Popen",
        lambda command, **named: real([sys.executable, str(script), *command[3:]], **named),
    )  # fmt: skip

    def prepare(seconds: float, code: int) -> Path:
        (tmp_path / "seconds").write_text(str(seconds))
        (tmp_path / "code").write_text(str(code))
        return tmp_path

    return prepare


def test_the_launcher_gets_the_config_and_the_command(fake_launcher):
    folder, file = fake_launcher(0, 0), find_launch("fsdp2-8")
    launching.launch(file, ["uptrain", "x"])
    assert (folder / "arguments").read_text() == f"--config_file {file} -m headfold uptrain x"
    fake_launcher(0, 3)
    with pytest.raises(SystemExit) as ended:
        launching.launch(file, [])
    assert ended.value.code == 3


CPUS = "distributed_type: MULTI_CPU\nnum_processes: 2\nnum_machines: 1\nmachine_rank: 0\nuse_cpu: true\n"


def test_a_launch_on_two_cpus_starts_two_processes_on_cpus(tmp_path, monkeypatch):
    """accelerate's own launcher, which starts one and says nothing, and a child in the place of headfold."""
    (tmp_path / "headfold.py").write_text(
        "import os, pathlib\n"
        "names = ('RANK', 'WORLD_SIZE', 'ACCELERATE_USE_CPU')\n"
        "pathlib.Path('rank-' + os.environ['RANK']).write_text(' '.join(os.environ[name] for name in names))\n"
    )
    file = tmp_path / "cpus.yaml"
    file.write_text(CPUS + "main_process_port: 0\n")
    assert read_layout(file) == Layout(2, False, cpu=True)
    monkeypatch.chdir(tmp_path)  # `python -m` looks here first
    launching.launch(file, [])
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert told == ["0 2 true", "1 2 true"]


def test_processes_of_mpirun_are_left_to_it(tmp_path, fake_launcher):
    folder, file = fake_launcher(0, 0), tmp_path / "mpi.yaml"
    file.write_text(CPUS + "mpirun_config:\n  mpirun_hostfile: hosts\n")
    launching.launch(file, [])
    assert "--multi_gpu" not in (folder / "arguments").read_text()
    file.write_text(CPUS)
    launching.launch(file, [])
    assert "--multi_gpu" in (folder / "arguments").read_text()


def test_a_signal_is_passed_on_to_the_processes_and_gives_exit_code_75(fake_launcher):
    import threading

    folder = fake_launcher(30, 0)

    def stop_when_ready():
        while not (folder / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_ready).start()
    with pytest.raises(HeadfoldError) as stopped:
        launching.launch(find_launch("ddp-8"), [])
    assert stopped.value.exit_code == 75
    assert (folder / "saved").exists()


CHILD = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
def stop(*_):
    here.joinpath("signalled").write_text(""); time.sleep(0.7); here.joinpath("saved").write_text(""); sys.exit(75)
signal.signal(signal.SIGTERM, stop)
here.joinpath("partial").write_text(str(os.getpid())); here.joinpath("partial").rename(here / "ready")
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_the_launcher_of_one_process_leaves_no_orphan(number, tmp_path, monkeypatch):
    """accelerate's own launcher, which passes no signal on, and a child in the place of headfold."""
    import threading

    (tmp_path / "headfold.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)  # `python -m` looks here first

    def stop_when_ready():
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop_when_ready, daemon=True).start()
    with pytest.raises(HeadfoldError) as stopped:
        launching.launch(find_launch("one-gpu"), [str(tmp_path)])
    assert stopped.value.exit_code == 75
    assert (tmp_path / "saved").exists()
    child = int((tmp_path / "ready").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
