"""The suites of `jaxspec bench --suite NAME`: what is measured on the models shipped here.

To measure a further method, add one entry to `methods`; a further model, one to `targets`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxspec.bench.assisted import PLAIN, decode_with_transformers, why_not_here
from jaxspec.bench.batches import BatchFigures, measure_batches
from jaxspec.bench.compare import PLAIN as OUR_PLAIN
from jaxspec.bench.compare import compare, find_divergences
from jaxspec.bench.comparison import Comparison, Divergence
from jaxspec.bench.figures import Figures, figures_of_subsets, subsets_of
from jaxspec.bench.prompts import read_entries
from jaxspec.bench.step import StepTimes, measure_drafter, measure_tree_building
from jaxspec.bench.timing import release_programs
from jaxspec.checkpoint import (
    Model,
    load,
    load_dflash,
    load_eagle,
    shipped_folders,
    shipped_heads,
    shipped_models,
)
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.core.tree import Path as RankPath
from jaxspec.core.types import Drafter, Params, PyTree, Warp
from jaxspec.drafters import (
    AdaptiveBlock,
    AdaptiveExit,
    Deer,
    DFlash,
    DraftModel,
    Eagle,
    Eagle2,
    LayerSkip,
    LoadedDrafter,
    NoDraft,
    PromptLookup,
)
from jaxspec.drafters.fit import OtherTargetError
from jaxspec.generation import GenerationConfig, prepare
from jaxspec.models import Eagle3Head, EagleHead
from jaxspec.progress import progress_bar
from jaxspec.trees import draft_batches, tree_of_head
from jaxspec.trees.search import TREE_FILE

EAGLE_HEAD, EAGLE3_HEAD, SKIPS = "demo-eagle", "demo-eagle3", "demo-skips"
DRAFT, DEER, DFLASH = "demo-draft", "demo-deer", "demo-dflash"
MADE_FOR = "demo"
"""The target that heads and sets belong to."""
Method = Drafter | LoadedDrafter


class PromptSet(NamedTuple):
    """Prompts of one category.

    category: how figures call it.
    file: where in the folder of evaluation data, one JSON object a line.
    template: the prompt made from one row, in `str.format` style, in the shape that the models saw
        in training up to where the answer begins. A list in a field is written one entry a line.
    of: what the field `category` of a row must be one of; `()` takes all rows.
    """

    category: str
    file: str
    template: str
    of: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is measured together.

    Attributes:
        title: of its part of the page.
        prompt_sets: the prompts.
        targets: shipped models; those that are not here are left out.
        methods: drafters by name, each made for a target; `None` where its head or set is not
            here, or is for another target.
        temperatures: by name; 0 is greedy. Every method is measured at each.
        assistant: the shipped model that `transformers` drafts with, greedily; `None` to leave
            `transformers` out.
        prompts_per_set: so many are decoded unless another number is asked for.
        max_new_tokens: of every prompt, at most.
        top_p: of sampling.
        seed: of sampling.
        batches: rows decoded together, greedily, apart from everything else; `()` for none.
        batch_methods: which of `methods` that is measured with, plain decoding beside them.
    """

    title: str
    prompt_sets: tuple[PromptSet, ...]
    targets: tuple[str, ...]
    methods: Mapping[str, Callable[[Model], Method | None]]
    temperatures: Mapping[str, float]
    assistant: str | None
    prompts_per_set: int
    max_new_tokens: int
    top_p: float = 1.0
    seed: int = 0
    batches: tuple[int, ...] = ()
    batch_methods: tuple[str, ...] = ()


_GSM8K = PromptSet("GSM8K", "gsm8k/test.jsonl.gz", "{question}\n")
_HUMANEVAL = PromptSet("HumanEval", "humaneval/HumanEval.jsonl.gz", "{prompt}")
_MBPP = PromptSet("MBPP", "mbpp/test.jsonl.gz", '"""\n{text}\n{test_list}\n"""\n')
# The groups of Spec-Bench (Xia et al. 2024), first turns; the first group is MT-Bench.
_CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SPEC_BENCH = {
    "chat": _CHAT,
    "translation": ("translation",),
    "summarisation": ("summarization",),
    "questions": ("qa",),
    "mathematics": ("math_reasoning",),
    "retrieval": ("rag",),
}


def searched_set(**settings: Any) -> Callable[[Model], LayerSkip | None]:
    """The shipped set with some settings in place of those found with it."""

    def method(target: Model) -> LayerSkip | None:
        if target.name != MADE_FOR or SKIPS not in shipped_folders():
            return None
        return LayerSkip.read(SKIPS, **settings)

    return method


def adaptive_exit(**settings: Any) -> Callable[[Model], LayerSkip | None]:
    """The shipped set with a threshold that adapts, from prompt to prompt.

    It begins where the search left it; what moves it is the paper's but for `settings`.
    """
    return searched_set(num_speculative_tokens=8, adaptive=AdaptiveExit(**settings))


def with_head(
    name: str, draft: Callable[[EagleHead | Eagle3Head], LoadedDrafter]
) -> Callable[[Model], LoadedDrafter | None]:
    """A method that drafts with a shipped head."""

    def method(target: Model) -> LoadedDrafter | None:
        if target.name != MADE_FOR or name not in shipped_heads():
            return None
        return draft(load_eagle(name, target.network))

    return method


def searched_tree(name: str) -> Callable[[Model], LoadedDrafter | None]:
    """A shipped head over the tree that was searched for it."""
    over_its_tree = with_head(name, lambda head: Eagle.of(head, tree_of_head(name)))

    def method(target: Model) -> LoadedDrafter | None:
        head = shipped_heads().get(name)
        if head is None or not (head / TREE_FILE).is_file():
            return None
        return over_its_tree(target)

    return method


def with_draft_model(name: str) -> Callable[[Model], LoadedDrafter | None]:
    """A shipped causal model that drafts for every target with its tokenizer."""

    def method(target: Model) -> LoadedDrafter | None:
        if name not in shipped_models():
            return None
        return if_it_drafts_for(target, DraftModel.of(load(name)))

    return method


def with_deer(name: str, **settings: Any) -> Callable[[Model], LoadedDrafter | None]:
    """A shipped diffusion model that drafts for every target with its tokenizer."""

    def method(target: Model) -> LoadedDrafter | None:
        if name not in shipped_models():
            return None
        return if_it_drafts_for(target, Deer.of(load(name), **settings))

    return method


def adaptive_deer(name: str, block: int) -> Callable[[Model], LoadedDrafter | None]:
    """Chains of a shipped diffusion model, as long as pays by what passes cost here."""
    whole = with_deer(name, block=block)

    def method(target: Model) -> LoadedDrafter | None:
        chain = whole(target)
        if chain is None:
            return None
        return with_deer(name, block=block, adaptive=measure_costs(target, chain))(target)

    return method


def measure_costs(target: Model, chain: LoadedDrafter) -> AdaptiveBlock:
    """What drafting and each further token of a target pass cost on this machine.

    Rounded, as they are constants of the program: it is found again where they are the same. A
    token's to one digit, as it may be far below a tenth where passes are bound by memory.

    Args:
        target: the model.
        chain: drafts that are always whole.
    """
    params = Params(target.network, chain.params)
    one, whole = (
        measure_drafter(params, drafter, Warp(), repeats=5)
        for drafter in (NoDraft(), chain.drafter)
    )
    further = (whole.target - one.target) / (whole.width - 1)
    return AdaptiveBlock(
        draft_cost=round(whole.draft / one.target, 1),
        token_cost=float(f"{max(0.0, further / one.target):.1g}"),
    )


def if_it_drafts_for(target: Model, drafter: LoadedDrafter) -> LoadedDrafter | None:
    """The drafter, or `None` where its tokens mean something else to the target."""
    try:
        prepare(target, [0], GenerationConfig(max_new_tokens=1), drafter, 0)
    except OtherTargetError:
        return None
    return drafter


def with_dflash(name: str, **settings: Any) -> Callable[[Model], LoadedDrafter | None]:
    """A shipped head that drafts blocks from the target's hidden states."""

    def method(target: Model) -> LoadedDrafter | None:
        if target.name != MADE_FOR or name not in shipped_heads("dflash"):
            return None
        return DFlash.of(load_dflash(name, target.network), **settings)

    return method


def dynamic_tree(head: EagleHead | Eagle3Head, paths: Sequence[RankPath]) -> LoadedDrafter:
    """EAGLE-2 within the bounds of a static tree: its nodes, levels, and nodes per draft pass.

    At least two of these: with one it would be a chain, always the same.
    """
    widest = max(*draft_batches(paths), 1 + max(path[-1] for path in paths))
    depth = max(1, max(map(len, paths)) - 1)
    return Eagle2.of(head, num_nodes=len(paths), depth=depth, beam=max(2, widest))


EVERY_METHOD: Mapping[str, Callable[[Model], Method | None]] = {
    "prompt lookup": lambda target: PromptLookup(),
    "draft model": with_draft_model(DRAFT),
    "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
    "EAGLE-2, 59 nodes": with_head(EAGLE_HEAD, Eagle2.of),
    "EAGLE-3, searched tree": searched_tree(EAGLE3_HEAD),
    "layer skip, as searched": searched_set(),
    "DEER, chain of 8": with_deer(DEER, block=8),
    "DEER, tree of 8": with_deer(DEER, block=8, num_nodes=8),
    "DEER, adaptive chain": adaptive_deer(DEER, block=8),
    "DFlash, chain": with_dflash(DFLASH),
}
"""What `jaxspec bench --drafter all` measures; `None` where a method is not for a target."""

_BLOCKS = (4, 8, 16, 32)

SUITES = {
    "shipped": Suite(
        title="Figures of the shipped models",
        prompt_sets=(_GSM8K, _HUMANEVAL, _MBPP),
        targets=("demo", "demo-small"),
        methods={
            # Both with the lengths that they draft by default.
            "prompt lookup": lambda target: PromptLookup(),
            "draft model": with_draft_model(DRAFT),
            "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
            "EAGLE-1, 25 nodes": with_head(EAGLE_HEAD, Eagle.of),
            "EAGLE-2, 59 nodes": with_head(EAGLE_HEAD, Eagle2.of),
            "EAGLE-3, searched tree": searched_tree(EAGLE3_HEAD),
            "layer skip, as searched": searched_set(),
        },
        temperatures={"greedy": 0.0, "temperature 1": 1.0},
        assistant=DRAFT,
        prompts_per_set=20,
        max_new_tokens=128,
    ),
    # Static against dynamic trees on the prompts of EAGLE's own evaluation: a table with the
    # columns of the paper on trees for phones (budget, drafting, verification, tau, tokens/s).
    "trees": Suite(
        title="Static and dynamic EAGLE trees",
        prompt_sets=(PromptSet("GSM8K", "eagle_prompts/gsm8k_question.jsonl.gz", "{turns[0]}\n"),),
        targets=(MADE_FOR,),
        methods={
            "searched tree": searched_tree(EAGLE_HEAD),
            "EAGLE's 25 nodes": with_head(EAGLE_HEAD, Eagle.of),
            "EAGLE-2, as searched": with_head(
                EAGLE_HEAD, lambda head: dynamic_tree(head, tree_of_head(EAGLE_HEAD))
            ),
            "EAGLE-2, 25 nodes": with_head(
                EAGLE_HEAD, lambda head: dynamic_tree(head, EAGLE_PATHS)
            ),
            "EAGLE-2, 59 nodes": with_head(EAGLE_HEAD, Eagle2.of),
            "EAGLE-3, searched tree": searched_tree(EAGLE3_HEAD),
        },
        temperatures={"greedy": 0.0, "temperature 1": 1.0},
        assistant=None,
        prompts_per_set=80,
        max_new_tokens=128,
    ),
    "skips": Suite(
        title="Drafting with the target's own layers, by task",
        prompt_sets=(
            _GSM8K,
            _HUMANEVAL,
            *(
                PromptSet(name, "spec_bench/question.jsonl.gz", "{turns[0]}\n", of)
                for name, of in _SPEC_BENCH.items()
            ),
        ),
        targets=(MADE_FOR,),
        methods={
            "layer skip, as searched": searched_set(),
            "layer skip, K = 8": searched_set(num_speculative_tokens=8),
            "layer skip, K = 8, adaptive": adaptive_exit(),
            "draft model": with_draft_model(DRAFT),
            "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
        },
        temperatures={"greedy": 0.0, "temperature 0.7, top-p 0.9": 0.7},
        assistant=None,
        prompts_per_set=20,
        max_new_tokens=128,
        top_p=0.9,
    ),
    # Chains against trees of one draft pass each, with as many tokens to verify.
    "blocks": Suite(
        title="Drafting whole blocks: DEER and DFlash",
        prompt_sets=(_GSM8K, _HUMANEVAL, _MBPP),
        targets=("demo", "demo-small"),
        methods={
            "EAGLE-1, searched tree": searched_tree(EAGLE_HEAD),
            **{f"DEER, chain of {k}": with_deer(DEER, block=k) for k in _BLOCKS},
            **{f"DEER, tree of {k}": with_deer(DEER, block=k, num_nodes=k) for k in _BLOCKS},
            "DEER, adaptive chain": adaptive_deer(DEER, block=16),
            "DFlash, chain": with_dflash(DFLASH),
            "DFlash, tree of 8": with_dflash(DFLASH, num_nodes=8),
        },
        temperatures={"greedy": 0.0, "temperature 0.6": 0.6, "temperature 1": 1.0},
        assistant=None,
        prompts_per_set=5,
        max_new_tokens=128,
        batches=(1, 2, 4, 8, 16),
        batch_methods=("EAGLE-1, searched tree", "DEER, chain of 8", "DEER, tree of 8"),
    ),
    # The same as `--drafter all`, in full.
    "methods": Suite(
        title="Every method that comes with the package",
        prompt_sets=(_GSM8K, _HUMANEVAL, _MBPP),
        targets=("demo", "demo-small"),
        methods=EVERY_METHOD,
        temperatures={"greedy": 0.0, "temperature 0.6": 0.6, "temperature 1": 1.0},
        assistant=None,
        prompts_per_set=5,
        max_new_tokens=128,
        batches=(1, 2, 4, 8, 16),
        batch_methods=tuple(EVERY_METHOD),
    ),
    "skip-settings": Suite(
        title="Drafting with the target's own layers: exit threshold and length",
        prompt_sets=(_GSM8K, _HUMANEVAL),
        targets=(MADE_FOR,),
        methods={
            "as searched": searched_set(),
            **{f"K = {n}": searched_set(num_speculative_tokens=n) for n in (1, 2, 3, 4, 6, 8)},
            **{
                f"K = 8, threshold {p:g}": searched_set(num_speculative_tokens=8, threshold=p)
                for p in (0.2, 0.4, 0.6, 0.8)
            },
            # From here on the threshold adapts, K = 8: as the paper has it, then one thing changed.
            "adaptive": adaptive_exit(),
            **{f"alpha = {rate:g}": adaptive_exit(target_rate=rate) for rate in (0.7, 0.8, 0.95)},
            **{f"epsilon = {step:g}": adaptive_exit(step=step) for step in (0.03, 0.1, 0.3)},
            **{f"beta1 = {kept:g}": adaptive_exit(rate_memory=kept) for kept in (0.2, 0.8, 0.95)},
            **{f"beta2 = {kept:g}": adaptive_exit(threshold_memory=kept) for kept in (0.0, 0.5)},
        },
        temperatures={"greedy": 0.0},
        assistant=None,
        prompts_per_set=20,
        max_new_tokens=128,
    ),
}


class SuitePrompt(NamedTuple):
    """A prompt and its `PromptSet.category`."""

    category: str
    text: str


@dataclasses.dataclass(frozen=True)
class AssistedRow:
    """A method of `transformers`, with fields as in `ComparisonRow`.

    Speed-ups are over `transformers` decoding plainly, divergences from OUR plain decoding.
    """

    name: str
    overall: Figures
    low_repetition: Figures | None
    by_category: Mapping[str, Figures]
    divergences: tuple[Divergence, ...]


class Assisted(NamedTuple):
    """Both methods of `transformers` on the prompts of one greedy comparison."""

    rows: tuple[AssistedRow, ...]
    versions: str


class MethodSteps(NamedTuple):
    """What a method's steps are made of.

    nodes: the largest draft, the root EXCLUDED.
    building: seconds of a draft that choosing a dynamic tree takes; `None` where it is static.
    """

    nodes: int
    times: StepTimes
    building: float | None


class Setting(NamedTuple):
    """What was measured at one of a suite's `temperatures`.

    assisted: what `transformers` makes of it, or why that is left out.
    steps: of every row of the comparison, by its name.
    batches: by rows decoded together and by method, where the suite asks for it.
    """

    comparison: Comparison
    assisted: Assisted | str
    steps: Mapping[str, MethodSteps]
    batches: Mapping[int, Mapping[str, BatchFigures]] = MappingProxyType({})

    @property
    def outputs_agree(self) -> bool:
        """True if every greedy output equals our plain decoding's, in batches too, ties aside."""
        rows = () if isinstance(self.assisted, str) else self.assisted.rows
        together = (figures for methods in self.batches.values() for figures in methods.values())
        others = (divergence for row in (*rows, *together) for divergence in row.divergences)
        return self.comparison.outputs_agree and all(divergence.is_tie for divergence in others)


class TargetResult(NamedTuple):
    """One target, measured.

    num_params: of the target.
    draft_params: of each method that has weights, by its name.
    prompts: those that were decoded.
    settings: by the names of the suite's `temperatures`.
    left_out: methods whose heads or sets are not here, or are for another target.
    """

    num_params: int
    draft_params: Mapping[str, int]
    prompts: Sequence[SuitePrompt]
    settings: Mapping[str, Setting]
    left_out: tuple[str, ...]


class SuiteResult(NamedTuple):
    """A suite, measured.

    targets: by name.
    missing: targets that are not here.
    """

    name: str
    suite: Suite
    prompts_per_set: int
    repeats: int
    targets: Mapping[str, TargetResult]
    missing: tuple[str, ...]

    @property
    def outputs_agree(self) -> bool:
        """True if every greedy output equals our plain decoding's, ties aside."""
        return all(
            setting.outputs_agree
            for target in self.targets.values()
            for setting in target.settings.values()
        )


def measure(
    name: str, data_folder: Path, prompts_per_set: int, repeats: int, progress: bool = True
) -> SuiteResult:
    """Measures a suite of `SUITES`.

    Args:
        name: of the suite.
        data_folder: where the files of its prompt sets are; they are read in place.
        prompts_per_set: prompts of each set at most.
        repeats: timed runs of each prompt and method.
        progress: show a bar where standard error is a terminal.

    Raises:
        ValueError: a number is below 1, the data or all targets are missing, or a row of the data
            lacks a field.
    """
    suite = SUITES[name]
    if prompts_per_set < 1:
        raise ValueError(f"prompts_per_set must be at least 1, got {prompts_per_set}.")
    rows = {group: read_prompt_set(group, data_folder) for group in suite.prompt_sets}
    folders = shipped_models()
    here = [target for target in suite.targets if target in folders]
    if not here:
        raise ValueError(
            f"None of the models of suite {name!r} is here: {', '.join(suite.targets)}. "
            "They are in checkpoints/ of the repository."
        )

    def measure_target(target: str) -> TargetResult:
        model = load(target)
        prompts = [
            prompt
            for prompts in rows.values()
            for prompt in first_that_fit(prompts, model, suite.max_new_tokens, prompts_per_set)
        ]
        made = {method: make(model) for method, make in suite.methods.items()}
        drafters = {name: drafter for name, drafter in made.items() if drafter is not None}
        loaded = {n: d for n, d in drafters.items() if isinstance(d, LoadedDrafter)}
        settings = {}
        for label, temperature in suite.temperatures.items():
            config = GenerationConfig(
                max_new_tokens=suite.max_new_tokens,
                temperature=temperature,
                top_p=suite.top_p if temperature else 1.0,
            )
            comparison = compare(
                model,
                [prompt.text for prompt in prompts],
                drafters,
                config,
                repeats=repeats,
                seed=suite.seed,
                categories=[prompt.category for prompt in prompts],
                progress=progress,
            )
            if suite.assistant is None:
                assisted = "this suite compares our own methods"
            elif temperature:
                assisted = "they are measured greedily only"
            else:
                assisted = _assisted(
                    suite, suite.assistant, model, folders[target], prompts, comparison, progress
                )
            steps = time_steps(model, drafters, config, repeats, progress)
            together = {}
            if not temperature and suite.batches:
                chosen = {n: drafters[n] for n in suite.batch_methods if n in drafters}
                together = measure_batches(
                    model,
                    [prompt.text for prompt in prompts],
                    chosen,
                    config,
                    suite.batches,
                    repeats,
                    progress=progress,
                )
            settings[label] = Setting(comparison, assisted, steps, together)
        return TargetResult(
            num_params=num_params(model.params),
            draft_params={n: num_params(drafter.params) for n, drafter in loaded.items()},
            prompts=prompts,
            settings=settings,
            left_out=tuple(name for name, drafter in made.items() if drafter is None),
        )

    return SuiteResult(
        name=name,
        suite=suite,
        prompts_per_set=prompts_per_set,
        repeats=repeats,
        targets={target: measure_target(target) for target in here},
        missing=tuple(target for target in suite.targets if target not in folders),
    )


def time_steps(
    model: Model,
    drafters: Mapping[str, Method],
    config: GenerationConfig,
    repeats: int,
    progress: bool = True,
) -> dict[str, MethodSteps]:
    """Times the steps of plain decoding and of every method, sampled as `config` says.

    Behind a few ids again and again, not on prompts; see `measure_drafter`.
    """
    warp = prepare(model, [0], config, None, 0).prompts.warp
    methods = {OUR_PLAIN: NoDraft(), **drafters}
    steps = {}
    with progress_bar(len(methods), progress) as advance:
        for name, method in methods.items():
            advance(f"timing steps of {name}")
            release_programs()
            drafter, weights = method[:2] if isinstance(method, LoadedDrafter) else (method, ())
            params, runs = Params(model.network, weights), {"repeats": max(5, repeats)}
            building = None
            if isinstance(drafter, Eagle2):
                building = measure_tree_building(params, drafter, **runs)
            times = measure_drafter(params, drafter, warp, **runs)
            steps[name] = MethodSteps(drafter.tree_shape[0] - 1, times, building)
    return steps


def read_prompt_set(group: PromptSet, data_folder: Path) -> list[SuitePrompt]:
    """All prompts of a set, in the order of its file.

    Raises:
        ValueError: the file is not there, or a row lacks a field of the template.
    """
    path = data_folder / group.file
    if not path.is_file():
        raise ValueError(
            f"--data-folder {data_folder}: {group.file} is not there; give the folder of the "
            f"evaluation data, in which {group.category} is."
        )
    return [
        SuitePrompt(group.category, _fill(group.template, row, where))
        for where, row in read_entries(path)
        if not group.of or row.get("category") in group.of
    ]


class _Lines(list[Any]):
    """Is written one entry a line; `{name[0]}` in a template is an entry by itself."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def _fill(template: str, row: Mapping[str, Any], where: str) -> str:
    fields = {
        name: _Lines(value) if isinstance(value, list) else value for name, value in row.items()
    }
    try:
        text = template.format(**fields)
    except KeyError as error:
        raise ValueError(
            f"{where}: has no field {error}, which the prompt is made of, only "
            f"{', '.join(map(repr, row))}."
        ) from error
    # Lines end here as they did in training.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def first_that_fit(
    prompts: Sequence[SuitePrompt], model: Model, room: int, count: int
) -> list[SuitePrompt]:
    """The first `count` prompts that leave `room` tokens of the context, or all there are."""
    assert model.tokenizer is not None, f"{model.name} ships without a tokenizer"
    fitting = []
    for prompt in prompts:
        if len(fitting) == count:
            break
        if len(model.tokenizer.encode(prompt.text)) <= model.config.max_positions - room:
            fitting.append(prompt)
    return fitting


def num_params(params: PyTree) -> int:
    """Weights in a pytree: of a network or a head those of its own, not what it shares."""
    own = getattr(params, "params", params)
    return sum(leaf.size for leaf in jax.tree.leaves(own))


def _assisted(
    suite: Suite,
    assistant: str,
    model: Model,
    folder: Path,
    prompts: Sequence[SuitePrompt],
    comparison: Comparison,
    progress: bool,
) -> Assisted | str:
    """`transformers` on the prompts of a greedy comparison, or why it is not here."""
    reason = why_not_here()
    if reason is not None:
        return reason
    plain, indices = comparison.plain.trials, comparison.prompt_indices
    ids = [trial.generation.prompt_tokens.tolist() for trial in plain]
    found = decode_with_transformers(
        model,
        folder,
        shipped_models()[assistant],
        ids,
        suite.max_new_tokens,
        comparison.repeats,
        progress,
    )
    subsets = subsets_of(plain, [prompts[index].category for index in indices])
    requests = [prepare(model, prompt, comparison.config, None, suite.seed) for prompt in ids]
    rows = tuple(
        AssistedRow(
            name=name,
            **figures_of_subsets(trials, found.trials[PLAIN], subsets)._asdict(),
            divergences=find_divergences(model, requests, indices, plain, trials),
        )
        for name, trials in found.trials.items()
    )
    return Assisted(rows, found.versions)
