"""Why overlap is off on CPU: small torch operations on one thread while another runs Python. `python -m mini_engine.bench.gil`

Each operation releases the GIL, and has to take it back. While it is away the other thread takes it, and gives it up only when asked
to after the switch interval, 5 ms, however short the operation was. A forward of 30 layers is hundreds of such operations; a GPU runs
them from its own queue, and the mock device sleeps without the GIL: there the host's Python costs nothing.

Stdout    the two times, their ratio, and last one JSON object.

No request path.    No vLLM counterpart: it forces async scheduling off on CPU (platforms/cpu.py).
"""

import json
import sys
import threading
import time

NUM_OPS = 600  #: about a decode step of a small model
SIZE = 128


def time_ops() -> float:
    """Seconds for NUM_OPS small matrix products, one after the other."""
    import torch

    torch.set_num_threads(1)
    a, out = torch.rand(SIZE, SIZE), torch.empty(SIZE, SIZE)
    start = time.perf_counter()
    for _ in range(NUM_OPS):
        torch.mm(a, a, out=out)
    return time.perf_counter() - start


def time_ops_beside_busy_python() -> float:
    """The same, while another thread counts."""
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            sum(range(100))

    busy = threading.Thread(target=count)
    busy.start()
    try:
        return time_ops()
    finally:
        stop.set()
        busy.join()


def main() -> None:
    time_ops()  # warms up
    alone = min(time_ops() for _ in range(5))
    beside = time_ops_beside_busy_python()
    print(f"{NUM_OPS} products of {SIZE} x {SIZE} matrices, GIL switch interval {sys.getswitchinterval() * 1000:g} ms")
    print(f"alone               {alone * 1000:9.1f} ms")
    print(
        f"beside busy Python  {beside * 1000:9.1f} ms   {beside / alone:.0f} times as long, {beside / NUM_OPS * 1000:.2f} ms per operation"
    )
    print(json.dumps({"alone_ms": round(alone * 1000, 2), "beside_ms": round(beside * 1000, 2), "ratio": round(beside / alone, 1)}))


if __name__ == "__main__":
    main()
