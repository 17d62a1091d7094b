"""EAGLE's objectives against recorded losses and gradients, and against drafting itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import load_eagle
from jaxspec.core.masks import causal, same_document
from jaxspec.models import (
    Eagle3Head,
    Network,
    init_eagle3_params,
    init_eagle_params,
    init_params,
)
from jaxspec.training.data import Sequences
from jaxspec.training.eagle import (
    FeatureRegression,
    HeadQuality,
    TrainingTimeTest,
    feature_losses,
)
from jaxspec.training.target import Observed
from tests.models.test_eagle import first, golden  # noqa: F401  (fixtures)


def test_recorded_losses_and_gradients(golden, first):  # noqa: F811
    target, folder = first
    head, recorded = load_eagle(folder, target), np.load(golden / "eagle1_loss.npz")
    tokens = jnp.asarray(recorded["shifted_input_ids"])
    states, expected = jnp.asarray(recorded["features"]), jnp.asarray(recorded["target_features"])
    counted = jnp.asarray(recorded["loss_mask"]) > 0

    def loss(params):
        learning = type(head)(params, head.config, head.bias)

        def read(tokens, states):
            length = len(tokens)
            embedded, mask = target.embed(tokens), causal(length)
            return learning.forward(embedded, states, jnp.arange(length), mask, None).features

        predicted = jax.vmap(read)(tokens, states)
        unembed = jax.vmap(target.unembed)
        total, loss = jax.nn.logsumexp(unembed(expected), axis=-1), "cross-entropy"
        said = (unembed(predicted), unembed(expected), total)
        losses = feature_losses(predicted, expected, *said, counted, loss)
        return losses[0] + 0.1 * losses[1], (predicted, losses)

    differentiated = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, (predicted, losses)), gradient = differentiated(head.params)
    np.testing.assert_allclose(predicted, recorded["pred_features"], atol=1e-4)
    np.testing.assert_allclose(losses[0], recorded["vloss"], rtol=1e-5)
    np.testing.assert_allclose(losses[1], recorded["ploss"], rtol=1e-5)
    np.testing.assert_allclose(total, recorded["loss_vw1_pw0.1"], rtol=1e-5)
    np.testing.assert_allclose(gradient["fc"]["kernel"].T, recorded["grad/fc.weight"], atol=1e-6)
    np.testing.assert_allclose(gradient["fc"]["bias"], recorded["grad/fc.bias"], atol=1e-6)
    down = recorded["grad/layers.0.mlp.down_proj.weight"]
    np.testing.assert_allclose(gradient["mlp"]["down"]["kernel"].T, down, atol=1e-6)


@pytest.fixture(scope="module")
def target(tiny_config) -> Network:
    config = tiny_config.replace(vocab_size=24)
    return Network(init_params(config, jax.random.key(0)), config)


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    """Two documents in the first row, one and padding in the second."""
    tokens = np.random.default_rng(0).integers(0, 24, (2, 12)).astype(np.int32)
    segments = np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], np.int32)
    positions = np.array([[*range(5), *range(7)], [*range(9), 0, 1, 2]], np.int32)
    return Sequences(tokens, segments, positions)


def layer_of(target: Network, **changes):
    return target.config.replace(num_layers=1, layer_types=("full",), **changes)


def changed(sequences: Sequences, row: int, place: int) -> Sequences:
    tokens = sequences.tokens.copy()
    tokens[row, place] = (tokens[row, place] + 1) % 24
    return sequences._replace(tokens=tokens)


def test_feature_regression_counts_places_within_documents(target, sequences):
    config = layer_of(target)
    params = init_eagle_params(config, True, jax.random.key(1))
    ids = jnp.arange(0, 24, 2)
    objective = FeatureRegression(config, noise=0.0)

    @jax.jit
    def loss(sequences):
        return objective(params, Observed(sequences, target, ids), jax.random.key(2))

    value, metrics = loss(sequences)
    assert metrics["tokens"] == 4 + 6 + 8
    assert loss(changed(sequences, 1, 11))[0] == value  # padding
    assert loss(changed(sequences, 1, 8))[0] != value
    noisy = FeatureRegression(config, noise=0.1)
    draw = jax.jit(lambda key: noisy(params, Observed(sequences, target, ids), key)[0])
    draws = [draw(jax.random.key(seed)) for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2] != value


def test_the_overlap_of_tokens_counts_all_that_the_target_may_say(target, sequences):
    config = layer_of(target)
    params, ids = init_eagle_params(config, True, jax.random.key(1)), jnp.arange(0, 24, 2)
    objective = FeatureRegression(config, noise=0.0, loss="overlap")
    observed = Observed(sequences, target, ids)
    metrics = jax.jit(objective)(params, observed, jax.random.key(2))[1]
    head, states = objective.head(params, target, ids), observed.states(())
    nats = []
    for row, features in zip(zip(*sequences[:3], strict=True), states.features, strict=True):
        tokens, segments, positions = map(jnp.asarray, row)
        mask = (causal(12) & same_document(segments))[:-1, :-1]
        embedded = target.embed(tokens[1:])
        predicted = head.forward(embedded, features[:-1], positions[:-1], mask, None).features
        drafted = jax.nn.softmax(head.unembed(target, predicted))
        said = jax.nn.softmax(target.unembed(features[1:]))[:, ids]
        counted = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
        nats.append(-np.log(np.sum(np.minimum(drafted, said), axis=1))[np.asarray(counted)])
    np.testing.assert_allclose(metrics["token_loss"], np.mean(np.concatenate(nats)), rtol=1e-5)


def test_unrolled_states_are_those_of_drafting(target, sequences):
    """Place t's loss at step i is that of a chain of i + 1 drafts from there, fed the true text."""
    ids = jnp.arange(0, 24, 3)
    config = layer_of(target, vocab_size=len(ids))
    taps = (0, 1)
    params = init_eagle3_params(config, 2 * target.embed_dim, jax.random.key(1))
    head = Eagle3Head(params, config, taps, 24, ids)
    objective = TrainingTimeTest(config, taps, num_unrolled=3, decay=0.8)
    row = jax.tree.map(lambda field: field[:1, :5], sequences)
    observed = Observed(row, target, ids)
    value, metrics = jax.jit(lambda key: objective(params, observed, key))(jax.random.key(0))

    @jax.jit
    def drafted_after(states, read):
        """The state after a text, and the log-probabilities of what is drafted there."""
        length = len(read)
        hidden = head.forward(target.embed(read), states, jnp.arange(length), causal(length), None)
        return hidden.features[-1:], jax.nn.log_softmax(head.unembed(target, hidden.features)[-1])

    tokens = jnp.asarray(row.tokens[0])
    seen = target.forward(tokens, jnp.arange(5), causal(5), None, taps=taps)
    true_states, logits = head.states_of(seen.features, seen.taps), target.unembed(seen.features)
    total, places, nats = 0.0, 0, 0.0
    overlaps = {step: [] for step in range(3)}
    ranks = {step: [] for step in range(3)}  # of the target's choice; tokens not drafted come last
    for place in range(4):
        known = place + 1
        states, read = true_states[:known], tokens[1 : known + 1]
        for step in range(3):
            if place + 1 + step > 4:
                break
            # All pairs so far in one causal pass: true states, then the chain's own.
            state, drafted = drafted_after(states, read)
            wanted = logits[place + 1 + step]
            order = ids[jnp.argsort(-drafted)].tolist()
            choice = int(jnp.argmax(wanted))
            ranks[step].append(order.index(choice) if choice in order else len(order))
            both = jnp.minimum(jax.nn.softmax(wanted)[ids], jnp.exp(drafted))
            overlaps[step].append(float(jnp.sum(both)))
            if choice in order:
                nats -= 0.8**step * np.log(overlaps[step][-1])
                law = jax.nn.softmax(wanted[ids])
                total -= 0.8**step * float(jnp.sum(law * drafted))
                places += step == 0
            if place + 2 + step <= 4:
                states = jnp.concatenate([states, state])
                read = jnp.append(read, tokens[place + 2 + step])
    np.testing.assert_allclose(value, total / 5, rtol=1e-4)
    assert metrics["tokens"] == places

    matched = TrainingTimeTest(config, taps, num_unrolled=3, decay=0.8, loss="overlap")
    value_of_nats, _ = jax.jit(matched)(params, observed, jax.random.key(0))
    np.testing.assert_allclose(value_of_nats, nats / 5, rtol=1e-4)

    quality = HeadQuality(objective, depth=3, top_k=4)
    loss, shown = jax.jit(quality)(params, Observed(row, target, ids), jax.random.key(0))
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    assert shown["tokens"] == 4
    for step, found in ranks.items():
        mean = np.mean(overlaps[step])
        np.testing.assert_allclose(shown[f"overlap_at_{step + 1}"], mean, rtol=1e-5)
        for name, most in (("top1", 1), ("top4", 4)):
            share = np.mean(np.array(found) < most)
            np.testing.assert_allclose(shown[f"{name}_at_{step + 1}"], share, rtol=1e-6)
