"""Weights from disk into the decoder's fused tensors, one tensor at a time: no second copy of the model is ever in memory.

Promises  after load_model() every weight has been written exactly once, in the dtype asked for; else it raises, naming file and tensor.

Stands before a request's path.    vLLM: model_executor/model_loader/default_loader.py
"""

import contextlib
import ctypes
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_engine.config import Quantization
from mini_engine.exceptions import VLLMValidationError
from mini_engine.model import cpu_kernels
from mini_engine.model.config import ModelConfig
from mini_engine.model.decoder import Decoder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_model(
    model_dir: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
    use_kernels: bool = True,
) -> Decoder:
    """Read config.json and the weights of `model_dir`. Raises VLLMValidationError for whatever is missing, corrupt or unsupported.

    use_kernels: the C kernels, for float32 on CPU, where they build."""
    files = weight_files(model_dir)
    kernels = cpu_kernels.load() if use_kernels and (torch.device(device).type, dtype) == ("cpu", torch.float32) else None
    if quantization == "int8" and kernels is None:
        raise VLLMValidationError("quantization int8 needs the C kernels: see the warning above", parameter="quantization")
    model = Decoder(ModelConfig.from_dir(model_dir), dtype, device, kernels)
    with torch.inference_mode():
        load_weights(model, iterate_safetensors(files), where=str(model_dir))
        model.pack(quantization)
    _trim_heap()
    return model


def weight_files(model_dir: str | Path) -> list[Path]:
    """The safetensors files of a model directory: those its index names, or the single one."""
    model_dir = Path(model_dir)
    index = model_dir / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise VLLMValidationError(f"{index}: not a safetensors index: {type(e).__name__}: {e}") from e
    else:
        names = [SINGLE]
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise VLLMValidationError(f"{model_dir}: no {', '.join(missing)}; the directory must hold all weights as safetensors")
    return [model_dir / name for name in names]


def iterate_safetensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) over all files. The tensor is a view of the mapped file: copy it before asking for the next."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict: keys() is all it has)
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as e:
            raise VLLMValidationError(f"{file}: corrupt or truncated safetensors file ({e}); fetch it again") from e


def load_weights(model: Decoder, weights: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Copy `weights` into the model's slots. Only rotary tables and a tied lm_head may be left over: a weight without a place would
    be a model that computes something else."""
    slots = model.slots()
    unknown = []
    for name, tensor in weights:
        slot = slots.pop(name, None)
        per_head = name.endswith(("q_norm.weight", "k_norm.weight"))  # one vector, copied to each head's row
        if slot is None:
            if "rotary_emb." not in name and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
                unknown.append(name)
        elif tensor.shape == (slot.shape[1:] if per_head else slot.shape):
            slot.copy_(tensor)
        else:
            raise VLLMValidationError(f"{where}: {name} has shape {list(tensor.shape)}, but config.json asks for {list(slot.shape)}")
    if slots:
        names = sorted(slots)
        raise VLLMValidationError(f"{where}: {len(names)} weight(s) missing, first {', '.join(names[:3])}")
    if unknown:
        raise VLLMValidationError(f"{where}: {len(unknown)} tensor(s) without a place in config.json's model, or twice, first {unknown[0]}")


def _trim_heap() -> None:
    """Give freed memory back to the system: what was weights before they were packed."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
