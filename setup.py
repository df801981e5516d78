"""Plain pip installation (``pip install -e .``): everything but the ROS interfaces.

colcon does not use this file: the package's build type is ament_cmake (see CMakeLists.txt).
"""

from setuptools import setup

setup()
