#!/usr/bin/env bash
# Uploads the dataset that dataset.py wrote: upload.sh USER/NAME FOLDER [--upload]
# Without --upload it checks the files and says what it would do. It needs `hf auth login` and the hub's command hf.
set -euo pipefail
name=$1 folder=$2
upload=(hf upload "$name" "$folder" . --repo-type dataset --commit-message "Exact effects of every far key and value")
(cd "$folder" && sha256sum --check --quiet SHA256SUMS)
du -ch "$folder"/* | tail -1
if [[ ${3:-} == --upload ]]; then
  "${upload[@]}"
else
  echo "would run: ${upload[*]}"
fi
