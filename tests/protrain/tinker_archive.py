"""An unmodified `tinker` client of the versions that fetch one archive, in a process that
has it: python tinker_archive.py BASE FOLDER.

Saves an adapter and fetches it by the command line; prints what that says as JSON.
"""

from __future__ import annotations

import json
import sys


def main(base: str, folder: str) -> None:
    import tinker
    from click.testing import CliRunner
    from tinker.cli.__main__ import main_cli

    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=base, rank=4, seed=3)
    path = client.save_weights_for_sampler("end").result().path
    words = ["--format", "json", "checkpoint", "download", path, "-o", folder]
    ended = CliRunner().invoke(main_cli, words)
    assert not ended.exit_code, (ended.output, ended.exception)
    print(json.dumps(json.loads(ended.stdout[ended.stdout.index("{") :])))


if __name__ == "__main__":
    main(*sys.argv[1:])
