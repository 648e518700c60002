"""What the errors of a user say, all in one file that can be read as prose: messages.txt, which is compared as a whole.

Other tests look for the setting or the file that an error names. `python tests/test_messages.py` writes the file again.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("messages.txt")
ERRORS = {"UserError", "DivergedError", "OneRankError", "CrashError", "OneRankCrashError"}


def text(node: ast.expr) -> str:
    """A message as it is written, with the names of its values in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return str(node.value) if isinstance(node, ast.Constant) else f"{{{ast.unparse(node)}}}"


def messages() -> str:
    lines = []
    for file in sorted(path for room in ("pipeline", "data_tools", "launch") for path in (ROOT / room).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call) and node.args]
        said = [text(call.args[0]) for call in calls if getattr(call.func, "id", "") in ERRORS]
        if said:
            lines += [f"\n{file.relative_to(ROOT)}", *(f"- {line}" for line in said)]
    return "\n".join(lines).lstrip() + "\n"


def test_the_file_has_all_messages() -> None:
    assert FILE.read_text() == messages(), "python tests/test_messages.py writes it again: read what changed in it"


if __name__ == "__main__":
    FILE.write_text(messages())
