"""Make the CMake files of the ROS wheels name this machine's Python and numpy headers.

The wheels of the ros-python-wheels project export the include folders of the Python they were
built with (``/opt/python/cp311-cp311/include/python3.11``), which exist nowhere else; CMake then
stops with "INTERFACE_INCLUDE_DIRECTORIES ... non-existent path". Running this again does no harm.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import numpy

BUILDER_NUMPY = re.compile(
    r"/opt/python/[^/;\"]+/lib/python3\.\d+/site-packages/numpy/_?core/include"
)
BUILDER_PYTHON = re.compile(r"/opt/python/[^/;\"]+/include/python3\.\d+")


def main() -> int:
    """Patch every ``*.cmake`` under the environment's ``share``; returns the exit status."""
    python_include = sysconfig.get_path("include")
    if not (Path(python_include) / "Python.h").is_file():
        print(
            f"Python.h is not in {python_include}: install the headers of this Python "
            f"(apt install python3-dev) and try again",
            file=sys.stderr,
        )
        return 1
    patched = 0
    for file in sorted(Path(sys.prefix, "share").rglob("*.cmake")):
        before = file.read_text(encoding="utf-8")
        after = BUILDER_NUMPY.sub(lambda _: numpy.get_include(), before)
        after = BUILDER_PYTHON.sub(lambda _: python_include, after)
        if after != before:
            file.write_text(after, encoding="utf-8")
            patched += 1
    print(f"patched {patched} CMake files of the ROS wheels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
