"""Prometheus series of one API server, under vLLM's names, labels and buckets, so that its dashboards and tools work.

Plain numbers are kept here and turned into families only when somebody scrapes: recording a message is a few additions, takes no
lock, and costs nothing per token. The registry is the server's own, never the process-wide one: two servers in one process are apart.
Written on the event loop; a scrape from another thread may see half of one message, never a wrong type or a torn number.

Stands beside form 9 of a request.    vLLM: v1/metrics/loggers.py::PrometheusStatLogger, v1/metrics/buckets.py
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mini_engine.observe.stats import IterationStats
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

#: name → (kind, help); plain numbers
NUMBERS: dict[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str]] = {
    "num_requests_running": (GaugeMetricFamily, "Requests in the running queue."),
    "num_requests_waiting": (GaugeMetricFamily, "Requests waiting to be scheduled."),
    "kv_cache_usage_perc": (GaugeMetricFamily, "Share of the KV blocks in use; 1 is all of them."),
    "prefix_cache_queries": (CounterMetricFamily, "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": (CounterMetricFamily, "Prompt tokens found in the prefix cache."),
    "num_preemptions": (CounterMetricFamily, "Requests pushed out of the running queue to be computed again."),
    "prompt_tokens": (CounterMetricFamily, "Prompt tokens of requests that got their first token."),
    "prompt_tokens_cached": (CounterMetricFamily, "Of these, tokens whose KV was there already."),
    "generation_tokens": (CounterMetricFamily, "Tokens generated."),
}
#: name → (bucket bounds; None: 1, 2, 5, 10, … up to max_model_len, the field of FinishedRequestStats that it counts, if it is one)
HISTOGRAMS: dict[str, tuple[Sequence[float] | None, str | None]] = {
    "request_prompt_tokens": (None, "num_prompt_tokens"),
    "request_generation_tokens": (None, "num_generation_tokens"),
    "request_params_max_tokens": (None, "max_tokens_param"),
    "request_prefill_kv_computed_tokens": (None, "num_computed_tokens"),
    "request_max_num_generation_tokens": (None, None),
    "request_params_n": (PARAMS_N, None),
    "request_num_preemptions": (NUM_PREEMPTIONS, "num_preemptions"),
    "iteration_tokens_total": (ITERATION_TOKENS, None),
    "time_to_first_token_seconds": (TIME_TO_FIRST_TOKEN, None),
    "inter_token_latency_seconds": (INTER_TOKEN_LATENCY, None),
    "request_time_per_output_token_seconds": (INTER_TOKEN_LATENCY, "mean_time_per_output_token"),
    "e2e_request_latency_seconds": (REQUEST_LATENCY, "e2e_latency"),
    "request_queue_time_seconds": (REQUEST_LATENCY, "queued_time"),
    "request_inference_time_seconds": (REQUEST_LATENCY, "inference_time"),
    "request_prefill_time_seconds": (REQUEST_LATENCY, "prefill_time"),
    "request_decode_time_seconds": (REQUEST_LATENCY, "decode_time"),
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
        bounds = (*(str(float(bound)) for bound in self.bounds), "+Inf")
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class EngineSeries:
    """All numbers of one engine. The record methods are the only writers."""

    def __init__(self, max_model_len: int) -> None:
        self.numbers: dict[str, float] = dict.fromkeys(NUMBERS, 0.0)
        self.request_success: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        tokens = request_tokens_buckets(max_model_len)
        self.histograms = {name: Histogram(bounds or tokens) for name, (bounds, _) in HISTOGRAMS.items()}

    def record_scheduler(self, stats: SchedulerStats) -> None:
        numbers = self.numbers
        numbers["num_requests_running"] = stats.num_running_reqs
        numbers["num_requests_waiting"] = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        numbers["kv_cache_usage_perc"] = stats.kv_cache_usage
        numbers["prefix_cache_queries"] += stats.prefix_cache_stats.queries
        numbers["prefix_cache_hits"] += stats.prefix_cache_stats.hits

    def record_iteration(self, stats: IterationStats) -> None:
        numbers, histograms = self.numbers, self.histograms
        numbers["num_preemptions"] += stats.num_preempted_reqs
        numbers["prompt_tokens"] += stats.num_prompt_tokens
        numbers["prompt_tokens_cached"] += stats.num_cached_tokens
        numbers["generation_tokens"] += stats.num_generation_tokens
        histograms["iteration_tokens_total"].observe(stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_generation_tokens)
        for n in stats.n_params_iter:
            histograms["request_params_n"].observe(n)
        for num_tokens in stats.max_num_generation_tokens_iter:
            histograms["request_max_num_generation_tokens"].observe(num_tokens)
        for ttft in stats.time_to_first_tokens_iter:
            histograms["time_to_first_token_seconds"].observe(ttft)
        for latency, times in stats.inter_token_latencies.items():
            histograms["inter_token_latency_seconds"].observe(latency, times)
        for finished in stats.finished_requests:
            self.request_success[finished.finish_reason] += 1
            for name, (_, field) in HISTOGRAMS.items():
                if field is not None:
                    histograms[name].observe(getattr(finished, field))


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
        engines = [((self.model_name, str(index)), engine) for index, engine in self.engines.items()]
        for name, (kind, text) in NUMBERS.items():
            family = kind(f"vllm:{name}", text, labels=labels)
            for values, engine in engines:
                family.add_metric(values, engine.numbers[name])
            yield family
        success = CounterMetricFamily("vllm:request_success", "Requests that ended, by reason.", labels=(*labels, "finished_reason"))
        for values, engine in engines:
            for reason, count in engine.request_success.items():
                success.add_metric((*values, str(reason)), count)
        yield success
        for name in HISTOGRAMS:
            histogram = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " ").capitalize() + ".", labels=labels)
            for values, engine in engines:
                histogram.add_metric(values, engine.histograms[name].cumulative(), engine.histograms[name].total)
            yield histogram
        if self.cache_config:
            names = tuple(next(iter(self.cache_config.values())))
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache of each engine.", labels=("engine", *names))
            for index, config in self.cache_config.items():
                info.add_metric((str(index), *(config[name] for name in names)), 1.0)
            yield info
