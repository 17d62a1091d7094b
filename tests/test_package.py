"""The package as a whole: its public face, its layers, its documents, its wheel."""

import ast
import contextlib
import doctest
import graphlib
import importlib
import inspect
import io
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxspec
from jaxspec.checkpoint import shipped_heads, shipped_models
from jaxspec.core import proposal

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxspec"
# A folder may import from folders before it, never from one after it. `jaxspec` itself is the
# table of contents. Nothing in the package imports `NOT_INSTALLED`, which lie next to it.
LAYERS = (
    ("start", "progress", "compilation", "extras", "bounded", "native"),
    ("core",),
    ("models",),
    ("sharding",),
    ("checkpoint",),
    ("drafters", "diffusion"),
    ("decoding",),
    ("measure",),
    ("batch", "training"),
    ("tuning", "lm_eval"),
    ("mobile",),
    ("jaxspec",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
NOT_INSTALLED = ("benchmarks", "tests")
# A figure, with its interval if it has one.
NUMBER = r"(?<![\d.])\d+(?:\.\d+)?(?![\d.]*\d)(?: \[[\d., ]+\])?"
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "jaxspec.")
    if not module.name.endswith("__main__")
)
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))


def run_python(source: str, root: Path = ROOT, folder: Path = ROOT, **variables: str) -> str:
    """Returns the output of a fresh interpreter in `folder`, with the package of `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root), **variables}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs_shipped_models() -> None:
    missing = sorted({"demo", "demo-draft"} - set(shipped_models()))
    if missing:
        pytest.skip(f"needs checkpoints/{', checkpoints/'.join(missing)}, which is not here")


def test_importing_is_quick(tmp_path):
    def seconds(names: str) -> float:
        source = f"import time; start = time.process_time(); import {names}; "
        source += "print(time.process_time() - start)"
        return float(
            run_python(source, PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(tmp_path))
        )

    # From bytecode, as installed packages are. This writes it.
    seconds("jaxspec")
    # Next to the packages below it, in turns, so that neither the machine nor its load counts.
    ours, below = [], []
    for _ in range(5):
        below.append(seconds("jax, flax.linen"))
        ours.append(seconds("jaxspec"))
    assert min(ours) < 1.4 * min(below)


def test_importing_loads_nothing_optional():
    source = "import sys, jaxspec; print(*sys.modules)"
    loaded = set(run_python(source).split())
    optional = {"torch", "transformers", "matplotlib", "IPython", "huggingface_hub"}
    assert not loaded & optional


def test_core_imports_without_flax():
    print_core = """
import importlib, pathlib, sys, types

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "flax":
            raise ImportError("flax is blocked")

sys.meta_path.insert(0, Blocker())
# The package's own table of contents imports the models; an empty stand-in does not.
package = types.ModuleType("jaxspec")
package.__path__ = [PATH]
sys.modules["jaxspec"] = package
for path in sorted(pathlib.Path(PATH, "core").glob("*.py")):
    importlib.import_module("jaxspec.core" + "." * (path.stem != "__init__")
                            + path.stem.replace("__init__", ""))
print(*(name for name in sys.modules if name.startswith("jaxspec.core.")))
"""
    loaded = run_python(print_core.replace("PATH", repr(str(PACKAGE)))).split()
    assert "jaxspec.core.decode" in loaded


def module_of(source: str) -> str:
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer_of(module: str) -> str:
    """The layer of a dotted name; names that are no module of ours are attributes."""
    parts = module.split(".")
    if len(parts) == 1:
        return "jaxspec"
    if parts[1] in RANKS:
        return parts[1]
    return "face" if (PACKAGE / f"{parts[1]}.py").is_file() else "jaxspec"


def imported_modules(path: Path, for_types: bool = False) -> set[str]:
    """Modules of this repository that a file imports when it runs, wherever in it.

    With `for_types`, those that it imports for types alone as well.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in () if for_types else ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("jaxspec", *NOT_INSTALLED)}


@pytest.mark.parametrize("source", SOURCES)
def test_imports_go_one_way(source):
    module = module_of(source)
    layer = layer_of(module)
    for imported in imported_modules(ROOT / source, for_types=True):
        assert imported.split(".")[0] not in NOT_INSTALLED, f"{module} imports {imported}"
    for imported in imported_modules(ROOT / source):
        other = layer_of(imported)
        assert other == layer or RANKS[other] < RANKS[layer], f"{module} imports {imported}"


def test_imports_form_no_circle():
    """Inside functions neither; that a module runs the `__init__.py` above it does not count."""
    files = {module_of(source): ROOT / source for source in SOURCES}
    imports = {module: set() for module in files}
    for module, path in files.items():
        for name in imported_modules(path):
            imports[module].add(name if name in files else name.rpartition(".")[0])
    for module in files:
        imports[module] -= {module}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_every_folder_is_a_package():
    """Without `__init__.py` a folder can be imported and yet is invisible to tools."""
    for source in SOURCES:
        assert f"{source.rpartition('/')[0]}/__init__.py" in SOURCES, source


def test_only_models_import_flax():
    for source in SOURCES:
        if source.startswith("jaxspec/models/"):
            continue
        text = (ROOT / source).read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) flax\b", text, re.MULTILINE), source


def test_public_names_are_few_sorted_and_there():
    assert jaxspec.__all__ == sorted(jaxspec.__all__)
    assert len(jaxspec.__all__) <= 42  # drafters without weights are named where others are
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name) is not None
    # The docstring groups them: a table of contents.
    assert sorted(re.findall(r"`(\w+)`", jaxspec.__doc__)) == jaxspec.__all__


@pytest.mark.parametrize("name", MODULES)
def test_classes_say_what_they_are(name):
    module = importlib.import_module(name)
    assert module.__doc__ or not module.__file__ or not Path(module.__file__).read_text()
    for thing_name, thing in vars(module).items():
        is_ours = getattr(thing, "__module__", None) == name
        if is_ours and inspect.isclass(thing) and not thing_name.startswith("_"):
            # Records without a docstring of their own get one from the standard library.
            generated = f"{thing_name}("
            assert thing.__doc__, f"{name}.{thing_name} has no docstring"
            assert not thing.__doc__.startswith(generated), f"{name}.{thing_name} has no docstring"


def test_no_public_class_name_is_used_twice():
    places: dict[str, str] = {}
    for source in SOURCES:
        for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in places, f"{node.name}: {places[node.name]} and {source}"
                places[node.name] = source


@pytest.mark.parametrize("name", jaxspec.__all__)
def test_the_public_face_is_documented(name):
    thing = getattr(jaxspec, name)
    assert inspect.getdoc(thing)
    methods = [] if not inspect.isclass(thing) else vars(thing).items()
    for method_name, method in methods:
        if inspect.isfunction(method) and not method_name.startswith("_"):
            assert inspect.getdoc(method) or method_name in PROTOCOL_METHODS, method_name


# Documented once, in the protocols of `core.types`.
PROTOCOL_METHODS = {"init", "propose"}


def public_functions() -> dict[str, Callable]:
    """Functions that a room exports, and those that drafters are written with, by full name."""
    rooms = [importlib.import_module(name) for name in ("jaxspec", *MODULES)]
    things = [getattr(room, name) for room in rooms for name in getattr(room, "__all__", ())]
    things += (thing for thing in vars(proposal).values() if inspect.getmodule(thing) is proposal)
    functions = (thing for thing in things if inspect.isfunction(inspect.unwrap(thing)))
    return {f"{thing.__module__}.{thing.__qualname__}": thing for thing in functions}


PUBLIC_FUNCTIONS = public_functions()


def documented_examples() -> dict[str, doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    places = {name: importlib.import_module(name) for name in MODULES}
    # In modules, the finder leaves out functions that a decorator of another module wraps.
    places |= PUBLIC_FUNCTIONS
    found = (test for name, place in places.items() for test in finder.find(place, name))
    return {test.name: test for test in found if test.examples}


EXAMPLES = documented_examples()


@pytest.mark.parametrize("name", sorted(PUBLIC_FUNCTIONS))
def test_public_functions_have_an_example(name):
    assert name in EXAMPLES, f"{name} has no `>>>` in its docstring"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_documented_examples_run(name, monkeypatch):
    test = EXAMPLES[name]
    source = "".join(example.source for example in test.examples)
    if "demo" in source:
        needs_shipped_models()
    if "import ExportConfig" in source:
        for module in ("litert_converter", "ai_edge_litert"):
            pytest.importorskip(module, reason="needs the extra mobile: '.[mobile]'")
    monkeypatch.chdir(ROOT)
    said = io.StringIO()
    outcome = doctest.DocTestRunner(verbose=False).run(test, out=said.write)
    assert outcome.failed == 0, said.getvalue()
    assert outcome.attempted > 0


# Models and heads of the Hub have no place in a test: shipped ones stand in for them.
STAND_INS = {
    "Qwen/Qwen3-0.6B": "demo",
    "Qwen/Qwen3-8B": "demo",
    "RedHatAI/Qwen3-8B-speculator.eagle3": "demo-eagle",
}


@pytest.mark.parametrize(
    "document",
    [
        *("README.md", "docs/index.md", "docs/first_steps.md", "docs/write_a_drafter.md"),
        *("docs/bring_your_own_model.md", "docs/bring_a_drafter.md", "docs/evaluation_sets.md"),
    ],
)
def test_python_in_documents_runs(document, monkeypatch, tmp_path):
    text = (ROOT / document).read_text(encoding="utf-8")
    for published, shipped in STAND_INS.items():
        text = text.replace(published, shipped)
    # The text behind a block is what it prints.
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.M | re.S)
    assert blocks
    needs_shipped_models()
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "document"}
    for block, printed in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(block, document, "exec"), namespace)
        assert printed in ("", said.getvalue())


@pytest.mark.parametrize(
    "document", ["*.md", "docs/**/*.md", "examples/*.md", ".github/*.md", "benchmarks/**/*.md"]
)
def test_links_between_documents_lead_somewhere(document):
    pages = sorted(ROOT.glob(document))
    assert pages
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = link.partition("#")
            there = page.parent / file if file else page
            assert there.exists(), f"{page.name} links to {link}"
            if anchor and there.suffix == ".md":
                assert anchor in anchors_of(there), f"{page.name} links to {link}"


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_hints_to_install_name_our_distribution():
    # PyPI's `jaxspec` is another package. `jaxspec.extras` makes the hints of the package.
    wrong = re.compile(r"jaxspec\[[a-z]|pip install (-\S+ )*['\"]?jaxspec\b(?!-decoding)")
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("jaxspec", "docs", "notebooks", "tests", "benchmarks", "examples"):
        texts += (path for path in (ROOT / folder).rglob("*") if path.suffix in HINTING)
    for path in texts:
        if path != Path(__file__):
            for line in path.read_text(encoding="utf-8").splitlines():
                assert not wrong.search(line), f"{path}: {line}"
    for source in SOURCES:
        if source != "jaxspec/extras.py":
            text = (ROOT / source).read_text(encoding="utf-8")
            assert not re.search(r"pip install ['\"](?!jax==)", text), source


HINTING = (".py", ".md", ".ipynb", ".sh", ".js", ".html")


def test_the_reference_lists_every_public_name():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    shown = {name for each in listed for name in names_in(each)}
    assert not set(jaxspec.__all__) - shown
    promised = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`(jaxspec(?:\.[a-z]\w*)+)`", promised)):
        assert any(each == name or each.startswith(f"{name}.") for each in listed), name
        missing = set(getattr(pkgutil.resolve_name(name), "__all__", ())) - shown
        assert not missing, f"docs/api lacks {sorted(missing)} of {name}"


def names_in(full_name: str) -> set[str]:
    """Returns what a page shows of a module, or the name of something else."""
    module = pkgutil.resolve_name(full_name)
    if not inspect.ismodule(module):
        return {full_name.rpartition(".")[2]}
    nodes = ast.parse(inspect.getsource(module)).body
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = (node.targets[0] for node in nodes if isinstance(node, ast.Assign))
    defined |= {target.id for target in assigned if isinstance(target, ast.Name)}
    return set(getattr(module, "__all__", defined))


def test_files_that_the_architecture_names_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:jaxspec|tests|benchmarks|examples)[/\w]*(?:\.py)?)`", page)
    assert len(named) > 20
    for name in named:
        path = ROOT / name
        assert path.exists() or path.with_suffix(".py").exists(), name


def test_every_paper_that_is_cited_is_among_the_references():
    references = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for number in re.findall(r"(?:arXiv |arxiv\.org/abs/|\()(\d{4}\.\d{5})\b", text):
            assert number in references, f"{path.name} cites {number}"


def test_nothing_reads_a_folder_outside_the_repository():
    outside = "../" + "shared"
    folders = ("jaxspec", "benchmarks", "tests", "docs", "notebooks", "examples", "README.md")
    for path in [found for name in folders for found in files_of(ROOT / name)]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        assert outside not in text, path


def files_of(path: Path) -> list[Path]:
    kinds = {".py", ".md", ".ipynb", ".js", ".mjs"}
    found = [path] if path.is_file() else path.rglob("*")
    return [file for file in found if file.suffix in kinds]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="needs hatchling: pip install '.[test]'")
    needs_shipped_models()
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_carries_the_models_of_the_demo_and_no_more(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = ("config.json", "generation_config.json", "model.safetensors", "recipe.md")
    of_tokenizer = ("tokenizer.json", "tokenizer_config.json")  # the others share it
    expected = {f"jaxspec/checkpoints/demo/{file}" for file in of_tokenizer}
    expected |= {
        f"jaxspec/checkpoints/{model}/{file}"
        for model in shipped_models()
        if model.startswith("demo")
        for file in needed
    }
    of_heads = ("config.json", "model.safetensors", "recipe.md")
    in_heads_folders = ("tree.json", "profile.json", "acceptance.json", "search.json")
    for head, folder in shipped_heads().items():
        files = (*of_heads, *(file for file in in_heads_folders if (folder / file).is_file()))
        expected |= {f"jaxspec/checkpoints/{head}/{file}" for file in files}
    carried = {name for name in names if name.startswith("jaxspec/checkpoints/")}
    sets = [path.parent.name for path in (ROOT / "checkpoints").glob("demo*/skips.json")]
    of_sets = ("skips.json", "trace.jsonl.gz", "recipe.md")
    expected |= {f"jaxspec/checkpoints/{name}/{file}" for name in sets for file in of_sets}
    drawn = ("metrics.json", "first-stage/metrics.json", *in_heads_folders)
    expected |= {f"jaxspec/checkpoints/demo-deer/{file}" for file in drawn}
    assert carried == expected
    assert set(SOURCES) <= names
    page = (PACKAGE / "mobile" / "web").iterdir()
    assert {path.relative_to(ROOT).as_posix() for path in page if path.is_file()} <= names
    assert "jaxspec/py.typed" in names
    facts = f"jaxspec_decoding-{jaxspec.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"jaxspec", facts}


@pytest.fixture(params=["repository", "wheel"])
def root(request, tmp_path) -> Path:
    """Returns the folder that holds the package: this repository, or an installation."""
    if request.param == "repository":
        return ROOT
    # A wheel of Python alone is installed by unpacking it.
    zipfile.ZipFile(request.getfixturevalue("wheel")).extractall(tmp_path / "site")
    return tmp_path / "site"


def test_the_head_of_the_demo_loads_with_its_tree(root, tmp_path):
    needs_shipped_models()
    if "demo-eagle" not in shipped_heads():
        pytest.skip("needs checkpoints/demo-eagle, which is not here")
    source = """
import jaxspec
from jaxspec.checkpoint import find_head
from jaxspec.tuning import load_acceptance, load_profile, load_tree

head = jaxspec.load_eagle("demo-eagle", jaxspec.load("demo").network)
folder = find_head("demo-eagle")
load_acceptance(folder / "acceptance.json").check_head(head)
load_profile(folder / "profile.json")
load_tree(folder / "tree.json")
print(jaxspec.__file__)
"""
    assert run_python(source, root, tmp_path).strip() == str(root / "jaxspec" / "__init__.py")


def test_the_demo_loads(root, tmp_path):
    needs_shipped_models()
    source = "import jaxspec; print(jaxspec.__file__, jaxspec.load('demo').tokenizer.bos_id)"
    place = str(root / "jaxspec" / "__init__.py")
    assert run_python(source, root, tmp_path).split() == [place, "0"]


MEASURED_AS = {
    "plain decoding": "plain",
    "EAGLE-1 over its searched chain": "EAGLE-1, searched tree",
    "EAGLE-3 over its searched chain": "EAGLE-3, searched tree",
    "draft model, chains of 4": "draft model",
    "prompt lookup": "prompt lookup",
    "layer skipping": "layer skip, as searched",
    "DEER, chains of 4": "DEER, chain of 4",
    "llama.cpp, plain, bf16": "llama.cpp, bf16",
}
"""Methods as the README and as side-by-side.md name them."""


def test_figures_of_the_readme_are_those_of_results_pages():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    figures = text[text.index("## Figures") : text.index("## Papers")]
    results = ROOT / "benchmarks" / "results"
    page = (results / "side-by-side.md").read_text(encoding="utf-8")
    measured = {}
    for row in page.splitlines():
        if " of 60 same" in row:
            name, *cells = re.split(r" +\| +", row.removeprefix("| "))
            measured.setdefault(name, cells)
    rows = [re.split(r" +\| +", row) for row in figures.splitlines() if " of 60 | " in row]
    assert len(rows) > 5
    for name, *shown in rows:
        row = measured[MEASURED_AS[name.removeprefix("| ")]]
        assert all(
            cell.startswith(figure.removesuffix(" |"))
            for cell, figure in zip(row, shown, strict=False)
        ), f"{name}: side-by-side.md has {row}"
    pages = [*results.glob("*.md"), *ROOT.glob("checkpoints/*/recipe.md")]
    written = {
        number for each in pages for number in re.findall(NUMBER, each.read_text(encoding="utf-8"))
    }
    # The whole text, without code, addresses, names of heads and years of papers.
    said = text.replace(text[text.index("## Papers") : text.index("## More")], "")
    said = re.sub(r"^```.*?^```|`[^`]*`|(?<=\])\([^)]*\)|EAGLE-[\d.]+", "", said, flags=re.M | re.S)
    assert {"11.6", "1.97 [1.76, 2.21]"} <= set(re.findall(NUMBER, said))
    absent = set(re.findall(NUMBER, said)) - written
    assert not absent, f"no results page or recipe has {sorted(absent)}"
