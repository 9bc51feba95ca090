"""Waiting queues: who is admitted next. One interface, two policies.

FCFS is a deque: arrivals at the back, preempted requests at the front, so that they are the next to come back.
Priority is a heap over Request's order: lower priority value first, then earlier arrival; there is no front to prepend to.
Inside form 6 of a request.    vLLM: v1/core/sched/request_queue.py
"""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator

from mini_engine.config import SchedulingPolicy
from mini_engine.scheduler.request import Request


class RequestQueue(ABC):
    """Requests in the order of a policy. peek and pop need a non-empty queue."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """A new request."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """A preempted request: as far forward as the policy lets it."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The next one, left in place."""

    @abstractmethod
    def pop_request(self) -> Request:
        """The next one, taken out."""

    @abstractmethod
    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take these out wherever they are. O(queue) once for all of them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be popped."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        self._queue.append(request)

    def prepend_request(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek_request(self) -> Request:
        return self._queue[0]

    def pop_request(self) -> Request:
        return self._queue.popleft()

    def remove_requests(self, requests: Collection[Request]) -> None:
        gone = set(requests)
        self._queue = deque(request for request in self._queue if request not in gone)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class PriorityRequestQueue(RequestQueue):
    """Lowest (priority, arrival_time, request_id) first."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def prepend_request(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def peek_request(self) -> Request:
        return self._heap[0]

    def pop_request(self) -> Request:
        return heapq.heappop(self._heap)

    def remove_requests(self, requests: Collection[Request]) -> None:
        gone = set(requests)
        self._heap = [request for request in self._heap if request not in gone]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """The queue of a policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
