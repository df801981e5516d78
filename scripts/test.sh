#!/usr/bin/env bash
# Run the tests in two steps: side by side in two processes, then those that need the machine alone.
#
#   scripts/test.sh fast|usual|all [PYTEST OPTION...]
#
# fast: laws, machines, engine, parser and guard. usual: all but tests marked `exhaustive`. all: all.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

laws=(
    test/decoding test/engine/test_engine.py test/engine/test_engine_operations.py
    test/protocols/edge_cloud/test_machines.py test/protocols/edge_cloud/test_link.py
    test/protocols/collective/test_machine.py test/protocols/dragon/test_dragon_machine.py
    test/protocols/jupiter/test_lane.py test/protocols/minions/test_minions.py
    test/robot/test_grammar.py test/robot/test_guard.py test/robot/test_mission.py
)
chosen=$1
shift
case $chosen in
fast) markers="not exhaustive and not slow" && set -- "${laws[@]}" "$@" ;;
usual) markers="not exhaustive" ;;
all) markers="exhaustive or not exhaustive" ;;
*) echo "usage: scripts/test.sh fast|usual|all [PYTEST ARGUMENT...]" >&2 && exit 2 ;;
esac

failed=0
run() { # run MARKERS ARGUMENT...
    local status=0
    scripts/with-ros python -m pytest -m "$@" || status=$?
    [ "$status" = 0 ] || [ "$status" = 5 ] || failed=$status # 5: no test is chosen
}

run "($markers) and not alone" --numprocesses 2 --dist loadfile "$@"
run "($markers) and alone" "$@"
exit "$failed"
