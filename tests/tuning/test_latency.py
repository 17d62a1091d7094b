"""Latency profiles: what they say between measurements, and what they refuse to say beyond."""

import dataclasses
import json

import numpy as np
import pytest

from jaxspec.tuning import (
    LatencyProfile,
    Timing,
    load_profile,
    save_profile,
    shipped_profiles,
)
from jaxspec.tuning.latency import profile_from_dict

PHONE = "galaxy-s25-adreno830-vicuna7b-q4"
SERVER = "server-a100-roofline-7b-bf16"


def profile(target=((1, 1.0), (4, 4.0)), draft=((1, 0.1), (4, 0.4)), **facts):
    return LatencyProfile(
        "here",
        tuple(Timing(*timing) for timing in target),
        tuple(Timing(*timing) for timing in draft),
        **facts,
    )


def test_times_between_measured_sizes_lie_on_a_line():
    np.testing.assert_allclose(profile().target_seconds(np.arange(1, 5)), [1, 2, 3, 4])
    assert profile().draft_seconds((1, 2, 4)) == pytest.approx(0.1 + 0.2 + 0.4)
    firsts = profile(first_draft=(Timing(1, 0.7), Timing(3, 0.9)))
    assert firsts.draft_seconds((1,)) == pytest.approx(0.7)
    assert firsts.draft_seconds((1, 2)) == pytest.approx(0.8 + 0.2)
    with pytest.raises(ValueError, match=r"1 to 3 levels, not for 4; .*--levels 1,3,4"):
        firsts.draft_seconds((1, 1, 1, 1))
    assert profile().draft_seconds(()) == 0


@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_is_extrapolated(tokens):
    with pytest.raises(ValueError, match=rf"1 to 4 tokens.*not for {tokens}; measure that"):
        profile().target_seconds(tokens)
    with pytest.raises(ValueError, match=r"1 to 4 nodes.*--batches 1,4,5"):
        profile().draft_seconds((1, 5))


@pytest.mark.parametrize(
    ("field", "timings", "message"),
    [
        ("target", [(1, 1.0)], "target needs .* at least 2 sizes"),
        ("target", [(2, 1.0), (4, 2.0)], "target needs the time of 1"),
        ("draft", [], "draft needs .* at least 1 sizes"),
        ("target", [(1, 1.0), (2, 0.0)], "seconds must be above 0, got 0.0"),
        ("target", [(1, 1.0), (2, -3.0)], "seconds must be above 0, got -3.0"),
        ("draft", [(1, float("nan"))], "seconds must be a finite number, got nan"),
        ("draft", [(1, "fast")], "seconds must be a finite number, got 'fast'"),
        ("draft", [(1, True)], "seconds must be a finite number, got True"),
        ("draft", [(1, 1.0, "x")], "spread must be a finite number, got 'x'"),
        ("draft", [(1, 1.0, -1.0)], "spread must be at least 0, got -1.0"),
        ("target", [(1, 1.0), (4, 2.0), (4, 3.0)], "target lists a size twice"),
        ("target", [(0, 1.0), (1, 1.0)], "size must be at least 1, got 0"),
        ("target", [(float("nan"), 1.0), (1, 1.0)], "size must be a whole number, got nan"),
    ],
)
def test_bad_timings_are_refused_by_field(field, timings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        profile(**{field: timings})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", 5, "name must be a text, got 5"),
        ("target", None, "target must be a sequence, got None"),
        ("target", "ab", "target must be a sequence, got 'ab'"),
        ("draft", [(1, 1.0)], r"draft\[0\] must be of type Timing, got \(1, 1.0\)"),
        ("one_pass", "no", "one_pass must be True or False, got 'no'"),
        ("published", (1,), r"published\[0\] must be of type TableRow, got 1"),
    ],
)
def test_fields_of_other_types_are_refused(field, value, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(profile(), **{field: value})


@pytest.mark.parametrize("name", shipped_profiles())
def test_profiles_survive_a_file(name, tmp_path):
    shipped = load_profile(name)
    save_profile(shipped, tmp_path / "again.json")
    assert load_profile(tmp_path / "again.json") == shipped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_keyed_on": "nodes"}, "target_keyed_on must be 'tokens'"),
        ({"target_keyed_on": None}, "target_keyed_on must be 'tokens'"),
        (
            {"target": [{"nodes": 1, "seconds": 1.0}]},
            r"target\[0\] must have the fields tokens, seconds, spread; got nodes, seconds",
        ),
        ({"target": 3}, "target must be a sequence, got 3"),
        ({"draft": [1]}, r"draft\[0\] must be a mapping, got 1"),
        (
            {"draft": [{"nodes": 1.5, "seconds": 1.0}]},
            r"draft\[0\]: size must be a whole number, got 1.5",
        ),
        (
            {"draft": [{"nodes": 1, "seconds": True}]},
            r"draft\[0\]: seconds must be a finite number",
        ),
        ({"first_draft": None}, "first_draft must be a sequence, got None"),
        ({"published": [{"name": "x"}]}, r"published\[0\] must have the fields name, nodes,"),
        ({"one_pass": "false"}, "one_pass must be True or False, got 'false'"),
        ({"device": 5}, "device must be a text, got 5"),
        ({"latency": 1}, "unknown field 'latency'"),
    ],
)
def test_files_that_mean_something_else_are_refused(change, message):
    with pytest.raises(ValueError, match=f"profile phone.json: {message}"):
        profile_from_dict({**profile().as_dict(), **change}, "phone.json")


def test_whole_numbers_in_files_may_be_floats():
    draft = [{"nodes": 1.0, "seconds": 1}]
    found = profile_from_dict({**profile().as_dict(), "draft": draft}, "phone.json")
    assert found.draft == (Timing(1, 1.0),)


def test_an_unknown_profile_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=PHONE):
        load_profile("galaxy")


def test_the_phone_is_what_was_published():
    phone = load_profile(PHONE)
    assert 1 / phone.target_seconds(1) == pytest.approx(11.49)
    for run, batches in zip(phone.published, ((1, 4, 4, 1, 1), (1, 1, 1, 1, 1)), strict=True):
        assert phone.target_seconds(run.nodes + 1) == pytest.approx(run.target_seconds)
        assert phone.draft_seconds(batches) == pytest.approx(run.draft_seconds)


def test_the_server_is_the_roofline_that_it_says_it_is():
    """T(n) = max(bytes / bandwidth, 2 * weights * n / peak), of 7B weights in bfloat16."""
    shipped = load_profile(SERVER)
    bandwidth, peak = 2.039e12, 312e12
    for timings, num_weights in ((shipped.target, 6.74e9), (shipped.draft, 0.37e9)):
        assert [timing.size for timing in timings] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
        for timing in timings:
            bound = max(2 * num_weights / bandwidth, 2 * num_weights * timing.size / peak)
            assert timing == Timing(timing.size, bound)
    normalised = shipped.normalised()
    sizes = np.asarray([timing.size for timing in shipped.target])
    np.testing.assert_allclose(normalised[sizes <= 128], 1)
    np.testing.assert_allclose(normalised[sizes == 256], 256 / (312 / 2.039))


def test_files_are_plain_json(tmp_path):
    save_profile(profile(), tmp_path / "p.json")
    entry = json.loads((tmp_path / "p.json").read_text())
    assert entry["target_keyed_on"] == "tokens"
    assert entry["target"][1] == {"tokens": 4, "seconds": 4.0, "spread": None}
