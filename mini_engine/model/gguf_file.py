"""GGUF reader: metadata and tensors of one file, mapped into memory, nothing believed that lies outside the file.

Promises  every length in the header is checked against the file before it is used: a truncated or damaged file raises
          VLLMValidationError with the offset, never allocates what a wrong length asks for, never reads past the end.
Layout    "GGUF", version, tensor count, key count, then (key, type, value) pairs, then (name, shape, type, offset) per tensor,
          then, aligned, the data. Shapes are written fastest dimension first; `shape` here is numpy's order.
Not here  what the names mean (gguf_convert.py). The reader of the `gguf` package takes two seconds for a vocabulary of 49,152
          strings, ours a tenth; its block formats are used (`gguf.quants`), not rewritten.

Before the request's path: on the way from a downloaded file to a model directory.    vLLM: transformers_utils/gguf_utils.py
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from mini_engine.exceptions import VLLMValidationError

#: value type → struct code; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]  #: slowest dimension first
    ggml_type: int
    offset: int  #: from the start of the file
    n_bytes: int


class GGUFFile:
    """An open GGUF file; use as a context manager. `metadata` maps key → Python value, `tensors` name → GGUFTensor."""

    def __init__(self, path: Path) -> None:
        """Reads the header only. Raises VLLMValidationError when the file is missing, not GGUF, damaged or too short."""
        self.path = path
        try:
            with path.open("rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
            raise VLLMValidationError(f"cannot read {path}: {e}", parameter="model", value=str(path)) from None
        self._pos = 0
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        if self._take(4) != b"GGUF":
            raise self._error("does not start with 'GGUF': not a GGUF file")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version}; this reader knows 2 and 3")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name, num_dims = self._string(), self._scalar("I")
            dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
            infos.append((name, dims[::-1], self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"alignment {alignment!r}: damaged")
        data_start = -(-self._pos // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, data_start + offset) for name, shape, kind, offset in infos}

    def _tensor(self, name: str, shape: tuple[int, ...], ggml_type: int, offset: int) -> GGUFTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
        except (ValueError, KeyError):
            raise self._error(f"tensor {name} has unknown type {ggml_type}") from None
        if not shape or shape[-1] % block:
            raise self._error(f"tensor {name}: a row of {shape[-1] if shape else 0} is no multiple of its block of {block}")
        n_bytes = 1
        for n in shape:
            n_bytes *= n
        n_bytes = n_bytes // block * block_bytes
        if offset + n_bytes > len(self._map):
            raise self._error(f"tensor {name} ends at byte {offset + n_bytes:,}: truncated")
        return GGUFTensor(name, shape, ggml_type, offset, n_bytes)

    def dequantize(self, name: str) -> np.ndarray:
        """The tensor as a float32 array of its `shape`, independent of this file. Raises VLLMValidationError if a value is not finite."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        t = self.tensors[name]
        kind = GGMLQuantizationType(t.ggml_type)
        raw = np.frombuffer(self._map[t.offset : t.offset + t.n_bytes], np.uint8).reshape(*t.shape[:-1], -1)  # a copy: close() stays free
        try:
            array = dequantize(raw.view({"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)), kind)
        except NotImplementedError:
            raise self._error(f"tensor {name} is stored as {kind.name}, which the gguf package cannot expand") from None
        array = np.ascontiguousarray(array, np.float32).reshape(t.shape)
        if not np.isfinite(array).all():
            raise self._error(f"tensor {name} holds values that are not finite: damaged")
        return array

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _error(self, what: str) -> VLLMValidationError:
        return VLLMValidationError(f"{self.path} ({len(self._map):,} bytes): {what}", parameter="model", value=str(self.path))

    def _take(self, n: int) -> bytes:
        end = self._pos + n
        if end > len(self._map):
            raise self._error(f"header asks for {n:,} bytes at {self._pos:,}: truncated or damaged")
        data = self._map[self._pos : end]
        self._pos = end
        return data

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        try:
            return self._take(int.from_bytes(self._take(8), "little")).decode()
        except UnicodeDecodeError:
            raise self._error(f"text that is not UTF-8 before byte {self._pos:,}: damaged") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if code := _SCALARS.get(item):
                return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize("<" + code))))
            if item == _STRING:
                return [self._string() for _ in range(count)]
            kind = item  # arrays of arrays exist on paper only
        elif code := _SCALARS.get(kind):
            return self._scalar(code)
        raise self._error(f"unknown value type {kind} before byte {self._pos:,}: damaged")
