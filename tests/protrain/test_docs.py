"""What README.md, docs/ and examples/ say can be typed, and leads somewhere.

Commands are parsed by those who would get them; the `full` tests also run them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from fork_server import Fork
from plan_jobs import BASE, run_command
from published_models import BASES, SMALL
from test_examples import refused

from axolotl.integrations.protrain.args import ProTrainArgs
from axolotl.integrations.protrain.cli import protrain
from axolotl.integrations.protrain.refusals import EXCLUDED, PLACES, TAKEN_OVER
from axolotl.integrations.protrain.run import LOGGED

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "decisions"),
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
EXAMPLES = [
    path
    for path in ROOT.glob("examples/*.yaml")
    if "ProTrainPlugin" in path.read_text()
]
RUN = {"plan", "migrate", "keys", "doctor"}
"""Commands run here; `make demo` trains, and selftest and serve have tests of their own."""


def commands() -> Iterator[tuple[str, ...]]:
    """Each that a page shows, without its comment and the variables before it."""
    for text in TEXTS.values():
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words = words[1:]
                if words:
                    yield tuple(words)


OURS = sorted({words[1:] for words in commands() if words[0] == "axolotl-protrain"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the pages' YAMLs are, and the examples, of models that need no download."""
    for name, config in {"small": SMALL, **BASES}.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    keys = BASE | {"base_model": "small", "protrain_capacity_bytes": "2GiB"}
    keys |= {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
    keys |= {"lora_target_linear": True, "lora_mlp_kernel": False}
    card = dict(mib=24000, tflops_16=80, tflops_32=20, memory_gb_s=500, pcie=4)
    (tmp_path / "cards.yaml").write_text(yaml.safe_dump({"mine": card}))
    for name in ("your", "config", "base"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(keys))
    (tmp_path / "examples").mkdir()
    (tmp_path / "outputs/run").mkdir(parents=True)
    for path in EXAMPLES:
        (tmp_path / "examples" / path.name).write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_is_understood(words: tuple[str, ...], folder: Path) -> None:
    group = click.Context(protrain)
    name, command, arguments = protrain.resolve_command(group, list(words))
    assert name and command
    assert command.make_context(name, arguments, group)


@pytest.mark.parametrize("name", ["", *sorted(protrain.commands)])
def test_help_has_examples_that_are_understood(name: str, folder: Path) -> None:
    command = protrain.commands[name] if name else protrain
    examples = re.findall(r"^ *axolotl-protrain (.*)", command.help or "", re.M)
    assert examples and all(words.startswith(name) for words in examples)
    for words in examples:
        test_a_command_is_understood(tuple(words.split()), folder)
    runner = CliRunner()
    if not name:
        version = runner.invoke(protrain, ["--version"])
        assert version.output.startswith("axolotl-protrain ")
        # the line that completes commands in a shell
        asked = {"_AXOLOTL_PROTRAIN_COMPLETE": "bash_source"}
        script = runner.invoke(protrain, [], env=asked, prog_name="axolotl-protrain")
        assert "complete -o" in script.output


def test_other_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands():
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        for word in words:
            if re.match(r"(examples|benchmarks|tests|docs)/", word):
                assert (ROOT / word).exists(), words


def test_pages_are_narrow_and_their_links_lead_somewhere() -> None:
    command = [sys.executable, "tools/pages.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_bullets_of_the_readme_are_short_and_linked() -> None:
    bullets = re.findall(r"^\* (\[.*(?:\n  .*)*)", TEXTS["README.md"], re.M)[:10]
    for bullet in bullets:
        link = re.match(r"\[([^\]]+)\]\([^)]+\)", bullet)
        assert link, bullet
        words = re.sub(r"\]\([^)]+\)", "", bullet).split()
        assert len(words) <= 15, bullet


def test_the_readme_counts_as_its_proofs_do() -> None:
    counts = dict(re.findall(r"^## (.*): (\d+)$", TEXTS["docs/models.md"], re.M))
    exact = sum(int(n) for name, n in counts.items() if name.startswith("Exact"))
    everything = sum(map(int, counts.values()))
    _, optimizers = TEXTS["docs/compatibility.md"].split("\n## Optimizers")
    rows = re.findall(r"^\| `.*", optimizers.split("\n## ")[0], re.M)
    full, lora = (sum(row.split(" | ")[n] == "exact" for row in rows) for n in (1, 3))
    assert f"[{exact} of {everything} model types]" in TEXTS["README.md"]
    said = " ".join(TEXTS["README.md"].split())
    assert f"[{full} of {len(rows)} optimizers]" in said
    assert f"exact in a full fine-tune, {lora} in LoRA" in said


def test_the_page_of_keys_has_them_all() -> None:
    """If not, run `make reference`."""
    sys.path.insert(0, str(ROOT / "tools"))
    import reference

    assert reference.PAGE.read_text() == reference.rendered()


def test_each_command_is_in_the_reference() -> None:
    named = re.findall(r"^\| `(\w+)` \|", TEXTS["docs/reference/commands.md"], re.M)
    assert {*named} == {*protrain.commands}


def test_pictures_are_small() -> None:
    pictures = [*(ROOT / "docs/images").iterdir()]
    assert pictures and all(path.stat().st_size < 150_000 for path in pictures)


def test_an_issue_is_asked_for_its_report() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert "body" not in form or any(
            "report.json" in str(field["attributes"]) for field in form["body"]
        ), path


BROWSER = shutil.which("chromium")
ZENSICAL = shutil.which("zensical", path=f"{ROOT}/.venv-docs/bin:{os.environ['PATH']}")


@pytest.mark.skipif(not (BROWSER and ZENSICAL), reason="no browser, or no `make site`")
def test_a_browser_opens_the_site_and_its_pictures(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "tools/site_pages.py"], cwd=ROOT, check=True)
    build = [str(ZENSICAL), "build", "--clean", "--strict"]
    subprocess.run(build, cwd=ROOT, check=True)
    page = ROOT / "build/site/docs/how-it-works.html"
    shown = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={tmp_path}", "--dump-dom", str(page)),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert ">When something fails<" in re.sub(r"\s*([<>])\s*", r"\1", shown)
    (picture,) = re.findall(r'<img[^>]*src="([^"]+)"', shown)
    assert (page.parent / picture).read_bytes().startswith(b"<svg")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["role_boundaries", "merge_experts", "expert_wise_save"]
)
def test_a_fault_of_others_is_still_there(name: str) -> None:
    """If not, its workaround here can go, and its line in docs/upstream."""
    command = [sys.executable, str(ROOT / "docs/upstream" / f"{name}.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "reproduced" in done.stdout


def test_the_tour_is_short_and_leads_somewhere() -> None:
    """The files that it names are there; nobody needs more than half an hour for it."""
    text = (ROOT / "DESIGN.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 250 and len(text.split()) <= 2500
    here = {
        path.name for top in ("src", "tests") for path in ROOT.joinpath(top).rglob("*")
    }
    named = re.findall(r"`([\w/.]+(?:\.py|\.md|/))`", text)
    assert named and {Path(name).name for name in named} <= here
    for page in ROOT.glob("docs/decisions/*.md"):
        assert len(page.read_text().splitlines()) <= 15, page


def test_notes_that_are_named_are_there() -> None:
    """In the tour, the decisions, docstrings and comments."""
    code = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    pages = [ROOT / "DESIGN.md", *(ROOT / "docs").rglob("*.md")]
    texts = [path.read_text() for path in (*code, *pages)]
    titles = {
        title
        for text in texts
        for title in re.findall(r"^\s*(?:# )?Note \[([^\]]+)\]$", text, re.M)
    }
    one = r"\[[^\]`\\]+\]"
    for text in texts:
        flat = re.sub(r"\s+(# )?", " ", text)
        for named in re.findall(rf"Notes? ({one}(?:(?:,| and|, and) {one})*)", flat):
            assert {*re.findall(r"\[(.+?)\]", named)} <= titles, named


@pytest.mark.parametrize("page", TEXTS)
def test_keys_are_keys(page: str) -> None:
    named = set(re.findall(r"`(protrain_[a-z0-9_]+)\b(?!…)", TEXTS[page]))
    assert named <= {*ProTrainArgs.model_fields, "protrain_n_"}


def test_every_metric_is_explained_and_no_other() -> None:
    named = re.findall(r"^\| `protrain/(\w+)`", TEXTS["docs/words.md"], re.M)
    logged = [name.replace("_bytes", "_gib") for name in LOGGED]
    assert named == [*logged, "device_peak_gib", "process_peak_gib"]


def test_every_key_that_migrate_changes_is_in_the_guide() -> None:
    changed = [
        *PLACES,
        *TAKEN_OVER,
        *(row.key for row in EXCLUDED if row.instead == ""),
    ]
    assert all(f"`{key}" in TEXTS["docs/coming-from.md"] for key in changed)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_accepted_and_listed(path: Path) -> None:
    keys = yaml.safe_load(path.read_text())
    plugins = [p for p in keys["plugins"] if "protrain" not in p]
    assert refused(keys | {"plugins": plugins}) == []
    assert f"`{path.name}`" in TEXTS["examples/README.md"]


@pytest.mark.full
@pytest.mark.parametrize("words", [w for w in OURS if w[0] in RUN], ids=" ".join)
def test_a_command_runs(words: tuple[str, ...], folder: Path) -> None:
    log = folder / "log.txt"
    with log.open("w") as file:
        run = Fork(run_command, list(words), folder=folder, stdout=file, stderr=file)
    # 2: a small machine, or a card too small
    assert run.wait(300) in (0, 2), log.read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    # the loss of a preference is traced with its tokenizer
    [p for p in EXAMPLES if "gb" in p.name and not re.search("dpo|grpo", p.name)],
    ids=lambda path: path.name,
)
def test_an_example_fits_what_its_name_says(path: Path, folder: Path) -> None:
    text = path.read_text()
    several = ["--gpus", "2"] if "2x24gb" in path.name else []
    ram = re.search(r"(\d+) GB (there|of host)", text.replace("\n# ", " "))
    card = "3060" if "12gb" in path.name else "4090"
    asked = ["plan", f"examples/{path.name}", "--gpu", card, *several, "--json"]
    asked += ["--ram", ram[1]] if ram else []
    with (folder / "answer.json").open("w") as file:
        run = Fork(run_command, asked, folder=folder, stdout=file, stderr=file)
    assert run.wait(600) == 0, (folder / "answer.json").read_text()


@pytest.mark.full
def test_help_comes_at_once() -> None:
    """No command imports torch before it is asked to do something."""
    module = "axolotl.integrations.protrain.cli"
    for name in ("plan", "migrate", "doctor", "selftest", "serve", "keys"):
        command = [sys.executable, "-m", module, name, "--help"]
        subprocess.run(command, check=True, timeout=3)
