"""Native products, MLPs, attention and filters against float64 and their references."""

import dataclasses
import importlib.util
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.random import _mt19937

from jaxspec import native
from jaxspec.core import masks
from jaxspec.core.cache import append
from jaxspec.core.forms import exchanged
from jaxspec.core.sampling import keep_top_k, keep_top_p
from jaxspec.models import Experts, Network, init_params
from jaxspec.models.linear import multiply

ROOT = Path(__file__).resolve().parents[2]
ABSENT = np.zeros(0, np.float32)
WEIGHTS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}
# Rows, inputs, outputs: whole vectors and none, one row and many.
SHAPES = [
    (1, 64, 64),
    (1, 7, 5),
    (2, 33, 130),
    (5, 100, 17),
    (6, 320, 640),
    (26, 48, 31),
    (64, 96, 80),
]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """The library that the package was installed with, or one that is compiled for these tests."""
    if native.status().instructions is not None:
        yield native.status()
        return
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    library = tmp_path_factory.mktemp("native") / build.LIBRARY
    reason = build.compile_library(library)
    if reason is not None:
        assert "no C compiler" in reason, reason
        pytest.skip(f"needs a C compiler: {reason}")
    found = native.load(library)
    assert found.instructions is not None, found.reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "status", lambda: found)
        yield found


def product(x, w, scale=ABSENT, bias=ABSENT, *, turned=False, workers=2):
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[0 if turned else 1]), jnp.float32)
    call = partial(native.call, "product", shape, turned=int(turned), workers=workers)
    return jax.jit(call)(x, w, scale, bias)


def draw(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == jnp.int8:
        return jnp.asarray(rng.integers(-127, 128, shape, dtype=np.int8))
    return jnp.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_as_near_to_float64_as_that_of_xla(shape, weights, turned):
    rows, inputs, outputs = shape
    x = draw((rows, inputs), jnp.float32)
    w = draw((outputs, inputs) if turned else (inputs, outputs), WEIGHTS[weights], seed=1)
    kernel = np.asarray(w.astype(jnp.float32), np.float64)
    exact = np.asarray(x, np.float64) @ (kernel.T if turned else kernel)
    plain = x @ (w.T if turned else w).astype(jnp.float32)
    error = np.abs(product(x, w, turned=turned) - exact)
    # The bound on a sum of that many float32 products; XLA's own error is below it too.
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(kernel.T if turned else kernel)
    bound = 2.0**-24 * max(np.sqrt(inputs), 4) * size
    assert np.all(error <= bound)
    assert error.mean() <= 1.05 * np.abs(plain - exact).mean() + 1e-12


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_row_does_not_depend_on_its_neighbours(weights, turned):
    x = draw((64, 100), jnp.float32)
    w = draw((70, 100) if turned else (100, 70), WEIGHTS[weights], seed=1)
    every = product(x, w, turned=turned)
    for rows in (1, 2, 3, 7, 26):
        np.testing.assert_array_equal(product(x[:rows], w, turned=turned), every[:rows])
    np.testing.assert_array_equal(product(x, w, turned=turned, workers=1), every)


@pytest.mark.parametrize("turned", [False, True])
def test_scales_and_biases_belong_to_outputs(turned):
    x, w = draw((3, 40), jnp.float32), draw((40, 21), jnp.int8, seed=1)
    scale, bias = draw((21,), jnp.float32, seed=2), draw((21,), jnp.float32, seed=3)
    got = product(x, w.T if turned else w, scale, bias, turned=turned)
    exact = np.asarray(x) @ np.asarray(w, np.float64) * np.asarray(scale) + np.asarray(bias)
    np.testing.assert_allclose(got, exact, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_not_finite_stays_so(turned):
    x = np.zeros((3, 40), np.float32)
    x[0, 3], x[1, 39], x[2, 5] = np.nan, np.inf, 1e-42
    w = np.ones((40, 21), np.float32)
    got = np.asarray(product(x, w.T.copy() if turned else w, turned=turned))
    assert np.isnan(got[0]).all()
    assert np.isposinf(got[1]).all()
    # XLA's threads take numbers below the normal ones for zero.
    np.testing.assert_array_equal(got[2], np.asarray(jax.jit(jnp.dot)(x[2:], w))[0])


def test_calls_at_once_end_and_agree():
    x, w = draw((6, 320), jnp.float32), draw((320, 640), jnp.bfloat16, seed=1)
    call = jax.jit(
        lambda x: jax.lax.fori_loop(0, 50, lambda i, y: y + product(x, w), jnp.zeros((6, 640)))
    )
    expected = call(x)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: np.asarray(call(x)), range(32)):
            np.testing.assert_array_equal(got, expected)


def test_a_kernel_in_bfloat16_is_multiplied_as_the_float32_that_it_is():
    x, w = draw((6, 96), jnp.float32), draw((96, 64), jnp.bfloat16, seed=1)
    np.testing.assert_array_equal(
        jax.jit(multiply)(x, w), jax.jit(multiply)(x, w.astype(jnp.float32))
    )


KINDS = {
    "llama": {},
    "qwen": {"qk_norm": True, "qkv_bias": True},
    "gelu": {
        "activation": "gelu_tanh",
        "mlp_bias": True,
        "out_bias": True,
        "norm_plus_one": True,
        "post_norms": True,
    },
    "capped": {"attention_softcap": 5.0},
    "scaled": {"residual_scale": 0.4, "logit_divisor": 1.5, "query_scale": 0.2},
    "scaled, normed behind": {"residual_scale": 0.4, "pre_norms": False, "post_norms": True},
    "unrotated": {"layer_types": ("full", "unrotated")},
    "shared expert": {
        "residual_scale": 0.4,
        "experts": Experts(5, 2, mlp_dim=12, normalize=True, layers=(True, False), shared_dim=20),
    },
    "joint norms": {"qk_norm": True, "joint_qk_norm": True},  # falls back to XLA
    # Enough work for helpers to join.
    "wide": {"embed_dim": 256, "mlp_dim": 256, "head_dim": 32, "post_norms": True},
}


def network(kind, tiny_config) -> Network:
    config = dataclasses.replace(tiny_config, **KINDS[kind])
    return Network(init_params(config, jax.random.key(0)), config)


@pytest.mark.parametrize(("tokens", "cached"), [(1, 12), (5, 12), (5, 0), (20, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_agrees_with_its_reference(kind, tokens, cached, tiny_config):
    model = network(kind, tiny_config)
    ids = jax.random.randint(jax.random.key(1), (3, 12 + tokens), 0, tiny_config.vocab_size)

    def logits(ids):
        hidden = model.forward(ids[:12], jnp.arange(12), masks.causal(12), None)
        cache = append(model.empty_cache(32), hidden.new_kv, cached)
        positions = jnp.arange(cached, cached + tokens)
        new = model.forward(ids[12:], positions, masks.causal(tokens), cache)
        return model.unembed(new.features), new.new_kv

    ours = jax.jit(jax.vmap(logits))(ids)
    native_attention = "jaxspec_attention" in jax.jit(jax.vmap(logits)).lower(ids).as_text()
    assert native_attention == (kind != "joint norms")
    with exchanged({}):
        reference = jax.jit(jax.vmap(lambda ids: logits(ids)))(ids)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), ours, reference)


@pytest.mark.parametrize("vocab_size", [5, 16, 100, 4096])
def test_filters_keep_what_their_reference_keeps(vocab_size):
    logits = jnp.round(4 * jax.random.normal(jax.random.key(vocab_size), (3, 2, vocab_size)))
    logits = logits.at[0, 1, 3].set(-jnp.inf).at[1, 0, 2].set(jnp.nan).at[2, 0].set(-jnp.inf)

    def filtered(logits):
        return keep_top_k(logits, jnp.int32(4)), keep_top_p(logits, jnp.float32(0.8))

    ours = jax.jit(jax.vmap(filtered))
    assert "jaxspec_threshold" in ours.lower(logits).as_text()
    with exchanged({}):
        reference = jax.jit(jax.vmap(lambda logits: filtered(logits)))(logits)
    jax.tree.map(np.testing.assert_array_equal, ours(logits), reference)


def test_gradients_are_those_of_the_reference(tiny_config):
    model = network("llama", tiny_config)

    def loss(params, ids):
        net = dataclasses.replace(model, params=params)
        hidden = net.forward(ids, jnp.arange(8), masks.causal(8), None)
        return jnp.mean(jax.nn.logsumexp(net.unembed(hidden.features), axis=-1))

    ids = jnp.arange(8)
    ours = jax.jit(jax.grad(loss))(model.params, ids)
    with exchanged({}):
        reference = jax.jit(jax.grad(lambda *args: loss(*args)))(model.params, ids)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), ours, reference)


def no_library(path: Path) -> None:
    path.write_bytes(b"not a library")


def of_nobody_knows(path: Path) -> None:
    path.write_bytes(Path(_mt19937.__file__).read_bytes())


def of_another_processor(path: Path) -> None:
    """The same with another machine in the header of an ELF file: 243 is RISC-V."""
    of_nobody_knows(path)
    with path.open("r+b") as file:
        file.seek(18)
        file.write(bytes([243, 0]))


@pytest.mark.parametrize("make", [no_library, of_nobody_knows, of_another_processor, Path.mkdir])
def test_a_file_that_cannot_be_used_is_named_and_left_alone(make, tmp_path):
    make(tmp_path / "libjaxspec.so.2")
    with pytest.warns(UserWarning, match=r"libjaxspec\.so\.2 cannot be used.*Install the package"):
        found = native.load(tmp_path / "libjaxspec.so.2")
    assert found.instructions is None
    assert "libjaxspec.so.2 cannot be used" in found.reason


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("#define XLA_FFI_API_MAJOR 7\n#define XLA_FFI_API_MINOR 12\n", "jaxlib has 7012"),
        ("#define XLA_FFI_VERSION 7\n", "not enough values"),
        (None, "No such file"),
    ],
)
def test_a_jaxlib_of_another_interface_is_told_nothing(header, said, tmp_path, monkeypatch):
    if not native.LIBRARY.exists():
        pytest.skip("needs the package installed with native code")
    folder = tmp_path / "xla" / "ffi" / "api"
    folder.mkdir(parents=True)
    if header is not None:
        (folder / "c_api.h").write_text(header)
    told = []
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *args, **_: told.append(args))
    with pytest.warns(UserWarning, match="cannot be used"):
        found = native.load(native.LIBRARY)
    assert found.instructions is None
    assert said in found.reason
    assert told == []


UNUSABLE = """
import sys
from pathlib import Path
from jaxspec import native
native.LIBRARY = Path(sys.argv[1])
assert native.status().instructions is None
import jax, jax.numpy as jnp
from jaxspec.models.linear import multiply
product = jax.jit(multiply)
print(float(product(jnp.ones((2, 8)), jnp.ones((8, 3))).sum()), native.status().reason)
"""


def test_without_a_usable_file_products_are_right_and_that_is_said_once(tmp_path):
    no_library(tmp_path / "libjaxspec.so.2")
    run = [sys.executable, "-c", UNUSABLE, str(tmp_path / "libjaxspec.so.2")]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("48.0 products by XLA: libjaxspec.so.2 cannot be used")
    assert done.stderr.count("cannot be used") == 1


def test_without_native_code_a_reason_is_given(monkeypatch):
    monkeypatch.setenv("JAXSPEC_NATIVE", "off")
    source = "from jaxspec import native; print(native.status())"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "JAXSPEC_NATIVE=off" in done.stdout


PROGRAM = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from jaxspec import native
from jaxspec.models.linear import multiply
assert native.status().instructions is not None, native.status().reason
where = sys.argv[1]
if where == "one core" and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if where == "distributed":
    jax.distributed.initialize("localhost:" + sys.argv[2], 1, 0)
children = []
if where == "forked":  # before JAX has started threads, as loaders of data do
    children = [os.fork() for _ in range(2)]
x, w = jnp.ones((6, 640)), jnp.ones((640, 640), jnp.bfloat16)
got = jax.jit(lambda x, w: jax.lax.fori_loop(0, 50, lambda i, y: multiply(x + 0 * y, w), x))(x, w)
np.testing.assert_array_equal(got, 640.0)
if 0 in children:
    os._exit(0)
for child in children:
    assert os.waitpid(child, 0)[1] == 0, "a forked process failed"
print("right")
"""


@pytest.mark.parametrize("where", ["one core", "forked", "distributed"])
def test_products_run(where, compiled):
    if not native.LIBRARY.exists():
        pytest.skip("needs the package installed with native code")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    run = [sys.executable, "-c", PROGRAM, where, port]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "right\n", done.stderr[-2000:]
