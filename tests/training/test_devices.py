"""Abilities of the devices of a run, and demands of a run on them."""

import io
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxspec.core.forms import exchanged
from jaxspec.core.masks import causal
from jaxspec.models import Diffusion, Experts, ModelConfig, Network, param_shapes
from jaxspec.training import plan
from jaxspec.training.efficiency import Efficiency, flops_per_token
from jaxspec.training.loop import History, fit
from jaxspec.training.plan import data_mesh, device_name, matmul_peak
from jaxspec.training.settings import DTYPES, TrainingPace
from jaxspec.training.state import TrainState

CONFIG = ModelConfig(
    vocab_size=48,
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    max_positions=64,
)


def counted_flops(config, length):
    """Returns the operations that XLA counts in a forward pass over `length` tokens."""

    def logits(params, tokens):
        network = Network(params, config)
        hidden = network.forward(tokens, jnp.arange(length), causal(length), None)
        return network.unembed(hidden.features)

    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
    with exchanged({}):  # the compiler does not look into native code
        lowered = jax.jit(logits).lower(param_shapes(config), tokens)
    return lowered.compile().cost_analysis()["flops"]


@pytest.mark.parametrize("tied_head", [False, True])
def test_flops_of_a_token_are_what_the_compiler_counts(tied_head):
    config, length = CONFIG.replace(tied_head=tied_head), 64
    forward = length * flops_per_token(config, length) / 3
    # Norms, softmax and rotation come on top; no product is missing and none counts twice.
    assert forward < counted_flops(config, length) < 1.25 * forward


def test_a_markov_head_counts_one_product():
    def filling(rank):
        return CONFIG.replace(diffusion=Diffusion(1, rank=rank))

    difference = flops_per_token(filling(5), 16) - flops_per_token(filling(0), 16)
    assert difference == 6 * 5 * CONFIG.vocab_size


def test_only_experts_that_a_token_visits_count():
    def sparse(num):
        return CONFIG.replace(experts=Experts(num, 2, 16, True, (True, True)))

    router = 6 * 2 * CONFIG.embed_dim
    difference = flops_per_token(sparse(8), 16) - flops_per_token(sparse(4), 16)
    assert difference == router * 4


def test_the_peak_is_what_large_products_reach(monkeypatch):
    """On a device whose calls cost a millisecond each, small products are far from it."""
    peak, sizes = 1e12, []

    def seconds_of_product(mesh, dtype, size):
        sizes.append(size)
        return 1e-3 + 2 * size**3 / peak

    monkeypatch.setattr(plan, "_seconds_of_product", seconds_of_product)
    assert 0.9 * peak < matmul_peak(data_mesh(1), "float32") < peak
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_takes_the_best_time_of_its_calls(dtype, monkeypatch):
    """By a clock that each look at it moves on, a little less every time."""
    steps = iter(np.linspace(2.0, 1.0, 100))
    clock = itertools.accumulate(steps)
    monkeypatch.setattr(plan.time, "perf_counter", lambda: next(clock))
    # One call compiles, three are timed; each looks at the clock twice, so the last took step 8.
    expected = float(np.linspace(2.0, 1.0, 100)[7])
    assert plan._seconds_of_product(data_mesh(1), dtype, 8) == pytest.approx(expected)


def test_more_devices_than_there_are_is_refused():
    assert (
        device_name(data_mesh()) == f"{jax.local_device_count()} x {jax.devices()[0].device_kind}"
    )
    with pytest.raises(ValueError, match=r"num_devices must be in 1\.\."):
        data_mesh(jax.local_device_count() + 1)


def test_the_share_of_the_peak_goes_into_the_history_and_before_the_eye(tmp_path):
    def train_step(state, batch):
        metrics = {"loss": 1.0, "gradient_norm": 1.0, "tokens": 100.0}
        return state._replace(step=state.step + 1), metrics

    history, console = History(tmp_path / "history.jsonl"), Console(file=io.StringIO(), width=200)
    efficiency = Efficiency(flops_per_token=7.0, peak=7000.0)
    fit(
        train_step,
        TrainState(0, {}, ()),
        lambda step: (),
        20,
        history=history,
        pace=TrainingPace(record_steps=5),
        efficiency=efficiency,
        console=console,
    )
    for record in map(json.loads, history.path.open()):
        assert record["utilisation"] == pytest.approx(record["tokens_per_second"] / 1000, rel=1e-4)
    assert f"{100 * history.records[-1]['utilisation']:.1f} % of peak" in console.file.getvalue()
