"""A stage of a Ray Data pipeline: rows with prompts in, records out, decoded by a pool of actors.

Needs the extra `ray`. Ray moves the rows and feeds the actors; where one is lost, it starts another
and gives it the rows again. Each actor is a process that loads the model once and decodes tables of
rows as `jaxspec.batch.run` does. A row's output depends on the settings, the seed and its id, not
on the actor, or on how often it is decoded.
"""

import importlib
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from jaxspec.batch.job import run
from jaxspec.batch.rows import Row, checked_id
from jaxspec.batch.settings import AnyConfig, AnyDrafter, JobSettings
from jaxspec.batch.writer import Collector
from jaxspec.checkpoint import Model, load
from jaxspec.core.checks import Count, checked
from jaxspec.extras import needs_extra
from jaxspec.sharding import parse_mesh

MakeDrafter = Callable[[Model], AnyDrafter]


def decode(
    dataset: Any,
    model: str,
    config: AnyConfig | None = None,
    drafter: MakeDrafter | None = None,
    seed: int = 0,
    *,
    prompt: str = "prompt",
    row_id: str = "id",
    actors: int = 1,
    rows_per_call: int = 256,
    dtype: str | None = None,
    weights: str | None = None,
    mesh: str | None = None,
    resources: Mapping[str, Any] | None = None,
    settings: JobSettings | None = None,
) -> Any:
    """Decodes every row of a Ray dataset.

    Args:
        dataset: a `ray.data.Dataset` with a column of prompts (text or token ids) and one of ids.
        model: folder, shipped name or Hub id, which every actor can load.
        config: settings of decoding, see `jaxspec.batch.run`; greedy, 128 tokens by default.
        drafter: makes the drafter for a model, in each actor: `lambda model: PromptLookup()`.
        seed: seed of the randomness.
        prompt: name of the column of prompts.
        row_id: name of the column of ids: numbers or texts, no two alike.
        actors: processes that decode.
        rows_per_call: rows of the table that Ray hands an actor (Ray's `batch_size`). Slots are
            refilled within a table.
        dtype: dtype of the network, see `load`.
        weights: the form in which matrices are kept, as "int8"; see `load`.
        mesh: "data=2,model=4": devices of each actor to divide the work over.
        resources: resources of an actor, for Ray: `{"num_gpus": 8}`, `{"num_cpus": 4}`.
        settings: see `jaxspec.batch.run`.

    Returns:
        A dataset, lazy as Ray's are, with a row for each sample: `id`, `sample`, `text`, `tokens`,
        `finish_reason`, `num_prompt_tokens` and `error`, which is null where nothing went wrong;
        `logprobs` and `warped_logprobs` if asked for.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the dataset lacks a column, or `actors` or `rows_per_call` is below 1.
    """
    actors = checked("actors", actors, Count)
    rows_per_call = checked("rows_per_call", rows_per_call, Count)
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
            "config": config,
            "drafter": drafter,
            "seed": seed,
            "prompt": prompt,
            "row_id": row_id,
            "dtype": dtype,
            "weights": weights,
            "mesh": mesh,
            "settings": settings,
        },
        batch_size=rows_per_call,
        batch_format="pyarrow",
        compute=ray_data.ActorPoolStrategy(size=actors),
        **(resources or {}),
    )


class Decoder:
    """An actor: keeps a model loaded, and decodes tables of rows."""

    def __init__(
        self,
        model: str,
        config: AnyConfig | None,
        drafter: MakeDrafter | None,
        seed: int,
        prompt: str,
        row_id: str,
        dtype: str | None,
        weights: str | None,
        mesh: str | None,
        settings: JobSettings | None,
    ):
        devices = None if mesh is None else parse_mesh(mesh)
        self._model = load(model, dtype, mesh=devices, weights=weights)
        self._drafter = None if drafter is None else drafter(self._model)
        self._config, self._seed, self._settings = config, seed, settings
        self._prompt, self._row_id = prompt, row_id

    def __call__(self, table: Any) -> Any:
        """Returns the records of a `pyarrow.Table` of rows, as another table."""
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
            self._settings,
        )
        records = sorted(output.records, key=itemgetter("line", "sample"))
        return self._table(records, table.schema.field(self._row_id).type)

    def _table(self, records: list[Mapping[str, Any]], id_type: Any) -> Any:
        """Returns a table with the same columns for any records: Ray joins tables of all actors."""
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
            if getattr(self._config, name, False):
                columns[name] = arrow.list_(arrow.float32())
        values = {name: [record.get(name) for record in records] for name in columns}
        return arrow.table(values, schema=arrow.schema(columns.items()))


def _row(line: int, row_id: Any, prompt: Any) -> Row:
    try:
        return Row(line, checked_id(row_id), prompt)
    except ValueError as error:
        return Row(line, row_id, None, str(error))


def _ray_data() -> Any:
    with needs_extra("jaxspec.batch.ray", "ray"):
        return importlib.import_module("ray.data")
