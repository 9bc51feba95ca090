"""PrometheusStatLogger: vLLM's names, labels and buckets, exact counts, and two servers apart in one process."""

import math
from collections import Counter

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from mini_engine.observe.metrics import INTER_TOKEN_LATENCY, PrometheusStatLogger, request_tokens_buckets
from mini_engine.observe.metrics import Histogram as OurHistogram
from mini_engine.observe.stats import IterationStats, RequestStateStats
from mini_engine.wire.messages import EngineCoreOutput, FinishReason, PrefillStats, PrefixCacheStats, SchedulerStats

# what a stock text server exposes (WIRE §9) and this engine can fill
NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "cache_config_info",
]


def scrape(logger: PrometheusStatLogger) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name → labels without model_name and engine → value."""
    body, content_type = logger.expose("")
    assert content_type.startswith("text/plain")
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine")))
            samples.setdefault(sample.name, {})[rest] = sample.value
    return samples


def finished_request() -> IterationStats:
    stats, request = IterationStats(iteration_timestamp=102.0), RequestStateStats(arrival_time=100.0)
    stats.update_from_output(EngineCoreOutput("r", [7], prefill_stats=PrefillStats(40, 8, 32)), 11.0, request)
    stats.update_from_output(EngineCoreOutput("r", [8]), 11.02, request)
    stats.update_from_finished_request(FinishReason.STOP, 40, 16, request)
    stats.n_params_iter.append(1)
    stats.max_num_generation_tokens_iter.append(2)
    return stats


def test_names_and_labels_are_vllms() -> None:
    logger = PrometheusStatLogger("m", 8192)
    logger.log_engine_initialized({"block_size": 16, "num_gpu_blocks": 100})
    families = {family.name: family for family in text_string_to_metric_families(logger.expose("")[0].decode())}
    assert {f"vllm:{name}" for name in NAMES} == {name for name in families if name.startswith("vllm:")}
    for name in NAMES[:-1]:
        assert all(s.labels["model_name"] == "m" and s.labels["engine"] == "0" for s in families[f"vllm:{name}"].samples), name
    (info,) = families["vllm:cache_config_info"].samples
    assert (info.labels, info.value) == ({"engine": "0", "block_size": "16", "num_gpu_blocks": "100"}, 1.0)
    assert set(scrape(logger)["vllm:request_success_total"]) == {(("finished_reason", str(reason)),) for reason in FinishReason}


def test_one_finished_request_is_counted_everywhere() -> None:
    logger = PrometheusStatLogger("m", 8192)
    scheduler_stats = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(queries=40, hits=32),
    )
    for _ in range(2):
        logger.record(scheduler_stats, finished_request())
    samples = scrape(logger)
    value = {name: values[()] for name, values in samples.items() if () in values}
    assert value["vllm:num_requests_running"] == 3
    assert value["vllm:num_requests_waiting"] == 3
    assert value["vllm:kv_cache_usage_perc"] == 0.25
    assert (value["vllm:prefix_cache_queries_total"], value["vllm:prefix_cache_hits_total"]) == (80, 64)
    assert (value["vllm:prompt_tokens_total"], value["vllm:prompt_tokens_cached_total"]) == (80, 64)
    assert value["vllm:generation_tokens_total"] == 4
    assert samples["vllm:request_success_total"][(("finished_reason", "stop"),)] == 2
    assert value["vllm:iteration_tokens_total_sum"] == 2 * (8 + 2)
    assert value["vllm:e2e_request_latency_seconds_sum"] == 4.0
    assert value["vllm:inter_token_latency_seconds_count"] == 2
    assert value["vllm:request_params_max_tokens_sum"] == 32
    assert value["vllm:request_queue_time_seconds_count"] == 0  # no events: unknown, not zero


def test_histogram_equals_prometheus_clients() -> None:
    """Counts per bucket and sum, at the bounds, between them and above, against the library's own."""
    bounds = sorted(INTER_TOKEN_LATENCY)
    values = Counter({0.0: 3, 0.01: 2, math.nextafter(0.01, 1): 1, 0.3: 5, 80.0: 1, 81.0: 4})
    registry = CollectorRegistry()
    theirs = Histogram("x", "x", buckets=bounds, registry=registry)
    ours = OurHistogram(INTER_TOKEN_LATENCY)
    for value, times in values.items():
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    (family,) = registry.collect()
    expected = {s.labels["le"]: s.value for s in family.samples if s.name == "x_bucket"}
    assert dict(ours.cumulative()) == expected
    assert ours.total == next(s.value for s in family.samples if s.name == "x_sum")


def test_bucket_bounds() -> None:
    assert request_tokens_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert request_tokens_buckets(8192)[-1] == 5000
    assert request_tokens_buckets(1) == (1,)


def test_two_servers_in_one_process_are_apart() -> None:
    one, two = PrometheusStatLogger("m", 100), PrometheusStatLogger("m", 100)
    one.record(None, finished_request())
    assert scrape(one)["vllm:generation_tokens_total"][()] == 2
    assert scrape(two)["vllm:generation_tokens_total"][()] == 0


def test_engines_behind_one_server_have_their_own_series() -> None:
    logger = PrometheusStatLogger("m", 100, engine_indexes=(0, 1))
    logger.record(SchedulerStats(num_running_reqs=5), None, engine_idx=1)
    (family,) = [f for f in text_string_to_metric_families(logger.expose("")[0].decode()) if f.name == "vllm:num_requests_running"]
    assert {s.labels["engine"]: s.value for s in family.samples} == {"0": 0, "1": 5}


def test_openmetrics_is_served_to_those_who_ask() -> None:
    body, content_type = PrometheusStatLogger("m", 100).expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
