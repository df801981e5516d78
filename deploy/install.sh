#!/usr/bin/env bash
# Install collab_llm on Debian or Ubuntu, as root, from the source tree around this script. The images
# run it, and so does a chroot in test/deploy/test_install.py (docs/deploy.md).
#
#   deploy/install.sh verifier    the cloud side, without ROS: /opt/collab_llm, run by the user collab_llm
#   deploy/install.sh robot       the robot's graph, with a ROS 2 sourced: built in the source tree
#
# pip's own variables count: with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS naming PyTorch's CPU builds, the
# verifier has no CUDA. EXTRAS names extras of the package, such as "ray".
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
home=/opt/collab_llm

apt_install() {
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@"
}

clean() { rm -rf /var/lib/apt/lists/*; }

install_verifier() {
    apt_install ca-certificates python3 python3-venv
    python3 -m venv "$home"
    "$home/bin/python" -m pip install --quiet --upgrade 'pip>=25' # older ones search for hours
    # A copy: pip builds inside the tree, which may be mounted read-only.
    local copy
    copy=$(mktemp -d)
    tar -C "$root" --exclude=.git --exclude=.venv --exclude=./build --exclude=./install -cf - . | tar -C "$copy" -xf -
    "$home/bin/python" -m pip install --no-cache-dir "$copy${EXTRAS:+[$EXTRAS]}"
    rm -rf "$copy"
    # Triton compiles kernels for the GPU that it finds; without them the verifier is right, but slow.
    if "$home/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
        apt_install gcc libc6-dev python3-dev
    fi
    install -m 644 "$root/deploy/health.py" "$home/health.py"
    ln -sf "$home/bin/collab-llm" /usr/local/bin/collab-llm
    id collab_llm >/dev/null 2>&1 ||
        useradd --system --uid 10001 --create-home --home-dir /var/lib/collab_llm --shell /usr/sbin/nologin collab_llm
    clean
}

install_robot() {
    : "${ROS_DISTRO:?source ROS 2 first, or use an image that has}"
    set +u # ROS's own files read unset variables
    # shellcheck source=/dev/null
    . "/opt/ros/$ROS_DISTRO/setup.bash"
    set -u
    apt_install build-essential python3-dev python3-rosdep python3-venv
    [ -e /etc/ros/rosdep/sources.list.d/20-default.list ] || rosdep init
    rosdep update --rosdistro "$ROS_DISTRO"
    rosdep install --from-paths "$root" --ignore-src --rosdistro "$ROS_DISTRO" -y
    "$root/scripts/setup.sh" build
    rm -rf /root/.cache/pip
    clean
}

case ${1:-} in
verifier | robot) "install_$1" ;;
*)
    echo "usage: deploy/install.sh verifier | robot" >&2
    exit 2
    ;;
esac
