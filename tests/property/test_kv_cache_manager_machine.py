"""A state machine over the KV cache manager against a slow model made of dictionaries.

The model keeps, for every block, the prefix it holds (nothing is hashed), and expects of
each look-up exactly the longest chain of such prefixes, and of a copy that the tokens are
there, are those of the request, and are as many as any published block could give.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from tests.engine.fake import make_request
from tiny_vllm.core.block_hash import blake2b_128
from tiny_vllm.core.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from tiny_vllm.request import Request

Prefix = tuple[str | None, tuple[int, ...]]

_token_ids = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class KVCacheMachine(RuleBasedStateMachine):
    live = Bundle("live")
    waiting = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []  # those with a table
        self.count = 0
        self.held: dict[int, Prefix] = {}  # block -> published prefix
        self.step: list[tuple[str, int, Prefix]] = []  # published since the last commit
        self.kv_of: dict[tuple[int, int], Prefix] = {}  # (block, offset) -> the prefix up to it
        self.running: list[tuple[int, int]] = []  # slots that this step computes
        self.computed: dict[str, int] = {}  # tokens of its requests before this step

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        weak=st.booleans(),
        partial=st.booleans(),
    )
    def build(self, num_blocks: int, block_size: int, weak: bool, partial: bool) -> None:
        self.size = block_size
        self.weak = weak  # colliding hashes may cost hits, never give wrong ones
        fn = (lambda data: blake2b_128(data)[:1] * 2) if weak else blake2b_128
        self.partial = partial
        self.kv = KVCacheManager(num_blocks, block_size, hash_fn=fn, partial_reuse=partial)

    def _expected(self, request: Request) -> list[Prefix]:
        chain = []
        for end in range(self.size, len(request.token_ids), self.size):
            prefix = (request.cache_salt, tuple(request.token_ids[:end]))
            if prefix not in self.held.values():
                break
            chain.append(prefix)
        return chain

    def _published(self, request: Request, start: int, end: int) -> None:
        for index in range(start // self.size, end // self.size):
            block_id = request.block_ids[index]
            if self.weak and self.kv.pool.blocks[block_id].entry is None:
                continue
            prefix = (request.cache_salt, tuple(request.token_ids[: (index + 1) * self.size]))
            self.held[block_id] = prefix
            self.step.append((request.request_id, block_id, prefix))

    def _allocate(self, request: Request, num_tokens: int, hit=NO_HIT) -> bool:
        held = {i for other in self.requests for i in other.block_ids}
        available = self.kv.num_available_blocks
        new = self.kv.allocate(request, num_tokens, hit)
        if new is None:
            assert self.kv.num_available_blocks == available
            return False
        fresh = new[len(hit.blocks) :]
        assert held.isdisjoint(fresh)
        assert fresh == sorted(fresh)
        for block_id in fresh:
            self.held.pop(block_id, None)
        self.step = [entry for entry in self.step if entry[1] not in fresh]
        start = request.num_computed_tokens
        self.computed.setdefault(request.request_id, start)
        copy = self.kv.copy_of(request, hit)
        if copy is not None:
            for offset in range(copy.num_tokens):
                self.kv_of[copy.target, offset] = self.kv_of[copy.source, offset]
        for position in range(start, start + num_tokens):
            slot = request.block_ids[position // self.size], position % self.size
            self.kv_of[slot] = (request.cache_salt, tuple(request.token_ids[: position + 1]))
            self.running.append(slot)
        self._published(request, start, start + num_tokens)
        request.num_computed_tokens += num_tokens
        return True

    def _check_part(self, request: Request, hit: PrefixHit) -> None:
        start, salt = len(hit.blocks) * self.size, request.cache_salt
        wanted = request.token_ids[start : min(start + self.size, request.num_tokens - 1)]
        # what each published block gives: computed slots that hold the request's own prefix
        gives = {0}
        for block in self.kv.pool.blocks:
            length = len(block.entry.tokens) // 4 if block.entry is not None else 0
            if any((block.block_id, offset) in self.running for offset in range(length)):
                continue
            for offset in range(min(length, len(wanted))):
                prefix = (salt, tuple(request.token_ids[: start + offset + 1]))
                if self.kv_of[block.block_id, offset] != prefix:
                    break
                gives.add(offset + 1)
        if not self.partial:
            assert hit.part is None
        elif not self.weak:  # a block that a collision kept out has no children
            assert hit.num_copied_tokens == max(gives)
        assert hit.num_copied_tokens in gives

    @rule(target=waiting, tokens=_token_ids, salt=st.sampled_from([None, None, "s"]))
    def arrive(self, tokens: list[int], salt: str | None) -> Request:
        self.count += 1
        return make_request(f"{self.count}", tokens, cache_salt=salt)

    @rule(target=live, request=consumes(waiting), data=st.data())
    def admit(self, request: Request, data: st.DataObject):
        hit = self.kv.lookup(request)
        expected = self._expected(request)
        found = [self.held[block.block_id] for block in hit.blocks]
        assert found == expected[: len(found)]
        assert self.weak or len(found) == len(expected)
        assert hit.num_tokens == len(found) * self.size + hit.num_copied_tokens < request.num_tokens
        self._check_part(request, hit)
        num_tokens = data.draw(st.integers(1, request.num_tokens - hit.num_tokens))
        fits = self.kv.fits(request, hit, 0)
        admitted = self._allocate(request, num_tokens, hit)
        assert admitted or not fits
        if not admitted:
            self.kv.free(request)
            return multiple()
        self.requests.append(request)
        return request

    @rule(request=live, data=st.data())
    def advance(self, request: Request, data: st.DataObject) -> None:
        if request not in self.requests:
            return
        if request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(data.draw(st.integers(0, 1)))
        left = request.num_tokens - request.num_computed_tokens
        self._allocate(request, data.draw(st.integers(1, left)))

    @rule()
    def end_step(self) -> None:
        self.kv.commit()
        self.step.clear()
        self.running.clear()
        self.computed.clear()

    @precondition(lambda self: self.step)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A request fails after scheduling: it and all who built on it this step lose blocks."""
        failed = data.draw(st.sampled_from([entry[0] for entry in self.step]))
        lost: dict[int, Prefix] = {}
        for request_id, block_id, prefix in self.step:
            parent = (prefix[0], prefix[1][: -self.size])
            if request_id == failed or parent in lost.values():
                lost[block_id] = prefix
        retracted = self.kv.retract({failed})
        assert retracted >= lost.keys()
        for block_id in retracted - lost.keys():  # half-filled ones: each of one request alone
            assert block_id not in self.held
            for owner in (r for r in self.requests if block_id in r.block_ids):
                assert owner.request_id == failed or not lost.keys().isdisjoint(owner.block_ids)
        for block_id in lost:
            del self.held[block_id]
        for request in list(self.requests):
            if request.request_id == failed or not lost.keys().isdisjoint(request.block_ids):
                self._drop(request)
        self.end_step()

    @rule(target=waiting, request=live)
    def preempt(self, request: Request):
        """Only between steps, as the scheduler does."""
        if request not in self.requests:
            return multiple()
        self.end_step()
        self.requests.remove(request)
        self.kv.release(request)
        request.num_computed_tokens = 0
        return request

    @rule(request=consumes(live))
    def finish(self, request: Request) -> None:
        """Abort or normal end, also in the middle of a step."""
        if request in self.requests:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self.requests.remove(request)
        # As in the scheduler: what runs in this step is not counted before its end.
        before = self.computed.pop(request.request_id, request.num_computed_tokens)
        request.num_computed_tokens = before
        self.kv.free(request)

    @rule()
    def reset(self) -> None:
        assert self.kv.reset() == (not self.requests)
        if not self.requests:
            self.held.clear()
            self.step.clear()
            self.running.clear()
            self.computed.clear()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check(self.requests)
        blocks = self.kv.pool.blocks
        full = [b for b in blocks if b.entry is not None and not b.entry.is_tail]
        assert {b.block_id for b in full} == self.held.keys()
        used = {i for request in self.requests for i in request.block_ids}
        assert self.kv.num_available_blocks == len(blocks) - len(used)


KVCacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestKVCacheMachine = KVCacheMachine.TestCase
