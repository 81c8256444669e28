"""The schedule is a pure function of the step, and the run's length follows from epochs or steps."""

import math

import pytest

from service.config.schema import OptimSection, TrainSection
from service.train.schedule import Schedule, make_schedule, total_steps


def test_warm_up_is_linear_and_the_cosine_ends_at_the_minimum():
    schedule = Schedule(peak=1.0, minimum=0.1, warmup=10, total=110)
    assert [schedule(s) for s in range(10)] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert schedule(10) == pytest.approx(1.0)
    assert schedule(60) == pytest.approx(0.55)
    assert schedule(110) == schedule(1000) == pytest.approx(0.1)
    values = [schedule(s) for s in range(10, 111)]
    assert values == sorted(values, reverse=True)
    assert schedule(109) > 0.1


def test_peak_scales_with_the_global_batch_unless_given():
    train = TrainSection(global_batch=1024, epochs=10)
    assert make_schedule(OptimSection(base_lr=8e-4), train, 102400).peak == pytest.approx(3.2e-3)
    assert make_schedule(OptimSection(lr=0.5), train, 102400).peak == 0.5


def test_lengths_follow_from_epochs_or_steps():
    train = TrainSection(global_batch=100, epochs=2.5)
    assert total_steps(train, 1000) == 25
    assert total_steps(train.model_copy(update={"steps": 7}), 1000) == 7
    assert total_steps(train, 10) == 1
    assert make_schedule(OptimSection(warmup_epochs=0.5), train, 1000).warmup == 5
    assert make_schedule(OptimSection(warmup_epochs=0.5, warmup_steps=3), train, 1000).warmup == 3


def test_no_warm_up_starts_at_the_peak_and_a_run_inside_its_warm_up_only_rises():
    assert Schedule(1.0, 0.0, 0, 10)(0) == 1.0
    rising = [Schedule(1.0, 0.0, 40, 10)(s) for s in range(10)]
    assert rising == sorted(rising)
    assert all(math.isfinite(v) and v > 0 for v in rising)
