"""Imports run one way; format constants stand in one place; the package lives without its optional parts."""

from __future__ import annotations

import ast
import math
import re
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.fresh import Answer, Fresh

from lowbit.formats import FORMATS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lowbit"

#: From the bottom up: a module may import its own layer's and lower ones.
LAYERS = [
    {
        "_version",
        "files",
        "interrupts",
        "machine",
        "checkout",
        "name_tables",
        "user_warnings",
        "tables",
        "dist_utils",
        "sizes",
        "combinations",
        "torch_private",
    },
    {"formats", "rounding"},
    {"scaling"},
    {"op_calls", "recipes"},
    {"tensor"},
    {"reference"},
    {"ops"},
    {"backends"},
    {"autograd"},
    {"functional"},
    {"datafree"},
    {"models"},
    {"report", "storage"},
    {"nn"},
    {"convert"},
    {"serialize"},
    {"interop"},
    {"memory", "progress"},
    {"optim"},
    {"train"},
    {"offload"},
    {"checkpointing", "tiled"},
    {"observers", "distributed"},
    {"calibrate"},
    {"plan", "out_of_core"},
    {"qat"},
    {"integrations"},
    {"demo", "finetune"},
    {"evaluate"},
    {"cli", "__main__"},
    {"testing"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
#: They give names to users that lie above them, the second at their first use.
FRONTS = {"__init__.py", "memory/__init__.py"}
#: Imported by one backend file each, and by nothing else.
PRIVATE = {
    "kernels": {"backends/triton.py"},
    "bench": {"cli/bench.py"},
    "_native": {"backends/native.py", "backends/cpu.py"},
}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "kernels" not in p.relative_to(PACKAGE).parts)


@cache
def parsed(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, flat; parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported(path: Path) -> set[tuple[str, ...]]:
    """What a module imports of lowbit, anywhere in it, as dotted parts below the package."""
    found = set()
    for node in parsed(path):
        if isinstance(node, ast.Import):
            found |= {tuple(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "lowbit"}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            if node.module and node.module.split(".")[0] == "lowbit":
                below = tuple(node.module.split(".")[1:])
                found |= {below} if below else {(a.name,) for a in node.names}
                if below:
                    found |= {(*below, a.name) for a in node.names}
    return {parts for parts in found if parts}


def wrong_imports(path: Path) -> list[str]:
    """What a module imports of higher layers, or of what is private to another."""
    here = path.relative_to(PACKAGE)
    layer = here.parts[0].removesuffix(".py")
    if str(here) in FRONTS:
        return []
    if layer not in LEVEL:
        return [f"{here} belongs to no layer; give it one in LAYERS"]
    wrong = []
    for target in sorted({parts[0] for parts in imported(path)}):
        if target in PRIVATE:
            if str(here) not in PRIVATE[target] and layer != "cli":
                wrong.append(f"{here} imports lowbit.{target}, which only its backend may")
        elif target not in LEVEL:
            wrong.append(f"{here} imports lowbit.{target}, which has no layer")
        elif LEVEL[target] > LEVEL[layer]:
            wrong.append(f"{here} imports lowbit.{target}, a layer above its own")
    return wrong


def test_imports_run_one_way():
    wrong = [line for path in modules() for line in wrong_imports(path)]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other():
    """Not within functions or for types either."""
    paths = {
        ".".join(("lowbit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in modules()
        if str(path.relative_to(PACKAGE)) not in FRONTS
    }

    def below(path: Path) -> set[str]:
        nodes = [node for node in parsed(path) if isinstance(node, ast.Import | ast.ImportFrom)]
        plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        pairs = [(n.module or "", a.name) for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
        return plain | {f"{home}.{name}" if f"{home}.{name}" in paths else home for home, name in pairs}

    imports = {name: below(path) for name, path in paths.items()}
    # A module that imports nothing that is left is in no circle.
    while done := [name for name, targets in imports.items() if not targets & imports.keys()]:
        for name in done:
            del imports[name]
    assert not imports


def test_layers_do_not_choose_kernels():
    """What a module of ``nn`` computes is an op's; which backend serves it, and where that pays, is decided above."""
    for path in (PACKAGE / "nn").glob("*.py"):
        assert not [parts for parts in imported(path) if parts[0] in ("backends", "kernels", "_native")], path.name


def test_every_layer_is_there():
    assert set(LEVEL) == {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()} - {"__init__"}


def test_the_picture_of_the_layers_has_their_order():
    picture = (ROOT / "ARCHITECTURE.md").read_text().split("```")[1].splitlines()
    lines = [line.split() for line in picture if line.strip(" ─")]
    assert [LEVEL[words[0]] for words in lines] == list(reversed(range(len(LAYERS))))
    for names, words in zip(reversed(LAYERS), lines, strict=True):
        assert names - {"_version", "__main__"} <= set(words)


def test_formats_and_scalings_need_no_torch():
    for path in (PACKAGE / "formats.py", PACKAGE / "scaling.py", *(PACKAGE / "recipes").glob("*.py")):
        names = {a.name for n in parsed(path) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in parsed(path) if isinstance(n, ast.ImportFrom)}
        outside = {n.split(".")[0] for n in names} - sys.stdlib_module_names - {"lowbit"}
        assert not outside, f"{path} imports {outside}"


#: Packages of torch whose names begin with an underscore, and which its documentation names all the same.
DOCUMENTED = {"torch.utils._pytree", "torch.utils._python_dispatch"}
#: Attributes of torch's objects that only ``torch_private`` reads and writes.
PRIVATE_ATTRIBUTES = {
    "_execution_engine",
    "_local_tensor",
    "_make_subclass",
    "_post_accumulate_grad_hooks",
    "_get_foreach_kernels_supported_devices",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_torch(tree: ast.Module) -> set[str]:
    """What a module imports or reads of torch's own modules by names that begin with an underscore."""
    names, of_torch = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports = {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
            names |= {name for name in imports if any(map(private, name.split(".")))}
            of_torch |= {"torch"} if imports else set()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            closed = any(map(private, node.module.split("."))) and node.module not in DOCUMENTED
            names |= {f"{node.module}.{alias.name}" for alias in node.names if closed or private(alias.name)}
            of_torch |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = ast.unparse(node).split(".")
            operator = root == "torch" and rest[0] == "ops"
            if (root in of_torch and not operator and private(node.attr)) or node.attr in PRIVATE_ATTRIBUTES:
                names.add(ast.unparse(node))
    return names - DOCUMENTED


def test_what_torch_does_not_document_is_used_in_one_file():
    for path in modules():
        if path.name != "torch_private.py":
            names = private_names_of_torch(ast.parse(path.read_text()))
            assert not names, f"{path.relative_to(ROOT)} uses {', '.join(sorted(names))}; see lowbit/torch_private.py"


def constants(path: Path) -> set[float]:
    return {
        float(node.value)
        for node in parsed(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
    }


def test_no_constant_of_a_format_stands_outside_the_table():
    """The maxima of fp8 and of two levels, and the entries of codebooks but 0 and powers of 2, come from formats.py."""
    banned = {448.0, 57344.0, 2688.0, 240.0}
    for f in FORMATS.values():
        banned |= {abs(v) for v in f.codebook if math.frexp(abs(v))[0] not in (0.0, 0.5)}
    for path in [*modules(), *(ROOT / "kernels").glob("*.py")]:
        if path.name != "formats.py":
            assert not constants(path) & banned, f"{path.relative_to(ROOT)} repeats a constant of a format"
    numbers = re.compile(r"(?<![\w.])(448|57344|2688|0\.6961928\w*|0\.0795802\w*)(?![\w])")
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cpp", ".inl", ".cu", ".cuh"):
            code = re.sub(r"//.*", "", path.read_text())
            assert not numbers.search(code), f"{path.relative_to(ROOT)} repeats a constant of a format"


def test_tests_and_tools_are_not_imported_by_the_package():
    for path in modules():
        for node in parsed(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {
                "tests",
                "bench",
                "csrc",
                "tools",
                "ml_dtypes",
                "pytest",
                "hypothesis",
            }


# -- without the optional parts ----------------------------------------------------------------------------------------
WITHOUT = """
import sys
import importlib.machinery
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED or name in BLOCKED else super().find_spec(name, path, target)
sys.meta_path = [Finder if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("always", "lowbit runs on its reference")
import torch
if "native" in BLOCKED:
    torch.ops.load_library = lambda path: (_ for _ in ()).throw(OSError("no such library"))
import lowbit as lb
from lowbit.backends import registry
x = torch.randn(4, 40)
for name in ("fp8_e4m3:row", "mxfp4", "nvfp4", "uint4:group32:affine", "nf4"):
    q = lb.quantize(x, name)
    assert torch.equal(lb.fake_quantize(x, name), q.dequantize())
    lb.scaled_mm(x, q)
chosen = {lb.explain("quantize", x, "int8:row").chosen.name}
print(sorted(chosen), sorted(registry.absent()))
"""


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    with Fresh(tmp_path_factory.mktemp("fresh")) as interpreter:
        yield interpreter


def run(fresh: Fresh, blocked: set[str], root: Path = ROOT) -> Answer:
    return fresh.ask(f"BLOCKED = {blocked!r}\n{WITHOUT}", [root], root)


def test_without_extension_and_triton_the_reference_runs_and_says_so_once(fresh, tmp_path):
    """Of a copy without the record of the last build here, which may be one that was told to be silent."""
    shutil.copytree(ROOT / "lowbit", tmp_path / "lowbit", ignore=shutil.ignore_patterns("__pycache__", "_build.json"))
    done = run(fresh, {"triton", "native", "lowbit._native"}, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['reference']"), done.stdout
    assert "'cpu'" in done.stdout and "'triton'" in done.stdout, "absent backends are listed with their reasons"
    assert done.stderr.count("Warning") == 1 and "RuntimeWarning: lowbit runs on its reference" in done.stderr


def test_without_triton_everything_else_runs(fresh):
    done = run(fresh, {"triton"})
    assert done.returncode == 0, done.stderr
    assert "'triton'" in done.stdout and done.stderr == ""


def test_importing_lowbit_imports_nothing_heavy(fresh):
    """No ONNX, no plotting, no command line, no Triton kernels before they are asked for."""
    code = "import sys, lowbit; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = fresh.ask(code, [ROOT], ROOT)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout))
    assert not loaded & {"onnx", "onnxruntime", "matplotlib", "typer", "rich", "ml_dtypes", "hypothesis", "pytest"}
    assert done.stderr == ""


@pytest.mark.parametrize("kernels", [True, False], ids=["with kernels", "without"])
def test_a_copy_that_was_never_installed_uses_its_own_kernels(fresh, tmp_path, kernels):
    """Also beside an editable install of another checkout, whose kernels Python would find."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("lowbit", *(["kernels"] if kernels else [])):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "setup.py", tmp_path)
    code = "import lowbit; from lowbit.backends import triton; print(lowbit.__file__); print(triton.unavailable())"
    code += "; import lowbit.kernels.spec as s; print(s.__file__)" if kernels else ""
    hidden = "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in str(f)]; "
    done = fresh.ask(code if kernels else hidden + code, [tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    package, reason, *spec = done.stdout.splitlines()
    assert Path(package) == tmp_path / "lowbit/__init__.py"
    assert [Path(path) for path in spec] == ([tmp_path / "kernels/spec.py"] if kernels else [])
    if find_spec("triton"):
        assert "lowbit.kernels is missing; install lowbit" in reason or (kernels and reason == "None")


HIDDEN = """
import {name}, {name}.layer
print({name}.get_kernel())
import lowbit.{name}.{module}
print(lowbit.{name}.{module}.__file__)
import {name}
print({name}.get_kernel())
"""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("checkout_first", [True, False])
@pytest.mark.parametrize(("name", "module"), [("kernels", "spec"), ("bench", "report")])
def test_folders_of_a_checkout_hide_no_installed_package(fresh, tmp_path, name, module, checkout_first):
    package, elsewhere = tmp_path / "site" / name, tmp_path / "elsewhere"
    package.mkdir(parents=True)
    elsewhere.mkdir()
    (package / "__init__.py").write_text("def get_kernel(): return 'theirs'\n")
    (package / "layer.py").write_text("")
    places = [ROOT, tmp_path / "site"]
    code = HIDDEN.format(name=name, module=module)
    done = fresh.ask(code, places if checkout_first else places[::-1], elsewhere)
    assert done.returncode == 0, done.stderr
    theirs, ours, again = done.stdout.splitlines()
    assert theirs == again == "theirs" and Path(ours) == ROOT / name / f"{module}.py"


def test_the_version_stands_in_one_place():
    version = re.search(r'"([^"]+)"', (PACKAGE / "_version.py").read_text().split("__version__")[1]).group(1)
    for path in [*modules(), ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]:
        if path.name != "_version.py":
            assert f'"{version}"' not in path.read_text(), f"{path.name} repeats the version"
