"""Kill, resume, compare: the same bits and the same record as an uninterrupted run."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from runs import (
    Start,
    assert_same,
    children_of,
    events_of,
    final_tensors,
    make_config,
    make_run,
    run_to_end,
    start_torchrun,
    state_of,
    wait_for_step,
)

from service.train.checkpoint import list_checkpoints

LONG = {"steps": 60, "eval_every": 25}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A finished run of 60 steps by number of ranks."""
    runs: dict[int, Path] = {}

    def get(ranks: int) -> Path:
        if ranks not in runs:
            runs[ranks] = make_run(tmp_path_factory.mktemp("whole") / str(ranks), make_config(train=LONG))
            run_to_end(runs[ranks], ranks)
        return runs[ranks]

    return get


def test_a_run_ends_with_its_last_checkpoint_and_a_record_of_each_event(uninterrupted):
    folder = uninterrupted(1)
    # The last but one is of step 57, unless the disk was behind.
    steps = [step for step, _ in list_checkpoints(folder / "checkpoints")]
    assert len(steps) == 2
    assert steps[-1] == 60
    events = events_of(folder)
    assert [e["step"] for e in events if "loss" in e] == list(range(4, 61, 4))
    assert [e["step"] for e in events if "val_loss" in e] == [25, 50, 60]
    assert (state_of(folder)["status"], state_of(folder)["step"]) == ("finished", 60)
    assert [path.name for path in (folder / "reconstructions").iterdir()] == ["step-00000060.png"]


def test_a_finished_run_started_again_changes_nothing(tmp_path):
    folder = make_run(tmp_path, make_config(train={"steps": 6}))
    run_to_end(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix in (".jsonl", ".png")}
    run_to_end(folder)
    assert before == {p: p.read_bytes() for p in before}
    assert state_of(folder)["status"] == "finished"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_stopped_by_a_signal_and_resumed(tmp_path, uninterrupted, name):
    folder = make_run(tmp_path, make_config(train=LONG))
    start = Start(folder)
    wait_for_step(folder, 3)
    start.signal(signal.Signals[name])
    start.signal(signal.SIGTERM)
    codes, output = start.finish()
    assert codes == [75], output
    state = state_of(folder)
    assert state["status"] == "stopped"
    assert 3 <= state["step"] < 60
    assert name in state["reason"]
    assert list_checkpoints(folder / "checkpoints")[-1][0] == state["step"]
    assert f"resuming from step-{state['step']:08d}" in run_to_end(folder)
    assert_same(folder, uninterrupted(1))


def test_two_ranks_stop_together_when_one_gets_the_signal(tmp_path, uninterrupted):
    folder = make_run(tmp_path, make_config(train=LONG))
    start = Start(folder, ranks=2)
    wait_for_step(folder, 3)
    start.signal(signal.SIGUSR1, rank=1)
    codes, output = start.finish()
    assert codes == [75, 75], output
    assert state_of(folder)["status"] == "stopped"
    assert list_checkpoints(folder / "checkpoints")[-1][0] == state_of(folder)["step"]
    run_to_end(folder, ranks=2)
    assert_same(folder, uninterrupted(2))


def test_two_ranks_killed_twice_in_an_epoch(tmp_path, uninterrupted):
    folder = make_run(tmp_path, make_config(train=LONG))
    for step in (3, 6):
        start = Start(folder, ranks=2)
        wait_for_step(folder, step)
        start.kill()
    run_to_end(folder, ranks=2)
    assert_same(folder, uninterrupted(2))


def test_one_rank_killed_ends_the_other_as_a_failure_that_a_retry_may_cure(tmp_path):
    folder = make_run(tmp_path, make_config(train=LONG))
    start = Start(folder, ranks=2)
    wait_for_step(folder, 3)
    start.signal(signal.SIGKILL, rank=1)
    codes, output = start.finish()
    assert codes == [1, -signal.SIGKILL], output
    assert (state_of(folder)["status"], state_of(folder)["exit_code"]) == ("failed", 1)
    assert "rank 0" in state_of(folder)["reason"]


def test_another_number_of_ranks_goes_on_with_the_same_samples(tmp_path):
    # Masks and stochastic depth are the sample's, so only the order of sums differs.
    steady = make_config(model=make_config().model.model_copy(update={"drop_path_rate": 0.3}), train=LONG)
    one = make_run(tmp_path / "one", steady)
    run_to_end(one)
    other = make_run(tmp_path / "other", steady)
    start = Start(other, ranks=2)
    wait_for_step(other, 12)
    start.signal(signal.SIGTERM)
    assert start.finish()[0] == [75, 75]
    run_to_end(other)
    for mine, theirs in zip(events_of(one), events_of(other), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    weights = final_tensors(other)
    for name, tensor in final_tensors(one).items():
        assert weights[name].allclose(tensor, rtol=1e-2, atol=1e-4), name


def test_a_killed_run_leaves_no_step_twice_in_the_record(tmp_path):
    folder = make_run(tmp_path, make_config(train=LONG, checkpoint={"every_steps": 25}))
    start = Start(folder)
    wait_for_step(folder, 25)
    while max((e["step"] for e in events_of(folder)), default=0) < 32:
        time.sleep(0.01)
    start.kill()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 36, "lo')
    run_to_end(folder)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert [e["step"] for e in events_of(folder) if "loss" in e] == list(range(4, 61, 4))


@pytest.mark.slow
def test_under_torchrun_killed_and_signalled(tmp_path, uninterrupted):
    folder = make_run(tmp_path, make_config(train=LONG))
    process = start_torchrun(folder, 2)
    wait_for_step(folder, 3)
    workers = children_of(process)
    os.killpg(process.pid, signal.SIGKILL)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    newest = list_checkpoints(folder / "checkpoints")[-1][0]
    process = start_torchrun(folder, 2)
    wait_for_step(folder, newest + 1)
    os.kill(children_of(process)[1], signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert state_of(folder)["status"] == "stopped", output
    assert list_checkpoints(folder / "checkpoints")[-1][0] == state_of(folder)["step"]
    process = start_torchrun(folder, 2)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert_same(folder, uninterrupted(2))


@pytest.mark.slow
def test_twenty_random_kills_lose_nothing(tmp_path):
    config = make_config(train={"steps": 400, "eval_every": 50}, checkpoint={"every_steps": 2})
    whole = make_run(tmp_path / "whole", config)
    run_to_end(whole)
    folder = make_run(tmp_path / "killed", config)
    generator = random.Random(0)
    newest = 0
    for kill in range(20):
        start = Start(folder)
        wait_for_step(folder, newest + 1)
        time.sleep(generator.uniform(0, 0.1))
        start.kill()
        newest = list_checkpoints(folder / "checkpoints")[-1][0]
        assert newest < 400, f"finished before kill {kill}: make the run longer"
    assert "damaged" not in run_to_end(folder)
    assert_same(folder, whole)
