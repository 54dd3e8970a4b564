"""Sampling on the device: as often as the probabilities say, within what is asked for, the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvfold.runtime.sampling import Kind, Sampler
from tests.runtime.helpers import engine, prompts

VOCAB = 32
DRAWS = 20_000


def logits(batch: int = 1) -> Tensor:
    return 2.0 * torch.randn(batch, VOCAB, generator=torch.Generator().manual_seed(3))


def draws(scores: Tensor, count: int, **settings: float) -> Tensor:
    """Draw from copies of the first row at once, ``[count]``."""
    asked = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, **settings}
    kind = Kind(True, asked["top_p"] < 1 or asked["top_k"] > 0, False)
    sampler = Sampler(count, VOCAB, torch.device("cpu"))
    sampler.load(kind, **asked, prompts=[])
    sampler.draw(torch.Generator().manual_seed(0))
    return sampler.choose(scores[:1].expand(count, -1), kind, torch.ones(count, dtype=torch.bool))


def reference(scores: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probabilities as stock ``generate`` draws from."""
    ids = torch.zeros(len(scores), 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 1.5},
        {"top_k": 7, "top_p": 0.8, "temperature": 1.2},
        {"top_k": 1000},
        {"top_p": 1e-6},
    ],
)
def test_tokens_come_as_often_as_they_should(settings: dict[str, float]) -> None:
    scores = logits()
    wanted = reference(scores, **settings)[0]
    found = torch.bincount(draws(scores, DRAWS, **settings), minlength=VOCAB)
    assert not found[wanted == 0].any(), "a token was drawn that must not be"
    expected = wanted * DRAWS
    judged = expected > 5
    chi = ((found - expected).square() / expected)[judged].sum()
    # chi squared has this mean and this variance; six deviations are never passed by chance
    freedom = max(1, int(judged.sum()) - 1)
    assert chi < freedom + 6 * (2 * freedom) ** 0.5 + 1e-6


def test_equal_logits_stay_together() -> None:
    scores = torch.zeros(1, VOCAB)
    scores[0, :4] = 5.0
    assert set(draws(scores, 500, top_k=2).tolist()) == {0, 1, 2, 3}


def test_a_share_of_one_keeps_every_token() -> None:
    scores = torch.zeros(1, VOCAB)
    scores[0, 0] = 60.0
    sampler, kind = Sampler(1, VOCAB, torch.device("cpu")), Kind(True, True, False)
    sampler.load(kind, temperature=1.0, top_p=1.0, top_k=VOCAB, repetition_penalty=1.0, prompts=[])
    assert torch.equal(sampler._likely(scores), scores)


def test_repetition_penalty() -> None:
    scores, prompt = logits(2), torch.tensor([[1, 2, 3], [4, 4, 5]])
    kind, sampler = Kind(False, False, True), Sampler(2, VOCAB, torch.device("cpu"))
    alive = torch.tensor([True, True])
    for penalty in (1.3, 0.7):
        sampler.load(
            kind, temperature=0, top_p=1, top_k=0, repetition_penalty=penalty, prompts=[prompt[:1], prompt[1:]]
        )
        found, ids = [], prompt
        for _ in range(6):
            token = sampler.choose(scores, kind, alive)
            wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores.clone()).argmax(-1)
            assert torch.equal(token, wanted)
            ids = torch.cat((ids, token[:, None]), 1)
            found.append(token)


def test_what_an_ended_sequence_chooses_is_not_seen() -> None:
    kind, sampler = Kind(False, False, True), Sampler(2, VOCAB, torch.device("cpu"))
    sampler.load(kind, temperature=0, top_p=1, top_k=0, repetition_penalty=2.0, prompts=[])
    sampler.choose(logits(2), kind, torch.tensor([True, False]))
    assert sampler._seen.sum(1).tolist() == [1, 0]


def test_noise_of_zero_draws_nothing_impossible() -> None:
    scores = torch.full((1, VOCAB), -torch.inf)
    scores[0, 3] = 0.0
    sampler, kind = Sampler(1, VOCAB, torch.device("cpu")), Kind(True, False, False)
    sampler.load(kind, temperature=1, top_p=1, top_k=0, repetition_penalty=1, prompts=[])
    sampler._noise.zero_()
    assert sampler.choose(scores, kind, torch.tensor([True])).tolist() == [3]


SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}


def test_a_seed_gives_the_same_answers() -> None:
    first, second = (engine(seed=5) for _ in range(2))
    calls = [first.generate(prompts(), 20, **SAMPLED) for _ in range(2)]
    assert calls[0] != calls[1]
    assert [second.generate(prompts(), 20, **SAMPLED) for _ in range(2)] == calls
    assert first.generate(prompts(), 20, **SAMPLED, seed=5) == calls[0]
    assert engine(seed=6).generate(prompts(), 20, **SAMPLED) != calls[0]


def test_warming_up_takes_nothing_from_the_generator() -> None:
    made = engine(seed=1).warm_up(50, 5, **SAMPLED)
    assert made.generate(prompts(), 20, **SAMPLED) == engine(seed=1).generate(prompts(), 20, **SAMPLED)


def test_greedy_calls_take_nothing_from_the_generator() -> None:
    made, other = engine(seed=1), engine(seed=1)
    made.generate(prompts(), 20)
    assert made.generate(prompts(), 20, **SAMPLED) == other.generate(prompts(), 20, **SAMPLED)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    engine().generate(prompts(), 5, **SAMPLED)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_temperature_near_zero_is_greedy() -> None:
    assert engine().generate(prompts(), 20, temperature=1e-4) == engine().generate(prompts(), 20)
