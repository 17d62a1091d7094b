"""Faults of a call of `denoise` are named before anything is compiled."""

import pytest

from jaxspec import DenoiseConfig, Model, SelfSpeculation, denoise, denoise_stream, generate, score
from jaxspec.models import Network
from jaxspec.sharding import make_mesh, shard
from tests.diffusion.networks import BLOCK, MASK, tiny_model


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"steps": 1.5}, "steps must be a whole number, got 1.5"),
        ({"order": "loudest"}, r"order must be one of \('low_confidence', .*got 'loudest'"),
        ({"schedule": "cosine"}, r"schedule must be one of \('even', 'linear'\), got 'cosine'"),
        ({"cache": "all"}, r"cache must be one of \('none', .*'dual'\), got 'all'"),
        ({"threshold": 0.0}, r"threshold must be in \(0, 1\], got 0.0"),
        ({"threshold": 1.5}, r"threshold must be in \(0, 1\], got 1.5"),
        ({"threshold": 0.9, "steps": 4}, "threshold: decides how many steps"),
        ({"threshold": 0.9, "order": "entropy"}, "threshold: is a probability.*got 'entropy'"),
        ({"temperature": -1.0}, r"temperature must be in \[0, 3e\+38\), got -1.0"),
        ({"guidance": -0.5}, r"guidance must be in \[0, 10000.0\], got -0.5"),
        ({"temperature": "hot"}, "temperature must be a finite number or a sequence, got 'hot'"),
        ({"temperature": float("inf")}, "temperature must be a finite number.*got inf"),
        ({"guidance": (1.0, 2.0)}, r"guidance must be a finite number, got \(1.0, 2.0\)"),
        ({"threshold": "a"}, r"threshold must be a finite number, got 'a'"),
        ({"threshold": float("nan")}, r"threshold must be a finite number, got nan"),
        ({"max_new_tokens": None}, "max_new_tokens must be a whole number, got None"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a sequence, got 5"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids\[0\] must be a whole number, got 'a'"),
        ({"eps": 0.0}, r"eps must be in \(0, 1\), got 0.0"),
    ],
)
def test_settings_out_of_range(values, message):
    with pytest.raises(ValueError, match=message):
        DenoiseConfig(**values)


SHORT = {"max_new_tokens": 12, "block_length": BLOCK}


@pytest.mark.parametrize(
    ("network", "prompt", "values", "message"),
    [
        ({}, [1], {"max_new_tokens": 10, "block_length": 4}, r"multiple of block_length \(4\)"),
        ({}, [1], {**SHORT, "steps": 7}, r"steps must be a multiple of the .* \(3\), got 7"),
        ({}, [1, MASK], SHORT, r"prompts\[0\] holds the mask \(id 23\)"),
        (
            {},
            [1] * 120,
            SHORT,
            r"prompts\[0\] has 120 tokens; .*holds 128, and 12 places.*or decode less",
        ),
        ({}, [], SHORT, "give at least one"),
        ({}, [24], SHORT, r"ids outside 0..23: \[24\]"),
        ({}, [[1], [1, [2]]], SHORT, r"prompts\[1\]\[1\] must be a whole number, got \[2\]"),
        ({}, ["a"], SHORT, r"prompts\[0\]: .* has no tokenizer"),
        ({"block": 4}, [1], {"max_new_tokens": 8, "block_length": 8}, "block_length must be 4"),
        ({"block": 4}, [1], {**SHORT, "cache": "dual"}, "causal over blocks, got 'dual'"),
        ({}, [1], {**SHORT, "cache": "blocks"}, "sees both sides, got 'blocks'"),
        ({}, [1], {**SHORT, "cache": "dual", "guidance": 1.0}, "guidance needs cache='none'"),
        ({}, [1], {**SHORT, "cache": "dual", "allow_mask_token": True}, "allow_mask_token needs"),
        ({"shift": True}, [1], {**SHORT, "cache": "dual", "steps": 3}, "two steps per block"),
        ({}, [1], {**SHORT, "temperature": (0.5, 1.0)}, "temperature: got 2 values for 1 prompts"),
        ({}, [1], {**SHORT, "temperature": [[0.5]]}, r"temperature\[0\] must be a finite number"),
        ({}, [1], {**SHORT, "temperature": ()}, "temperature: got 0 values for 1 prompts"),
        ({}, [1], {**SHORT, "stop_token_ids": [10**6]}, "stop_token_ids has ids outside"),
        ({}, [1], {**SHORT, "guidance": 1e38}, r"guidance must be in \[0, 10000.0\], got 1e\+38"),
    ],
)
def test_settings_that_do_not_fit(network, prompt, values, message):
    with pytest.raises(ValueError, match=message):
        denoise(tiny_model(**network), prompt, DenoiseConfig(**values))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("schedule", ["even", "linear"])
def test_steps_that_decide_nothing_are_not_taken(schedule, shift):
    """There are more of them than a machine could take."""
    config = DenoiseConfig(
        **SHORT,
        steps=3 * 10**8,
        schedule=schedule,
        cache="dual" if shift else None,
        allow_mask_token=not shift,
        stop_token_ids=(),
    )
    row = denoise(tiny_model(shift=shift), [1], config)[0]
    assert len(row.tokens) == 12
    assert row.num_calls <= 12


@pytest.mark.parametrize("seed", [-1, 2**31, True, 0.5])
def test_a_seed_must_fit_the_generator(seed):
    with pytest.raises(ValueError, match=r"^seed must be "):
        denoise(tiny_model(), [1], DenoiseConfig(**SHORT), seed=seed)


def test_settings_may_be_keywords():
    model, given = tiny_model(), DenoiseConfig(**SHORT, steps=12)
    expected = denoise(model, [1], DenoiseConfig(**SHORT, steps=6))
    assert repr(expected) == "DenoiseResult(rows: 1, tokens: 12)"
    assert "token budget or context used up" in expected._repr_html_()
    for config, settings in ((None, {**SHORT, "steps": 6}), (given, {"steps": 6})):
        (row,) = denoise(model, [1], config, **settings)
        assert (row.num_calls, row.tokens.tolist()) == (6, expected[0].tokens.tolist())
        assert len(list(denoise_stream(model, [1], config, **settings))) == 6
    with pytest.raises(TypeError, match=r"stepz is no argument and no setting; .* steps"):
        denoise(model, [1], stepz=6)


def test_more_drafts_than_places():
    with pytest.raises(ValueError, match=r"num_drafts must be below max_new_tokens \(12\)"):
        denoise(tiny_model(), [1], DenoiseConfig(**SHORT), SelfSpeculation(12))


def test_what_is_no_speculation():
    with pytest.raises(ValueError, match="speculation must be a SelfSpeculation, got 4"):
        denoise(tiny_model(), [1], DenoiseConfig(**SHORT), 4)


@pytest.mark.parametrize("block", [None, 4])
def test_on_a_mesh_rows_are_those_of_one_device(block):
    model = tiny_model(block=block)
    meshed = Model(Network(shard(model.params, make_mesh()), model.config))
    prompts, settings = [[1, 2], [3], [4, 5, 6]], DenoiseConfig(max_new_tokens=8, block_length=4)
    expected = [row.tokens.tolist() for row in denoise(model, prompts, settings)]
    for speculation in (None, SelfSpeculation(2)):
        found = denoise(meshed, prompts, settings, speculation)
        assert [row.tokens.tolist() for row in found] == expected


def test_causal_models_and_diffusion_models_are_told_apart():
    model = tiny_model()
    causal = Model(Network(model.params, model.config.replace(diffusion=None)), name="causal")
    with pytest.raises(ValueError, match="causal is causal and cannot fill in masks; use `gen"):
        denoise(causal, [1])
    for call in (generate, score):
        with pytest.raises(ValueError, match=r"tiny is a diffusion language model.*use `denoise`"):
            call(model, [1])
