"""Plain pip installation of the laboratory, beside the package that it measures and trains.

``pip install . ./collab_llm_lab`` in the folder above. This folder is the package itself.
"""

from setuptools import find_packages, setup

setup(
    name="collab_llm_lab",
    version="0.1.0",
    description="Benchmarks, trainings and the demo of collab_llm",
    license="Apache-2.0",
    python_requires=">=3.10",
    install_requires=["collab_llm_nodes"],
    package_dir={"collab_llm_lab": "."},
    packages=["collab_llm_lab", *(f"collab_llm_lab.{name}" for name in find_packages())],
    package_data={"": ["*.txt", "*.jsonl"]},  # sentences and questions of the trainings
    entry_points={"collab_llm.commands": ["lab = collab_llm_lab.commands:add_to"]},
)
