"""One prompt with ``n`` completions as ``n`` core requests, merged again for the caller."""

from collections.abc import Iterator
from dataclasses import replace

from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams


class RequestGroup:
    """The core requests of one prompt. They share its KV through the prefix cache."""

    def __init__(
        self, request_id: str, params: SamplingParams, text: str | None, token_ids: list[int]
    ) -> None:
        self.request_id = request_id
        self.text, self.token_ids = text, token_ids
        self.num_tokens = 0
        self._params = params
        self._latest: dict[str, RequestOutput] = {}
        self._num_finished = self._reported = 0
        ids = [request_id] if params.n == 1 else [f"{request_id}/{i}" for i in range(params.n)]
        self.request_ids = ids

    def children(self) -> Iterator[tuple[str, SamplingParams]]:
        """Core request ids with their parameters; a seed gives each child its own."""
        for i, request_id in enumerate(self.request_ids):
            seed = self._params.seed
            child_seed = None if seed is None else (seed + i) % 2**63
            yield request_id, self._params.replace(n=1, seed=child_seed)

    def take(self, output: RequestOutput) -> None:
        """Note the newest output of one child."""
        old = self._latest.get(output.request_id)
        self.num_tokens += output.num_output_tokens - (old.num_output_tokens if old else 0)
        self._num_finished += output.finished
        self._latest[output.request_id] = output

    def just_finished(self) -> int:
        """Children that finished since the last call; keeps empty endings visible."""
        new, self._reported = self._num_finished - self._reported, self._num_finished
        return new

    @property
    def finished(self) -> bool:
        return self._num_finished == len(self.request_ids)

    def output(self) -> RequestOutput:
        """The group as the caller sees it: one output, ``n`` completions."""
        known = [self._latest[i] for i in self.request_ids if i in self._latest]
        completions = [
            replace(child.outputs[0], index=i)
            for i, request_id in enumerate(self.request_ids)
            if (child := self._latest.get(request_id)) is not None
        ]
        return replace(
            known[0], request_id=self.request_id, outputs=completions, finished=self.finished
        )
