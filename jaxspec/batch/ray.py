"""A stage of a Ray Data pipeline: rows with prompts in, records out, decoded by a pool of actors.

Needs the extra `ray`. Ray moves the rows, feeds the actors, and starts another one and gives it the
rows again where one is lost; each actor is a process that loads the model once and decodes what it
is handed as `jaxspec.batch.run` does. A row's output depends on the settings, the seed and its id,
not on which actor decodes it, or how often.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.batch.job import run
from jaxspec.batch.rows import Row, checked_id
from jaxspec.batch.writer import Collector
from jaxspec.checkpoint import Model, load
from jaxspec.core.types import Drafter
from jaxspec.drafters import LoadedDrafter
from jaxspec.generation import GenerationConfig
from jaxspec.sharding import parse_mesh

MakeDrafter = Callable[[Model], Drafter | LoadedDrafter]

_BATCH = 256


def decode(
    dataset: Any,
    model: str,
    config: GenerationConfig | None = None,
    drafter: MakeDrafter | None = None,
    seed: int = 0,
    *,
    prompt: str = "prompt",
    row_id: str = "id",
    actors: int = 1,
    batch_size: int = _BATCH,
    dtype: str | None = None,
    mesh: str | None = None,
    resources: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Decodes every row of a Ray dataset.

    Args:
        dataset: a `ray.data.Dataset` with a column of prompts (text or token ids) and one of ids.
        model: folder, shipped name or Hub id, which every actor can load.
        config: how to decode; greedy, 128 tokens by default.
        drafter: makes the drafter for a model, in each actor: `lambda model: PromptLookup()`.
        seed: of the randomness.
        prompt: name of the column of prompts.
        row_id: name of the column of ids: numbers or texts, each row its own.
        actors: processes that decode.
        batch_size: rows that an actor is handed at once. It refills slots within them.
        dtype: of the weights, as for `load`.
        mesh: "data=2,model=4": devices of each actor to divide the work over.
        resources: what an actor occupies, for Ray: `{"num_gpus": 8}`, `{"num_cpus": 4}`.
        settings: of `jaxspec.batch.run`, such as `{"batch": 32}`.

    Returns:
        A dataset, lazy as Ray's are, with a row for each sample: `id`, `sample`, `text`, `tokens`,
        `finish_reason`, `num_prompt_tokens` and `error`, which is null where nothing went wrong;
        `logprobs` and `warped_logprobs` if asked for.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the dataset lacks a column, or `actors` or `batch_size` is below 1.
    """
    for name, value in (("actors", actors), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    ray_data = _ray_data()
    columns = dataset.columns() or []
    for role, column in (("prompt", prompt), ("row_id", row_id)):
        if column not in columns:
            raise ValueError(
                f"{role}: the dataset has no column {column!r}, only {', '.join(columns)}."
            )
    return dataset.map_batches(
        Decoder,
        fn_constructor_kwargs={
            "model": model,
            "config": config or GenerationConfig(),
            "drafter": drafter,
            "seed": seed,
            "prompt": prompt,
            "row_id": row_id,
            "dtype": dtype,
            "mesh": mesh,
            "settings": dict(settings or {}),
        },
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray_data.ActorPoolStrategy(size=actors),
        **(resources or {}),
    )


class Decoder:
    """What an actor is: a model that stays loaded, and tables of rows one after the other."""

    def __init__(
        self,
        model: str,
        config: GenerationConfig,
        drafter: MakeDrafter | None,
        seed: int,
        prompt: str,
        row_id: str,
        dtype: str | None,
        mesh: str | None,
        settings: Mapping[str, Any],
    ):
        self._model = load(model, dtype=dtype, mesh=None if mesh is None else parse_mesh(mesh))
        self._drafter = None if drafter is None else drafter(self._model)
        self._config, self._seed, self._settings = config, seed, settings
        self._prompt, self._row_id = prompt, row_id

    def __call__(self, table: Any) -> Any:
        """Records of a `pyarrow.Table` of rows, as another one."""
        prompts, ids = table[self._prompt].to_pylist(), table[self._row_id].to_pylist()
        rows = [
            _row(line, row_id, prompt)
            for line, (row_id, prompt) in enumerate(zip(ids, prompts, strict=True), start=1)
        ]
        output = Collector()
        run(
            self._model,
            rows,
            output,
            self._config,
            self._drafter,
            self._seed,
            **self._settings,
        )
        records = sorted(output.records, key=lambda record: (record["line"], record["sample"]))
        return self._table(records, table.schema.field(self._row_id).type)

    def _table(self, records: list[Mapping[str, Any]], id_type: Any) -> Any:
        """With the same columns whatever the records: Ray joins tables of all actors."""
        arrow: Any = importlib.import_module("pyarrow")
        columns = {
            "id": id_type,
            "sample": arrow.int32(),
            "text": arrow.string(),
            "tokens": arrow.list_(arrow.int32()),
            "finish_reason": arrow.string(),
            "num_prompt_tokens": arrow.int32(),
            "error": arrow.string(),
        }
        for name in ("logprobs", "warped_logprobs"):
            if getattr(self._config, name):
                columns[name] = arrow.list_(arrow.float32())
        values = {name: [record.get(name) for record in records] for name in columns}
        return arrow.table(values, schema=arrow.schema(columns.items()))


def _row(line: int, row_id: Any, prompt: Any) -> Row:
    try:
        return Row(line, checked_id(row_id), prompt)
    except ValueError as error:
        return Row(line, row_id, None, str(error))


def _ray_data() -> Any:
    try:
        return importlib.import_module("ray.data")
    except ImportError as error:
        raise ImportError(
            "jaxspec.batch.ray needs Ray: pip install 'jaxspec[ray]' (or 'ray[data]')."
        ) from error
