"""The README says what the code does."""

import re
from pathlib import Path

from daric_rag.config import DaricConfig

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def options_table() -> str:
    """Every option of `DaricConfig` as rows of a Markdown table."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, field in DaricConfig.model_fields.items():
        rows.append(f"| `{name}` | {shown(name, field.default)} | {escaped(str(field.description))} |")
    return "\n".join(rows)


def shown(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int) and value:
        unit, text = next((1 << power, text) for power, text in ((30, "GiB"), (20, "MiB")) if value >> power)
        assert value % unit == 0
        return f"{value // unit} {text}"
    if isinstance(value, str):
        return escaped(f'`"{value}"`'.replace("\n", "\\n"))
    return f"`{value}`"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def test_the_options_table_is_the_configuration():
    found = re.search(r"<!-- options -->\n(.*?)\n<!-- end of options -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == options_table()


def test_its_python_is_twenty_lines_or_so_and_compiles():
    (code,) = re.findall(r"```python\n(from vllm.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 25
    compile(code, "README.md", "exec")


def test_what_it_links_to_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
