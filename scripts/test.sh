#!/usr/bin/env bash
# Run the tests in two steps: side by side in two processes, then those that need the machine alone.
#
#   scripts/test.sh fast|usual|all [PYTEST ARGUMENT...]
#
# fast: laws, machines, engine, parser, guard. usual: everything but the marker `whole`. all: everything.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

chosen=$1
shift
case $chosen in
fast) markers="not whole and not slow" && set -- test/decoding test/robot test/protocols/edge_cloud/test_machine*.py "$@" ;;
usual) markers="not whole" ;;
all) markers="whole or not whole" ;;
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
