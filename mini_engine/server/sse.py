"""Server-sent events: one payload in, the bytes of one event out. The last change of form of a request.

An event is `data: <payload>` and an empty line. The payload is JSON on one line (JSON escapes every line break inside a string),
so no payload can end an event early. The seam `server.sse` replaces encode_event.

Stands at form 9 of a request.    vLLM: the f"data: {json}\\n\\n" in entrypoints/openai/*/serving.py
"""

from collections.abc import Callable

EncodeEvent = Callable[[bytes | str], bytes]


def encode_event(payload: bytes | str) -> bytes:
    """The event's bytes. `payload` holds no line break, and is encoded as UTF-8 when it is a str."""
    if isinstance(payload, str):
        payload = payload.encode()
    return b"data: " + payload + b"\n\n"


DONE_PAYLOAD = b"[DONE]"  #: the last event of every stream, after an error too
