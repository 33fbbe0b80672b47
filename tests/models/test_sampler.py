"""The sampler against hand-computed supports, slow references and frequency bounds."""

import math
from collections import Counter

import pytest
import torch

from tiny_vllm.logits import edit_logits, filter_logits, token_logprobs
from tiny_vllm.protocol import SampledToken
from tiny_vllm.sampler import (
    SampleError,
    Sampler,
    SamplingRow,
    _gumbel,
    make_generator,
    prompt_logprobs,
    request_seed,
)
from tiny_vllm.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
PROBABILITIES = [0.5, 0.25, 0.15, 0.07, 0.03]


def row(prompt=(), output=(), eos=(), seed=0, **params):
    generator = None if params.get("temperature") == 0 else make_generator(seed)
    return SamplingRow(
        SamplingParams(**params), list(prompt), list(output), frozenset(eos), generator
    )


def greedy(**params):
    return row(temperature=0, **params)


def sample(logits, rows):
    return Sampler().sample(torch.as_tensor(logits, dtype=torch.float32), rows)


def ids(results):
    assert all(isinstance(result, SampledToken) for result in results), results
    return [result.token_id for result in results]


def draws(logits, count, seed=1, **params):
    """``count`` draws of one request: step t has t output tokens."""
    rows = [row(output=[0] * t, seed=seed, **params) for t in range(count)]
    return ids(sample(torch.tensor(logits).expand(count, -1), rows))


def support(logits, **params):
    """Tokens that the filters keep."""
    temperature = params.pop("temperature", 1.0)
    scaled = torch.tensor([logits]) / temperature
    scaled -= scaled.max()
    filter_logits(scaled, [SamplingParams(**params)])
    return torch.nonzero(scaled[0] > -INF)[:, 0].tolist()


LOGITS = [math.log(p) for p in PROBABILITIES]


class TestGreedy:
    def test_takes_the_maximum_of_each_row(self):
        assert ids(sample([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]], [greedy(), greedy()])) == [1, 0]

    @pytest.mark.parametrize("vocab_size", [5, 17, 1000, 49152])
    def test_ties_go_to_the_lowest_id(self, vocab_size):
        logits = torch.randint(0, 3, (8, vocab_size), generator=make_generator(0)).float()
        expected = [int((values == values.max()).nonzero()[0]) for values in logits]
        assert ids(sample(logits, [greedy() for _ in range(8)])) == expected

    def test_logits_are_left_unchanged(self):
        logits = torch.tensor([LOGITS, LOGITS])
        before = logits.clone()
        sample(logits, [greedy(logit_bias={1: 9.0}), row(top_k=2, repetition_penalty=2.0)])
        assert torch.equal(logits, before)

    def test_no_rows(self):
        assert Sampler().sample(torch.empty(0, 5), []) == []

    def test_inference_tensors_are_accepted(self):
        with torch.inference_mode():
            logits = torch.tensor([LOGITS, LOGITS])
        rows = [row(top_p=0.5, min_p=0.1, presence_penalty=1.0, output=[1]), greedy()]
        assert len(ids(sample(logits, rows))) == 2


class TestBadRows:
    GOOD = [0.0, 1.0, 0.5]

    @pytest.mark.parametrize("bad", [[0.0, NAN, 1.0], [NAN] * 3, [0.0, INF, 1.0], [-INF] * 3])
    @pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}])
    def test_a_bad_row_is_an_error_and_its_neighbours_are_not(self, bad, params):
        rows = [greedy(), row(**params), greedy()]
        first, middle, last = sample([self.GOOD, bad, self.GOOD], rows)
        assert isinstance(middle, SampleError)
        assert ids([first, last]) == [1, 1]

    def test_the_message_tells_masked_from_broken(self):
        masked, broken = sample([[-INF] * 3, [0.0, NAN, 1.0]], [greedy(), greedy()])
        assert "masked" in masked.message
        assert "nan" in broken.message

    def test_masking_all_tokens_is_an_error(self):
        everything = greedy(min_tokens=1, stop_token_ids=[0, 1, 2], max_tokens=4)
        result, other = sample([self.GOOD, self.GOOD], [everything, greedy()])
        assert isinstance(result, SampleError)
        assert "min_tokens" in result.message
        assert ids([other]) == [1]

    def test_an_edit_does_not_hide_a_broken_row(self):
        hidden = greedy(min_tokens=1, stop_token_ids=[1])
        assert isinstance(sample([[0.0, NAN, 1.0]], [hidden])[0], SampleError)

    def test_minus_infinity_beside_finite_logits_is_no_error(self):
        assert ids(sample([[-INF, 0.0, -INF]], [row()])) == [1]


class TestEdits:
    def test_logit_bias_moves_the_choice_of_its_row_only(self):
        rows = [greedy(logit_bias={2: 5.0, 0: -100.0}), greedy()]
        assert ids(sample([[1.0, 2.0, 0.0]] * 2, rows)) == [2, 1]

    def test_min_tokens_masks_what_would_stop_until_it_is_reached(self):
        logits = [[0.0, 3.0, 2.0, 1.0]]
        rows = [
            {"eos": [1], "stop_token_ids": [2], "output": [0], "expected": 3},
            {"eos": [1], "output": [0], "expected": 2},
            {"eos": [1], "output": [0], "ignore_eos": True, "expected": 1},
            {"eos": [1], "stop_token_ids": [2], "output": [0, 0], "expected": 1},
        ]
        for case in rows:
            expected = case.pop("expected")
            result = sample(logits, [greedy(min_tokens=2, **case)])
            assert ids(result) == [expected], case

    def test_penalties_equal_a_slow_reference(self):
        generator = make_generator(3)
        logits = torch.randn(4, 20, generator=generator)
        rows = [
            row(prompt=[1, 2, 2, 3], output=[4, 4, 19], repetition_penalty=1.3),
            row(prompt=[1], output=[5, 5, 5, 0], presence_penalty=0.5, frequency_penalty=0.25),
            row(),
            row(
                prompt=[7],
                output=[7, 8],
                repetition_penalty=0.5,
                presence_penalty=-1.0,
                frequency_penalty=2.0,
                logit_bias={7: 1.5},
                min_tokens=9,
                eos=[11],
            ),
        ]
        expected = torch.tensor(
            [_slow_edit(values, r) for values, r in zip(logits.tolist(), rows, strict=True)]
        )
        torch.testing.assert_close(edit_logits(logits, rows), expected)

    def test_nothing_to_edit_gives_the_same_tensor(self):
        logits = torch.zeros(2, 3)
        assert edit_logits(logits, [greedy(), row(top_k=1)]) is logits


def _slow_edit(values, row):
    p, output = row.params, list(row.output_token_ids)
    values = [v + (p.logit_bias or {}).get(i, 0.0) for i, v in enumerate(values)]
    if len(output) < p.min_tokens:
        values = [-INF if i in row.eos_token_ids else v for i, v in enumerate(values)]
    for i in set(row.prompt_token_ids) | set(output):
        r = p.repetition_penalty
        values[i] = values[i] / r if values[i] > 0 else values[i] * r
    for i in set(output):
        values[i] -= p.presence_penalty + p.frequency_penalty * output.count(i)
    return values


class TestFilters:
    @pytest.mark.parametrize(
        ("params", "kept"),
        [
            ({}, [0, 1, 2, 3, 4]),
            ({"top_k": 1}, [0]),
            ({"top_k": 3}, [0, 1, 2]),
            ({"top_k": 5}, [0, 1, 2, 3, 4]),
            ({"top_k": 99}, [0, 1, 2, 3, 4]),
            ({"top_k": -1}, [0, 1, 2, 3, 4]),
            ({"top_p": 0.4}, [0]),
            ({"top_p": 0.51}, [0, 1]),
            ({"top_p": 0.8}, [0, 1, 2]),
            ({"top_p": 0.98}, [0, 1, 2, 3, 4]),
            ({"top_p": 1e-9}, [0]),
            ({"min_p": 0.4}, [0, 1]),  # at least 0.2
            ({"min_p": 0.1}, [0, 1, 2, 3]),  # at least 0.05
            ({"min_p": 1.0}, [0]),
            ({"top_k": 4, "min_p": 0.4}, [0, 1]),
            ({"top_k": 2, "min_p": 0.1}, [0, 1]),
            # top_p counts within what top_k left: 0.5 of 0.75 is 0.667
            ({"top_k": 2, "top_p": 0.66}, [0]),
            ({"top_k": 2, "top_p": 0.68}, [0, 1]),
            # at temperature 2 the probabilities are 0.349, 0.247, 0.191, 0.131, 0.085
            ({"temperature": 2.0, "top_p": 0.58}, [0, 1]),
            ({"temperature": 2.0, "top_p": 0.61}, [0, 1, 2]),
        ],
    )
    def test_kept_support(self, params, kept):
        assert support(LOGITS, **params) == kept

    def test_ties_with_the_last_kept_token_are_kept(self):
        assert support([1.0, 0.0, 1.0, 1.0], top_k=2) == [0, 2, 3]
        assert support([0.0, 0.0, 0.0, -9.0], top_p=0.5) == [0, 1, 2]

    def test_a_nucleus_wider_than_the_prefix_is_still_exact(self):
        size = 5000
        logits = torch.linspace(0.0, 1e-3, size).tolist()  # nearly uniform
        assert len(support(logits, top_p=0.9)) == pytest.approx(0.9 * size, abs=5)

    def test_rows_of_a_batch_keep_their_own_support(self):
        cases = [{"top_k": 2}, {}, {"top_p": 0.51}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.8}]
        scaled = torch.tensor([LOGITS] * len(cases))
        scaled -= scaled.amax(dim=-1, keepdim=True)
        filter_logits(scaled, [SamplingParams(**case) for case in cases])
        kept = [torch.nonzero(values > -INF)[:, 0].tolist() for values in scaled]
        assert kept == [support(LOGITS, **case) for case in cases]


class TestDraws:
    @pytest.mark.parametrize(
        ("params", "expected"),
        [
            ({}, PROBABILITIES),
            ({"temperature": 2.0}, [p**0.5 for p in PROBABILITIES]),
            ({"temperature": 0.5}, [p**2 for p in PROBABILITIES]),
            ({"top_k": 2}, PROBABILITIES[:2]),
            ({"top_p": 0.8}, PROBABILITIES[:3]),
        ],
    )
    def test_frequencies(self, params, expected):
        count = 4000
        counts = Counter(draws(LOGITS, count, **params))
        for token_id, weight in enumerate(expected):
            p = weight / sum(expected)
            bound = 4 * math.sqrt(p * (1 - p) / count)  # four standard deviations
            assert counts[token_id] / count == pytest.approx(p, abs=bound)
        assert max(counts) < len(expected)

    def test_unlikely_tokens_are_drawn_as_often_as_they_should(self):
        """Noise with few bits at its upper end would hardly ever let one of them win."""
        logits = [0.0] + [math.log(1e-2 / 199)] * 199
        count = 4000
        rare = sum(token_id != 0 for token_id in draws(logits, count))
        assert rare == pytest.approx(40, abs=25)

    def test_neighbouring_ids_and_steps_are_independent(self):
        """Correlation between noise of adjacent ids, steps and seeds stays near 0."""
        count = 2048
        for a, b in [
            (draws([0.0] * 16, count, seed=1), draws([0.0] * 16, count, seed=2)),
            (draws([0.0] * 16, count, seed=1)[:-1], draws([0.0] * 16, count, seed=1)[1:]),
        ]:
            same = sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
            assert same == pytest.approx(1 / 16, abs=0.022)

    def test_all_64_bits_of_the_key_count(self):
        ids_ = torch.arange(100, dtype=torch.int32)
        keys = torch.tensor([[1, 1], [1, 2], [2, 1], [1, 1 - 2**31]], dtype=torch.int32)
        noise = _gumbel(keys, ids_)
        for i in range(4):
            for j in range(i):
                assert (noise[i] == noise[j]).sum() < 3
        assert torch.equal(_gumbel(keys[:1], ids_), noise[:1])

    def test_temperature_near_zero_is_the_arg_max(self):
        assert set(draws([1.0, 1.001, 0.0], 50, temperature=1e-60)) == {1}

    def test_temperature_is_per_row(self):
        logits = torch.tensor([LOGITS]).expand(400, -1)
        rows = [row(output=[0] * (t // 2), temperature=(1e-6, 100.0)[t % 2]) for t in range(400)]
        drawn = ids(sample(logits, rows))
        assert set(drawn[::2]) == {0}
        assert set(drawn[1::2]) == {0, 1, 2, 3, 4}


class TestRandomness:
    def test_a_seed_repeats_and_another_differs(self):
        first = draws([0.0] * 50, 40, seed=7)
        assert draws([0.0] * 50, 40, seed=7) == first
        assert draws([0.0] * 50, 40, seed=8) != first
        assert draws([0.0] * 50, 40, seed=-7) != first

    @pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}])
    def test_the_batch_and_the_place_in_it_do_not_matter(self, params):
        logits = torch.randn(12, 3000, generator=make_generator(5))

        def make(i):
            return row(output=[0] * i, seed=i, **params)

        alone = [ids(sample(logits[i : i + 1], [make(i)]))[0] for i in range(12)]
        assert ids(sample(logits, [make(i) for i in range(12)])) == alone
        order = [5, 0, 11, 3]
        mixed = [make(i) for i in order] + [greedy(), row(seed=99), row(seed=98, top_k=1)]
        batch = torch.cat([logits[order], torch.randn(3, 3000)])
        assert ids(sample(batch, mixed))[:4] == [alone[i] for i in order]

    def test_a_row_made_again_continues_as_if_never_dropped(self):
        """A preempted request gets a new generator; its next token must not change."""
        whole = draws([0.0] * 50, 6, seed=4)
        resumed = row(output=[0] * 5, seed=4)
        assert ids(sample([[0.0] * 50], [resumed])) == whole[5:]

    def test_few_candidates_draw_as_the_whole_vocabulary_does(self):
        """A filter that keeps the same tokens as masking by hand draws the same token."""
        logits = torch.randn(1, 4096, generator=make_generator(6))
        kept = logits[0].topk(50).indices
        masked = torch.full_like(logits, -INF)
        masked[0, kept] = logits[0, kept]
        for t in range(30):
            filtered = sample(logits, [row(output=[0] * t, top_k=50)])
            assert ids(filtered) == ids(sample(masked, [row(output=[0] * t)]))

    def test_a_rounding_error_in_the_logits_rarely_moves_the_draw(self):
        logits = torch.randn(300, 1000, generator=make_generator(8))
        noisy = logits + 1e-4 * torch.randn(300, 1000, generator=make_generator(9))
        rows = [row(seed=i) for i in range(300)]
        moved = sum(
            a != b for a, b in zip(ids(sample(logits, rows)), ids(sample(noisy, rows)), strict=True)
        )
        assert moved <= 3

    def test_request_seed(self):
        free, fixed = SamplingParams(), SamplingParams(seed=-5)
        assert request_seed(fixed, 0, "a") == -5
        assert request_seed(free, 0, "a") == request_seed(free, 0, "a")
        others = [request_seed(free, 0, "b"), request_seed(free, 1, "a")]
        assert request_seed(free, 0, "a") not in others
        assert make_generator(request_seed(free, 0, "a")).initial_seed() >= 0


class TestLogprobs:
    def test_equal_log_softmax_of_the_unedited_logits(self):
        logits = torch.randn(3, 40, generator=make_generator(2))
        rows = [
            greedy(logprobs=3, logit_bias={4: 100.0}),
            row(logprobs=0, temperature=5.0, top_k=2),
            greedy(),
        ]
        first, second, third = sample(logits, rows)
        expected = logits.log_softmax(-1)
        assert first.token_id == 4
        assert next(iter(first.logprobs)) == 4
        for result, values in ((first, expected[0]), (second, expected[1])):
            for token_id, entry in result.logprobs.items():
                assert entry.logprob == pytest.approx(float(values[token_id]), abs=1e-5)
                assert entry.rank == int((values > values[token_id]).sum()) + 1
        assert set(first.logprobs) == {4, *expected[0].topk(3).indices.tolist()}
        assert list(second.logprobs) == [second.token_id]
        assert third.logprobs is None

    def test_a_sampled_token_among_the_top_is_not_listed_twice(self):
        result = sample([LOGITS], [greedy(logprobs=3)])[0]
        assert [(t, e.rank) for t, e in result.logprobs.items()] == [(0, 1), (1, 2), (2, 3)]
        assert result.logprobs[2].logprob == pytest.approx(math.log(0.15), abs=1e-5)

    def test_equal_values_share_a_rank_in_id_order(self):
        entry = token_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], [4])[0]
        assert [(t, e.rank) for t, e in entry.items()] == [(2, 1), (1, 1), (0, 3), (3, 4)]

    def test_more_than_the_vocabulary_gives_all_of_it(self):
        assert len(sample([LOGITS], [greedy(logprobs=20)])[0].logprobs) == 5

    def test_prompt_logprobs(self):
        logits = torch.randn(6, 30, generator=make_generator(1))
        tokens = [3, 0, 29, 7, 7, 1]
        entries = prompt_logprobs(logits, tokens, 2)
        expected = logits.log_softmax(-1)
        for entry, token_id, values in zip(entries, tokens, expected, strict=True):
            assert next(iter(entry)) == token_id
            assert entry[token_id].logprob == pytest.approx(float(values[token_id]), abs=1e-5)
            assert set(entry) == {token_id, *values.topk(2).indices.tolist()}

    def test_no_prompt_logprobs_of_a_prompt_of_one_token(self):
        assert prompt_logprobs(torch.empty(0, 5), [], 3) == []
