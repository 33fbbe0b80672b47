"""The depth-first order of an offline batch."""

import random

from tiny_vllm.engine.prefix_order import depth_first


def test_families_run_together_in_the_order_of_their_first_member():
    a, b = list(range(20)), list(range(100, 120))
    prompts = [[9, 9], [*a, 1], [*b, 1], [*a, 2], [7], [*b, 1, 5], [*a, 1, 3]]
    order = depth_first(prompts)
    assert [prompts[i] for i in order] == [
        [9, 9],
        [*a, 1],
        [*a, 1, 3],
        [*a, 2],
        [*b, 1],
        [*b, 1, 5],
        [7],
    ]


def test_prompts_that_share_nothing_keep_their_order():
    rng = random.Random(0)
    prompts = [[rng.randrange(10**6) for _ in range(30)] for _ in range(50)]
    assert depth_first(prompts) == list(range(50))
    assert depth_first([]) == []


def test_every_branch_of_a_tree_is_left_once():
    """Walking the order, a document never comes back after another one began."""
    rng = random.Random(1)
    documents = [[rng.randrange(50000) for _ in range(64)] for _ in range(6)]
    which = [rng.randrange(6) for _ in range(60)]
    prompts = [[*documents[d], *rng.choices(range(1000), k=5)] for d in which]
    order = depth_first(prompts)
    assert sorted(order) == list(range(60))
    seen = [which[i] for i in order]
    runs = [d for i, d in enumerate(seen) if i == 0 or seen[i - 1] != d]
    assert len(runs) == len(set(which))


def test_bad_ids_leave_the_order_as_it_is():
    assert depth_first([[2, 3], [-1], [1]]) == [0, 1, 2]
