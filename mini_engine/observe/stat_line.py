"""The statistics line: what one API server's engines did in the last ten seconds, for people who watch the log.

    Engine 000: Avg prompt throughput: 51.2 tokens/s, Avg generation throughput: 148.0 tokens/s, Running: 8 reqs, Waiting: 2 reqs,
    KV cache usage: 12.5%, Prefix cache hit rate: 40.1%                                                            (all on one line)

Promises  costs nothing per token or message: it reads what metrics.py has counted anyway. Silent when idle: an interval without a token
          has a line only when the one before had tokens, so the last line of a busy time says that it is over.
Words     vLLM's, so that its tools read them; without the device before "KV cache", which this process does not know. Cached prompt
          tokens are no throughput. The hit rate is that of the interval, left out when no prompt was looked up in it.
Several   API servers: each has a line with its own throughput only, because the engine tells its load to one of them at a time.

Beside form 9 of a request, called by entrypoints/serve.py.    vLLM: v1/metrics/loggers.py::LoggingStatLogger
"""

import logging
import time
from collections.abc import Callable, Mapping

from mini_engine.observe.metrics import EngineSeries

logger = logging.getLogger(__name__)

LOG_STATS_INTERVAL_S = 10.0  #: vLLM: VLLM_LOG_STATS_INTERVAL


class LoggingStatLogger:
    """`engines`: PrometheusStatLogger's, only read here. `alone`: no other API server. `clock`: seconds, monotonic."""

    def __init__(self, engines: Mapping[int, EngineSeries], alone: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines, self._alone, self._clock = engines, alone, clock
        self._last_time = clock()
        self._last = {index: dict(engine.numbers) for index, engine in engines.items()}
        self._was_busy = dict.fromkeys(engines, False)

    def log_if_due(self) -> None:
        """Call it every now and then; most calls do nothing."""
        seconds = self._clock() - self._last_time
        if seconds < LOG_STATS_INTERVAL_S:
            return
        self._last_time += seconds
        for index, engine in self._engines.items():
            now = dict(engine.numbers)
            new = {name: value - self._last[index][name] for name, value in now.items()}
            prompt, generated = new["prompt_tokens"] - new["prompt_tokens_cached"], new["generation_tokens"]
            busy, was_busy = prompt + generated > 0, self._was_busy[index]
            self._last[index], self._was_busy[index] = now, busy
            if not (busy or was_busy):
                continue
            line = f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, Avg generation throughput: {generated / seconds:.1f} tokens/s"
            if self._alone:
                line += ", Running: {num_requests_running:.0f} reqs, Waiting: {num_requests_waiting:.0f} reqs".format_map(now)
                line += f", KV cache usage: {100 * now['kv_cache_usage_perc']:.1f}%"
                if queries := new["prefix_cache_queries"]:
                    line += f", Prefix cache hit rate: {100 * new['prefix_cache_hits'] / queries:.1f}%"
            logger.info("Engine %03d: %s", index, line)
