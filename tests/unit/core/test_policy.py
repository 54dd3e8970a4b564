from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from kvfold.core.errors import ConfigError
from kvfold.core.policy import Policy
from kvfold.core.types import Need
from tests.helpers import laws, policies

ALLOCATORS = {
    "uniform": st.just("uniform"),
    "ada": st.floats(0, 1).map(lambda s: f"ada(safeguard={s})"),
    "pyramid": st.integers(1, 50).map(lambda b: f"pyramid(beta={b})"),
    "given": st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=3).map(
        lambda t: f"given(shares={t})"
    ),
}
OWN = {
    "manifoldkv": {
        "rope_frame": st.sampled_from(["pre", "post"]),
        "metric": st.sampled_from(["l2", "l1", "linf", "cosine"]),
    },
    "windowed_manifoldkv": {"window": st.integers(1, 9999), "merge_last": st.booleans()},
    "keydiff": {"block_size": st.one_of(st.none(), st.integers(1, 500))},
    "snapkv": {
        "obs_window": st.integers(1, 64),
        "kernel_size": st.sampled_from([1, 3, 5, 7]),
        "pooling": st.sampled_from(["avg", "max"]),
    },
    "pyramidkv": {"obs_window": st.integers(1, 64)},
    "h2o": {"normalize": st.booleans()},
    "expected_attention": {
        "future_positions": st.integers(1, 999),
        "epsilon": st.floats(0, 1),
        "use_vnorm": st.booleans(),
    },
    "criticalkv": {
        "base": st.sampled_from(["snapkv", "snapkv(obs_window=7)", "h2o", "expected_attention(use_vnorm=False)"])
    },
    "random": {"seed": st.integers(0, 99)},
}


@st.composite
def texts(draw: st.DrawFn) -> str:
    method = draw(st.sampled_from(policies.METHODS))
    params = {"keep": draw(st.sampled_from(["0.25", "0.3", "500", "64MiB", "12.5%", "1.0", "33%"]))}
    allocator = draw(st.sampled_from([None, *[a for m, a in policies.COMBINATIONS if m == method]]))
    if allocator:
        params["allocator"] = draw(ALLOCATORS[allocator])
    for name, values in {"sink_tokens": st.integers(0, 99), "recent_tokens": st.integers(0, 99)}.items():
        if draw(st.booleans()):
            params[name] = draw(values)
    if method not in policies.REPLAYING and params.get("allocator") != "kvzip":
        for name in ("chunk", "every"):
            if draw(st.booleans()):
                params[name] = draw(st.integers(1, 4096))
    for name, values in OWN.get(method, {}).items():
        if draw(st.booleans()):
            params[name] = draw(values)
    shuffled = draw(st.permutations(list(params.items())))
    return f"{method}({', '.join(f'{key}={value}' for key, value in shuffled)})"


@laws.few(300)
@given(texts())
def test_printing_reads_back(text: str) -> None:
    policy = kvfold.policy(text)
    assert kvfold.policy(str(policy)) == policy
    assert str(kvfold.policy(str(policy))) == str(policy)
    assert hash(kvfold.policy(str(policy))) == hash(policy)


def test_defaults_are_not_printed() -> None:
    assert (
        str(kvfold.policy("manifoldkv(keep=0.25, sink_tokens=4, recent_tokens=32, allocator=uniform, metric=l2)"))
        == "manifoldkv(keep=0.25)"
    )
    assert str(kvfold.policy("dense")) == str(Policy()) == "dense"


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("manifoldkv(keep=0.25)", {}),
        ("  ManifoldKV ( keep = 0.25 ) ", {}),
        ("manifoldkv", {"keep": 0.25}),
        ("manifoldkv", {"keep": "25%"}),
        ("manifoldkv", {"keep": kvfold.Budget.fraction(0.25)}),
        ("manifoldkv(keep=25%,)", {}),
        ("manifoldkv(keep='0.25')", {}),
    ],
)
def test_ways_to_write_one_policy(text: str, params: dict[str, object]) -> None:
    assert kvfold.policy(text, **params) == kvfold.policy("manifoldkv", keep=0.25)


def test_a_finished_policy_passes_through() -> None:
    policy = kvfold.policy("knorm", keep=0.5)
    assert kvfold.policy(policy) is policy
    with pytest.raises(ConfigError, match="a finished policy takes no further parameters"):
        kvfold.policy(policy, keep=0.3)


def test_hyphens_and_nested_calls() -> None:
    policy = kvfold.policy("windowed-manifoldkv(keep=0.5, allocator=ada(safeguard=0.5), window=64)")
    assert (policy.method, policy.allocator.safeguard, policy.evictor.window) == ("windowed_manifoldkv", 0.5, 64)


BAD = [
    ("knorm(keep=0)", "keep must be a whole number of tokens of at least 1, got 0"),
    ("knorm(keep=-4)", "keep must be a whole number of tokens of at least 1, got -4"),
    ("knorm(keep=0.0)", "keep must be a fraction in (0, 1], got 0.0"),
    ("knorm(keep=1.5)", "keep must be a fraction in (0, 1], got 1.5"),
    ("knorm(keep=nan)", "keep must be a fraction in (0, 1], got nan"),
    ("knorm(keep=inf)", "keep must be a fraction in (0, 1], got inf"),
    ("knorm(keep=much)", "keep must be tokens, a fraction or bytes, got 'much'"),
    ("knorm(keep=[1])", "keep must be tokens, a fraction or bytes, got [1]"),
    ("knorm(keep=true)", "keep must be tokens, a fraction or bytes, got True"),
    ("knorm", "knorm needs keep; give a fraction, tokens or bytes"),
    ("knorm(keep=none)", "knorm needs keep"),
    ("knorm(kep=0.5)", "knorm has no parameter 'kep'; its parameters: keep"),
    ("knrm(keep=0.5)", "got 'knrm'; did you mean knorm"),
    ("snap(keep=0.5)", "did you mean snapkv"),
    ("qqqq(keep=0.5)", "got 'qqqq'; known: manifoldkv"),
    ("ada(keep=0.5)", "method must be one of the catalogue, got 'ada'"),
    ("knorm(keep=0.5, allocator=adda)", "allocator must be one of the catalogue, got 'adda'; did you mean ada"),
    ("knorm(keep=0.5, allocator=snapkv)", "allocator must be one of the catalogue, got 'snapkv'"),
    ("knorm(keep=35)", "keep must be at least sink_tokens + recent_tokens = 36, got '35'; raise it"),
    ("knorm(keep=9, sink_tokens=10, recent_tokens=0)", "keep must be at least sink_tokens + recent_tokens = 10"),
    ("snapkv(keep=40, obs_window=64)", "keep must be at least sink_tokens + recent_tokens = 68"),
    ("knorm(keep=0.5, sinks=3)", "knorm has no parameter 'sinks'; its parameters: keep, allocator"),
    (
        "snapkv(keep=0.5, window=3)",
        "snapkv has no parameter 'window'; its parameters: obs_window, kernel_size, pooling, keep, ",
    ),
    ("knorm(keep=0.5, allocator=ada(guard=1))", "ada has no parameter 'guard'; its parameters: safeguard"),
    ("knorm(keep=0.5, sink_tokens=-1)", "sink_tokens must be a whole number of at least 0, got -1"),
    ("knorm(keep=0.5, recent_tokens=2.5)", "recent_tokens must be a whole number of at least 0, got 2.5"),
    ("knorm(keep=0.5, recent_tokens=true)", "recent_tokens must be a whole number"),
    ("knorm(keep=0.5, chunk=0)", "chunk must be a whole number of at least 1, got 0"),
    ("knorm(keep=0.5, every=0)", "every must be a whole number of at least 1, got 0"),
    ("knorm(keep=0.5, every=many)", "every must be a whole number of at least 1, got 'many'"),
    (
        "knorm(keep=0.5) + snapkv(keep=0.5)",
        "must have one method that evicts, got knorm and snapkv; both decide which tokens stay",
    ),
    ("knorm(keep=0.5) + snappkv(keep=0.5)", "did you mean snapkv"),
    ("knorm(keep=0.5, keep=0.4)", "keep must be given once, got it twice"),
    (
        "streamingllm(keep=0.5, allocator=ada)",
        "allocator ada gives heads different tokens, but streamingllm keeps one set for all; use uniform",
    ),
    ("tova(keep=0.5, allocator=given(shares=[[1, 2]]))", "allocator given gives heads different tokens"),
    (
        "kvzip(keep=0.5, chunk=8)",
        "kvzip reads the whole context again when the prompt ends; chunk and every must be left out",
    ),
    ("dense(keep=0.5)", "dense takes no parameters, got keep"),
    ("knorm(keep=0.5", "policy must have balanced brackets, got 'knorm(keep=0.5'"),
    ("knorm)keep=0.5(", "policy must"),
    ("knorm(0.5)", "a parameter must read key=value, got '0.5'"),
    ("knorm(keep=)", "a parameter must read key=value, got 'keep='"),
    ("knorm(=0.5)", "a parameter must read key=value"),
    ("", "policy must read name(key=value, ...), got ''"),
    ("+", "policy must read name(key=value, ...)"),
    ("12", "policy must read name(key=value, ...)"),
    ("knorm(keep=0.5) snapkv", "policy must read name(key=value, ...)"),
    ("knorm(keep=0.5, allocator=ada+uniform)", "allocator must be"),
    ("knorm(keep=0.5, allocator=3)", "allocator must be"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text for text, _ in BAD])
def test_bad_policies(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kvfold.policy(text)
    assert "\n" not in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, 0.5, ["knorm"], object()])
def test_a_policy_that_is_no_text(value: object) -> None:
    with pytest.raises(ConfigError, match="policy must be text or a Policy, got"):
        kvfold.policy(value)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0, -1, 0.0, True, [], "1.5"])
def test_bad_keep_as_an_argument(value: object) -> None:
    with pytest.raises(ConfigError, match="keep must be"):
        kvfold.policy("knorm", keep=value)


def test_double_parameters_across_text_and_arguments() -> None:
    with pytest.raises(ConfigError, match="keep must be given once, got it in the text and as an argument"):
        kvfold.policy("knorm(keep=0.5)", keep=0.5)


def test_properties() -> None:
    policy = kvfold.policy("snapkv(keep=0.5, obs_window=48)")
    assert (policy.sink_tokens, policy.recent_tokens, policy.protected_tokens, policy.query_window) == (4, 48, 52, 48)
    assert policy.needs == Need.KEYS | Need.QUERIES
    assert policy.needs.names() == ("KEYS", "QUERIES")
    dense = kvfold.policy("dense")
    assert (dense.evicts, dense.needs, dense.query_window, dense.protected_tokens) == (False, Need.NOTHING, 0, 0)
    assert kvfold.policy("keydiff(keep=0.5, block_size=128)").chunk == 128


@laws.few(100)
@given(
    seen=st.integers(0, 500),
    keep=st.sampled_from([0.1, 0.5, 40, "1KiB"]),
    sinks=st.integers(0, 20),
    recent=st.integers(0, 20),
)
def test_protected_tokens_are_a_floor(seen: int, keep: object, sinks: int, recent: int) -> None:
    policy = kvfold.policy("knorm", keep=keep, sink_tokens=sinks, recent_tokens=recent)
    if keep == "1KiB" and min(seen, 100) < min(seen, sinks + recent):
        return
    kept = policy.keep_tokens(seen, 10)
    assert min(seen, sinks + recent) <= kept <= seen
    assert kept == max(policy.budget.resolve(seen, row_nbytes=10), min(seen, sinks + recent))


def test_bytes_below_the_protected_tokens() -> None:
    policy = kvfold.policy("knorm", keep="1KiB", sink_tokens=4, recent_tokens=32)
    with pytest.raises(
        ConfigError,
        match=r"keep must be at least 3600 bytes \(sink_tokens \+ recent_tokens of this model\), got '1024B'",
    ):
        policy.keep_tokens(500, 100)
