#!/usr/bin/env bash
# Build llama.cpp's library for CUDA out of the sources of the package xllamacpp: examples/build_llama.sh FOLDER [SDIST.tar.gz]
#
# FOLDER/bin/libllama.so is of build 11549, whose structures Trilane knows; take it with LLAMA_LIBRARY=FOLDER/bin/libllama.so.
# The sources are 38 MB, xllamacpp-2026.10.11549.tar.gz, of which the folder thirdparty/llama.cpp is built. Without SDIST they
# are downloaded from PyPI. It needs cmake, a C++ compiler and CUDA's nvcc. The same command again goes on where it stopped.
#
# Environment variables, with their defaults:
#   CUDA=ON               OFF: for the CPU alone, in some minutes, to try the rest
#   CUDA_ARCHITECTURES    of the cards, such as 89; default native: those in this machine
#   JOBS                  compilers at once; default: one a core
#   BUILD_SECONDS         time limit; default: none
# Exit status: 0 built, 3 out of time, goes on when run again; 2 something is missing or wrong.
set -euo pipefail

refuse() { echo "examples/build_llama.sh: $*" >&2; exit 2; }

case ${1:-} in
  -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
  ""|-*) refuse "expected a folder to build in, got '${1:-}'; usage: examples/build_llama.sh FOLDER [SDIST.tar.gz]" ;;
esac
name=xllamacpp-2026.10.11549
source_url=https://files.pythonhosted.org/packages/87/62/b6dfaaf346d3d4fd0e2a2df755f2693b77673f2735da7ba0592af9d2f09e/$name.tar.gz
sha256=c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b
folder=$1 sdist=${2:-$1/$name.tar.gz} cuda=${CUDA:-ON} architectures=${CUDA_ARCHITECTURES:-native}

[[ $cuda =~ ^(ON|OFF)$ ]] || refuse "expected CUDA=ON or CUDA=OFF, got $cuda"
needed=(cmake c++ tar sha256sum)
[ "$cuda" = OFF ] || needed+=(nvcc)
for command in "${needed[@]}"; do
  command -v "$command" > /dev/null || refuse "$command: no such command, and llama.cpp is built with it"
done

mkdir -p "$folder"
if [ ! -e "$folder/source/CMakeLists.txt" ]; then
  if [ ! -e "$sdist" ]; then
    [ $# -lt 2 ] || refuse "expected the sources of $name, found no file $sdist"
    curl --fail --location --silent --show-error --output "$sdist.part" "$source_url" \
      || refuse "could not download the sources; carry $name.tar.gz here, from PyPI's files of xllamacpp, and name it"
    mv "$sdist.part" "$sdist"
  fi
  echo "$sha256  $sdist" | sha256sum --check --status || refuse "expected the sources of $name, got another file: $sdist"
  rm -rf "$folder/unpacked"
  mkdir "$folder/unpacked"
  tar xzf "$sdist" -C "$folder/unpacked" "$name/thirdparty/llama.cpp"
  mv "$folder/unpacked/$name/thirdparty/llama.cpp" "$folder/source"
  rm -r "$folder/unpacked"
fi
options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_CUDA="$cuda")
for part in TESTS EXAMPLES TOOLS SERVER COMMON APP; do options+=("-DLLAMA_BUILD_$part=OFF"); done
[ "$cuda" = OFF ] || options+=("-DCMAKE_CUDA_ARCHITECTURES=$architectures")
cmake -S "$folder/source" -B "$folder" "${options[@]}"
limit=(); [ -z "${BUILD_SECONDS:-}" ] || limit=(timeout "$BUILD_SECONDS")
status=0
"${limit[@]}" cmake --build "$folder" --target llama --parallel "${JOBS:-$(nproc)}" || status=$?
[ $status -ne 124 ] || exit 3
[ $status -eq 0 ] || exit $status
echo "LLAMA_LIBRARY=$folder/bin/libllama.so"
