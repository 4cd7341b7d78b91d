"""The pattern language, against a plain oracle: what patterns mean, which wins, what they spell."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowbit.models.names import (
    exact,
    is_inside,
    last_match,
    matches,
    patterns_in,
    plain_name,
    shown,
    spells,
    unmatched,
    written,
)

PARTS = st.sampled_from(["0", "1", "10", "a", "b", "ab", "up", "lm_head", "lora_A"])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
GLOBS = st.lists(
    st.sampled_from(["*", "?", "[ab]", "[!0]", ".", "0", "1", "a", "b", "up", "lm_head"]), min_size=1, max_size=5
).map("".join)
LAYER = nn.Linear(1, 1)


def oracle(pattern: str, path: str) -> bool:
    """The module itself or one that it is inside of has a path that matches, in full or behind any of its dots."""
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        named = parts[:length]
        while named:
            if fnmatch.fnmatchcase(".".join(named), pattern):
                return True
            named = named[1:]
    return fnmatch.fnmatchcase("", pattern)  # the model itself, which all is inside of


@given(GLOBS | PATHS, PATHS)
def test_shell_patterns_are_those_of_the_oracle(pattern, path):
    assert matches(pattern, path, LAYER) == oracle(pattern, path)


@given(PATHS, PATHS, PATHS)
def test_a_name_means_the_module_behind_any_dot_and_all_inside(outer, name, inner):
    for path in (name, f"{outer}.{name}", f"{name}.{inner}", f"{outer}.{name}.{inner}"):
        assert matches(name, path, LAYER)


@given(GLOBS, PATHS, PATHS)
def test_what_means_a_module_means_all_inside(pattern, path, inner):
    if matches(pattern, path, LAYER):
        assert matches(pattern, f"{path}.{inner}", LAYER)


@given(PATHS, PATHS)
def test_a_regular_expression_is_of_the_whole_path(first, second):
    assert matches(exact(first), second, LAYER) == (first == second)
    assert matches(f"re:.*{re.escape(first)}", second, LAYER) == second.endswith(first)
    assert matches(r"re:\d+", second, LAYER) == second.isdigit()


@pytest.mark.parametrize(
    ("pattern", "path", "means"),
    [
        ("lm_head", "model.lm_head", True),
        ("lm_head", "model.lm_head.linear", True),
        ("head", "model.lm_head", False),
        ("blocks.*.up", "model.blocks.3.up", True),
        ("blocks.3", "model.blocks.3.mlp.up", True),
        ("blocks.3", "model.blocks.30.up", False),
        ("*.up", "up", False),
        ("*", "", True),
        ("", "", True),
        ("", "a", True),
        ("re:model", "model.lm_head", False),
        ("re:(?!.*lm_head).*", "model.lm_head", False),
        ("re:(?!.*lm_head).*", "model.up", True),
        ("UP", "up", False),
        ("_orig_mod.model._orig_mod.up", "model.up", True),
    ],
)
def test_examples(pattern, path, means):
    assert matches(pattern, path, LAYER) == means


def test_a_function_is_asked_of_the_module_and_its_path():
    seen = []

    def wide(module: nn.Module, path: str) -> int:
        seen.append((module, path))
        return 1

    assert matches(wide, "a.b", LAYER) is True
    assert seen == [(LAYER, "a.b")]


@given(st.lists(st.tuples(GLOBS | PATHS, st.integers(0, 9) | st.none()), max_size=4), PATHS)
def test_the_last_match_wins(rows, path):
    expected = None
    for pattern, meaning in rows:
        if oracle(pattern, path):
            expected = meaning
    assert last_match(rows, path, LAYER) == expected


@given(GLOBS | PATHS, PATHS, st.data())
def test_what_spells_a_part_means_the_module_and_no_other_word(pattern, path, data):
    word = data.draw(st.sampled_from(path.split(".")))
    if spells(pattern, path, word):
        assert oracle(pattern, path)
        assert any(letter.isalnum() for letter in pattern)


@pytest.mark.parametrize(
    ("pattern", "path", "word", "spelled"),
    [
        ("lm_head", "model.lm_head", "lm_head", True),
        ("*lm_head", "model.lm_head", "lm_head", True),
        ("*_head", "model.lm_head", "lm_head", True),
        ("*_*", "model.lm_head", "lm_head", False),
        ("*head", "model.lm_head", "lm_head", True),
        ("*", "model.lm_head", "lm_head", False),
        ("?*.*", "model.lm_head", "lm_head", False),
        ("model.*", "model.lm_head", "lm_head", False),
        ("model", "model.lm_head", "lm_head", False),
        (r"re:model\.\w+", "model.lm_head", "lm_head", False),
        ("re:.*lm_head", "model.lm_head", "lm_head", True),
        ("other.lm_head", "model.lm_head", "lm_head", False),
        ("q_proj", "q_proj.lora_A.default", "lora_A", False),
        ("*lora_A*", "q_proj.lora_A.default", "lora_A", True),
        ("lora_?", "q_proj.lora_A.default", "lora_A", True),
        ("0", "features.0", "0", True),
        ("features.[0-9]", "features.0", "0", False),
        (lambda module, path: True, "lm_head", "lm_head", False),
    ],
)
def test_what_patterns_spell(pattern, path, word, spelled):
    assert spells(pattern, path, word) == spelled


def test_patterns_that_mean_nothing_are_found_but_for_functions():
    modules = [("a", LAYER), ("a.b", LAYER)]
    assert unmatched(["b", "c", "re:a", "re:b", lambda module, path: False], modules) == ["c", "re:b"]


def test_one_pattern_or_several():
    def asked(module: nn.Module, path: str) -> bool:
        return True

    several = ("a", asked)
    assert patterns_in(several, "skip") is several
    assert patterns_in(["a", "b"], "skip") == ("a", "b")
    assert patterns_in("a", "skip") == ("a",)
    assert patterns_in(asked, "skip") == (asked,)
    assert [shown(pattern) for pattern in several] == ["a", "asked"]
    assert written(["a", "re:b"], "skip") == ["a", "re:b"]
    with pytest.raises(ValueError, match="skip: the function asked cannot be written to a file"):
        written(several, "skip")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "got int"),
        (None, r"got None; skip=\(\) leaves nothing out"),
        (LAYER, "got Linear; give the module's name"),
        ([LAYER], "got Linear; give the module's name"),
        (["a", 3], "got int"),
        ([nn.Linear], r"got Linear; write lambda module, path: isinstance\(module, Linear\)"),
        (nn.Linear, r"got Linear; write lambda module, path: isinstance\(module, Linear\)"),
        (re.compile("up"), "got Pattern; write 're:up'"),
    ],
)
def test_what_is_no_pattern_is_refused(given, words):
    with pytest.raises(TypeError, match=f"skip: .*{words}"):
        patterns_in(given, "skip")


@pytest.mark.parametrize("function", [lambda module: True, lambda path, module: "up" in path])
def test_a_function_that_raises_is_named_with_the_module(function):
    with pytest.raises(ValueError, match=r"<lambda> raised TypeError for the Linear 'a.up': .*a module and its path"):
        matches(function, "a.up", LAYER)


def test_what_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match=r"'re:\(' is no regular expression"):
        matches("re:(", "a", LAYER)


def test_paths():
    assert plain_name("a._orig_mod.b") == "a.b" and plain_name("_orig_mod") == ""
    assert is_inside("a.b", "a") and is_inside("a", "a") and is_inside("a", "") and not is_inside("ab", "a")
