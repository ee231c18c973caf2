#!/bin/sh
# Train fused MoA, MoA and EAGLE-3 at once on one GPU, on the same batches, and draw their curves: within 12 minutes.
#
#   sh lab/gpu.sh OUTPUT_DIR [OPTION ...]      options of `python -m lab.train`, for all three
#
# Writes OUTPUT_DIR/NAME (weights; the curve's points in config.json), NAME.svg and NAME.log. A training that MINUTES
# (default: 11) did not suffice for leaves its checkpoint in OUTPUT_DIR/work; the same command continues it.
# CORPUS: the answers to train on. PYTHON: the interpreter.
set -u
out=$1
shift
python=${PYTHON:-python3}
mkdir -p "$out/work"
for name in moa-fused moa eagle3; do
  timeout "${MINUTES:-11}m" "$python" -m lab.train --drafter "$name" --epochs 2 --work-dir "$out/work" \
    --answers "${CORPUS:-corpora/smollm2-135m-instruct.corpus}" --output-dir "$out/$name" "$@" >"$out/$name.log" 2>&1 &
done
wait
status=0
for name in moa-fused moa eagle3; do
  tail -n 2 "$out/$name.log"
  "$python" -m lab.curve "$out/$name" --output "$out/$name.svg" || status=1
done
exit $status
