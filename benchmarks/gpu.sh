#!/usr/bin/env bash
# Measures a card: equal numbers, predicted beside measured memory and time, then peers and
# a profile. Writes a folder to open an issue with. On an H200 `exact` took 3
# minutes, a line of `runs` 1.5 to 2, one of `compare` 2 to 2.5.
#   usage: benchmarks/gpu.sh [FOLDER] [PART ...]
# Parts: exact paging packed doctor runs compare profile. PYTHON names the interpreter;
# GPU_WORK a folder with 40 GB of room for models (memory is fastest); GPU_DISK a folder of
# the disk. TINY=--tiny rehearses it with small models, PATIENCE=8 on a slow machine, EXACT and
# RUNS without what a machine lacks: `make gpu-rehearsal` does on the emulated device.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results/$(date +%F)-gpu}
shift || true
parts=${*:-exact paging packed doctor runs compare profile}
python=${PYTHON:-python3}
work=${GPU_WORK:-/dev/shm/protrain-gpu}
disk=${GPU_DISK:-$PWD/.gpu-disk}
mkdir -p "$folder" "$work" "$disk"
folder=$(realpath "$folder")
export PYTHONPATH=$PWD/src:$PWD/benchmarks:$PWD/tests/protrain:$PWD/tests/protrain/core${PYTHONPATH:+:$PYTHONPATH}
# else pieces of a small budget are free and of no use
export PYTORCH_ALLOC_CONF=expandable_segments:True
export HF_HUB_OFFLINE=1 AXOLOTL_DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false
began=$SECONDS

part() { # NAME SECONDS COMMAND...: its output to NAME.txt, its end to parts.txt
  local name=$1 limit=$(($2 * ${PATIENCE:-1})) from=$SECONDS code=0
  shift 2
  timeout -k 5 "$limit" "$@" >"$folder/$name.txt" 2>&1 || code=$?
  echo "$name: exit code $code, $((SECONDS - from)) s (ended at $((SECONDS - began)) s)" |
    tee -a "$folder/parts.txt"
}

wanted() { [[ " $parts " == *" $1 "* ]]; }

protrain() { "$python" -m axolotl.integrations.protrain.cli "$@"; }
export -f protrain
export python

train() { # NAME: one large run, its report beside its log
  cd "$work" &&
    "$python" -m axolotl.cli.train "$1.yaml" --max-steps=6 --output-dir="out/$1" &&
    protrain report "out/$1" && cp "out/$1/protrain/report.json" "$folder/$1.json"
}
export -f train
export work folder

if wanted exact; then
  part inputs-small 60 "$python" benchmarks/gpu_inputs.py ${TINY:-} --disk "$disk" "$work" \
    small experts packed
fi
if wanted runs; then
  part inputs-large 150 "$python" benchmarks/gpu_inputs.py ${TINY:-} --disk "$disk" "$work" \
    8b gpt-oss-20b 3b &
fi
if wanted exact; then
  # numbers do not depend on what else runs
  for name in ${EXACT:-lora qlora full experts packed disk fp16 grpo}; do
    (cd "$work" && part "exact-$name" 150 "$python" -m axolotl.integrations.protrain.cli \
      selftest "exact-$name.yaml" --steps 6 --keep "$work/exact-$name") &
  done
fi
if wanted paging; then
  part paging 150 "$python" -m pytest -q -n 4 --timeout 120 -p no:cacheprovider \
    tests/cuda_emulation/test_paging.py -k "equal or smaller or scaler or keys" &
fi
wait
if wanted packed; then
  part packed 60 "$python" benchmarks/packed.py --rounds 20
fi
if wanted doctor; then
  part doctor 60 "$python" -m axolotl.integrations.protrain.cli doctor
  part hardware 60 "$python" benchmarks/hardware.py --rounds 2
fi
if wanted profile; then
  part profile 80 "$python" benchmarks/gpu_profile.py --trace "$work/trace.json.gz"
fi
if wanted runs; then
  for name in ${RUNS:-lora-8b-12gb gpt-oss-20b-12gb lora-8b-12gb-disk qlora-8b-8gb full-3b-16gb}; do
    part "$name" 160 bash -c "train $name"
  done
fi
if wanted compare; then
  part compare 200 "$python" benchmarks/compare.py --case lora-8b-1k \
    --systems fsdp2,ours,plain_recompute --minutes 3 --output "$folder"
  part compare-full 200 "$python" benchmarks/compare.py --case full-3b-1k \
    --systems ours,fsdp2,plain_recompute --minutes 3 --label full --output "$folder"
  part compare-24gb 150 "$python" benchmarks/compare.py --case lora-8b-1k-fits \
    --systems ours,layer_offloading --minutes 2 --label 24gb --output "$folder"
fi
"$python" benchmarks/gpu_summary.py "$folder"
cat "$folder/parts.txt"
