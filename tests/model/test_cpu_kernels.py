"""The C kernels against plain float64 arithmetic, for every instruction set that this processor has; how they are built, and when not."""

import functools
import logging
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.config import EngineConfig, Quantization
from mini_engine.exceptions import VLLMValidationError
from mini_engine.model import build_kernels, cpu_kernels
from mini_engine.model.config import ModelConfig
from mini_engine.model.cpu_attention import GROUP, MAX_HEAD_DIM, CPUAttentionBackend
from mini_engine.model.cpu_kernels import CPUKernels, CPULinear, HugePages
from mini_engine.model.int8_linear import MAX_INPUTS, TERMS, Int8Linear
from mini_engine.model.layers import RMSNorm
from mini_engine.model.loader import load_model
from mini_engine.worker import worker
from mini_engine.worker.worker import Worker
from tests.model.conftest import activations, exact
from tests.model.paged import dense_logits
from tests.tiny_model import FAMILIES, Family, make_tiny_model
from tools.quality import TEXT, measure

LEVELS = 63  #: linear_int8.c's
#: gcc's name of an instruction set → what /proc/cpuinfo must have for it; vectors.h and dot4() have a branch for each
INSTRUCTION_SETS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw", "native": ""}
AVOID_FMA = "--param=avoid-fma-max-bits=512"  #: what gcc does of itself for some processors: an addition of its own, in loops with one sum


def here() -> list[str]:
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.is_file() else set()
    return [name for name, flag in INSTRUCTION_SETS.items() if not flag or flag in flags] + [AVOID_FMA] * ("fma" in flags)


def flags_for(name: str) -> list[str]:
    if name == AVOID_FMA:
        return [AVOID_FMA, *build_kernels.FLAGS]
    return [f"-march={name}" if flag == "-march=native" else flag for flag in build_kernels.FLAGS]


@pytest.fixture(scope="module", params=here())
def each(request: pytest.FixtureRequest, kernels: CPUKernels) -> CPUKernels:
    """The kernels as a processor with no more than these instructions gets them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_kernels, "FLAGS", flags_for(request.param))
        return CPUKernels(build_kernels.build(build_kernels.compiler()))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(kernels: CPUKernels, weight: Tensor, bias: Tensor | None = None, quantization: Quantization = "none") -> CPULinear:
    kind = Int8Linear if quantization == "int8" else CPULinear
    return kind(kernels, HugePages(CPULinear.most_bytes(weight)), weight, bias)


SHAPES = {"rows": st.integers(1, 40), "outputs": st.integers(1, 130), "inputs": st.integers(1, 70), "with_bias": st.booleans()}


@given(**SHAPES, accumulate=st.booleans())
def test_linear_is_exact(each: CPUKernels, rows: int, outputs: int, inputs: int, with_bias: bool, accumulate: bool) -> None:
    """Any number of rows, and outputs that do not fill a panel. A row alone has the same bits as in the crowd."""
    x, weight = activations(rows, inputs, 1), random(outputs, inputs, seed=2)
    bias, before = random(outputs, seed=3) if with_bias else None, random(rows, outputs, seed=4)
    kernel, y = linear(each, weight, bias), before.clone()
    y = kernel(x, y) if accumulate else kernel(x)
    torch.testing.assert_close(y.double(), exact(x, weight, bias) + (before if accumulate else 0), rtol=1e-5, atol=1e-4)
    alone = [kernel(row[None], old[None].clone() if accumulate else None) for row, old in zip(x, before, strict=True)]
    assert torch.equal(torch.cat(alone), y)


def check_int8(kernels: CPUKernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """|error| <= sum |x| * half a weight step + sum |w| * half a step of the second activation term, and float32's own rounding."""
    kernel = linear(kernels, weight, bias, "int8")
    expected, y = exact(x, weight, bias), kernel(x)
    weight_step, activation_step = weight.double().abs().amax(1) / 127, x.double().abs().amax(1) / LEVELS / (2 * LEVELS)
    bound = x.double().abs().sum(1)[:, None] * weight_step / 2
    bound += activation_step[:, None] / 2 * (weight.double().abs().sum(1) + weight.shape[1] * weight_step)
    error = (y.double() - expected).abs()
    assert (error <= bound * 1.01 + 1e-5 * expected.abs().amax() + 1e-6).all()
    assert torch.equal(torch.cat([kernel(row[None]) for row in x]), y)  # a row does not depend on its neighbours
    return error


@given(**SHAPES, scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_int8_is_within_its_rounding(each: CPUKernels, rows: int, outputs: int, inputs: int, with_bias: bool, scale: float) -> None:
    """`scale`: of all rows but the first."""
    x = activations(rows, inputs, 2)
    x[1:] *= scale
    check_int8(each, x, random(outputs, inputs, seed=5), random(outputs, seed=3) if with_bias else None)


@pytest.mark.parametrize("inputs", [1536, 8192])
def test_int8_of_a_real_size(each: CPUKernels, inputs: int) -> None:
    """Far from zero on average: the sums that take the weights' 128 out are larger than float32 holds exactly."""
    error = check_int8(each, activations(5, inputs, 2) + 2, random(40, inputs, seed=5), None)
    assert error.max() > 0  # it is not the exact kernel under another name


def test_int8_is_the_same_on_every_processor(each: CPUKernels, kernels: CPUKernels) -> None:
    """Whole numbers are added up, whatever adds them (the scaling after them may be contracted); and the largest activation times the
    largest weight, twice, fits in 16 bits."""
    for x, weight in ((activations(9, 67, 6), random(40, 67, seed=7)), (torch.ones(2, 64), torch.ones(16, 64))):
        y = linear(each, weight, None, "int8")(x)
        torch.testing.assert_close(y, linear(kernels, weight, None, "int8")(x), rtol=1e-6, atol=0)
    torch.testing.assert_close(y, torch.full((2, 16), 64.0))


def test_int8_refuses_what_would_overflow(kernels: CPUKernels) -> None:
    largest = torch.ones(1, MAX_INPUTS)
    assert linear(kernels, largest, None, "int8")(largest).item() == pytest.approx(MAX_INPUTS)
    with pytest.raises(VLLMValidationError, match=f"at most {MAX_INPUTS} inputs, this model has one of {MAX_INPUTS + 1}"):
        linear(kernels, torch.ones(1, MAX_INPUTS + 1), None, "int8")


def test_constants_are_those_of_the_c_files() -> None:
    """Another GROUP would overrun the cache, another TERMS the scratch."""
    text = "".join(path.read_text() for path in build_kernels.CSRC.glob("*.[ch]"))
    for name, value in (("GROUP", GROUP), ("MAX_HEAD_DIM", MAX_HEAD_DIM), ("TERMS", TERMS), ("LEVELS", LEVELS)):
        assert re.findall(rf"\b{name} = (\d+),", text) == [str(value)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_is_not_finite_stays_so_and_in_its_row(each: CPUKernels, quantization: Quantization, bad: float) -> None:
    x, kernel = random(5, 24, seed=8), linear(each, random(40, 24, seed=9), None, quantization)
    before = kernel(x)
    x[2, 7] = bad
    y = kernel(x)
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@given(rows=st.integers(1, 20), size=st.integers(1, 80), scale=st.sampled_from([1e-6, 1.0, 1e4]))
def test_rms_norm(each: CPUKernels, rows: int, size: int, scale: float) -> None:
    x, weight = random(rows, size, seed=10) * scale, random(size, seed=11)
    expected = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(each.rms_norm(x, weight, 1e-5).double(), expected, rtol=2e-6, atol=1e-7)


@given(rows=st.integers(1, 20), size=st.integers(1, 80), scale=st.sampled_from([1e-6, 1.0, 30.0, 1e5, 1e30]))
def test_silu_and_mul(each: CPUKernels, rows: int, size: int, scale: float) -> None:
    gate, up = random(rows, size, seed=12) * scale, random(rows, size, seed=13)
    expected = torch.nn.functional.silu(gate.double()) * up
    torch.testing.assert_close(each.silu_and_mul(torch.cat((gate, up), 1)).double(), expected, rtol=1e-6, atol=1e-30)


def shape(num_kv_heads: int, shared: int, head_dim: int) -> ModelConfig:
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": head_dim}
    heads = {"num_attention_heads": num_kv_heads * shared, "num_key_value_heads": num_kv_heads}
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    return ModelConfig.from_dict(config | sizes | heads)


@given(data=st.data(), num_kv_heads=st.integers(1, 3), shared=st.integers(1, 15), head_dim=st.sampled_from([16, 48, 64, 256]))
@settings(max_examples=25)
def test_attention(each: CPUKernels, data: st.DataObject, num_kv_heads: int, shared: int, head_dim: int) -> None:
    """A request in chunks beside another, with q/k norm or without: the same bits as whole and alone, and close to softmax(q k / sqrt(d)) v
    in float64. NaN where nothing is."""
    config, num_tokens = shape(num_kv_heads, shared, head_dim), data.draw(st.integers(1, 150), label="num_tokens")
    block_size = data.draw(st.sampled_from([16, 32]), label="block_size")
    qkv = random(num_tokens, config.num_heads + 2 * num_kv_heads, head_dim, seed=num_tokens)
    norm = RMSNorm(config.num_heads + num_kv_heads, head_dim, eps=1e-5, dtype=torch.float32, device=torch.device("cpu"))
    norm.weight.copy_(random(*norm.weight.shape, seed=14))
    qk_norm = data.draw(st.sampled_from([None, norm]), label="qk_norm")
    angles = random(num_tokens, head_dim // 2, seed=15)
    cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)

    def attend(chunks: list[int], neighbour: bool) -> Tensor:
        """neighbour: beside the same tokens in reverse, in other blocks."""
        backend, num_blocks = CPUAttentionBackend(each, config, block_size), -(-num_tokens // block_size)
        table = np.random.default_rng(16).permutation(np.arange(1, 2 * num_blocks + 1, dtype=np.int32)).reshape(2, num_blocks)
        (kv_cache,) = backend.new_kv_caches(2 * num_blocks + 1)
        kv_cache.fill_(math.nan)
        outputs, computed, count = [], 0, 1 + neighbour
        for chunk in chunks:
            span, rows = slice(computed, computed + chunk), np.array([1, 0][:count])
            computed += chunk
            positions = np.tile(np.arange(span.start, span.stop), count)
            step = backend.build(rows, np.array([chunk] * count), np.array([computed] * count), positions, table)
            both = torch.cat((qkv[span], qkv[span].flip(0))[:count]).flatten(1)
            out = step.attend(both, qk_norm, torch.cat((cos[span],) * count), torch.cat((sin[span],) * count), kv_cache)
            outputs.append(out[:chunk].view(chunk, config.num_heads, head_dim))
        return torch.cat(outputs)

    chunks = []
    while sum(chunks) < num_tokens:
        chunks.append(data.draw(st.integers(1, num_tokens - sum(chunks)) | st.just(1), label="chunk"))
    out = attend(chunks, neighbour=True)
    assert torch.equal(out, attend([num_tokens], neighbour=False))
    qk, v = qkv[:, : config.num_heads + num_kv_heads].double(), qkv[:, config.num_heads + num_kv_heads :].double()
    if qk_norm is not None:
        qk = torch.nn.functional.rms_norm(qk, (head_dim,), None, 1e-5) * norm.weight.double()
    qk = qk * cos.double()[:, None] + torch.roll(qk, head_dim // 2, -1) * sin.double()[:, None]
    k, v = (t.repeat_interleave(shared, 1).transpose(0, 1) for t in (qk[:, config.num_heads :], v))
    expected = torch.nn.functional.scaled_dot_product_attention(qk[:, : config.num_heads].transpose(0, 1), k, v, is_causal=True)
    torch.testing.assert_close(out.double(), expected.transpose(0, 1), rtol=1e-4, atol=1e-5)


# ── as a model ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_int8_model_is_close_to_the_exact_one(kernels: CPUKernels, tmp_path: Path, family: Family, tied: bool) -> None:
    """With biases (qwen2), and with an embedding that is the head too: the head is packed, the embedding stays exact."""
    make_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    sequence = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        plain = dense_logits(load_model(tmp_path), sequence)
        int8 = dense_logits(load_model(tmp_path, quantization="int8"), sequence)
    assert 0 < (plain - int8).abs().mean() < 0.05 * plain.std()


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_int8_beside_another_type_is_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(VLLMValidationError, match="int8 works on float32 on CPU"):
        Worker(EngineConfig(str(tmp_path), device="cpu", quantization="int8", num_threads=1, **changes))


def test_int8_on_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "choose_device", torch.device)
    with pytest.raises(VLLMValidationError, match=r"int8 works on float32 on CPU, not .* on cuda"):
        Worker(EngineConfig(str(make_tiny_model(tmp_path)), device="cuda", quantization="int8", num_threads=1))


@pytest.mark.model
def test_int8_costs_little_quality(kernels: CPUKernels) -> None:
    """On the committed text; measured when this was written: perplexity 25.78 → 26.0, 93 % the same likeliest token."""
    result = measure(EngineConfig().model, TEXT.read_text(encoding="utf-8"), "int8", num_threads=1)
    assert result["tokens"] > 800
    assert result["perplexity"] < 1.02 * result["perplexity_float32"]
    assert result["same_likeliest_token"] > 0.9


# ── built, or not ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("command", "script", "said"),
    [
        ("no-such-cc", "", "there is no 'no-such-cc'; install gcc"),
        ('cc "-DX', "", "No closing quotation"),
        ("{}", 'echo "unknown option" >&2; exit 1', "unknown option"),
        ("{}", "printf 'no \\344\\366 here' >&2; exit 1", " here"),  # not UTF-8
        ("{}", "exit 0", "cannot open shared object file"),  # says it compiled
        ("{}", 'for last; do :; done; echo junk > "$last"', "kernels.so: file too short"),  # compiles to something else
        ("cc -fvisibility=hidden", "", "undefined symbol"),  # to something without our functions
        ("{}", "exec sleep 60", "timed out"),
    ],
    ids=["none", "quotes", "refuses", "latin-1", "writes-nothing", "writes-junk", "hides", "hangs"],
)
def test_without_a_compiler_torch_goes_on(
    command: str, script: str, said: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "fake-cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", command.format(compiler))
    if "sleep" in script:
        monkeypatch.setattr(build_kernels, "BUILD_TIMEOUT_S", 1.0)
    monkeypatch.setattr(cpu_kernels, "load", functools.cache(cpu_kernels.load.__wrapped__))
    make_tiny_model(tmp_path)
    with caplog.at_level(logging.WARNING, logger=cpu_kernels.__name__):
        models = [load_model(tmp_path) for _ in range(2)]
    (record,) = caplog.records  # once, not per model
    assert "no C kernels" in record.getMessage() and said in record.getMessage()
    assert torch.equal(dense_logits(models[0], [5, 6, 7]), dense_logits(load_model(tmp_path, use_kernels=False), [5, 6, 7]))
    with pytest.raises(VLLMValidationError, match="int8 needs the C kernels: see the warning"):
        load_model(tmp_path, quantization="int8")


def test_two_processes_build_at_once_and_then_nobody(kernels: CPUKernels, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets a whole library; it stays for as long as source, flags and compiler are the same."""
    code = "from mini_engine.model import cpu_kernels; import sys; sys.exit(cpu_kernels.load() is None)"
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, said = process.communicate(timeout=100)
        assert process.returncode == 0, said
    (library,) = cache.iterdir()
    built = library.stat().st_mtime_ns
    build_kernels.build(build_kernels.compiler())
    assert library.stat().st_mtime_ns == built
    monkeypatch.setattr(build_kernels, "FLAGS", [*build_kernels.FLAGS, "-DOTHER"])
    build_kernels.build(build_kernels.compiler())
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "half", "changed", "directory"])
def test_a_damaged_library_is_built_anew(kernels: CPUKernels, damage: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is never loaded: half a library ends the process by SIGBUS, and a changed one by whatever it does."""
    build_kernels.build(build_kernels.compiler())
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    library.unlink()
    if damage == "directory":
        library.mkdir()
    else:
        library.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "changed": whole[:-9] + b"junk" + whole[-5:]}[damage])
    CPUKernels(build_kernels.build(build_kernels.compiler()))
    assert (library.is_dir() and "cannot be kept" in caplog.text) if damage == "directory" else library.read_bytes() == whole


def test_without_a_cache_each_start_builds(
    kernels: CPUKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "file" / "cache"))
    CPUKernels(build_kernels.build(build_kernels.compiler()))
    assert "cannot be kept" in caplog.text and "MINI_ENGINE_CACHE" in caplog.text
    monkeypatch.delenv("MINI_ENGINE_CACHE")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-at-all").expanduser())
    with pytest.raises(VLLMValidationError, match="Set MINI_ENGINE_CACHE"):
        build_kernels.build(build_kernels.compiler())


@pytest.mark.parametrize("name", here())
def test_they_compile_without_a_warning(kernels: CPUKernels, name: str, tmp_path: Path) -> None:
    flags = (*flags_for(name), "-Wall", "-Wextra", "-Wshadow", "-Werror")
    for source in build_kernels.CSRC.glob("*.c"):
        run = subprocess.run([*build_kernels.compiler(), *flags, "-c", source, "-o", tmp_path / "x.o"], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def test_there_is_one_openmp(kernels: CPUKernels) -> None:
    """Two would keep two teams of threads on the same cores."""
    code = "import torch; from mini_engine.model import cpu_kernels; cpu_kernels.load(); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "/kernels-" in maps
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}) == 1


def test_memory_is_zeroed_and_lives_as_long_as_a_tensor() -> None:
    pages = HugePages(1 << 16)
    first, second = pages.take(3, 5), pages.take(7, dtype=torch.uint8)
    del pages
    assert not first.any() and not second.any()
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    first.fill_(1.0)
    assert not second.any()


def test_memory_is_private_and_asks_for_huge_pages() -> None:
    tensor = HugePages(1 << 22).take(1 << 20)
    name, flags = "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            name = line if start <= tensor.data_ptr() < end else ""
        elif name and line.startswith("VmFlags:"):
            flags = line
            break
    assert " rw-p " in name
    assert not Path("/sys/kernel/mm/transparent_hugepage").exists() or " hg" in flags
