"""Imports go down: no module imports from a layer above its own, and none in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import offload

PACKAGE = Path(offload.__file__).parent

LAYERS = [
    {"errors", "units", "_native"},
    {"system", "tensors"},
    {"optionfile", "report"},
    {"config", "distributed"},
    {"engines"},
    {"lanes"},
    {"probe"},
    {"blocks"},
    {"tiers"},
    {"hooks"},
    {"recompute"},
    {"planner"},
    {"step"},
    {"session"},
    {"integrations", "measure", "planning"},
    {"workloads"},
    {"profiler", "tuner"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def component(path: Path) -> str:
    """The name in the table: a module of the package, or one of its subpackages."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Components of offload that a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            if node.module == "offload":
                names = [f"offload.{alias.name}" for alias in node.names]
            else:
                names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "offload":
                module = rest.partition(".")[0]
                # "from offload import Session" takes a name from the package's own module.
                found.add(module if module in LAYER_OF else "__init__")
    return found - {component(path)}


SOURCES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in SOURCES]


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_module_imports_nothing_from_above(path: Path) -> None:
    assert component(path) in LAYER_OF, "every module has its place in LAYERS"
    own = LAYER_OF[component(path)]
    upward = {name for name in imports(path) if LAYER_OF[name] > own}
    assert not upward, f"{path.name} is in layer {own} and imports {sorted(upward)} from above"


def test_no_imports_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        graph.setdefault(component(path), set()).update(imports(path))
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("errors") < order.index("session") < order.index("__main__")


def test_errors_imports_nothing_of_the_package() -> None:
    assert imports(PACKAGE / "errors.py") == set()


def test_every_entry_of_the_table_exists() -> None:
    present = {component(path) for path in SOURCES}
    assert LAYER_OF.keys() - present <= {"_native"}  # built, and absent without a compiler
