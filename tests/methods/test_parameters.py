"""Bad parameters are refused by name, with the rule and a fix; good ones print and read back."""

from __future__ import annotations

import re

import pytest

from kvfold.core.errors import ConfigError
from kvfold.core.policy import policy

BAD = [
    ("manifoldkv(rope_frame=mid)", "rope_frame must be one of post, pre, got 'mid'"),
    ("manifoldkv(metric=l3)", "metric must be one of l2, l1, linf, cosine"),
    ("windowed_manifoldkv(window=0)", "window must be a whole number of at least 1, got 0"),
    ("windowed_manifoldkv(window=2.5)", "window must be a whole number"),
    ("windowed_manifoldkv(merge_last=3)", "merge_last must be True or False, got 3"),
    ("windowed_manifoldkv(metric=l3)", "metric must be one of"),
    ("keydiff(block_size=0)", "block_size must be a whole number of at least 1"),
    ("keydiff(block_size=true)", "block_size must be a whole number"),
    ("snapkv(obs_window=0)", "obs_window must be a whole number of at least 1"),
    ("snapkv(kernel_size=4)", "kernel_size must be odd"),
    ("snapkv(kernel_size=-1)", "kernel_size must be a whole number of at least 1"),
    ("pyramidkv(pooling=sum)", "pooling must be one of avg, max"),
    ("h2o(normalize=1)", "normalize must be True or False"),
    ("expected_attention(future_positions=0)", "future_positions must be a whole number of at least 1"),
    ("expected_attention(use_covariance=1)", "use_covariance must be True or False"),
    ("expected_attention(use_vnorm=none)", "use_vnorm must be True or False"),
    ("expected_attention(epsilon=-0.1)", "epsilon must be a number of at least 0"),
    ("expected_attention(epsilon=1e999)", "epsilon must be a number of at least 0, got inf"),
    ("expected_attention(skip_tokens=-1)", "skip_tokens must be a whole number of at least 0"),
    ("criticalkv(base=knorm)", "base must be a method that rates the tokens of each head by attention"),
    ("criticalkv(base=tova)", "base must be a method that rates the tokens of each head by attention"),
    ("criticalkv(base=criticalkv)", "base must be another method"),
    ("criticalkv(base=snapkw)", "did you mean snapkv"),
    ("criticalkv(base=3)", "base must be the name of a method, got 3"),
    ("criticalkv(base=snapkv(window=3))", "snapkv as base has no parameter 'window'"),
    ("criticalkv(base=snapkv(obs_window=0))", "obs_window must be"),
    ("criticalkv(epsilon=-1)", "epsilon must be a number of at least 0"),
    ("criticalkv(first_stage=1.5)", "first_stage must be a number in [0, 1], got 1.5"),
    ("random(seed=-1)", "seed must be a whole number of at least 0"),
    ("random(seed=0.5)", "seed must be a whole number"),
    ("knorm(allocator=ada(safeguard=1.2))", "safeguard must be a number in [0, 1]"),
    ("knorm(allocator=ada(safeguard=nan))", "safeguard must be a number"),
    ("knorm(allocator=pyramid(beta=0))", "beta must be a whole number of at least 1"),
    ("knorm(allocator=given)", "given must have either shares or file"),
    ("knorm(allocator=given(shares=[1], file=a.json))", "given must have either shares or file"),
    ("knorm(allocator=given(shares=[]))", "shares must be a list of numbers"),
    ("knorm(allocator=given(shares=3))", "shares must be a list of numbers"),
    ("knorm(allocator=given(shares=[[1, 2], [3]]))", "shares must be as long for each layer"),
    ("knorm(allocator=given(shares=[[1, 2], 3]))", "shares must be all numbers, or all lists"),
    ("knorm(allocator=given(shares=[[], []]))", "shares must be all numbers, or all lists"),
    ("knorm(allocator=given(shares=[1, -2]))", "shares must be finite numbers of at least 0, got -2"),
    ("knorm(allocator=given(shares=[0, 0]))", "shares must be above 0 somewhere"),
    ("knorm(allocator=given(file=3))", "file must be the path of a JSON file"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text for text, _ in BAD])
def test_bad_parameters_are_refused(text: str, message: str) -> None:
    name, inside = re.fullmatch(r"(\w+)\((.*)\)", text).groups()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        policy(f"{name}(keep=0.5, {inside})")
    assert "\n" not in str(caught.value)


GOOD = [
    "manifoldkv(keep=0.5, rope_frame=pre, metric=cosine)",
    "windowed_manifoldkv(keep=0.5, window=128, merge_last=False)",
    "keydiff(keep=0.5, block_size=128)",
    "pyramidkv(keep=0.5, obs_window=8, kernel_size=7, pooling=max)",
    "h2o(keep=0.5, normalize=True)",
    "criticalkv(keep=0.5, base=expected_attention(epsilon=0.01, use_vnorm=False))",
    "criticalkv(keep=0.5, base=snapkv(obs_window=64))",
    "kvzip(keep=0.5, allocator=ada(safeguard=0))",
    "knorm(keep=0.5, allocator=given(shares=((1.0, 2.0), (0.5, 0.0))))",
    "tova(keep=0.5, allocator=given(shares=(1.0, 2.0)))",
    "random(keep=0.5, seed=5)",
]


@pytest.mark.parametrize("text", GOOD)
def test_parameters_print_and_read_back(text: str) -> None:
    built = policy(text)
    assert str(built) == text
    assert policy(str(built)) == built
    assert isinstance(hash(built.evictor), int)
    assert isinstance(hash(built.allocator), int)


@pytest.mark.parametrize("base", ["expected_attention(epsilon=0.01)", " Expected-Attention( epsilon = 0.01 )"])
def test_the_base_of_criticalkv_prints_in_one_form(base: str) -> None:
    built = policy("criticalkv", keep=0.5, base=base)
    assert "base=expected_attention(epsilon=0.01)" in str(built)


def test_methods_with_one_set_per_layer_refuse_budgets_by_head() -> None:
    for method in ("tova", "streamingllm"):
        for allocator in ("ada", "given(shares=[[1, 2], [2, 1]])"):
            with pytest.raises(ConfigError, match="one set for all"):
                policy(f"{method}(keep=0.5, allocator={allocator})")
