"""Requirements, their documentation, and what the code imports agree."""

from __future__ import annotations

import ast
import re
import sys
from xml.etree import ElementTree

from folders import ROOT, SUPPORT

PYTHON_FILES = sorted(
    p
    for folder in ("collab_llm_nodes", "collab_llm_lab", "scripts", "test")
    for p in (ROOT / folder).rglob("*.py")
    if p.name != "setup.py"  # setuptools builds it
)
# Where the module's name is not the distribution's.
DISTRIBUTION = {
    "PIL": "pillow",
    "backports": "backports.zstd",
    "compression": "backports.zstd",  # of Python itself since 3.14
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "prometheus_client": "prometheus-client",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_tools": "grpcio-tools",
    "kubernetes_validate": "kubernetes-validate",
    "markdown_it": "markdown-it-py",
    "pydantic_monty": "pydantic-monty",
    "qwen_vl_utils": "qwen-vl-utils",
    "yaml": "pyyaml",
}
# Parts of transformers' own dependencies that it hands to its users. (Of jinja2: the errors of chat
# templates; torch requires it as well.)
THROUGH_TRANSFORMERS = {"huggingface_hub", "jinja2", "tokenizers"}
OPTIONAL = {
    "anyio",
    "bitsandbytes",
    "faiss",
    "fastapi",
    "foxglove",
    "h11",
    "mcp",
    "mcp_types",
    "nav2_msgs",
    "nicegui",
    "pydantic",
    "ray",
    "rerun",
    "rosbag2_interfaces",
    "starlette",
    "torchao",
    "torchvision",
    "triton",
    "unitree_api",
    "unitree_go",
    "uvicorn",
}


def requirements(name: str) -> set[str]:
    """The distribution names in ``requirements/<name>.txt``, in lower case."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines if line and line[0] not in "#-"}


def imported_modules() -> dict[str, str]:
    """Top-level modules that the project imports, each with one file that does."""
    found: dict[str, str] = {}
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                found.setdefault(name.split(".")[0], str(path.relative_to(ROOT)))
    return found


def test_every_requirement_has_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()
    others = {"underlay", "transformers-oldest", "transformers-newest"}  # versions of the same
    for name in {file.stem for file in (ROOT / "requirements").iterdir()} - others:
        for package in requirements(name):
            assert f"`{package}`" in text, f"docs/dependencies.md does not say why {package}"


def test_every_import_is_a_requirement() -> None:
    helpers = (*(ROOT / "scripts").glob("*.py"), *SUPPORT.iterdir())  # a test is no helper
    own = {p.stem for p in helpers} | {"collab_llm", "collab_llm_nodes", "collab_llm_lab"}
    ros = {
        element.text
        for element in ElementTree.parse(ROOT / "package.xml").getroot()
        if element.tag.endswith("depend")
    }
    pip = requirements("runtime") | requirements("dev")
    for module, file in imported_modules().items():
        known = own | ros | THROUGH_TRANSFORMERS | OPTIONAL | set(sys.stdlib_module_names)
        if module not in known:
            assert DISTRIBUTION.get(module, module) in pip, f"{file} imports {module}"


def test_nothing_pulls_torchvision() -> None:
    """Its PyPI build cannot load beside a CPU torch and breaks transformers at import."""
    assert "torchvision" not in requirements("runtime") | requirements("dev")
