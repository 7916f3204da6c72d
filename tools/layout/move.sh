#!/usr/bin/env bash
# usage: tools/layout/move.sh PYTHON   - moves the tree to its target layout; three commits. PYTHON is 3.12 or later, which knows
# where names in f-strings are. Needs a clean checkout after `make setup`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NEW=$1 OURS=.venv/bin/python HERE=tools/layout
tidy() {
  $OURS -m ruff check --fix -q --select "$1" qsync_fx passes backend tests benchmarks examples || true
  $OURS -m ruff format -q . || true
}
bash $HERE/before.sh
$NEW $HERE/regroup.py . $HERE/layout.txt $HERE/renames.txt
tidy I,F401,F811,F821,PIE790,RUF022
$NEW $HERE/wrap_long_text.py .
$NEW $HERE/devices_homes.py .
$NEW $HERE/tests_layout.py .
tidy I,F401,F811,PIE790,RUF022
$NEW $HERE/wrap_long_text.py .
$NEW $HERE/edits_after_moves.py .
$OURS -m ruff format -q .
$OURS -m ruff check -q .
git add -A
git commit -qm "tree: move modules and tests to the layout of the papers' words"
$NEW $HERE/regroup.py . - $HERE/symbols.txt
tidy I,F811,PIE790,RUF022
$NEW $HERE/prose_names.py .
$OURS -m ruff format -q .
$NEW $HERE/wrap_long_text.py .
sed -i 's/("qsync_fx.allocator.milp.milp_allocator", "Exact")/("qsync_fx.allocator.milp.milp_allocator", "MilpAllocator")/; s/("qsync_fx.allocator.recovery", "Greedy")/("qsync_fx.allocator.recovery", "PrecisionRecovery")/; s/("qsync_fx.allocator.baselines", "Random")/("qsync_fx.allocator.baselines", "RandomGreedy")/' qsync_fx/allocator/api.py
sed -i 's/setattr(milp_allocator, "Search"/setattr(milp_allocator, "MilpSearch"/' tests/allocator/milp/test_exact.py
sed -i 's/vars(module)\["Flight"\]/vars(module)["PendingTransfers"]/' benchmarks/paper/aqgb_fig3.py
$OURS -m ruff check -q .
git add -A
git commit -qm "tree: name classes by terms of the field"
$NEW $HERE/rename_locals.py .
sed -i 's/bool turned/bool transposed/' backend/operators/gemm/*.py backend/operators/convert.py
sed -i 's/"turned": True/"transposed": True/; s/case.get("turned"/case.get("transposed"/g' tests/backend/cuda/runtime/test_converting.py
sed -i 's/turned=turned/transposed=turned/' tests/gpu/test_convert.py
$OURS -m ruff format -q .
$NEW $HERE/wrap_long_text.py .
$NEW $HERE/edits_after_locals.py .
$OURS -m ruff format -q .
$OURS -m ruff check -q .
git add -A
git commit -qm "tree: name locals and parameters after their content"
