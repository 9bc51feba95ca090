"""The statistics line: vLLM's words, rates of the interval, one last line, silence when idle. A fake clock, no waiting."""

import logging
import re

import pytest

from mini_engine.observe.metrics import PrometheusStatLogger
from mini_engine.observe.stat_line import LOG_STATS_INTERVAL_S, LoggingStatLogger
from mini_engine.observe.stats import IterationStats
from mini_engine.wire.messages import PrefixCacheStats, SchedulerStats

# as scripts that watch vLLM's log look for it
VLLMS = re.compile(
    r"Engine (\d{3}): Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs, Waiting: (\d+) reqs, KV cache usage: ([\d.]+)%(?:, Prefix cache hit rate: ([\d.]+)%)?"
)


class Log:
    """A stat logger over a real PrometheusStatLogger, the time in `now`, and what has been said since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture, *, alone: bool = True, engines: tuple[int, ...] = (0,)) -> None:
        self.now = 1000.0
        self.caplog = caplog
        caplog.set_level(logging.INFO, logger="mini_engine")
        self.metrics = PrometheusStatLogger("m", 100, engine_indexes=engines)
        self.logger = LoggingStatLogger(self.metrics.engines, alone, clock=lambda: self.now)

    def work(self, prompt: int, cached: int, generated: int, stats: SchedulerStats | None = None, engine: int = 0) -> None:
        iteration = IterationStats(num_prompt_tokens=prompt, num_cached_tokens=cached, num_generation_tokens=generated)
        self.metrics.record(stats, iteration, engine)

    def after(self, seconds: float) -> list[str]:
        self.now += seconds
        self.caplog.clear()
        self.logger.log_if_due()
        return self.caplog.messages


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


def test_the_line_is_vllms(log: Log) -> None:
    load = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.125,
        prefix_cache_stats=PrefixCacheStats(queries=40, hits=30),
    )
    log.work(100, 40, 250, load)
    (line,) = log.after(LOG_STATS_INTERVAL_S)
    match = VLLMS.fullmatch(line)
    assert match and match.groups() == ("000", "6.0", "25.0", "3", "3", "12.5", "75.0")  # what was cached was not computed


def test_one_line_per_interval_then_a_last_one_then_silence(log: Log) -> None:
    assert log.after(60) == []  # never busy: nothing to say
    log.work(0, 0, 30)
    assert log.after(LOG_STATS_INTERVAL_S - 0.1) == []
    log.work(0, 0, 30)
    (line,) = log.after(0.1)
    assert "generation throughput: 6.0 tokens/s" in line
    assert log.after(1) == []
    (last,) = log.after(LOG_STATS_INTERVAL_S)
    match = VLLMS.fullmatch(last)
    assert match and match.groups()[1:3] == ("0.0", "0.0") and match[7] is None  # no prompt was looked up
    assert [log.after(LOG_STATS_INTERVAL_S) for _ in range(3)] == [[], [], []]
    log.work(0, 0, 5)
    (again,) = log.after(2 * LOG_STATS_INTERVAL_S)  # a late look: the rate is over the time that really passed
    assert "generation throughput: 0.2 tokens/s" in again


def test_rates_are_of_the_interval_not_of_all_time(log: Log) -> None:
    rates = []
    for tokens in (1000, 10):
        log.work(0, 0, tokens)
        rates += [VLLMS.fullmatch(line)[3] for line in log.after(LOG_STATS_INTERVAL_S)]  # type: ignore[index]
    assert rates == ["100.0", "1.0"]


def test_engines_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog, engines=(0, 1))
    log.work(0, 0, 50, engine=1)
    assert [line[:11] for line in log.after(LOG_STATS_INTERVAL_S)] == ["Engine 001:"]


def test_one_of_several_servers_does_not_guess_the_engines_load(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog, alone=False)
    log.work(10, 0, 50, SchedulerStats(num_running_reqs=7))
    assert log.after(10) == ["Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 5.0 tokens/s"]
