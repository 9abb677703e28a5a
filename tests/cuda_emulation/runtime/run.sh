#!/bin/bash
# bash run.sh VENV ARGUMENTS...   python, with slow, random copies and kernels
venv=$1; shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}   # sums are split by threads
export MKL_CBWR=${MKL_CBWR:-COMPATIBLE}        # else MKL rounds by addresses
export FAKECUDA_POISON=${FAKECUDA_POISON:-1}
export FAKECUDA_RANDOM_COPY_US=${FAKECUDA_RANDOM_COPY_US:-10000}
export FAKECUDA_RANDOM_WORK_US=${FAKECUDA_RANDOM_WORK_US:-400}
exec "$venv/bin/python" -X faulthandler "$@"
