"""msgpack codec: a message becomes frame 0 plus one auxiliary frame per large array, and back without copying the arrays.

    frame 0   msgpack of the message; an array in it is [dtype, shape, data]
              data = Ext(3, bytes)      0-d, or fewer than 256 bytes: inline
              data = i (an int)         otherwise: the bytes are frame i, counted from 1
    frame i   C-contiguous little-endian memory, as it lies in the array

The type of a field says how its dtype is written: `np.ndarray` as numpy's typestr (`<i4`), `Tensor` as torch's name (`int32`).
numpy has no bfloat16, so a `bfloat16` tensor is refused on decode, and said so; nothing that this project reads is one.

Promises  decode() raises msgspec.DecodeError, or its subclass ValidationError (with the path), whatever the bytes are.
Callers   an array handed to encode() must not change until its frames are sent; a decoded array is read-only and keeps its frame alive.
          One encoder or decoder per thread.
Not here  sockets, and what the messages mean (messages.py). Pickle (Ext 1 and 2): refused, always.

Stands at forms 4 and 8 of a request.    vLLM: v1/serial_utils.py::MsgpackEncoder, MsgpackDecoder; WIRE §1.8
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import msgpack

from mini_engine import overlay as overlays
from mini_engine.wire.messages import Tensor

BytesLike = bytes | bytearray | memoryview

RAW_VIEW = 3  #: Ext code of an inline array
INLINE_BELOW = 256  #: bytes; an array of exactly this size already travels in a frame of its own

_NAMES = ("bool", *(f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)), "float16", "float32", "float64")
#: the only dtypes that cross: by torch's name, and by numpy's typestr in both byte orders
_TORCH_TYPES = {name: np.dtype(name) for name in _NAMES}
_NUMPY_TYPES = {d.str: d for base in _TORCH_TYPES.values() for d in (base, base.newbyteorder(">"))}


class MsgpackEncoder:
    """Message → frames. Raises TypeError for an object that has no wire form, OverflowError for an int above 64 bits."""

    def __init__(self, overlay: Mapping[str, str] = {}) -> None:
        self._encoder = msgpack.Encoder(enc_hook=self._enc_hook)
        self._overlay_encode = overlays.load(overlay, "wire.codec", None)
        self._inline_below = 0 if self._overlay_encode else INLINE_BELOW  # a learner's encoder need not know Ext
        self._aux: list[BytesLike] = []

    def encode(self, obj: object) -> list[BytesLike]:
        """Frames in fresh memory: [frame 0, aux frames…], all bytes-like."""
        return self.encode_into(obj, bytearray())

    def encode_into(self, obj: object, buffer: bytearray) -> list[BytesLike]:
        """The same, with frame 0 written over `buffer`, which the caller must not reuse before frame 0 is sent."""
        self._aux = frames = list[BytesLike]([buffer])
        try:
            if self._overlay_encode is None:
                self._encoder.encode_into(obj, buffer)
            else:
                buffer[:] = self._overlay_encode(msgspec.to_builtins(obj, enc_hook=self._enc_hook, builtin_types=(bytes,)))
        finally:
            self._aux = []
        return frames

    def _enc_hook(self, array: object) -> Any:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} {array!r:.80} has no wire form: send builtins, messages of wire/ or arrays")
        dtype = array.dtype.str
        if dtype not in _NUMPY_TYPES:
            raise TypeError(f"an array of dtype {array.dtype} has no wire form; known: {', '.join(_NAMES)}")
        if isinstance(array, Tensor):
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            dtype = array.dtype.name
        data: BytesLike = array.data if array.flags.c_contiguous else array.tobytes()
        if array.ndim == 0 or array.nbytes < self._inline_below:
            return dtype, array.shape, msgpack.Ext(RAW_VIEW, data)
        self._aux.append(data)
        return dtype, array.shape, len(self._aux) - 1


class MsgpackDecoder:
    """Frames → message. Without a type: builtins, in which an array stays `[dtype, shape, data]`."""

    def __init__(self, type: Any = None) -> None:
        self._decoder = msgpack.Decoder(Any if type is None else type, dec_hook=self._dec_hook, ext_hook=_ext_hook)
        self._frames: Sequence[BytesLike] = ()

    def decode(self, frames: Sequence[BytesLike]) -> Any:
        """Raises msgspec.DecodeError (malformed, truncated) or its subclass ValidationError (well formed, but wrong), nothing else."""
        if not frames:
            raise msgspec.DecodeError("a message needs at least one frame, got none")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except msgspec.DecodeError:
            raise
        except Exception as e:  # e.g. RecursionError, MemoryError: bytes from outside chose the depth and the sizes
            raise msgspec.DecodeError(f"{type(e).__name__}: {e}") from e
        finally:
            self._frames = ()

    def _dec_hook(self, wanted: type, obj: Any) -> Any:
        """msgspec adds the field's path to a ValueError raised here."""
        if not (isinstance(wanted, type) and issubclass(wanted, np.ndarray)):
            raise ValueError(f"no way to decode a {wanted}")
        match obj:
            case [str(name), [*shape], data] if all(type(n) is int and n >= 0 for n in shape):
                pass
            case _:
                raise ValueError(f"an array must be [dtype, shape (ints >= 0), frame index or Ext {RAW_VIEW}], got {obj!r:.80}")
        types = _TORCH_TYPES if wanted is Tensor else _NUMPY_TYPES
        if name not in types:
            note = " (numpy cannot hold it)" if name == "bfloat16" else ""
            raise ValueError(f"dtype must be one of {', '.join(types)}, got {name!r}{note}")
        if type(data) is int and 1 <= data < len(self._frames):
            data = memoryview(self._frames[data])
        if not isinstance(data, memoryview):
            raise ValueError(f"data must be Ext {RAW_VIEW} or a frame index in [1, {len(self._frames) - 1}], got {data!r:.80}")
        dtype = types[name]
        if math.prod(shape) * dtype.itemsize != data.nbytes:
            raise ValueError(f"{name} of shape {shape!r:.80} does not fit {data.nbytes} bytes")
        array = wanted(shape, dtype, data)
        array.flags.writeable = False
        return array


def _ext_hook(code: int, data: memoryview) -> memoryview:
    if code != RAW_VIEW:
        raise msgspec.ValidationError(f"Ext code must be {RAW_VIEW} (an inline array), got {code}; pickled values are refused")
    return data
