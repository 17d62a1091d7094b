"""`jaxspec export`: a model as a file for phones."""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.bench.compare import describe
from jaxspec.bench.prompts import read_prompts
from jaxspec.bench.tuning import measure_acceptance, with_tree
from jaxspec.checkpoint import Model, find_head, load_eagle
from jaxspec.checkpoint.files import replacing_files, write_json
from jaxspec.commands import EXIT_DIFFERENT
from jaxspec.commands.options import (
    OF_DRAFTERS,
    add_drafter_arguments,
    add_model_arguments,
    announce,
    drafter_asked,
    load_model,
    refuse_unused,
    sizes,
)
from jaxspec.commands.tune_profile import show_profile
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.core.types import Drafter
from jaxspec.drafters import Deer, Eagle, LayerSkip, LoadedDrafter, PromptLookup
from jaxspec.generation import encode_prompt
from jaxspec.mobile.export import BUNDLES, MODEL_FILE, ExportConfig, export
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.gpu import TIMEOUT, check_gpu
from jaxspec.mobile.litertlm import export_litertlm
from jaxspec.mobile.litertlm_check import PROMPTS, check_litertlm
from jaxspec.mobile.memory import (
    check_phone_memory,
    draft_pass_weights,
    estimate_phone_memory,
)
from jaxspec.mobile.profile import SCRIPT_FILE, export_kit, measure_here
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.report import compare_quantizations, quality_table
from jaxspec.mobile.web import HEAP_LIMIT, PREFILL, choose_trees, export_web
from jaxspec.progress import progress_bar
from jaxspec.trees import (
    AcceptanceTable,
    load_acceptance,
    load_profile,
    load_tree,
    save_profile,
    save_tree,
    search_tree,
    shipped_tables,
    tree_of_head,
)

REPORT_FILE = "quantization.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec export`."""
    parser.description = (
        "Writes a model as one .tflite for LiteRT, with its manifest and tokenizer beside it. With "
        "--drafter the file also holds whole speculative steps."
    )
    add_model_arguments(parser)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder to write into")
    group = parser.add_argument_group("shapes")
    group.add_argument(
        "--slots", type=int, metavar="N", help="longest text, in tokens (default: 1024)"
    )
    group.add_argument(
        "--prefill", type=sizes, metavar="N,...", help="prompt tokens per call (default: 64)"
    )
    group.add_argument(
        "--verify", type=sizes, metavar="N,...", help="add verify_N and commit_N of these sizes"
    )
    group.add_argument(
        "--levels",
        type=sizes,
        metavar="N,...",
        help="add absorb and draft_N of these sizes, for hosts that grow trees themselves",
    )
    group.add_argument(
        "--bundle",
        choices=BUNDLES,
        help="cpu: also what hosts need that sample; gpu: few functions (default: cpu)",
    )
    group = parser.add_argument_group("diffusion language models")
    group.add_argument(
        "--drafts",
        type=sizes,
        metavar="N,...",
        help="whole rounds of so many drafted decisions each (default: 4)",
    )
    group.add_argument(
        "--block-length",
        type=int,
        metavar="N",
        help="slots filled in before more, of models that see both sides (default: 32)",
    )
    parser.add_argument(
        "--quantize",
        dest="quantization",
        choices=tuple(QUANTIZATIONS),
        help="of weights (default: int8)",
    )
    group = parser.add_argument_group("EAGLE")
    group.add_argument("--head", metavar="FOLDER", help="draft with this EAGLE-1 or EAGLE-3 head")
    group.add_argument(
        "--tree",
        metavar="FILE",
        help="of `jaxspec tune tree`, or eagle-25; default: the one beside the head, else EAGLE's "
        "25 nodes, whose depth is also that of kits and of --auto's search",
    )
    parser.add_argument(
        "--any-ops",
        dest="check_gpu_ops",
        action="store_false",
        default=None,
        help="write the file even if a phone's GPU would refuse it, or compute it wrongly",
    )
    parser.add_argument(
        "--phone-memory",
        type=float,
        metavar="GB",
        help="refuse what needs more on the phone, weights and caches together: on a CPU with a "
        "weight cache, or with --bundle gpu on a GPU",
    )
    parser.add_argument(
        "--check-gpu",
        action="store_true",
        help="then compile the file with LiteRT's GPU accelerator (any Vulkan driver) and compare "
        "its tokens, in a process of its own",
    )
    parser.add_argument(
        "--gpu-timeout",
        type=float,
        metavar="SECONDS",
        help=f"for all of --check-gpu, then it is ended (default: {TIMEOUT:.0f})",
    )
    group = parser.add_argument_group("what to write instead, or beside it")
    group.add_argument(
        "--latency-kit",
        action="store_true",
        help="passes of several sizes and a script that times them on a phone through adb",
    )
    group.add_argument(
        "--auto",
        action="store_true",
        help="time such a kit on this machine, search the fastest tree, and bake it in; needs "
        "--head, and --acceptance or --prompts",
    )
    group.add_argument(
        "--web",
        type=Path,
        metavar="FOLDER",
        help="a page that runs the model in a browser, in place of OUT; needs --head and npm; see "
        "`jaxspec serve`",
    )
    group.add_argument(
        "--profile",
        metavar="FILE",
        help="for --web: add the tree that is fastest on this device, as of `tune profile`",
    )
    group.add_argument(
        "--report",
        action="store_true",
        help="write every quantization in turn, compare them on --prompts, and keep none",
    )
    group.add_argument(
        "--litertlm",
        action="store_true",
        help="a .litertlm for the LiteRT-LM runtime instead; of drafters it can run layer-skip",
    )
    group.add_argument(
        "--check-lm",
        action="store_true",
        help="then decode with it by LiteRT-LM's CPU backend, with and without its drafter, in a "
        "process of its own; --prompts replaces its own prompts",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="held-out text: acceptance is counted on it by --auto and --web, laws are compared by "
        "--report",
    )
    group.add_argument("--limit", type=int, metavar="N", help="so many prompts at most")
    group.add_argument(
        "--acceptance",
        metavar="FILE",
        help="for --auto and --web (there by default the one beside the head): a table counted "
        f"before, or one of {', '.join(shipped_tables())}",
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="of --auto's timing and --check-lm (default: 1)"
    )
    add_drafter_arguments(parser, repeatable=False)


def run(args: argparse.Namespace) -> int:
    """Exports as the arguments say."""
    names = [field.name for field in dataclasses.fields(ExportConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    if args.web is not None:
        given.setdefault("prefill", PREFILL)
    config = ExportConfig(**given)
    _check_modes(args)
    model = load_model(args)
    drafter = _drafter(args, model)
    announce(model=args.model, drafter=describe(drafter), config=config)
    if model.config.diffusion is not None:
        given = ("phone_memory", "report", "auto", "latency_kit", "litertlm")
        refuse_unused(args, given, f"for causal models, and {args.model} fills in masks.")
    if args.phone_memory is not None:
        _check_memory(args, model, drafter, config)
    if args.report:
        return _report(args, model, drafter, config)
    if args.web is not None:
        return _web(args, model, drafter, config)
    if args.litertlm:
        return _litertlm(args, model, drafter, config)
    if args.auto:
        drafter = _tuned(args, model, drafter, config)
        if drafter is None:
            config = dataclasses.replace(config, levels=())  # only a head drafts level by level
    start = time.perf_counter()
    if args.latency_kit:
        assert isinstance(drafter, LoadedDrafter), "a kit has a head"
        manifest = export_kit(model, args.out, drafter, config)
    else:
        manifest = export(model, args.out, drafter, config)
    path = args.out / MODEL_FILE
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB in {time.perf_counter() - start:.0f} s")
    print(f"signatures: {', '.join(manifest.signatures)}")
    if args.latency_kit:
        print(f"on a phone: {args.out / SCRIPT_FILE} cpu 1 > kit.txt; then tune profile --import")
    return _check_on_gpu(path, args.gpu_timeout) if args.check_gpu else 0


def _check_modes(args: argparse.Namespace) -> None:
    if (args.out is None) == (args.web is None):
        raise ValueError("give OUT, a folder to write into, or --web FOLDER.")
    names = ("latency_kit", "auto", "report", "litertlm", "web")
    modes = [name for name in names if getattr(args, name)]
    if len(modes) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in modes)
        raise ValueError(f"{flags}: give one of them.")
    if (args.auto or args.latency_kit or args.web) and args.head is None:
        raise ValueError(f"--{modes[0].replace('_', '-')}: needs --head FOLDER, an EAGLE head.")
    if args.latency_kit:
        given = [name for name in ("bundle", "verify", "levels") if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--latency-kit: fixes --{' and --'.join(given)}; leave that out.")
    if args.web is not None:
        given = ("bundle", "verify", "levels", "check_gpu", "phone_memory")
        refuse_unused(args, given, "--web fixes the functions; leave that out.")
    elif args.profile is not None:
        raise ValueError("--profile: needs --web FOLDER; others take --tree FILE.")
    if args.auto and args.tree is not None:
        raise ValueError("--auto: searches a tree itself; leave --tree out.")
    if args.auto and (args.acceptance is None) == (args.prompts is None):
        raise ValueError(
            "--auto: needs to know how often drafts are accepted: give --prompts FILE.jsonl to "
            "count that, or --acceptance FILE."
        )
    if args.report and args.prompts is None:
        raise ValueError("--report: needs --prompts FILE.jsonl, held-out text.")
    if args.check_lm and not args.litertlm:
        raise ValueError("--check-lm: needs --litertlm.")
    if args.check_gpu and args.litertlm:
        raise ValueError("--check-gpu: is for a .tflite; a .litertlm is checked by --check-lm.")
    if args.report:
        refuse_unused(args, ("check_gpu",), "--report keeps no file to check; leave one out.")
        if args.quantization is not None:
            raise ValueError("--quantize: --report writes every quantization; leave one out.")
    if not (args.auto or args.web):
        refuse_unused(args, ("acceptance",), "needs --auto or --web.")
    if not (args.auto or args.check_lm):
        refuse_unused(args, ("threads",), "needs --auto or --check-lm.")
    if not (args.auto or args.report or args.check_lm or args.web):
        refuse_unused(args, ("prompts",), "needs --auto, --report, --web or --check-lm.")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}.")
    if args.prompts is None:
        refuse_unused(args, ("limit",), "needs --prompts FILE.jsonl.")
    if args.drafter is None:
        refuse_unused(args, OF_DRAFTERS, "needs --drafter.")
    if args.gpu_timeout is not None and not args.gpu_timeout > 0:
        raise ValueError(f"--gpu-timeout must be above 0 seconds, got {args.gpu_timeout:g}.")
    if not args.check_gpu:
        refuse_unused(args, ("gpu_timeout",), "needs --check-gpu.")
    else:
        lacking = missing_for_gpu()
        if lacking is not None:
            raise ValueError(f"--check-gpu: {lacking}.")


def _check_memory(
    args: argparse.Namespace, model: Model, drafter: Any, config: ExportConfig
) -> None:
    head, draft_pass, draft_passes = (), (), 0
    verify = set(config.verify)
    loaded = drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter, ())
    if isinstance(loaded.drafter, Eagle | LayerSkip):
        draft_pass = draft_pass_weights(model.params, loaded)
        draft_passes = loaded.drafter.tree_shape[1]
    if isinstance(loaded.drafter, Eagle):
        head = loaded.params.params
        draft_passes += len(config.levels) + bool(config.levels)  # `draft_N` and `absorb`
    if isinstance(loaded.drafter, Deer):
        head = draft_pass = loaded.params.params
        draft_passes = 1
    on_gpu = config.bundle == "gpu"
    # `decode`, and `step` or `step_block_N` where a drafter is baked in.
    steps = bool(draft_passes)
    if isinstance(loaded.drafter, Deer):
        steps = loaded.drafter.tree is not None
        draft_passes += steps  # `draft_block_N` and `step_block_N`
    if isinstance(loaded.drafter, PromptLookup) or (
        isinstance(loaded.drafter, Deer) and not (on_gpu and steps)
    ):
        verify.add(loaded.drafter.tree_shape[0])
    separate = len(set(config.prefill)) + len(verify) + 1 + steps
    needed = estimate_phone_memory(
        model.config,
        config.quantization,
        config.slots,
        head,
        draft_pass,
        draft_passes,
        separate_signatures=separate if on_gpu else 0,
    )
    where = "a GPU, which holds weights once for each use" if on_gpu else "a CPU with weight cache"
    print(
        f"on the phone, {where}: {needed.total / 1e9:.2f} GB, {needed.caches / 1e9:.2f} GB of it "
        "caches"
    )
    check_phone_memory(needed, int(1e9 * args.phone_memory))


def _web(args: argparse.Namespace, model: Model, drafter: Any, config: ExportConfig) -> int:
    assert isinstance(drafter, LoadedDrafter)
    profile = None if args.profile is None else load_profile(args.profile)
    given = None if args.tree is None else load_tree(args.tree)
    start = time.perf_counter()
    with progress_bar(5) as advance:
        acceptance = _web_acceptance(args, model, drafter, advance)
        trees = choose_trees(acceptance, profile, given)
        written = export_web(model, args.web, drafter, trees, acceptance, config, advance)
    table = Table(title="trees, the root excluded; tau includes the bonus token", box=box.SIMPLE)
    for column in ("function", "nodes", "depth", "tau expected"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for tree in written.profile["trees"]:
        cells = (tree["nodes"], tree["depth"], f"{tree['tokens_per_step']:.2f}")
        table.add_row(tree["signature"], *map(str, cells))
    console = Console(highlight=False)
    console.print(table)
    for part, size in written.payload.items():
        console.print(f"{size / 1e6:8.2f} MB  {part}")
    heap = written.profile["heap_bytes"]
    if heap > HEAP_LIMIT:
        console.print(
            f"wasm needs about {heap / 2**30:.1f} GiB and has 2: the page will refuse it."
        )
    print(f"{args.web}: {time.perf_counter() - start:.0f} s; now: jaxspec serve {args.web}")
    return 0


def _web_acceptance(
    args: argparse.Namespace,
    model: Model,
    drafter: LoadedDrafter,
    advance: Callable[[str], None],
) -> AcceptanceTable:
    """Given, counted here, or the table beside the head."""
    if args.acceptance is not None and args.prompts is not None:
        raise ValueError("--acceptance: --prompts counts one; leave one of them out.")
    advance("counting accepted drafts")
    if args.prompts is not None:
        prompts = [row.prompt for row in read_prompts(args.prompts, None, args.limit)]
        return measure_acceptance(model, drafter, prompts)
    beside = find_head(args.head) / "acceptance.json"
    if args.acceptance is None and not beside.is_file():
        raise ValueError(
            "--web: needs to know how often drafts are accepted, and no acceptance.json lies "
            "beside the head: give --prompts FILE.jsonl to count that, or --acceptance FILE."
        )
    return load_acceptance(args.acceptance or beside)


def _litertlm(
    args: argparse.Namespace,
    model: Model,
    drafter: Drafter | LoadedDrafter | None,
    config: ExportConfig,
) -> int:
    start = time.perf_counter()
    path = export_litertlm(model, args.out, drafter, config)
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB in {time.perf_counter() - start:.0f} s")
    if not args.check_lm:
        return 0
    prompts: Sequence[Any] = PROMPTS
    if args.prompts is not None:
        prompts = [row.prompt for row in read_prompts(args.prompts, None, args.limit)]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("--prompts: --check-lm takes texts only, and there is a chat.")
    checked = check_litertlm(path, prompts, threads=args.threads or 1)
    print(checked)
    return EXIT_DIFFERENT if checked.problems else 0


def _check_on_gpu(path: Path, timeout: float | None) -> int:
    checked = check_gpu(path, timeout=TIMEOUT if timeout is None else timeout)
    print(checked)
    return EXIT_DIFFERENT if checked.problems else 0


def _tuned(
    args: argparse.Namespace, model: Model, drafter: Any, config: ExportConfig
) -> LoadedDrafter | None:
    """The drafter over the tree that is fastest here; `None` where none pays."""
    assert isinstance(drafter, LoadedDrafter)
    acceptance, prompts = None, []
    if args.acceptance is not None:
        acceptance = load_acceptance(args.acceptance)
        if acceptance.head:  # tables of none of our heads say where they are from
            acceptance.check_head(drafter.params)
    else:
        prompts = [row.prompt for row in read_prompts(args.prompts, None, args.limit)]
    with TemporaryDirectory() as folder, progress_bar(3) as advance:
        advance("writing a latency kit")
        export_kit(model, folder, drafter, config)
        threads = 1 if args.threads is None else args.threads
        profile = measure_here(Path(folder) / MODEL_FILE, threads, advance=advance)
        advance("counting accepted drafts")
        if acceptance is None:
            acceptance = measure_acceptance(model, drafter, prompts)
    found = search_tree(acceptance, profile)
    best, plain = found.best, found.plain
    show_profile(profile)
    print(
        f"tree: {best.nodes} nodes (root excluded), tau {best.tau:.2f} (bonus included), "
        f"{best.tokens_per_second / plain.tokens_per_second:.2f} x plain, expected"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    save_profile(profile, args.out / "profile.json")
    save_tree(best, args.out / "tree.json", profile=profile.name, acceptance=acceptance.source)
    if not best.paths:
        print("Do not speculate here: no tree is worth its time. Exporting plain decoding.")
        return None
    return with_tree(drafter, best.paths)


def _report(args: argparse.Namespace, model: Model, drafter: Any, config: ExportConfig) -> int:
    prompts = read_prompts(args.prompts, None, args.limit)
    texts = [encode_prompt(model, row.prompt) for row in prompts]
    with progress_bar(len(QUANTIZATIONS)) as advance:
        found = compare_quantizations(model, texts, drafter, config, advance)
    table = Table(
        title=f"{len(texts)} held-out texts; tau is tokens per step, bonus included",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    columns, rows = quality_table(found)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    with replacing_files(args.out) as staging:
        rows = [row._asdict() for row in found]
        write_json(staging / REPORT_FILE, {"model": model.name, "quantizations": rows})
    print(f"wrote {args.out / REPORT_FILE}")
    return 0


def _drafter(args: argparse.Namespace, model: Model) -> Drafter | LoadedDrafter | None:
    if args.head is None:
        if args.tree is not None:
            raise ValueError("--tree: needs --head FOLDER, the head that drafts over it.")
        return drafter_asked(args, model)
    if args.drafter is not None:
        raise ValueError("Give either --head or --drafter, not both.")
    if args.tree is not None:
        paths = load_tree(args.tree)
    elif args.auto or args.latency_kit:
        paths = EAGLE_PATHS  # a search looks as deep as the tree of its kit, and no deeper
    else:
        paths = tree_of_head(args.head)
    return Eagle.of(load_eagle(args.head, model.network), paths)
