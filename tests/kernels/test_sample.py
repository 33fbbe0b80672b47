"""Sampling kernels against the sampler: same ids, same kept tokens, same integers."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tiny_vllm import sampler as definition
from tiny_vllm.logits import SamplingRow, filter_logits
from tiny_vllm.ops.kernels import sample_peak
from tiny_vllm.ops.kernels.sample import Advance, greedy, gumbel
from tiny_vllm.ops.kernels.sample_filter import Filters, filter_top
from tiny_vllm.ops.kernels.sample_math import gumbel_noise, step_key, uniform_numbers
from tiny_vllm.ops.kernels.sample_peak import make_workspace, tiling
from tiny_vllm.protocol import SampledToken
from tiny_vllm.sampler import Sampler, make_generator
from tiny_vllm.sampling_params import SamplingParams

# Triton's interpreter takes loop bounds from one-element arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

NAN, INF = math.nan, math.inf
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, 123456789]
MIN_TEMPERATURE = 1e-6


@pytest.fixture(autouse=True)
def _no_warnings_of_the_interpreter():
    """inf - inf and the like are meant; numpy would report them."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(params=[1, 2048], ids=["few programs", "many programs"])
def programs(request, monkeypatch):
    """Rows cut into one piece, and into as many as there are tiles."""
    monkeypatch.setattr(sample_peak, "_PROGRAMS", request.param)
    return request.param


def outputs(rows, device):
    ids = torch.full((rows,), -7, dtype=torch.int64, device=device)
    return ids, torch.full((rows,), 12345.0, device=device)


def run_greedy(logits, **options):
    ids, peaks = outputs(len(logits), logits.device)
    greedy(logits, ids, peaks, **options)
    return ids, peaks


def run_gumbel(logits, temperatures, seeds, num_outputs, **options):
    ids, peaks = outputs(len(logits), logits.device)
    numbers = [torch.tensor(v, device=logits.device) for v in (seeds, num_outputs)]
    heat = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
    gumbel(logits, heat, *numbers, ids, peaks, **options)
    return ids, peaks


def device_filters(params, device):
    def column(values, dtype):
        return torch.tensor(list(values), dtype=dtype, device=device)

    return Filters(
        column((p.top_k for p in params), torch.int32),
        column((p.top_p for p in params), torch.float32),
        column((p.min_p for p in params), torch.float64),
    )


def random_logits(rows, vocab, device, dtype, generator, scale=3.0):
    return torch.randn(rows, vocab, device=device, generator=generator).mul(scale).to(dtype)


class TestGreedy:
    @pytest.mark.parametrize("rows", [1, 5])
    @pytest.mark.parametrize("vocab", [1, 31, 1003, 1024, 5001])
    def test_equals_argmax(self, rows, vocab, dtype, device, generator, programs):
        logits = random_logits(rows, vocab, device, dtype, generator)
        ids, peaks = run_greedy(logits)
        assert torch.equal(ids, logits.float().argmax(-1))
        assert torch.equal(peaks, logits.float().amax(-1))

    @pytest.mark.parametrize("vocab", [7, 1003, 4100])
    def test_ties_go_to_the_lowest_id(self, vocab, dtype, device, generator, programs):
        logits = torch.randint(-2, 2, (4, vocab), device=device, generator=generator).to(dtype)
        ids, _ = run_greedy(logits)
        assert ids.tolist() == [int((r == r.max()).nonzero()[0]) for r in logits]

    @pytest.mark.parametrize("vocab", [5, 3000])
    def test_special_values(self, vocab, dtype, device, programs):
        """NaN is the maximum, the first of several; zeros tie whatever their sign."""
        logits = torch.full((8, vocab), -1.0, device=device, dtype=dtype)
        last, middle = vocab - 1, vocab // 2
        logits[0, [middle, last]] = NAN
        logits[1, last], logits[1, middle] = NAN, INF
        logits[2, [middle, last]] = INF
        logits[3] = -INF
        logits[4] = NAN
        logits[5, middle], logits[5, last] = -0.0, 0.0
        logits[6] = -INF
        logits[6, last] = -3.0
        logits[7, 0], logits[7, last] = -1e-5, 0.0
        ids, peaks = run_greedy(logits)
        assert ids.tolist() == [middle, last, middle, 0, 0, middle, last, last]
        expected = torch.tensor([NAN, NAN, INF, -INF, NAN, 0.0, -3.0, 0.0], device=device)
        torch.testing.assert_close(peaks, expected, rtol=0, atol=0, equal_nan=True)

    def test_rows_may_lie_apart(self, dtype, device, generator):
        wide = random_logits(9, 1500, device, dtype, generator)
        view = wide[1::2, 7:1210]
        ids, peaks = run_greedy(view)
        assert torch.equal(ids, view.float().argmax(-1))
        assert torch.equal(peaks, view.float().amax(-1))

    def test_no_rows(self, device):
        run_greedy(torch.empty(0, 10, device=device))
        run_gumbel(torch.empty(0, 10, device=device), [], [], [])
        floors = torch.empty(0, device=device)
        filter_top(torch.empty(0, 10, device=device), floors, device_filters([], device), floors)

    def test_a_larger_workspace_of_garbage_changes_nothing(self, device, generator):
        workspace = make_workspace(6, 2000, device)
        workspace.peak_keys.fill_(2**62)
        workspace.race_keys.fill_(2**62)
        for rows in (4, 1, 6):
            logits = random_logits(rows, 1100, device, torch.float32, generator)
            ids, _ = run_greedy(logits, workspace=workspace)
            assert torch.equal(ids, logits.argmax(-1))

    def test_the_loop_state_moves_on_but_not_in_padded_rows(self, device, generator):
        positions = torch.tensor([0, -1, 41, 7, -5], device=device)
        token_ids = torch.tensor([9, 9, 9, 9, 9], device=device)
        logits = random_logits(5, 1003, device, torch.float32, generator)
        ids, _ = run_greedy(logits, advance=Advance(positions, token_ids))
        assert positions.tolist() == [1, -1, 42, 8, -5]
        best = logits.argmax(-1).tolist()
        assert ids.tolist() == best
        assert token_ids.tolist() == [best[0], 9, best[2], best[3], 9]


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 100, 256, 5000])
@pytest.mark.parametrize("vocab", [1, 1023, 1025, 32000, 128256, 262144])
def test_tiling_covers_the_row_without_idle_programs(rows, vocab):
    splits, span = tiling(rows, vocab)
    assert 1 <= splits <= sample_peak.MAX_SPLITS.value
    assert (splits - 1) * span < vocab <= splits * span


@triton.jit
def _numbers_kernel(
    seeds_ptr, num_outputs_ptr, keys_ptr, uniform_ptr, noise_ptr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    key_0, key_1 = step_key(tl.load(seeds_ptr + row), tl.load(num_outputs_ptr + row))
    tl.store(keys_ptr + 2 * row, key_0.to(tl.int64))
    tl.store(keys_ptr + 2 * row + 1, key_1.to(tl.int64))
    ids = tl.arange(0, BLOCK)
    uniform = uniform_numbers(key_0, key_1, ids * 60013)
    tl.store(uniform_ptr + row * BLOCK + ids, uniform)
    tl.store(noise_ptr + row * BLOCK + ids, gumbel_noise(uniform))


def test_keys_and_random_numbers_have_the_same_bits(device):
    """Written out with Python's integers, not with the sampler's tensors."""
    num_outputs = [0, 1, 7, 2**31, 2**40, 3, 99]
    keys = torch.zeros(len(SEEDS), 2, dtype=torch.int64, device=device)
    uniform = torch.full((len(SEEDS), 64), NAN, device=device)
    noise = torch.full_like(uniform, NAN)
    _numbers_kernel[(len(SEEDS),)](
        torch.tensor(SEEDS, device=device),
        torch.tensor(num_outputs, device=device),
        keys,
        uniform,
        noise,
        BLOCK=64,
    )

    def mix(x):
        return definition._mix64(x) & (2**64 - 1)

    def scramble(x):
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    for row, (seed, count) in enumerate(zip(SEEDS, num_outputs, strict=True)):
        x = mix((mix(seed % 2**64) + (count + 1) * 0x9E3779B97F4A7C15) % 2**64)
        assert keys[row].tolist() == [x >> 32, x % 2**32]
        hashes = [
            scramble(scramble((i * 60013 * 0x9E3779B9 + (x >> 32)) % 2**32) ^ x % 2**32)
            for i in range(64)
        ]
        expected = torch.tensor([h & 0x7FFFFFFF for h in hashes], dtype=torch.int32).float()
        expected = expected.add(0.5).mul(2.0**-31).clamp(max=1 - 2.0**-24)
        assert torch.equal(uniform[row].cpu(), expected)
    exact = -torch.log(-torch.log1p(-uniform.double()))
    torch.testing.assert_close(noise.double(), exact, rtol=4e-7, atol=4e-7)


def sampler_rows(params, seeds, num_outputs):
    return [
        SamplingRow(p, [], [0] * count, frozenset(), make_generator(seed))
        for p, seed, count in zip(params, seeds, num_outputs, strict=True)
    ]


def race_sums(logits, row, token_ids):
    """Scaled logit plus noise of some tokens, as the sampler adds them."""
    heat = max(row.params.temperature, MIN_TEMPERATURE)
    scaled = (logits - logits.max())[token_ids] / heat
    keys = torch.tensor([definition._step_key(row)], dtype=torch.int32, device=logits.device)
    ids = torch.tensor(token_ids, dtype=torch.int32, device=logits.device)
    return (definition._gumbel(keys, ids)[0] + scaled).tolist()


def assert_drawn_as_sampled(logits, params, seeds, num_outputs, ids):
    """The sampler's ids, but for two tokens that end the race within a rounding error."""
    logits = logits.float()
    rows = sampler_rows(params, seeds, num_outputs)
    for i, result in enumerate(Sampler().sample(logits, rows)):
        assert isinstance(result, SampledToken)
        if result.token_id != ids[i]:
            first, second = race_sums(logits[i], rows[i], [result.token_id, int(ids[i])])
            assert first == pytest.approx(second, abs=1e-5), (i, rows[i].params)


class TestGumbel:
    @pytest.mark.parametrize("rows", [1, 5])
    @pytest.mark.parametrize("vocab", [1, 6, 1003, 5001])
    def test_draws_as_the_sampler(self, rows, vocab, dtype, device, generator, programs):
        temperatures = [1.0, 0.0, 0.3, 100.0, 1e-7][:rows]
        seeds, num_outputs = SEEDS[-rows:], [0, 5, 2, 900, 1][:rows]
        logits = random_logits(rows, vocab, device, dtype, generator)
        ids, peaks = run_gumbel(logits, temperatures, seeds, num_outputs)
        params = [SamplingParams(temperature=t) for t in temperatures]
        assert_drawn_as_sampled(logits, params, seeds, num_outputs, ids)
        assert torch.equal(peaks, logits.float().amax(-1))

    @pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 10.0, 1000.0])
    def test_flat_and_peaked_rows(self, scale, device, generator):
        """Skipping of tiles that cannot win must not show, whatever the spread."""
        rows = 12
        logits = random_logits(rows, 3001, device, torch.float32, generator, scale)
        seeds = torch.randint(-(2**63), 2**63 - 1, (rows,)).tolist()
        ids, _ = run_gumbel(logits, [1.0] * rows, seeds, list(range(rows)))
        params = [SamplingParams(temperature=1.0)] * rows
        assert_drawn_as_sampled(logits, params, seeds, list(range(rows)), ids)
        assert len(set(ids.tolist())) > 1

    def test_masked_tokens_are_not_drawn(self, device, generator):
        logits = random_logits(6, 2000, device, torch.float32, generator)
        logits[:, ::2] = -INF
        logits[5, :1999] = -INF
        ids, _ = run_gumbel(logits, [50.0] * 6, SEEDS[:6], [3] * 6)
        assert all(token_id % 2 for token_id in ids.tolist())
        assert ids[5] == 1999
        params = [SamplingParams(temperature=50.0)] * 6
        assert_drawn_as_sampled(logits, params, SEEDS[:6], [3] * 6, ids)

    @pytest.mark.parametrize("bad", [NAN, INF, "masked"])
    def test_a_broken_row_shows_in_its_peak_and_harms_no_other(self, bad, device, generator):
        logits = random_logits(3, 1003, device, torch.float32, generator)
        if bad == "masked":
            logits[1] = -INF
        else:
            logits[1, 777] = bad
        filters = device_filters([SamplingParams(top_k=5, top_p=0.9)] * 3, device)
        for chosen in (None, filters):
            ids, peaks = run_gumbel(logits, [1.0] * 3, [1, 2, 3], [0] * 3, filters=chosen)
            assert torch.equal(peaks.isfinite().cpu(), torch.tensor([True, False, True]))
            assert 0 <= ids[1] < 1003
            if chosen is None:
                params = [SamplingParams()] * 2
                assert_drawn_as_sampled(logits[::2], params, [1, 3], [0, 0], ids[::2])

    def test_a_row_does_not_depend_on_its_batch(self, device, generator, monkeypatch):
        logits = random_logits(5, 5001, device, torch.float32, generator)
        params = [SamplingParams(top_p=0.9), SamplingParams(top_k=9)] * 2 + [SamplingParams()]
        heat, num_outputs = [1.0, 2.0, 0.7, 1.5, 1.0], [4, 0, 2, 8, 1]
        filters = device_filters(params, device)
        together, _ = run_gumbel(logits, heat, SEEDS[:5], num_outputs, filters=filters)
        monkeypatch.setattr(sample_peak, "_PROGRAMS", 3)
        for i in range(5):
            one = slice(i, i + 1)
            alone, _ = run_gumbel(
                logits[one],
                heat[one],
                SEEDS[one],
                num_outputs[one],
                filters=Filters(*(f[one] for f in filters)),
            )
            assert alone[0] == together[i]

    def test_a_loop_on_the_device_draws_what_the_sampler_draws_step_by_step(
        self, device, generator
    ):
        heat = [1.0, 0.0, 0.8, 1.3]
        seeds = torch.tensor(SEEDS[1:5], device=device)
        num_outputs = torch.tensor([0, 3, 10, 2], device=device)
        positions = torch.tensor([5, 6, -1, 0], device=device)
        token_ids = torch.full((4,), 77, device=device)
        ids, peaks = outputs(4, device)
        heat_on_device = torch.tensor(heat, device=device)
        params = [SamplingParams(temperature=t) for t in heat]
        for step in range(3):
            logits = random_logits(4, 1003, device, torch.float32, generator)
            counts = [0 + step, 3 + step, 10, 2 + step]  # the third row is padding
            assert num_outputs.tolist() == counts
            advance = Advance(positions, token_ids)
            gumbel(logits, heat_on_device, seeds, num_outputs, ids, peaks, advance=advance)
            assert_drawn_as_sampled(logits, params, SEEDS[1:5], counts, ids)
            assert positions.tolist() == [6 + step, 7 + step, -1, 1 + step]
            expected = ids.tolist()
            expected[2] = 77
            assert token_ids.tolist() == expected


def scaled_as_sampled(logits, params):
    logits = logits.float()
    heat = torch.tensor([p.temperature for p in params], device=logits.device)
    return (logits - logits.amax(-1, keepdim=True)) / heat.clamp(min=MIN_TEMPERATURE)[:, None]


def run_filter(logits, params, **options):
    floors = torch.full((len(logits),), NAN, device=logits.device)
    heat = torch.tensor([p.temperature for p in params], device=logits.device)
    filter_top(logits, heat, device_filters(params, logits.device), floors, **options)
    return floors


def assert_filtered_as_defined(logits, params, floors):
    """The definition's tokens, but where the mass meets top_p within a rounding error."""
    scaled = scaled_as_sampled(logits, params)
    expected = scaled.clone()
    filter_logits(expected, params)
    for i, p in enumerate(params):
        kept = (scaled[i] >= floors[i]) & (scaled[i] > -INF)
        wanted = expected[i] > -INF
        if torch.equal(kept, wanted):
            continue
        assert p.top_p < 1.0, (i, p, int(kept.sum()), int(wanted.sum()))
        base = scaled[i : i + 1].clone()  # without top_p
        filter_logits(base, [SamplingParams(top_k=p.top_k, min_p=p.min_p)])
        mass = base[0].double().exp()
        smaller = kept if kept.sum() < wanted.sum() else wanted
        assert float(mass[smaller].sum() / mass.sum()) == pytest.approx(p.top_p, abs=1e-6), (i, p)


def spread(kind, rows, vocab, device, generator):
    logits = torch.randn(rows, vocab, device=device, generator=generator)
    if kind == "flat":
        return logits * 0.01
    if kind == "peaked":
        return logits * 10 + 100
    if kind == "ties":
        return (logits * 4).round() / 2
    if kind == "equal":
        return logits * 0
    if kind == "masked":
        return torch.where(logits > 1.0, logits, -INF).index_fill(
            1, torch.zeros_like(logits[0, :1], dtype=torch.int64), 2.0
        )
    return logits * 3


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 50, "temperature": 0.1},
    {"top_k": 2, "temperature": 1e-7},
    {"top_k": 1002},
    {"top_k": 1003},
    {"top_k": 1 << 30},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"top_p": 0.9, "temperature": 0.2},
    {"top_p": 0.9, "temperature": 30.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-30, "top_p": 0.99},
    {"min_p": 0.05, "top_k": 40},
    {"min_p": 0.2, "top_k": 500, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 1001, "top_p": 0.3, "temperature": 2.0},
    {"temperature": 0.0, "top_k": 3},
]


class TestFilter:
    @pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "ties", "equal", "masked"])
    @pytest.mark.parametrize("vocab", [1, 7, 1003, 6001])
    def test_keeps_what_the_definition_keeps(self, kind, vocab, device, generator):
        """6001 logits are two tiles of the survey and up to six of the search."""
        params = [SamplingParams(**options) for options in FILTERS]
        logits = spread(kind, len(params), vocab, device, generator)
        floors = run_filter(logits, params)
        drawn = [i for i, p in enumerate(params) if not p.is_greedy]
        assert not floors[drawn].isnan().any()
        assert_filtered_as_defined(logits[drawn], [params[i] for i in drawn], floors[drawn])

    def test_random_parameters(self, dtype, device, generator):
        rows = 20
        numbers = torch.rand(rows, 4).tolist()
        params = [
            SamplingParams(
                temperature=10 ** (2 * a - 1),
                top_k=int(1500**b) if b > 0.2 else 0,
                top_p=min(1.0, 0.2 + c),
                min_p=max(0.0, d - 0.7) / 5,
            )
            for a, b, c, d in numbers
        ]
        logits = random_logits(rows, 1500, device, dtype, generator)
        assert_filtered_as_defined(logits, params, run_filter(logits, params))

    def test_all_is_kept_by_a_row_without_filters(self, device, generator):
        logits = random_logits(3, 50, device, torch.float32, generator)
        params = [SamplingParams(), SamplingParams(top_k=-1), SamplingParams(top_k=50)]
        assert run_filter(logits, params).tolist() == [-INF] * 3

    def test_min_p_in_float32(self, device, generator):
        logits = random_logits(2, 1003, device, torch.float32, generator)
        params = [SamplingParams(min_p=0.125), SamplingParams(min_p=0.5, top_k=40)]
        filters = device_filters(params, device)
        floors = torch.full((2,), NAN, device=device)
        single = filters._replace(min_p=filters.min_p.float())
        filter_top(logits, torch.ones(2, device=device), single, floors)
        assert_filtered_as_defined(logits, params, floors)

    def test_rows_may_lie_apart_and_the_workspace_may_be_larger(self, device, generator):
        wide = random_logits(8, 1300, device, torch.float32, generator)
        view = wide[::2, 3:1100]
        params = [SamplingParams(top_k=3), SamplingParams(top_p=0.6)] * 2
        workspace = make_workspace(9, 2000, device)
        workspace.depths.fill_(-1)
        floors = run_filter(view, params, workspace=workspace)
        assert_filtered_as_defined(view, params, floors)

    def test_signed_zeros_tie(self, device):
        """The peak is -0.0 or 0.0, and top_k=1 keeps both."""
        logits = torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]], device=device)
        params = [SamplingParams(top_k=1)] * 2
        assert_filtered_as_defined(logits, params, run_filter(logits, params))

    def test_a_row_writes_no_scratch_of_its_neighbour(self, device, generator):
        """Padding lanes of a tile look like masked tokens: infinitely far below the peak."""
        logits = spread("masked", 1, 1003, device, generator)
        workspace = make_workspace(2, 1003, device)
        workspace.depths.fill_(-5)
        params = [SamplingParams(top_k=1000)]
        assert_filtered_as_defined(logits, params, run_filter(logits, params, workspace=workspace))
        assert (workspace.depths[1] == -5).all()

    @pytest.mark.parametrize("rows", [1, 5])
    def test_filtered_draws_equal_the_sampler(self, rows, dtype, device, generator):
        params = [
            SamplingParams(temperature=0.9, top_k=30, top_p=0.95),
            SamplingParams(temperature=1.5, top_p=0.8, min_p=0.01),
            SamplingParams(temperature=0.0, top_k=4),
            SamplingParams(temperature=3.0),
            SamplingParams(temperature=5.0, top_k=1),
        ][-rows:]
        logits = random_logits(rows, 5001, device, dtype, generator)
        seeds, heat = SEEDS[:rows], [p.temperature for p in params]
        filters = device_filters(params, device)
        for count in range(2):
            counts = [count] * rows
            ids, _ = run_gumbel(logits, heat, seeds, counts, filters=filters)
            assert_drawn_as_sampled(logits, params, seeds, counts, ids)
            again, _ = run_gumbel(logits, heat, seeds, counts, floors=run_filter(logits, params))
            assert torch.equal(ids, again)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
@pytest.mark.parametrize("dtype_", [torch.float32, torch.bfloat16])
def test_the_vocabulary_of_llama_in_a_graph(dtype_, device, generator):
    """Replays read new logits and their own state; nothing is bound to the captured values."""
    rows, vocab, steps = 6, 128256, 4
    params = [
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.0, top_p=0.99, min_p=0.001),
        SamplingParams(temperature=0.1, top_k=200, top_p=0.5),
    ]
    heat = torch.tensor([p.temperature for p in params], device=device)
    filters, workspace = device_filters(params, device), make_workspace(rows, vocab, device)
    seeds = torch.tensor(SEEDS[:rows], device=device)
    num_outputs = torch.zeros(rows, dtype=torch.int64, device=device)
    positions, token_ids = torch.zeros_like(num_outputs), torch.zeros_like(num_outputs)
    logits = torch.empty(rows, vocab, dtype=dtype_, device=device)
    ids, peaks = outputs(rows, device)

    def step():
        gumbel(
            logits,
            heat,
            seeds,
            num_outputs,
            ids,
            peaks,
            filters=filters,
            advance=Advance(positions, token_ids),
            workspace=workspace,
        )

    logits.copy_(random_logits(rows, vocab, device, dtype_, generator))
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    num_outputs.zero_()
    positions.zero_()
    for count in range(steps):
        logits.copy_(random_logits(rows, vocab, device, dtype_, generator))
        graph.replay()
        assert_drawn_as_sampled(logits, params, SEEDS[:rows], [count] * rows, ids)
        assert torch.equal(token_ids, ids)
        assert positions.tolist() == num_outputs.tolist() == [count + 1] * rows
