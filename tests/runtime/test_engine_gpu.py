"""Decode steps as CUDA graphs: the same tokens as without, no wait for the device, few captures for many sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.core.errors import UnsupportedError
from kvfold.hf.compat import cache_kwarg
from kvfold.runtime.graph import Graphs
from kvfold.runtime.sampling import Kind
from tests.cli.conftest import byte_tokenizer
from tests.helpers import policies, tiny
from tests.helpers.device import waiting_is_an_error
from tests.runtime.helpers import LENGTHS, MODELS, NEW, RAGGED, UNIFORM, answer_later, prompts

pytestmark = pytest.mark.gpu
DENSE_LAYERS = [name for name in MODELS if name not in ("gpt_oss", "llama4", "gemma3n")]
"""Families without experts that are called one by one, and without numbers that their steps take from the host."""
SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def model_of() -> Callable[..., PreTrainedModel]:
    held: dict[tuple[str, torch.dtype], PreTrainedModel] = {}

    def get(family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        if (family, dtype) not in held:
            wide = {"head_dim": 64} if family in ("llama", "qwen3") else {}
            held[family, dtype] = tiny.build(family, dtype, **MODELS[family], **wide).cuda()
        return held[family, dtype]

    return get


def made(model: PreTrainedModel, policy: str = "dense", **more: Any) -> kvfold.Engine:
    return kvfold.Engine(model, policy, **{"max_batch": 4, **more})


def captured(engine: kvfold.Engine) -> int:
    return sum(len(program._replays) for program in engine._memory._programs.values())


@pytest.mark.parametrize("policy", ["dense", UNIFORM, RAGGED, *policies.READERS])
def test_a_graph_gives_the_tokens_of_stock_generate(model_of: Any, policy: str) -> None:
    # k-means has ties, which fall as rounding says: these lengths have none
    model, lengths = model_of(), (120, 137, 190)
    found = made(model, policy, graph=True).generate(prompts(*lengths), NEW)
    for length, result in zip(lengths, found, strict=True):
        prompt, cache = prompts(length)[0].cuda(), kvfold.Cache(model, policy)
        wanted = model.generate(prompt, max_new_tokens=NEW, do_sample=False, **{cache_kwarg(): cache})
        assert list(result.ids) == wanted[0, length:].tolist()


@pytest.mark.parametrize("policy", ["dense", RAGGED, policies.RETRIEVERS[1], policies.RETRIEVERS[3]])
@pytest.mark.parametrize("settings", [{}, SAMPLED, {"temperature": 0.7}])
def test_a_graph_gives_the_tokens_of_no_graph(model_of: Any, policy: str, settings: dict[str, float]) -> None:
    found = [made(model_of(), policy, graph=graph).generate(prompts(), NEW, **settings) for graph in (True, False)]
    assert found[0] == found[1]


@pytest.mark.parametrize("family", DENSE_LAYERS)
def test_families(model_of: Any, family: str) -> None:
    model = model_of(family)
    engine = made(model, RAGGED)
    found = engine.generate(prompts(), NEW)
    assert engine.stats().is_captured
    for length, result in zip(LENGTHS, found, strict=True):
        prompt, cache = prompts(length)[0].cuda(), kvfold.Cache(model, RAGGED)
        wanted = model.generate(prompt, max_new_tokens=NEW, do_sample=False, **{cache_kwarg(): cache})
        assert list(result.ids) == wanted[0, length:].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["dense", RAGGED, "refinekv(cluster=16, tau=0.1)"])
def test_half_precision_runs(model_of: Any, dtype: torch.dtype, policy: str) -> None:
    found = made(model_of(dtype=dtype), policy).generate(prompts(), NEW)
    assert all(len(result.ids) == NEW for result in found)


@pytest.mark.parametrize("policy", ["dense", UNIFORM, RAGGED, *policies.READERS])
@pytest.mark.parametrize("settings", [{}, SAMPLED])
def test_steps_do_not_wait(model_of: Any, policy: str, settings: dict[str, float]) -> None:
    engine = made(model_of(), policy).warm_up([200], NEW, batch=3, **settings)
    call = engine._begin(prompts(120, 137, 200), engine_settings(engine, settings), None, None)
    tokens = call.tokens()
    first = [next(tokens), next(tokens)]
    # copies to pinned memory and events are no waits; the host is a few steps behind
    with waiting_is_an_error():
        rest = [next(tokens) for _ in range(NEW - 4)]
    assert len(first) + len(rest) == NEW - 2
    assert all(token >= 0 for step in rest for token in step[:3])
    assert all(token == -1 for step in rest for token in step[3:])
    call.close()


def engine_settings(engine: kvfold.Engine, settings: dict[str, float]) -> Any:
    given = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, **settings}
    return engine._settings(NEW, **given, stop=(), ignore_eos=True)


def test_lengths_differ_in_one_graph(model_of: Any) -> None:
    engine = made(model_of())
    engine.generate(prompts(100, 60, 37), 20)
    assert captured(engine) == 1
    for lengths in ((100, 99, 98, 97), (17, 80, 3), (20, 60, 10, 5)):
        batch = engine.generate(prompts(*lengths), 20)
        alone = [made(model_of(), graph=False).generate(prompts(length), 20)[0] for length in lengths]
        assert batch == alone
    # shorter ones may have a smaller capacity, never more than one graph each
    assert captured(engine) == len(engine._memory._programs) <= 2


def test_appends_across_a_capacity(model_of: Any) -> None:
    engine = made(model_of(), max_batch=1)
    prompt = prompts(100)[0]
    short, long = engine.generate(prompt, 20)[0], engine.generate(prompt, 200)[0]
    assert long.ids[:20] == short.ids
    assert {key[1] for key in engine._memory._programs} >= {512}
    assert engine.generate(prompt, 20)[0] == short


@pytest.mark.parametrize("policy", ["dense", policies.READERS[0]])
def test_a_capture_leaves_no_trace(model_of: Any, policy: str) -> None:
    engine = made(model_of(), policy)
    first = engine.generate(prompts(), NEW, repetition_penalty=1.3)
    count = captured(engine)
    assert count > 0
    assert engine.generate(prompts(), NEW, repetition_penalty=1.3) == first
    assert captured(engine) == count


def test_warm_up_captures_what_a_call_needs(model_of: Any) -> None:
    engine = made(model_of(), policies.RETRIEVERS[1]).warm_up([200, 100], NEW, batch=3)
    count = captured(engine)
    engine.generate(prompts(120, 137, 200), NEW)
    engine.generate(prompts(60, 100, 37), NEW)
    assert captured(engine) == count
    assert engine.stats().rows_read < 1


def test_the_making_of_steps_is_told_apart(model_of: Any) -> None:
    engine = made(model_of(), policies.RETRIEVERS[1])
    for is_new in (True, False):
        engine.generate(prompts(120, 137, 200), NEW)
        stats = engine.stats()
        assert (stats.warm_up_s > 0) is is_new
        assert 0 < stats.tpot < 0.1
    warm = made(model_of()).warm_up([200], NEW, batch=1)
    warm.generate(prompts(200), NEW)
    assert warm.stats().warm_up_s == 0


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("policy", ["dense", UNIFORM, RAGGED, *policies.READERS])
def test_questions(model_of: Any, policy: str, graph: bool) -> None:
    # k-means has ties, which fall as rounding says: these lengths have none
    model, lengths, asked = model_of(), (120, 137, 190), (7, 1, 0)
    questions = [tiny.ids(count, seed=1000 + count) if count else None for count in asked]
    found = made(model, policy, graph=graph).generate(prompts(*lengths), NEW, questions=questions)
    for prompt, question, result in zip(prompts(*lengths), questions, found, strict=True):
        assert result.ids == answer_later(model, policy, prompt, question, NEW)


def test_seeds(model_of: Any) -> None:
    found = [made(model_of(), seed=3).generate(prompts(), NEW, **SAMPLED) for _ in range(2)]
    assert found[0] == found[1]
    assert made(model_of(), seed=4).generate(prompts(), NEW, **SAMPLED) != found[0]


def test_end_tokens_and_silence(model_of: Any) -> None:
    wholes = made(model_of()).generate(prompts(), NEW)
    end = wholes[1].ids[3]
    found = made(model_of()).generate(prompts(), NEW, stop=end)
    for whole, result in zip(wholes, found, strict=True):
        assert result.ids == (whole.ids[: whole.ids.index(end)] if end in whole.ids else whole.ids)


def test_streams() -> None:
    tokenizer = byte_tokenizer()
    model = tiny.build("llama", vocab_size=len(tokenizer), head_dim=64).cuda()
    engine = kvfold.Engine(model, RAGGED, tokenizer=tokenizer)
    whole = engine.generate("the quick brown fox " * 8, NEW, ignore_eos=True)[0].text
    assert "".join(engine.stream("the quick brown fox " * 8, NEW, ignore_eos=True)) == whole
    stop = whole[10:13]
    cut = "".join(engine.stream("the quick brown fox " * 8, NEW, ignore_eos=True, stop=stop))
    assert cut == whole[: whole.index(stop)]


def test_experts_called_one_by_one_are_refused(model_of: Any) -> None:
    model = model_of("gpt_oss")
    model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedError, match=r"cannot be captured as a CUDA graph: .*; use graph=False") as caught:
        made(model).generate(prompts(60)[0], NEW)
    assert "\n" not in str(caught.value)
    found = made(model, graph=False).generate(prompts(60)[0], NEW)[0].ids
    prompt = prompts(60)[0].cuda()
    wanted = model.generate(prompt, max_new_tokens=NEW, do_sample=False, **{cache_kwarg(): kvfold.Cache(model)})
    assert list(found) == wanted[0, 60:].tolist()


def test_steps_that_take_numbers_from_the_host_are_refused_by_their_line(model_of: Any) -> None:
    # Gemma3nTextModel makes a tensor of a constant in each step
    with pytest.raises(UnsupportedError, match=r"cannot be captured .* in modeling_gemma3n.py, line \d+: .*epsilon"):
        made(model_of("gemma3n")).generate(prompts(60)[0], NEW)
    found = made(model_of("gemma3n"), graph=False).generate(prompts(60)[0], NEW)[0].ids
    assert len(found) == NEW


def test_a_wait_in_what_is_captured_is_named() -> None:
    graphs, numbers = Graphs(torch.device("cuda"), "Some model"), torch.ones(3, device="cuda")
    with pytest.raises(UnsupportedError, match=r"the step of Some model cannot be captured .* in test_engine_gpu.py, "):
        graphs.capture(lambda: print(numbers.sum().item()), "step")
    # the device goes on
    replay = Graphs(torch.device("cuda"), "Some model").capture(lambda: numbers.add_(1), "step")
    torch.cuda.synchronize()
    before = float(numbers[0])
    replay()
    assert float(numbers[0]) == before + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("policy", ["dense", RAGGED])
def test_compiled_steps(model_of: Any, policy: str) -> None:
    engine = made(model_of(), policy, compile=True)
    assert engine.generate(prompts(), NEW) == made(model_of(), policy).generate(prompts(), NEW)
    assert engine.stats().is_captured


def test_bytes_and_peak(model_of: Any) -> None:
    model, length = model_of(dtype=torch.bfloat16), 8000
    held, peaks = {}, {}
    for policy in ("dense", "knorm(keep=0.25)"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = made(model, policy, max_batch=1, chunk_size=512)
        for _ in range(2):
            engine.generate(tiny.ids(length), 16)
        stats = engine.stats()
        held[policy], peaks[policy] = stats.nbytes, stats.peak_nbytes - before
        engine.release()
        assert engine.nbytes == 0
    row = 2 * 2 * 2 * 64 * 2
    assert held["dense"] < 1.1 * row * (length + 16) + 2**20
    assert held["knorm(keep=0.25)"] < 0.35 * held["dense"] + 2**20
    # a dense prompt is read into its place, also in the second call
    assert peaks["dense"] < 2 * held["dense"] + 2**26


def test_kinds_of_steps_are_graphs_of_their_own(model_of: Any) -> None:
    engine = made(model_of(), max_batch=1)
    for settings in ({}, {"temperature": 1.0}, SAMPLED, {}):
        engine.generate(prompts(60)[0], 10, **settings)
    (program,) = engine._memory._programs.values()
    assert set(program._replays) == {Kind(False, False, False), Kind(True, False, False), Kind(True, True, True)}
