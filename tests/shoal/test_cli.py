"""The command line finds the command, answers at once, and says in a line what is wrong."""

import re
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import yaml

from shoal import __version__, cli, pull, serve

Captured = pytest.CaptureFixture[str]


def test_help_names_every_command(capsys: Captured) -> None:
    for argv in (["--help"], ["-h"], ["help"]):
        assert cli.main(argv) == 0
        shown = capsys.readouterr().out
        assert all(f"\n  {name} " in shown for name in cli.COMMANDS)


def test_version(capsys: Captured) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"shoal {__version__}\n"


def test_without_a_command_the_help_goes_to_stderr(capsys: Captured) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "usage: shoal" in shown.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["chta"], r"'chta'.*\bchat\?"),
        (["zzz"], "serve, stop, chat, status, doctor, logs, pull, check-schema, plan, bench"),
        (["--zzz"], "'--zzz'"),
        (["bench", "srve"], r"^shoal bench: .*'srve'.*\bserve\?"),
    ],
)
def test_a_wrong_command_is_one_line(argv: list[str], says: str, capsys: Captured) -> None:
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert re.search(says, said) and len(said.splitlines()) == 1


def test_commands_get_the_rest_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    module = types.SimpleNamespace(
        main=lambda argv: got.append(argv) or 7, __spec__=ModuleSpec("bench.load.serve", None)
    )
    monkeypatch.setitem(sys.modules, "bench.load.serve", module)
    monkeypatch.setitem(sys.modules, "shoal.chat", module)
    assert cli.main(["bench", "serve", "--rate", "1"]) == 7
    assert cli.main(["chat", "--help"]) == 7
    assert got == [["--rate", "1"], ["--help"]]


def test_bench_lists_only_what_is_there(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.BENCHES, "router", ("bench.not_there", "never"))
    assert cli.main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "\n  serve " in shown and "\n  router " not in shown
    assert cli.main(["bench", "router"]) == 2


def test_interrupts_and_broken_pipes_are_no_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "shoal.chat", types.SimpleNamespace(main=interrupted))
    assert cli.main(["chat"]) == 130
    code = "import sys; from shoal.cli import main; sys.exit(main(['--help']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("command", ["--help", "chat --help", "status --help", "serve --help", "pull --help"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = f"""
import sys
from shoal.cli import main
try:
    main({command.split()!r})
except SystemExit:
    pass
print([name for name in ("torch", "ray", "transformers", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---------------------------------------------------------------- serve and pull


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list:
    """The configurations that were launched."""
    configs: list = []
    launch = types.SimpleNamespace(serve=lambda config, followed: configs.append(config) or 0)
    monkeypatch.setitem(sys.modules, "cluster.launch", launch)
    monkeypatch.setattr("cluster.launch", launch, raising=False)
    return configs


def test_flags_win_over_the_file_and_no_default_is_printed(launched: list, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text("replicas: 3\nport: 9000\napi_key: hush\n")
    assert serve.main(["--config", str(file), "--port", "9001", "--placement", "round_robin"]) == 0
    (config,) = launched
    assert (config.replicas, config.port, config.placement) == (3, 9001, "round_robin")
    shown = capsys.readouterr().out
    assert "port: 9001" in shown and "page_size" not in shown and "hush" not in shown


def test_all_settings_are_shown_and_nothing_is_started(launched: list, capsys: Captured) -> None:
    assert serve.main(["--show-settings", "--port", "9001"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["port"] == 9001 and shown["page_size"] == 16 and launched == []


@pytest.mark.parametrize("argv", [["./mine", "--port", "9001"], ["--port", "9001", "./mine"], ["--model", "./mine"]])
def test_the_model_may_stand_alone(launched: list, argv: list[str]) -> None:
    assert serve.main(argv) == 0
    assert launched[0].model == "./mine"


def test_a_model_is_given_once(launched: list, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as raised:
        serve.main(["mine", "--model", "yours"])
    assert raised.value.code == 2 and launched == []
    said = capsys.readouterr().err
    assert "mine" in said and "--model yours" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--port", "99999"], "port: 99999: "),
        (["--config", "none.yaml"], "none.yaml: "),
    ],
)
def test_a_wrong_configuration_exits_with_2(launched: list, argv: list[str], says: str, capsys: Captured) -> None:
    assert serve.main(argv) == 2
    assert says in capsys.readouterr().err and launched == []


def test_an_unknown_key_in_a_file_is_an_error(launched: list, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text("replcas: 3\n")
    assert serve.main(["--config", str(file)]) == 2
    assert "replicas?" in capsys.readouterr().err and launched == []


@pytest.mark.parametrize("argv", [["--prot", "1"], ["x", "y"], ["--port", "x"], ["--replica", "3"]])
def test_an_unknown_flag_exits_with_2(launched: list, argv: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as raised:
        serve.main(argv)
    assert raised.value.code == 2 and launched == []
    assert "--port?" in capsys.readouterr().err or argv[0] != "--prot"


def test_pull_prints_the_folder_or_why_not(monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path) -> None:
    monkeypatch.setattr(pull.models, "pull", lambda name, dequantize: tmp_path / name)
    assert pull.main(["some"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'some'}\n"
    monkeypatch.undo()
    assert pull.main(["smollm2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("shoal pull: ") and "'smollm2'" in said
