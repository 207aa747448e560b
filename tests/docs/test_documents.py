"""Every Python block that a reader can copy runs, and says the truth."""

import ast
import inspect
import re

import jax.numpy as jnp
import pytest

import ejkernel.xla_utils.utils
from docs import documents, promised
from ejkernel.kernels._pallas.tpu.blocksparse_attention import _info

OURS = [
    documents.ROOT / "README.md",
    documents.ROOT / "CONTRIBUTING.md",
    *sorted((documents.ROOT / "docs").rglob("*.md")),
]
needs_promised = pytest.mark.skipif(
    not documents.PROMISED.is_dir(), reason="the promised documents are not next to this checkout"
)


def _promised(pattern):
    (path,) = documents.PROMISED.glob(pattern)
    return path


@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_our_documents_run(path):
    """Blocks that need other packages run in `make test-integrations`."""
    if blocks := [block for block in documents.read(path) if not block.needs]:
        documents.run(blocks)


@needs_promised
@pytest.mark.usefixtures("as_a_user_calls")
@pytest.mark.filterwarnings("ignore:.with mesh.. context manager:DeprecationWarning")
@pytest.mark.parametrize("pattern", [promised.TYPES, promised.MODULES, promised.INDEX])
def test_promised_documents_run(pattern):
    documents.run(
        documents.read(_promised(pattern)),
        preludes=promised.PRELUDES[pattern],
        checks=promised.CHECKS[pattern],
        refusals=promised.REFUSALS[pattern],
    )


def _kinds(parameters):
    return [(p.name, p.kind, p.default) for p in parameters]


def _signature(text):
    """The signature of a definition given as text; annotations are left out."""
    node = ast.parse(text).body[0]
    for argument in ast.walk(node):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    node.returns = None
    namespace = {"jnp": jnp}
    exec(compile(ast.Module([node], []), "<signature>", "exec"), namespace)
    return inspect.signature(namespace[node.name]).parameters.values()


@needs_promised
def test_packed_sequence_helpers_have_the_promised_signatures():
    text = _promised(promised.XLA_UTILS).read_text()
    definitions = re.findall(r"^\[docs\](def .*?\)(?: -> .*?)?:) \"\"\"", text, re.MULTILINE)
    assert len(definitions) == 10
    for definition in definitions:
        name = re.match(r"def (\w+)", definition)[1]
        ours = inspect.signature(getattr(ejkernel.xla_utils.utils, name)).parameters.values()
        expected = _kinds(_signature(f"{definition} pass"))
        # Static sizes for use under jit come on top, by keyword only.
        extra = _kinds(ours)[len(expected) :]
        assert _kinds(ours)[: len(expected)] == expected, name
        assert {kind for _, kind, _ in extra} <= {inspect.Parameter.KEYWORD_ONLY}, name
        assert {entry for entry, _, _ in extra} <= {"total_length", "total_chunks"}, name


@needs_promised
def test_the_docstring_example_of_the_packed_sequence_helpers():
    text = _promised(promised.XLA_UTILS).read_text()
    examples = re.findall(r"^ +>>> (\w+) = (.*?) +# (\[.*\])$", text, re.MULTILINE)
    assert [name for name, _, _ in examples] == ["lens", "pos_ids"]
    namespace = {**vars(ejkernel.xla_utils.utils), "cu_seqlens": jnp.array([0, 3, 5, 9])}
    for _, expression, expected in examples:
        assert eval(expression, namespace).tolist() == ast.literal_eval(expected)


@needs_promised
def test_block_mask_functions_have_the_promised_signatures():
    text = _promised(promised.SPLASH_INFO).read_text()
    definitions = re.findall(r"^- ejkernel\S+\._info\.(\w+\(.*\)) tuple\[.*#$", text, re.MULTILINE)
    assert len(definitions) == 4
    for definition in definitions:
        name = definition.partition("(")[0]
        ours = inspect.signature(getattr(_info, name)).parameters.values()
        assert _kinds(ours) == _kinds(_signature(f"def {definition}: pass")), name


@needs_promised
def test_the_block_mask_tuple_has_the_promised_fields():
    text = _promised(promised.SPLASH_INFO).read_text()
    found = re.findall(r"^- (\w+): .*#\nAlias for field number (\d)", text, re.MULTILINE)
    fields = tuple(name for name, _ in sorted(found, key=lambda entry: int(entry[1])))
    assert _info.MaskInfo._fields == fields
    assert _info.MaskInfo._field_defaults == {"is_dynamic_mask": None}


class TestTheRunnerItself:
    """A runner that lets everything pass would prove nothing."""

    def _blocks(self, tmp_path, text):
        (tmp_path / "page.md").write_text(text)
        return documents.read(tmp_path / "page.md")

    def test_blocks_share_a_namespace_and_know_their_heading(self, tmp_path):
        text = "# A\n```python\nx = 1\n```\n## B\n```bash\nfalse\n```\n```python\ny = x + 1\n```\n"
        blocks = self._blocks(tmp_path, text)
        assert [block.heading for block in blocks] == ["A", "B"]
        assert documents.run(blocks)["y"] == 2

    def test_a_block_says_what_it_needs(self, tmp_path):
        text = "```python\nx = 1\n```\n```python needs=flax,optax\nimport flax\n```\n"
        blocks = self._blocks(tmp_path, text)
        assert [block.needs for block in blocks] == [(), ("flax", "optax")]

    def test_an_error_carries_the_line_of_the_document(self, tmp_path):
        with pytest.raises(ZeroDivisionError) as caught:
            documents.run(self._blocks(tmp_path, "# A\n\n```python\nx = 1\n1 / 0\n```\n"))
        assert caught.traceback[-1].frame.code.raw.co_filename == "page.md"
        assert caught.traceback[-1].lineno == 4  # counted from zero

    def test_a_statement_that_should_be_refused_must_be(self, tmp_path):
        blocks = self._blocks(tmp_path, "```python\nx = 1\n```\n")
        with pytest.raises(AssertionError, match="must raise ValueError"):
            documents.run(blocks, refusals={"x = 1": documents.Refusal(ValueError, "")})

    def test_a_refusal_for_another_reason_is_no_refusal(self, tmp_path):
        blocks = self._blocks(tmp_path, "```python\nint('x')\n```\n")
        with pytest.raises(ValueError, match="invalid literal"):
            documents.run(blocks, refusals={"int": documents.Refusal(ValueError, "length")})

    def test_a_table_entry_that_no_block_reaches_is_an_error(self, tmp_path):
        blocks = self._blocks(tmp_path, "# A\n```python\nx = 1\n```\n")
        with pytest.raises(LookupError, match="'gone'"):
            documents.run(blocks, preludes={"gone": "pass"})
