"""The accountant, with numbers worked out by hand."""

import pytest

from tests.engine.fake import make_request
from tiny_vllm.cache_report import CacheRange, CacheReport, MissReason
from tiny_vllm.core.accounting import Accountant
from tiny_vllm.core.block_pool import Block
from tiny_vllm.core.kv_cache_manager import NO_HIT, PrefixHit
from tiny_vllm.protocol import TokenLedger
from tiny_vllm.request import BlockId, Request


def hit(num_blocks: int, num_asked: int, block_size: int = 4) -> PrefixHit:
    blocks = tuple(Block(BlockId(i)) for i in range(num_blocks))
    return PrefixHit(blocks, num_blocks * block_size, num_asked)


def run(books: Accountant, request: Request, num_tokens: int) -> None:
    books.ran(request, num_tokens)
    request.num_computed_tokens += num_tokens
    books.ledger.check()


def admit(books: Accountant, prompt_len: int, found: PrefixHit = NO_HIT) -> Request:
    request = make_request("a", list(range(prompt_len)))
    pieces = [CacheRange(found.num_tokens, prompt_len, MissReason.COLD)]
    if found.num_tokens:
        pieces.insert(0, CacheRange(0, found.num_tokens))
    books.admitted(request, found, CacheReport(tuple(pieces)))
    request.num_computed_tokens = found.num_tokens
    books.ledger.check()
    return request


def preempt(books: Accountant, request: Request) -> None:
    books.preempted(request)
    request.num_computed_tokens = 0
    request.metrics.num_preemptions += 1


def resume(books: Accountant, request: Request, found: PrefixHit) -> None:
    books.resumed(request, found)
    request.num_computed_tokens = found.num_tokens
    books.ledger.check()


def test_hit_then_chunks_then_decodes():
    books = Accountant()
    request = admit(books, 20, hit(2, 4))
    run(books, request, 7)
    assert books.ledger.pending_tokens == 5
    run(books, request, 5)
    request.token_ids += [1, 2]
    run(books, request, 1)
    run(books, request, 1)
    books.closed(request)
    assert books.ledger == TokenLedger(
        prompt_tokens=20,
        computed_tokens=12,
        cached_tokens=8,
        decoded_tokens=2,
        forward_tokens=14,
        blocks_asked=4,
        blocks_found=2,
        missed_cold=12,
    )
    assert request.num_cached_tokens == 8


def test_preempted_while_decoding():
    """Prompt 6, 3 outputs fed back of 4; then 4 tokens from the cache and the rest again."""
    books = Accountant()
    request = admit(books, 6, hit(0, 1))
    run(books, request, 6)
    for token_id in range(3):
        request.token_ids.append(token_id)
        run(books, request, 1)
    request.token_ids.append(9)
    preempt(books, request)
    resume(books, request, hit(1, 2))
    run(books, request, 6)
    books.closed(request)
    ledger = books.ledger
    assert (ledger.computed_tokens, ledger.recomputed_tokens, ledger.decoded_tokens) == (6, 5, 4)
    assert (ledger.cached_tokens, ledger.cached_tokens_resumed) == (0, 4)
    assert (ledger.blocks_asked, ledger.blocks_found) == (1, 0)
    assert (ledger.blocks_asked_resumed, ledger.blocks_found_resumed) == (2, 1)
    assert (ledger.forward_tokens, ledger.num_preemptions) == (15, 1)
    ledger.check()


def test_preempted_in_mid_prefill_then_helped_by_another_request():
    """5 of 20 computed; on return 12 are cached: 5 of them again, 7 for the first time."""
    books = Accountant()
    request = admit(books, 20)
    run(books, request, 5)
    preempt(books, request)
    resume(books, request, hit(3, 4))
    run(books, request, 8)
    ledger = books.ledger
    assert (ledger.computed_tokens, ledger.cached_tokens, ledger.pending_tokens) == (13, 7, 0)
    assert (ledger.cached_tokens_resumed, ledger.recomputed_tokens) == (5, 0)
    assert request.num_cached_tokens == 7


def test_twice_preempted_counts_first_time_once():
    books = Accountant()
    request = admit(books, 10)
    run(books, request, 8)
    preempt(books, request)
    resume(books, request, NO_HIT)
    run(books, request, 3)
    preempt(books, request)
    resume(books, request, NO_HIT)
    run(books, request, 10)
    assert (books.ledger.computed_tokens, books.ledger.recomputed_tokens) == (10, 11)


@pytest.mark.parametrize("preempted", [False, True])
def test_request_that_ends_early_drops_the_rest_of_its_prompt(preempted):
    books = Accountant()
    request = admit(books, 10, hit(1, 2))
    run(books, request, 3)
    if preempted:
        preempt(books, request)
    books.closed(request)
    books.ledger.check()
    assert (books.ledger.dropped_tokens, books.ledger.pending_tokens) == (3, 0)


def test_unbalanced_books_are_noticed():
    ledger = TokenLedger(prompt_tokens=3, computed_tokens=2)
    with pytest.raises(AssertionError, match="prompt 3 != 2"):
        ledger.check()
    with pytest.raises(AssertionError, match="forward 1 != 0"):
        TokenLedger(forward_tokens=1).check()


@pytest.mark.parametrize("preempted", [False, True])
def test_decodes_in_bulk_are_decodes_one_by_one(preempted):
    """After a preemption one of the two has to run its last known token again."""
    books = [Accountant(), Accountant()]
    rows = [[admit(book, 4) for _ in range(2)] for book in books]
    for book, (first, second) in zip(books, rows, strict=True):
        run(book, first, 4)
        run(book, second, 4)
        if preempted:
            run(book, first, 1)
            preempt(book, first)
            resume(book, first, NO_HIT)
            run(book, first, 4)
    books[0].decoded(rows[0])
    for request in rows[1]:
        books[1].ran(request, 1)
    assert books[0].ledger == books[1].ledger
    assert books[0].ledger.decoded_tokens == 2
    assert books[0].ledger.recomputed_tokens == (5 if preempted else 0)
