"""What a user is told of a rank that ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from autotp.errors import RankError
from autotp.serving import launch
from autotp.serving.rank import Options


@pytest.mark.parametrize(
    "message",
    ["StateError: no", {"message": "StateError: no", "extraInfo": {"timestamp": "1"}}],
    ids=["text", "record"],
)
def test_the_reason_is_the_ranks_own(message, tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": message}))

    def elastic_launch(config: Any, entrypoint: Any) -> Any:
        def start(options: Options) -> None:
            raise ChildFailedError("run", {1: ProcessFailure(1, 7, 1, str(file))})

        return start

    monkeypatch.setattr(launch, "elastic_launch", elastic_launch)
    options = Options([Path("x")], 2, None, "127.0.0.1", 0, "", (), 16, 4, None, "")
    with pytest.raises(RankError, match="rank 1 of 2 ended with code 1. StateError: no"):
        launch.serve(options)
