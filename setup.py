"""Plain pip installation (``pip install .``): everything but the ROS interfaces.

Enough for the cloud side (``collab-llm verifier``). ``.[lab]`` adds benchmarks and training. Nodes
need colcon, which does not use this file: the package's build type is ament_cmake (see
CMakeLists.txt).
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """Return what pip must install, from the one list of it."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [wanted for line in lines if (wanted := line.partition("#")[0].strip())]


def shared() -> list[tuple[str, list[str]]]:
    """Configurations and shipped models, where ``collab_llm_nodes.assets`` looks for them."""
    folders = [ROOT / "config", *(f for f in (ROOT / "models").rglob("*") if f.is_dir())]
    return [
        (
            str(Path("share/collab_llm") / folder.relative_to(ROOT)),
            [str(f.relative_to(ROOT)) for f in sorted(folder.iterdir()) if f.is_file()],
        )
        for folder in folders
    ]


setup(
    install_requires=requirements("runtime"),
    extras_require={
        "faiss": requirements("faiss"),
        "foxglove": requirements("foxglove"),
        "mcp": requirements("mcp"),
        "rerun": requirements("rerun"),
        "ray": requirements("ray"),
        "dashboard": requirements("dashboard"),
        "lab": [f"collab_llm_lab @ {(ROOT / 'collab_llm_lab').as_uri()}"],
    },
    data_files=shared(),
)
