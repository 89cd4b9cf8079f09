"""What a process writes to stderr, in either form."""

import json
import os
import subprocess
import sys

SAYS = """
import logging
from mesh.runtime.logs import begin_logging
begin_logging(logging.INFO, "%(levelname)s %(message)s")
logging.getLogger("mesh.it").info("%d of %s", 3, "chat")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("mesh.it").exception("no")
"""


def said(form: str | None) -> "subprocess.CompletedProcess[str]":
    given = {} if form is None else {"MESH_LOG": form}
    env = {name: value for name, value in os.environ.items() if name != "MESH_LOG"}
    return subprocess.run(
        [sys.executable, "-c", SAYS], env={**env, **given}, capture_output=True, text=True
    )


def test_lines_are_for_people_unless_json_is_asked_for() -> None:
    for form in (None, "", "text"):
        assert said(form).stderr.splitlines()[0] == "INFO 3 of chat"
    first, second = (json.loads(line) for line in said("json").stderr.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "mesh.it", "3 of chat")
    assert first["timestamp"] < second["timestamp"]
    assert "ZeroDivisionError" in second["exc_info"]


def test_a_form_that_is_none_is_told() -> None:
    assert "MESH_LOG is 'xml'" in said("xml").stderr
