"""The waiting queue and its order; preempted requests return to the front.

Owns the order only. A request is in the queue at most once; removal is O(1).
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from tiny_vllm.request import Request, RequestId, RequestStatus

MAX_PASSED = 64  # admissions after which nobody passes a waiting request any more
_WINDOW = 128  # oldest requests among which the longest cached prefix is sought


class WaitingQueue:
    """Requests that hold no blocks and wait for admission: first come, first served."""

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

    def candidates(self, limit: int) -> list[Request]:
        """The requests to admit next, in order, at most ``limit``."""
        return list(islice(self._requests.values(), limit))

    def remove(self, request_id: RequestId) -> None:
        """Take a request out, from wherever it stands."""
        del self._requests[request_id]

    def admitted(self, request_id: RequestId) -> None:
        """Take a request out because it starts."""
        self.remove(request_id)


class PrefixQueue(WaitingQueue):
    """Longest cached prefix first, with ageing.

    A request is not passed for ever: once `MAX_PASSED` others were admitted since it was
    queued, it goes before all that came after it. So a cold request starts after at most
    `MAX_PASSED` admissions and those that were queued before it.

    Args:
        num_cached: prompt tokens of a request that are cached now.
    """

    def __init__(self, num_cached: Callable[[Request], int]) -> None:
        super().__init__()
        self._num_cached = num_cached
        self._num_admitted = 0
        self._queued_at: dict[RequestId, int] = {}  # admissions before it

    def add(self, request: Request) -> None:
        super().add(request)
        self._queued_at[request.request_id] = self._num_admitted

    def add_front(self, request: Request) -> None:
        super().add_front(request)
        self._queued_at[request.request_id] = self._num_admitted

    def candidates(self, limit: int) -> list[Request]:
        window = super().candidates(_WINDOW)
        if len(window) > 1:
            window.sort(key=self._rank)  # stable: equals stay in order of arrival
        return window[:limit]

    def _rank(self, request: Request) -> tuple[bool, int]:
        passed = self._num_admitted - self._queued_at[request.request_id]
        if passed >= MAX_PASSED or request.status is RequestStatus.PREEMPTED:
            return False, 0
        return True, -self._num_cached(request)

    def remove(self, request_id: RequestId) -> None:
        super().remove(request_id)
        del self._queued_at[request_id]

    def admitted(self, request_id: RequestId) -> None:
        super().admitted(request_id)
        self._num_admitted += 1
