"""The hash chain: what enters it, that it is stable, and that it is computed once."""

import os
import subprocess
import sys
from hashlib import blake2b

import pytest

from tests.engine.fake import make_request
from tiny_vllm.core.block_hash import HashChain, blake2b_128, pack_tokens
from tiny_vllm.errors import InvalidRequestError


def hashes(token_ids, block_size=2, hash_fn=blake2b_128, **keys) -> list[bytes]:
    request = make_request("r", token_ids, **keys)
    HashChain(request, block_size, hash_fn).extend(request)
    return list(request.block_hashes)


def test_chain_by_hand():
    def digest(data: bytes) -> bytes:
        return blake2b(data, digest_size=16).digest()

    root = digest(b"\x01" + (2).to_bytes(8, "little") + b"s1" + b"\x00")
    first = digest(root + b"\x01\0\0\0\x02\0\0\0")
    second = digest(first + b"\x03\0\0\0\x00\x01\0\0")
    assert hashes([1, 2, 3, 256, 5], cache_salt="s1") == [first, second]


def test_only_full_blocks_are_hashed():
    assert [len(hashes(list(range(1, n + 1)))) for n in (1, 2, 3, 4)] == [0, 1, 1, 2]


def test_each_hash_covers_the_whole_prefix():
    one, other = hashes([1, 2, 3, 4]), hashes([9, 2, 3, 4])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert hashes([1, 2, 7, 7])[0] == one[0]


def test_salt_and_adapter_are_separate_fields():
    keys = [{}, {"cache_salt": ""}, {"adapter": ""}, {"cache_salt": "a"}, {"adapter": "a"}]
    keys += [{"cache_salt": "ab"}, {"cache_salt": "a", "adapter": "b"}]
    keys += [{"cache_salt": "\x00"}, {"cache_salt": "a\x00"}, {"cache_salt": "\udc80"}]
    assert len({hashes([1, 2], **key)[0] for key in keys}) == len(keys)


def test_extended_step_by_step_equals_at_once_and_hashes_each_block_once():
    calls: list[bytes] = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return blake2b_128(data)

    request = make_request("r", [1])
    chain = HashChain(request, 2, counting)
    for token_id in range(2, 10):
        chain.extend(request)
        request.token_ids.append(token_id)
    chain.extend(request)
    assert request.block_hashes == hashes(list(range(1, 10)))
    assert len(request.block_hashes) == len(chain.tokens) == 4
    blocks = [data for data in calls if len(data) == 16 + 8]
    assert len(blocks) == 4


def test_stable_across_processes_and_hash_seeds():
    code = (
        "from tests.unit.test_block_hash import hashes;"
        "print(hashes(list(range(9)), cache_salt='s', adapter='a')[-1].hex())"
    )
    seen = {hashes(list(range(9)), cache_salt="s", adapter="a")[-1].hex()}
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout.strip())
    assert len(seen) == 1


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "a", None])
def test_token_that_is_no_uint32_is_refused(bad):
    with pytest.raises(InvalidRequestError, match="token ids") as caught:
        pack_tokens([1, bad])
    assert caught.value.field == "prompt_token_ids"
