"""The waiting queue: first come, first served; preempted requests return to the front.

Owns the order only. A request is in the queue at most once; removal is O(1).
"""

from collections import OrderedDict

from tiny_vllm.request import Request, RequestId


class WaitingQueue:
    """Requests that hold no blocks and wait for admission."""

    def __init__(self) -> None:
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Queue a new request at the end."""
        self._requests[request.request_id] = request

    def add_front(self, request: Request) -> None:
        """Queue a preempted request before all others."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The request to admit next; the queue must not be empty."""
        return next(iter(self._requests.values()))

    def remove(self, request_id: RequestId) -> None:
        """Take a request out, from wherever it stands."""
        del self._requests[request_id]
