"""What no part of Nightmill may do: unpickle, run a checkpoint's code, let a template or a name out of its place."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import Text
from jobs.job import Job
from jobs.prompts import PromptBuilder, Refusal
from jobs.queue import celery_config
from jobs.store import Bucket, LocalDirectory, inner_key, open_store
from schemas.constraints import load_constraint
from schemas.errors import ConstraintError, JobError, JobNotFound, NightmillError, StoreError
from schemas.model_files import ModelFiles
from schemas.records import ConstraintKind, JobSpec, RowStatus
from schemas.settings import Settings
from tests.tiny_jobs import MODEL, make_job
from tests.tiny_models import write_tiny_model

PACKAGES = ("schemas", "kernels", "engine", "jobs", "worker", "ops")
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
RUNS_ITS_ARGUMENT = {"eval", "exec", "compile"}


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of what could run code that came with data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, name) for name in names if name.partition(".")[0] in RUNS_WHAT_IT_READS)
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if isinstance(node.func, ast.Name) and function in RUNS_ITS_ARGUMENT:
                yield node.lineno, function
            if function == "torch.load" and arguments.get("weights_only") != "True":
                yield node.lineno, function
            if function in ("yaml.load", "yaml.unsafe_load") or "allow_pickle" in arguments:
                yield node.lineno, function
            if "trust_remote_code" in arguments:
                yield node.lineno, function
            if function == "jinja2.Environment" and arguments.get("autoescape") != "True":  # a page of ours, escaped
                yield node.lineno, function


def test_no_code_comes_out_of_files_messages_or_checkpoints(repo_root: Path) -> None:
    paths = [path for package in PACKAGES for path in sorted((repo_root / package).rglob("*.py"))]
    found = [f"{path}:{line}: {name}" for path in paths for line, name in offences(ast.parse(path.read_text()))]
    assert found == []


def test_offences_sees_what_it_looks_for() -> None:
    code = (
        "import pickle\nfrom shelve import open\ntorch.load(f)\ntorch.load(f, weights_only=True)\neval('1')\n"
        "model.eval()\nnp.load(f, allow_pickle=True)\nAutoModel.from_pretrained(d, trust_remote_code=x)\n"
        "jinja2.Environment()\nre.compile('x')\nyaml.load(f)"
    )
    assert [line for line, _ in offences(ast.parse(code))] == [1, 2, 3, 5, 7, 8, 9, 11]


def test_messages_are_json_and_nothing_else() -> None:
    config = celery_config(Settings(), "redis://")
    assert (config["accept_content"], config["task_serializer"], config["result_backend"]) == (["json"], "json", None)


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    for name, mapping in {
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        "config.json": {},
    }.items():
        config = json.loads((directory / name).read_text())
        config["auto_map"] = mapping or {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
        (directory / name).write_text(json.dumps(config))
    Text(ModelFiles(directory, "huggingface"))
    assert not (tmp_path / "ran").exists()


ESCAPES = [
    "''.__class__.__mro__[1].__subclasses__()",
    "text.__init__.__globals__",
    "row.update({'text': 'x'})",
    "range(10 ** 9) | list",
    "cycler.__init__.__globals__.os.system('true')",
    "'{0.__class__.__mro__}'.format(text)",
]


@pytest.mark.parametrize(
    "fields",
    [
        *({"prompt_template": "{{ " + escape + " }}"} for escape in ESCAPES),
        *({"where": escape, "prompt_column": "text"} for escape in ESCAPES),
        {"prompt_template": "{% include '/etc/passwd' %}"},
        {"prompt_template": "{% for i in range(10 ** 9) %}x{% endfor %}"},
    ],
)
def test_a_template_reaches_nothing_but_its_row(fields: dict[str, str]) -> None:
    try:
        builder = PromptBuilder(JobSpec(name="t", inputs=(), model=MODEL, **fields), pa.schema({"text": pa.string()}))
    except NightmillError:
        return
    built = builder.build({"text": "x"})
    assert isinstance(built, Refusal)
    assert built.status is RowStatus.INPUT_ERROR


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "/etc", ".hidden", "", "a\0b", "a\nb", "-rf"])
def test_a_job_s_directory_lies_in_the_jobs_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match="job name"):
        make_job(tmp_path, name=name)
    with pytest.raises((JobNotFound, StoreError)):
        Job.open(open_store(str(tmp_path / "jobs")), name)


@given(st.lists(st.sampled_from(["..", "a", ".", "", "b.parquet", "..."]), max_size=5).map("/".join))
def test_no_key_leads_out_of_its_store(key: str) -> None:
    root = Path("/root-of-store/jobs")
    inside = Path("/", *_resolved(root / key)).is_relative_to(root)
    try:
        assert inner_key(key) == key
    except StoreError:
        return
    assert inside


def _resolved(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts[1:]:
        if part == "..":
            del parts[-1:]
        else:
            parts.append(part)
    return parts


@pytest.mark.parametrize("root", ["directory", "memory://jobs/x"])
def test_every_way_into_a_store_refuses_such_a_key(tmp_path: Path, root: str) -> None:
    store = open_store(str(tmp_path / "in") if root == "directory" else root)
    assert isinstance(store, LocalDirectory | Bucket)
    (tmp_path / "secret").write_text("x")
    ways = [store.within, store.stat, store.read, store.open_reader, store.delete, store.list]
    for way in [*ways, lambda key: store.create(key, b""), lambda key: store.open_writer(key).__enter__()]:
        for key in ("../secret", "a/../../secret", "/etc/passwd"):
            with pytest.raises(StoreError, match="leads out of its directory"):
                way(key)
    assert (tmp_path / "secret").read_text() == "x"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (ConstraintKind.JSON_SCHEMA, json.dumps({"enum": ["x" * 2**20]})),
        (ConstraintKind.JSON_SCHEMA, '{"items": ' * 200 + "{}" + "}" * 200),
        (ConstraintKind.JSON_SCHEMA, '{"enum": [' + "[" * 100_000 + "]" * 100_000 + "]}"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "array", "minItems": 1000000000}'),
        (ConstraintKind.REGEX, "a" * 100_000),
        (ConstraintKind.REGEX, "(" * 5_000 + "a" + ")" * 5_000),
        (ConstraintKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
        (ConstraintKind.EBNF, f'root ::= "{"x" * 600_000}"'),
        (ConstraintKind.EBNF, "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
        (ConstraintKind.CHOICE, json.dumps(["x" * 2**20, "y"])),
        (ConstraintKind.CHOICE, "[" * 100_000),
    ],
)
def test_a_constraint_that_is_too_large_or_too_deep_is_refused(kind: ConstraintKind, source: str) -> None:
    with pytest.raises(ConstraintError):
        load_constraint(kind, source)
