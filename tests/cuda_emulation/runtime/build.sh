#!/bin/bash
# Makes a virtual environment with a CUDA build of torch that runs without a GPU.
#
#   bash build.sh VENV [SITE_PACKAGES]
#
# SITE_PACKAGES: of another environment, whose packages (not its torch) are used too.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1 more=${2:-}
torch=${TORCH:-torch==2.13.0}
# only PyPI's torch is a CUDA build
index=(env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null)

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ ! -d "$site/torch" ]; then
  "${index[@]}" "$venv/bin/pip" install -q --no-deps "$torch" \
    'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*'  # these two for headers
  [ -n "$more" ] || "$venv/bin/pip" install -q numpy filelock 'typing-extensions' sympy networkx jinja2 fsspec pytest
fi
if [ -n "$more" ]; then
  echo "$more" > "$site/zz_more.pth"
  printf '#!%s\nfrom axolotl.cli.main import main\nif __name__ == "__main__":  # not where datasets spawns\n    main()\n' \
    "$(cd "$venv" && pwd)/bin/python" > "$venv/bin/axolotl"
  chmod +x "$venv/bin/axolotl"
fi

cuda=$site/nvidia/cu13
others=()
for name in ${more:+"$more"/bitsandbytes/libbitsandbytes_cuda130.so}; do
  [ -e "$name" ] && others+=("$name")
done
rm -f "$cuda"/lib/*
python3 "$here/libraries.py" "$site/torch/lib" "$cuda/lib" "$here/fakecudart.cpp" "$cuda/include" "${others[@]}"
g++ -std=c++20 -O1 -fPIC -shared -Wall "$here/override.cpp" -o "$site/fakecuda_override.so" \
  -I"$site/torch/include" -I"$site/torch/include/torch/csrc/api/include" -I"$cuda/include" \
  -L"$site/torch/lib" -lc10 -lc10_cuda -ltorch_cpu -Wl,--no-as-needed -ltorch_cuda \
  -L"$cuda/lib" -l:libcudart.so.13 -Wl,--allow-shlib-undefined
cp "$here/fakecuda_site.py" "$site/"
echo "import fakecuda_site" > "$site/fakecuda.pth"
"$venv/bin/python" -c 'import torch; x = torch.ones(3, device="cuda") * 2; print(torch.__version__, x)'
