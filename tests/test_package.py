"""The package as a whole: its public face, its layers, its documents, its wheel."""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jaxspec
from jaxspec.checkpoint import shipped_heads, shipped_models

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxspec"
# A folder may import from folders before it, never from one after it. Modules that lie directly
# in the package are one group, "face", but for the progress bar, which needs none of the others;
# `jaxspec` itself is the table of contents.
LAYERS = (
    ("progress",),
    ("core",),
    ("models",),
    ("sharding",),
    ("checkpoint",),
    ("drafters", "diffusion", "trees"),
    ("face",),
    ("bench",),
    ("training", "mobile", "batch"),
    ("jaxspec",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "jaxspec.")
    if not module.name.endswith("__main__")
)
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))


def run_python(source: str, root: Path = ROOT, folder: Path = ROOT) -> str:
    """What a fresh interpreter prints, started in `folder`, with the package of `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs_shipped_models() -> None:
    missing = sorted({"demo", "demo-draft"} - set(shipped_models()))
    if missing:
        pytest.skip(f"needs checkpoints/{', checkpoints/'.join(missing)}, which is not here")


def test_importing_is_quick():
    # Processor time, so that what else the machine does is not counted; best of three.
    source = "import time; start = time.process_time(); import jaxspec; "
    source += "print(time.process_time() - start)"
    assert min(float(run_python(source)) for _ in range(3)) < 1.5


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


def layer_of(module: str) -> str:
    """The layer of a dotted name; names that are no module of ours are attributes."""
    parts = module.split(".")
    if len(parts) == 1:
        return "jaxspec"
    if parts[1] in RANKS:
        return parts[1]
    return "face" if (PACKAGE / f"{parts[1]}.py").is_file() else "jaxspec"


def imported_modules(path: Path) -> set[str]:
    """Modules of ours that a file imports when it runs, wherever in it; not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "jaxspec"}


@pytest.mark.parametrize("source", SOURCES)
def test_imports_go_one_way(source):
    module = source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    layer = layer_of(module)
    for imported in imported_modules(ROOT / source):
        other = layer_of(imported)
        assert other == layer or RANKS[other] < RANKS[layer], f"{module} imports {imported}"


def test_only_models_import_flax():
    for source in SOURCES:
        if source.startswith("jaxspec/models/"):
            continue
        text = (ROOT / source).read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) flax\b", text, re.MULTILINE), source


def test_public_names_are_few_sorted_and_there():
    assert jaxspec.__all__ == sorted(jaxspec.__all__)
    assert len(jaxspec.__all__) <= 40
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name) is not None


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


def documented_examples() -> dict[str, doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = (test for name in MODULES for test in finder.find(importlib.import_module(name), name))
    return {test.name: test for test in found if test.examples}


EXAMPLES = documented_examples()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_documented_examples_run(name, monkeypatch):
    test = EXAMPLES[name]
    if "demo" in "".join(example.source for example in test.examples):
        needs_shipped_models()
    monkeypatch.chdir(ROOT)
    said = io.StringIO()
    outcome = doctest.DocTestRunner(verbose=False).run(test, out=said.write)
    assert outcome.failed == 0, said.getvalue()
    assert outcome.attempted > 0


@pytest.mark.parametrize("document", ["README.md", "docs/write_a_drafter.md"])
def test_python_in_documents_runs(document, monkeypatch, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    assert blocks
    needs_shipped_models()
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "document"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(compile(block, document, "exec"), namespace)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"])
def test_links_between_documents_lead_somewhere(document):
    path = ROOT / document
    for page in [path] if path.is_file() else sorted(path.glob("*.md")):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


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
    needed += ("tokenizer.json", "tokenizer_config.json")
    expected = {
        f"jaxspec/checkpoints/{model}/{file}"
        for model in shipped_models()
        if model.startswith("demo")
        for file in needed
    }
    of_heads = ("config.json", "model.safetensors", "recipe.md")
    beside_heads = ("tree.json", "profile.json", "acceptance.json", "search.json")
    for head, folder in shipped_heads().items():
        files = (*of_heads, *(file for file in beside_heads if (folder / file).is_file()))
        expected |= {f"jaxspec/checkpoints/{head}/{file}" for file in files}
    carried = {name for name in names if name.startswith("jaxspec/checkpoints/")}
    sets = [path.parent.name for path in (ROOT / "checkpoints").glob("demo*/skips.json")]
    of_sets = ("skips.json", "trace.jsonl", "recipe.md")
    expected |= {f"jaxspec/checkpoints/{name}/{file}" for name in sets for file in of_sets}
    drawn = ("metrics.json", "first-stage/metrics.json", *beside_heads)
    expected |= {f"jaxspec/checkpoints/demo-deer/{file}" for file in drawn}
    assert carried == expected
    assert set(SOURCES) <= names
    page = (PACKAGE / "mobile" / "web").iterdir()
    assert {path.relative_to(ROOT).as_posix() for path in page if path.is_file()} <= names
    facts = f"jaxspec-{jaxspec.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"jaxspec", facts}


@pytest.fixture(params=["repository", "wheel"])
def root(request, tmp_path) -> Path:
    """Where the package lies: here, or where it is installed."""
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
from jaxspec.trees import load_acceptance, load_profile, load_tree

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
