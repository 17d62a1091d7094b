"""A model with a tokenizer, small enough to measure in a test."""

import pytest

from jaxspec.checkpoint import Model
from tests.bench.models import tiny_model


@pytest.fixture(scope="session")
def model() -> Model:
    return tiny_model()
