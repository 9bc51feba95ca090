"""Prometheus series of one API server, under vLLM's names, labels and buckets, so that its dashboards and tools work.

Plain numbers are kept here and turned into families only when somebody scrapes: recording a message is a few additions, takes no
lock, and costs nothing per token. The registry is the server's own, never the process-wide one: two servers in one process are apart.
Written on the event loop; a scrape from another thread may see half of one message, never a wrong type or a torn number.

Stands beside form 9 of a request.    vLLM: v1/metrics/loggers.py::PrometheusStatLogger, v1/metrics/buckets.py
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mini_engine.observe.stats import FinishedRequestStats, IterationStats
from mini_engine.wire.messages import FinishReason, SchedulerStats

# vLLM 0.32.0's bucket bounds: a dashboard's quantiles are comparable only when they are the same
REQUEST_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
INTER_TOKEN_LATENCY = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITERATION_TOKENS = tuple(1 << i for i in (0, *range(3, 15)))
PARAMS_N = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

GAUGES = {
    "num_requests_running": "Requests in the running queue.",
    "num_requests_waiting": "Requests waiting to be scheduled.",
    "kv_cache_usage_perc": "Share of the KV blocks in use; 1 is all of them.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests pushed out of the running queue to be computed again.",
    "prompt_tokens": "Prompt tokens of requests that got their first token.",
    "prompt_tokens_cached": "Of these, tokens whose KV was there already.",
    "generation_tokens": "Tokens generated.",
}


def request_tokens_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to max_model_len (vLLM: build_1_2_5_buckets)."""
    return tuple(m * 10**e for e in range(len(str(max_model_len))) for m in (1, 2, 5) if m * 10**e <= max_model_len)


class Histogram:
    """Counts per bucket, and the sum. A value equal to a bound belongs to that bound's bucket, as Prometheus wants (`le`)."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  #: the last one is +Inf
        self.total = 0.0

    def observe(self, value: float | None, times: int = 1) -> None:
        """Count `value` `times` times; None is not known and not counted."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += times
            self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        running, result = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            result.append(("+Inf" if bound == float("inf") else str(float(bound)), float(running)))
        return result


class EngineSeries:
    """All numbers of one engine. record() is the only writer."""

    def __init__(self, max_model_len: int) -> None:
        tokens = request_tokens_buckets(max_model_len)
        self.gauges: dict[str, float] = dict.fromkeys(GAUGES, 0.0)
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.request_success: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self.histograms = {
            "request_prompt_tokens": Histogram(tokens),
            "request_generation_tokens": Histogram(tokens),
            "request_max_num_generation_tokens": Histogram(tokens),
            "request_params_max_tokens": Histogram(tokens),
            "request_prefill_kv_computed_tokens": Histogram(tokens),
            "request_params_n": Histogram(PARAMS_N),
            "request_num_preemptions": Histogram(NUM_PREEMPTIONS),
            "iteration_tokens_total": Histogram(ITERATION_TOKENS),
            "time_to_first_token_seconds": Histogram(TIME_TO_FIRST_TOKEN),
            "inter_token_latency_seconds": Histogram(INTER_TOKEN_LATENCY),
            "request_time_per_output_token_seconds": Histogram(INTER_TOKEN_LATENCY),
            "e2e_request_latency_seconds": Histogram(REQUEST_LATENCY),
            "request_queue_time_seconds": Histogram(REQUEST_LATENCY),
            "request_inference_time_seconds": Histogram(REQUEST_LATENCY),
            "request_prefill_time_seconds": Histogram(REQUEST_LATENCY),
            "request_decode_time_seconds": Histogram(REQUEST_LATENCY),
        }

    def record_scheduler(self, stats: SchedulerStats) -> None:
        self.gauges["num_requests_running"] = stats.num_running_reqs
        self.gauges["num_requests_waiting"] = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.gauges["kv_cache_usage_perc"] = stats.kv_cache_usage
        self.counters["prefix_cache_queries"] += stats.prefix_cache_stats.queries
        self.counters["prefix_cache_hits"] += stats.prefix_cache_stats.hits

    def record_iteration(self, stats: IterationStats) -> None:
        prompt, counters, histograms = stats.prompt_token_stats, self.counters, self.histograms
        counters["num_preemptions"] += stats.num_preempted_reqs
        counters["prompt_tokens"] += prompt.total
        counters["prompt_tokens_cached"] += prompt.cached
        counters["generation_tokens"] += stats.num_generation_tokens
        histograms["iteration_tokens_total"].observe(prompt.computed + stats.num_generation_tokens)
        for n in stats.n_params_iter:
            histograms["request_params_n"].observe(n)
        for num_tokens in stats.max_num_generation_tokens_iter:
            histograms["request_max_num_generation_tokens"].observe(num_tokens)
        for ttft in stats.time_to_first_tokens_iter:
            histograms["time_to_first_token_seconds"].observe(ttft)
        for latency, times in stats.inter_token_latencies.items():
            histograms["inter_token_latency_seconds"].observe(latency, times)
        for finished in stats.finished_requests:
            self._record_finished(finished)

    def _record_finished(self, finished: FinishedRequestStats) -> None:
        self.request_success[finished.finish_reason] += 1
        values: Mapping[str, float | None] = {
            "request_prompt_tokens": finished.num_prompt_tokens,
            "request_generation_tokens": finished.num_generation_tokens,
            "request_params_max_tokens": finished.max_tokens_param,
            "request_prefill_kv_computed_tokens": finished.num_prompt_tokens - finished.num_cached_tokens,
            "request_num_preemptions": finished.num_preemptions,
            "request_time_per_output_token_seconds": finished.mean_time_per_output_token,
            "e2e_request_latency_seconds": finished.e2e_latency,
            "request_queue_time_seconds": finished.queued_time,
            "request_inference_time_seconds": finished.inference_time,
            "request_prefill_time_seconds": finished.prefill_time,
            "request_decode_time_seconds": finished.decode_time,
        }
        for name, value in values.items():
            self.histograms[name].observe(value)


class PrometheusStatLogger(Collector):
    """The series of every engine behind one API server, labelled `model_name` and `engine`."""

    def __init__(
        self, model_name: str, max_model_len: int, registry: CollectorRegistry | None = None, engine_indexes: Sequence[int] = (0,)
    ) -> None:
        self.model_name = model_name
        self.engines = {index: EngineSeries(max_model_len) for index in engine_indexes}
        self.cache_config: dict[int, dict[str, str]] = {}
        self.registry = registry or CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def log_engine_initialized(self, cache_config: Mapping[str, object], engine_idx: int = 0) -> None:
        """What the ready frame said (block_size, num_gpu_blocks, …): the labels of cache_config_info, whose value is always 1."""
        self.cache_config[engine_idx] = {name: str(value) for name, value in cache_config.items()}

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, engine_idx: int = 0) -> None:
        """Count one message of engine `engine_idx`."""
        if scheduler_stats is not None:
            self.engines[engine_idx].record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self.engines[engine_idx].record_iteration(iteration_stats)

    def expose(self, accept_header: str = "") -> tuple[bytes, str]:
        """Body and content type for a scraper that sent this Accept header."""
        encoder, content_type = choose_encoder(accept_header)
        return encoder(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, once per scrape."""
        labels = ("model_name", "engine")
        values = {index: (self.model_name, str(index)) for index in self.engines}
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
            for index, engine in self.engines.items():
                gauge.add_metric(values[index], engine.gauges[name])
            yield gauge
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
            for index, engine in self.engines.items():
                counter.add_metric(values[index], engine.counters[name])
            yield counter
        success = CounterMetricFamily("vllm:request_success", "Requests that ended, by reason.", labels=(*labels, "finished_reason"))
        for index, engine in self.engines.items():
            for reason, count in engine.request_success.items():
                success.add_metric((*values[index], str(reason)), count)
        yield success
        for name in next(iter(self.engines.values())).histograms:
            family = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " ").capitalize() + ".", labels=labels)
            for index, engine in self.engines.items():
                histogram = engine.histograms[name]
                family.add_metric(values[index], histogram.cumulative(), histogram.total)
            yield family
        if self.cache_config:
            names = tuple(next(iter(self.cache_config.values())))
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache of each engine.", labels=("engine", *names))
            for index, config in self.cache_config.items():
                info.add_metric((str(index), *(config[name] for name in names)), 1.0)
            yield info
