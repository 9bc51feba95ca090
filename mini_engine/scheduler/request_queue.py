"""Waiting queues: who is admitted next. Two policies with the same methods.

FCFS is a deque: arrivals at the back, preempted requests at the front, so that they are the next to come back.
Priority is a heap over Request's order: lower priority value first, then earlier arrival; there is no front to prepend to.
Inside form 6 of a request.    vLLM: v1/core/sched/request_queue.py
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterator

from mini_engine.config import SchedulingPolicy
from mini_engine.scheduler.request import Request


class FCFSRequestQueue(deque[Request]):
    """First come, first served. peek and pop need a non-empty queue; iteration is in the order of popping."""

    def add_request(self, request: Request) -> None:
        """A new request."""
        self.append(request)

    def prepend_request(self, request: Request) -> None:
        """A preempted request: as far forward as the policy lets it."""
        self.appendleft(request)

    def peek_request(self) -> Request:
        """The next one, left in place."""
        return self[0]

    def pop_request(self) -> Request:
        """The next one, taken out."""
        return self.popleft()

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take these out wherever they are. O(queue) once for all of them."""
        gone = set(requests)
        kept = [request for request in self if request not in gone]
        self.clear()
        self.extend(kept)


class PriorityRequestQueue:
    """Lowest (priority, arrival_time, request_id) first."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    prepend_request = add_request

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


def create_request_queue(policy: SchedulingPolicy) -> FCFSRequestQueue | PriorityRequestQueue:
    """The queue of a policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
