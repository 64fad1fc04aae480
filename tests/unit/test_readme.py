"""The README says what the code does."""

import re
from pathlib import Path

from daric_rag.config import DaricConfig
from tests.tiny_models import TINY_MODELS

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def options_table() -> str:
    """Every option of `DaricConfig` as rows of a Markdown table."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, field in DaricConfig.model_fields.items():
        rows.append(f"| `{name}` | {shown(name, field.default)} | {escaped(str(field.description))} |")
    return "\n".join(rows)


def models_table() -> str:
    """Every kind of model that the engine tests start."""
    rows = ["| family | architecture | with |", "|---|---|---|"]
    for family, kind in TINY_MODELS.items():
        rows.append(f"| {family} | `{kind.architecture}` | {kind.particular} |")
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


def between(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_options_table_is_the_configuration():
    assert between("options") == options_table()


def test_the_models_table_is_what_is_tested():
    assert between("models") == models_table()


def test_its_python_is_twenty_lines_or_so_and_compiles():
    (code,) = re.findall(r"```python\n(from vllm.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 25
    compile(code, "README.md", "exec")


def test_what_it_links_to_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
